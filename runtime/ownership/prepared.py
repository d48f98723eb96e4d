"""Transactions over several pchannels, as the owner of one of them knows them.

PREPARE has in its channel what the transaction will write there, and promises that it can be: until it is decided, the
owner appends nothing else to the channel but what says nothing of time, and promises no time at or above that of the
PREPARE. So the records that the commit writes are the next ones of the channel, whatever their common timestamp is that
all channels of the transaction have: the highest of its PREPAREs. They are ordinary records, in the order of time, and
no reader has to wait, to put anything in order, or to know what was prepared.

In the log a whole of PREPARE records is followed by the records of the commit, or by ABORT, which bear the same
producer, number and attempt. Several may be prepared at once: they are committed in the order of their timestamps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..clock import MAX_TIMESTAMP
from ..log.record import BatchPart, Record, RecordType

ATTEMPT = "tidewal.attempt"  # tag: of a transaction, of which one may be committed
TURN_S = 0.2  # for which a write that was refused has its turn before the next transactions: it comes again in between
PREPARED_TYPE = "tidewal.type"  # tag of PREPARE: the type of the record that the commit will write

_STAMPED = {"ts": 0, "term": 0, "cseq": 0, "part": None, "id": b""}


class TransactionId(NamedTuple):
    """One attempt to commit what `producer`, a client, has written under its number `pseq`."""

    producer: str
    pseq: int
    attempt: str


@dataclass(slots=True)
class PreparedTransaction:
    """A transaction that is prepared in one channel at `ts`, and writes these `records` there. `before` is the id of
    the last record below it that was acknowledged: the next owner reads from there. `durable`: its PREPARE is. `since`
    is when it was prepared, or found, in seconds of the caller's clock."""

    id: TransactionId
    ts: int
    records: list[Record] = field(default_factory=list[Record])
    before: bytes = b""
    durable: bool = False
    committing: bool = False
    since: float = 0.0

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(record.body) for record in self.records)


class PreparedTransactions:
    """Those of one channel that are not decided, or whose decision the channel does not have yet. Guarded by the
    channel owner's lock. `turned_away_s` is when another write was refused for them, which has not come since, in
    seconds of the caller's clock; None for none. `snapshot_due`: a snapshot of the channel waits for them."""

    def __init__(self) -> None:
        self.turned_away_s: float | None = None
        self.snapshot_due: bool = False
        self._by_id: dict[TransactionId, PreparedTransaction] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def all(self) -> list[PreparedTransaction]:
        """In the order of their PREPAREs."""
        return list(self._by_id.values())

    @property
    def first_ts(self) -> int:
        """The timestamp of the first PREPARE; above all others where there is none."""
        return next((each.ts for each in self._by_id.values()), MAX_TIMESTAMP)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(each.size for each in self._by_id.values())

    def find(self, id: TransactionId) -> PreparedTransaction | None:
        """The transaction, where it is prepared."""
        return self._by_id.get(id)

    def of(self, producer: str, pseq: int) -> PreparedTransaction | None:
        """An attempt of that write, where one is prepared."""
        return next((each for each in self._by_id.values() if each.id[:2] == (producer, pseq)), None)

    def add(self, transaction: PreparedTransaction) -> None:
        """It is prepared behind those before it. A write that was refused before has had its turn."""
        self.turned_away_s = None
        self._by_id[transaction.id] = transaction

    def remove(self, id: TransactionId) -> None:
        """It is committed or aborted here, or was not prepared after all."""
        self._by_id.pop(id, None)

    def is_awaited(self, now_s: float) -> bool:
        """Whether other writes wait for them to end, or come in a moment since they have: no further one joins."""
        if self.snapshot_due:
            return True
        if self.turned_away_s is None:
            return False
        return bool(self._by_id) or now_s - self.turned_away_s < TURN_S

    def next_commit(self, decided: Mapping[TransactionId, int]) -> PreparedTransaction | None:
        """Which transaction is to be committed next, of those with a timestamp in `decided`: the one with the lowest,
        once no other may get a lower one. None while one is being committed, and where there is none."""
        there = self.all
        due = [each for each in there if each.id in decided]
        if not due or any(each.committing for each in there):
            return None
        first = min(due, key=lambda each: decided[each.id])
        open_below = (each.ts <= decided[first.id] for each in there if each.id not in decided)
        return None if any(open_below) else first

    # ---- recovery ---------------------------------------------------------------------------------------------------

    def recover(self, record: Record, before: bytes) -> bool:
        """Take over what a record in the log says, of which `before` is the id of the one before it; returns whether it
        was one of a transaction's own."""
        id = id_of(record)
        if id is None:
            return False
        if record.type is not RecordType.PREPARE:
            self.remove(id)
            return record.type is RecordType.ABORT
        known = self._by_id.get(id)
        if known is None or (record.part is not None and not record.part.number):
            known = PreparedTransaction(id, record.ts, before=before, durable=True)
            self.add(known)
        known.records.append(as_committed(record))
        return True


def id_of(record: Record) -> TransactionId | None:
    """The transaction that a record is of; None for one of none."""
    attempt = record.tags.get(ATTEMPT)
    return TransactionId(record.producer, record.pseq, attempt) if isinstance(attempt, str) else None


def as_prepared(records: Sequence[Record], id: TransactionId, ts: int) -> list[Record]:
    """The PREPARE at `ts` of what a transaction writes to one channel: a whole, which readers pass over."""
    return [
        replace(
            record,
            type=RecordType.PREPARE,
            producer=id.producer,
            pseq=id.pseq,
            part=BatchPart(ts, number, len(records)),
            tags={**record.tags, ATTEMPT: id.attempt, PREPARED_TYPE: int(record.type)},
        )
        for number, record in enumerate(records)
    ]


def as_committed(record: Record) -> Record:
    """What the commit writes, by a record of the PREPARE; it is to be stamped, and made a part of its batch."""
    kind = record.tags.get(PREPARED_TYPE)
    tags = {name: tag for name, tag in record.tags.items() if name != PREPARED_TYPE}
    known = RecordType(kind) if isinstance(kind, int) else RecordType.ROWS
    return replace(record, type=known, tags=tags, body=bytes(record.body), **_STAMPED)


def aborted(id: TransactionId) -> Record:
    """The record that the transaction writes nothing in its channel."""
    return Record(RecordType.ABORT, producer=id.producer, pseq=id.pseq, tags={ATTEMPT: id.attempt})
