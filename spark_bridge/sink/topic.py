"""Writing into topics: channels that have no owner, and do not deduplicate by themselves.

Tasks *stage* their rows in a channel of the query's own, as the very bytes that the topics will hold. Once all have,
the driver *decides* in the ledger whose staged rows count, copies them to the topics, and notes the batch as done. So
attempts that fail, run twice or beside each other leave nothing but staged rows that are never read, and a batch that
is decided has fixed content, however Spark computes it again. When the driver dies while it copies, the next one finds
the decision, reads what the topics hold behind the ends in it, and copies the rest.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgpack

from ...runtime.errors import BadRecord, CorruptLog, OutcomeUnknown, PositionLost, Unavailable
from ...runtime.log.ledger_body import STAGED
from ...runtime.log.record import Record, RecordType, decode, encode
from ...runtime.log.wal import Append, Entry, FromId, Wal
from .ledger import DIGEST_MASK, Decision, Ledger, MicroBatch, StagedRows, record_in, upto
from .messages import OutgoingMessage
from .retry import retry_until

STAGED_BYTES: Final = 4 * 1024 * 1024  # of one staged entry, where the channel takes as much
OVERHEAD_BYTES: Final = 1024  # of a message's limit, for all but the rows
ROW_BYTES: Final = 32  # of one row in a staged entry, beside its payload


def staged_name(ledger: str) -> str:
    """The channel where the tasks of a ledger's writer put their rows."""
    return ledger + STAGED


def producer_of(writer: str, batch: int, partition: int) -> str:
    """The producer of copied records: with the number in the partition (`pseq`) it identifies one."""
    return f"spark/{writer}/{batch}/{partition}"


@dataclass(slots=True)
class Stager:
    """Stages the messages of one task. `limit` is the largest size of an entry of `channel`, in bytes."""

    wal: Wal
    channel: str
    partition: int
    limit: int
    deadline_s: float
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    targets: set[str] = field(default_factory=set[str])
    _places: dict[str, int] = field(default_factory=dict[str, int])  # of the topics in what is held back
    _held: list[tuple[int, int, bytes]] = field(default_factory=list[tuple[int, int, bytes]])
    _size: int = 0
    _count: int = 0
    _chunks: int = 0
    _first: bytes = b""
    _last: bytes = b""
    _digest: int = 0

    @property
    def row_limit(self) -> int:
        """The largest size of one message, in bytes."""
        return self.limit - OVERHEAD_BYTES

    async def add(self, messages: Iterable[OutgoingMessage]) -> None:
        """Stage messages in their order; at most one entry of them is buffered."""
        for channel, timestamp, payload, digest in messages:
            size = len(payload) + ROW_BYTES + (0 if channel in self._places else len(channel) + ROW_BYTES)
            if self._held and self._size + size > min(self.row_limit, STAGED_BYTES):
                await self._flush()
            self._held.append((self._places.setdefault(channel, len(self._places)), timestamp, payload))
            self._size += size
            self._digest += digest

    async def finish(self) -> StagedRows | None:
        """Stage what is buffered. Returns what was staged in all, None for nothing."""
        if self._held:
            await self._flush()
        if not self._chunks:
            return None
        digest = self._digest & DIGEST_MASK
        return StagedRows(self.partition, self.token, self._chunks, self._first, self._last, digest)

    async def _flush(self) -> None:
        body = cast(bytes, msgpack.packb((list(self._places), self._held)))
        tags = {"token": self.token, "chunk": self._chunks, "row": self._count}
        entry = encode(Record(RecordType.LEDGER, tags=tags, body=body))
        self._last = await retry_until(lambda: self.wal.append(self.channel, entry), "the batch", self.deadline_s)
        self._first = self._first or self._last
        self._count += len(self._held)
        self._chunks += 1
        self.targets.update(self._places)
        self._places, self._held, self._size = {}, [], 0


def _digest(attempts: Iterable[StagedRows]) -> int:
    return sum(each.digest for each in attempts) & DIGEST_MASK


CopiedNumbers = Mapping[tuple[str, str], int]  # (channel, producer) -> the highest number there


class Publisher:
    """The driver's side: decides a batch, copies its rows to the topics, and notes it as done.

    One at a time for a ledger, as Spark's checkpoints demand of drivers."""

    def __init__(
        self, wal: Wal, ledger: Ledger, staged: str, writer: str, deadline_s: float, *, allow_old: bool = False
    ) -> None:
        """With `allow_old` a batch that is not above the last one that is done counts as done, whatever is in it."""
        self._wal = wal
        self._ledger = ledger
        self._staged = staged
        self._writer = writer
        self._deadline_s = deadline_s
        self._allow_old = allow_old
        self._copied = 0
        self._followed: int | None = (
            None  # the digest of what was decided before, while this commit brings it to its end
        )

    async def commit(self, batch: int, attempts: Sequence[StagedRows], targets: Iterable[str], run: str = "") -> None:
        """Make `attempts` the content of `batch` of the checkpoint `run`, unless an earlier commit did with others.
        Returns when all rows are in the topics, each once, however often this is called. Raises `InvalidRequest` for a
        number that is done, unless it is the last one with the same rows, `DeadlineExceeded` when the log does not take
        them in time, `OutcomeUnknown` when retention removed what shows whether they are there, and what the log
        raises."""
        wanted = sorted(set(targets))
        await retry_until(
            lambda: self._resume(batch, attempts, wanted, run), f"batch {batch}", self._deadline_s, lambda: self._copied
        )

    async def _resume(self, batch: int, attempts: Sequence[StagedRows], targets: Sequence[str], run: str) -> None:
        """Continue from the state that an earlier call or driver has left."""
        state = await self._ledger.state()
        if batch <= state.done.number:
            if not self._allow_old:
                digest = _digest(attempts) if self._followed is None else self._followed
                MicroBatch(batch, run, digest).check_repeats(state.done)
            return
        decision, there = state.decision, cast(CopiedNumbers, {})
        if decision is not None:
            self._check(decision, batch, run)
            self._followed = _digest(decision.attempts)
            there = await self._copied_before(decision)
        elif attempts:
            decision = Decision(batch, attempts, {each: await self._wal.latest_id(each) for each in targets}, run)
            await self._ledger.decide(decision)
            if (await self._ledger.state()).decision != decision:
                raise Unavailable(f"another driver has decided batch {batch} at the same time; retry")
        else:
            return
        await self._copy(decision, there)
        await self._ledger.finish(MicroBatch(batch, decision.run, _digest(decision.attempts)))
        await self._truncate_staged()

    def _check(self, decision: Decision, batch: int, run: str) -> None:
        if decision.batch != batch or (decision.run != run and not self._allow_old):
            other = "" if decision.run == run else " of another checkpoint"
            raise CorruptLog(
                f"batch {decision.batch} was begun and is not done, and this is batch {batch}{other}: run that one "
                "first, with the checkpoint or txnVersion that it had, or use another txnAppId",
                path=self._staged,
            )

    async def _copied_before(self, decision: Decision) -> CopiedNumbers:
        """The highest number of each producer of this batch that each topic has already."""
        wanted = {producer_of(self._writer, decision.batch, each.partition) for each in decision.attempts}
        found: dict[tuple[str, str], int] = {}
        for channel, end in decision.ends.items():
            try:
                async with aclosing(self._entries_after(channel, end)) as entry_lists:
                    async for entries in entry_lists:
                        for entry in entries:
                            try:
                                record = decode(entry.payload)
                            except BadRecord:
                                continue
                            if record.producer in wanted:
                                key = (channel, record.producer)
                                found[key] = max(found.get(key, -1), record.pseq)
            except PositionLost as error:
                raise OutcomeUnknown(
                    f"batch {decision.batch} was begun, and retention has removed from {channel} what shows how "
                    f"far it came ({error.message}): look what the topic has, then begin with a new checkpoint"
                ) from error
        return found

    async def _entries_after(self, channel: str, end: bytes | None) -> AsyncGenerator[Sequence[Entry]]:
        """The entries of a topic behind `end` (None: from its first entry ever). Raises `PositionLost` where retention
        has removed all of them, or the first behind `end`."""
        info = await self._wal.describe(channel)
        if info.latest_id is None:
            return
        if end is not None:
            start = FromId(end)
        elif info.first_id is not None:
            start = FromId(info.first_id, inclusive=True)
        else:
            raise PositionLost(f"all its entries up to {info.latest_id.hex()} are gone", requested=b"", channel=channel)
        async with aclosing(upto(self._wal, channel, start, info.latest_id)) as entry_lists:
            async for entries in entry_lists:
                yield entries

    async def _copy(self, decision: Decision, there: CopiedNumbers) -> None:
        async with aclosing(self._staged_rows(decision)) as staged:
            async for producer, first, targets, rows in staged:
                reached = [there.get((channel, producer), -1) for channel in targets]
                appends = [
                    Append(targets[target], payload, timestamp)
                    for number, (target, timestamp, payload) in enumerate(rows, first)
                    if number > reached[target]
                ]
                if appends:
                    await self._wal.append_many(appends)
                    self._copied += len(appends)

    async def _staged_rows(
        self, decision: Decision
    ) -> AsyncGenerator[tuple[str, int, list[str], list[tuple[int, int, bytes]]]]:
        """The staged entries of a decision: the producer, the number of the first row, the channels, the rows."""
        attempts = {each.token: each for each in decision.attempts}
        seen = dict.fromkeys(attempts, 0)
        first, last = min(each.first for each in decision.attempts), max(each.last for each in decision.attempts)
        async with aclosing(upto(self._wal, self._staged, FromId(first, inclusive=True), last)) as entry_lists:
            async for entries in entry_lists:
                for entry in entries:
                    record = record_in(entry, self._staged, RecordType.LEDGER)
                    token = None if record is None else record.tags.get("token")
                    if record is None or token not in attempts or record.tags["chunk"] != seen[token]:
                        continue  # of another attempt, or appended twice after an unknown outcome
                    seen[token] += 1
                    targets, rows = cast(Any, msgpack.unpackb(record.body, use_list=False))
                    producer = producer_of(self._writer, decision.batch, attempts[token].partition)
                    yield producer, cast(int, record.tags["row"]), list(targets), rows
        if any(seen[each.token] != each.chunks for each in decision.attempts):
            raise CorruptLog(
                f"{self._staged} does not hold all rows of batch {decision.batch} any more: they were removed by hand",
                path=self._staged,
            )

    async def _truncate_staged(self) -> None:
        """Truncate the staged rows: the next batch stages its own after this one."""
        if self._wal.capabilities.truncate:
            latest = await self._wal.latest_id(self._staged)
            if latest is not None:
                await self._wal.truncate(self._staged, latest)
