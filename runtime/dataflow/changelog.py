"""The changelog of a keyed state: the records of one channel from which the state can be made again.

Each commit of a program writes what has changed since the last one, under the next sequence number; the position of the
group carries that number (`Checkpoint`). A state is recovered by reading the changelog until the record with the number
has come: not to the channel's end, because a backend may publish what a commit has written a little later.

So that a changelog does not grow for ever, commits sweep through the state once enough has been written: each also
writes some keys that have not changed, until all have been written once since the sweep began (a snapshot in parts, for
which nothing has to wait). What lies before the sweep's beginning is not needed then: `base` says so, and the channel
is truncated there. A sweep goes on in the next life of its program: the tag `sweep` says where it began, and a recovery
sees which keys have been written since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import msgpack

from ..errors import CorruptLog, InvalidRequest, MessageTooLarge, check_version
from ..log.record import DECODE_ERRORS, BatchPart, Record, RecordType, encode
from .keyed_state import KeyedState, KeyedTable

SWEEP_FROM_BYTES = 4 * 1024 * 1024  # written since the last sweep began, before another one is worth its bytes
SWEEP_BYTES = 64 * 1024  # what a commit sweeps at least
RECORD_BYTES = 1024 * 1024  # of a record, about
RECORD_OVERHEAD_BYTES = 1024
KEYS_AT_ONCE = 4096
SWEPT_AT_ONCE = 256  # keys, where their values are small
KEY_BYTES = 200  # what a key takes in memory beside its encoded bytes, about

_CHECKPOINT_VERSION = 1
_TUPLE = 1  # of msgpack's extension types


class Codec(Protocol):
    """Encodes the values of a state's tables, many at a time."""

    def encode(self, values: list[Any]) -> bytes:
        """The bytes of `values`. Raises what it likes for a value that it cannot encode."""
        ...

    def decode(self, data: bytes) -> list[Any]:
        """The values that `encode` was given, equal and in their order."""
        ...


class MsgpackCodec:
    """What msgpack has: None, booleans, numbers up to 64 bits, text, bytes, lists, dictionaries, datetimes with a time
    zone; and tuples, which stay tuples."""

    def encode(self, values: list[Any]) -> bytes:
        return cast(bytes, msgpack.packb(values, strict_types=True, default=_extension, datetime=True))

    def decode(self, data: bytes) -> list[Any]:
        return cast("list[Any]", msgpack.unpackb(data, ext_hook=_extended, timestamp=3, strict_map_key=False))


def _extension(value: object) -> msgpack.ExtType:
    if type(value) is not tuple:
        raise TypeError(f"msgpack has no {type(value).__name__}; store something simpler, or use a codec")
    members = list(cast("tuple[object, ...]", value))
    return msgpack.ExtType(_TUPLE, msgpack.packb(members, strict_types=True, default=_extension, datetime=True))


def _extended(code: int, data: bytes) -> object:
    if code != _TUPLE:
        raise ValueError(f"unknown extension {code}")
    members = cast("list[object]", msgpack.unpackb(data, ext_hook=_extended, timestamp=3, strict_map_key=False))
    return tuple(members)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a group's position in an input channel says about the state: `life` names the changelog's records that
    count, which are those since the group last began anew there, and `sequence` the newest of them."""

    life: str
    sequence: int

    def to_bytes(self) -> bytes:
        """The checkpoint as msgpack."""
        return cast(bytes, msgpack.packb(("state", _CHECKPOINT_VERSION, self.life, self.sequence)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """The checkpoint that `to_bytes` wrote. Raises `InvalidRequest` for the metadata of another program, and
        `FormatTooNew`."""
        try:
            kind, version, *fields = cast("list[object]", msgpack.unpackb(data))
            if kind != "state":
                raise ValueError("of another kind")
            check_version("the state's checkpoint", version, _CHECKPOINT_VERSION)
            life, sequence = fields
            if type(life) is not str or type(sequence) is not int:
                raise ValueError("fields of other types")
        except DECODE_ERRORS as error:
            raise InvalidRequest(
                f"the group's position carries metadata that is not of a keyed state ({error}): another program uses "
                "the group; give this one a group of its own"
            ) from error
        return cls(life, sequence)


class Changelog:
    """Writes the changes of `state` as records, commit by commit. Pure: the caller appends them, in one commit with the
    group's position. `limit` is the largest record that the channel takes, in bytes."""

    def __init__(
        self,
        state: KeyedState,
        checkpoint: Checkpoint,
        *,
        codec: Codec,
        limit: int,
        base: int = 1,
        written: int = 0,
        swept: int = 0,
        sweep: _Sweep | None = None,
        before_sweep: int = 0,
    ) -> None:
        """`checkpoint` is that of the last commit, `base` the sequence number of the first one that is needed, and
        `written` the bytes of the changelog since; `swept` are those of the last whole sweep, and `before_sweep` those
        of `written` that lie before the `sweep` under way."""
        self.state = state
        self.checkpoint: Checkpoint = checkpoint
        self.base: int = base
        self._codec = codec
        self._limit = min(limit, RECORD_BYTES + RECORD_OVERHEAD_BYTES) - RECORD_OVERHEAD_BYTES
        self._largest = limit
        self._written = written - before_sweep  # bytes since the last sweep began
        self._swept = swept  # bytes of the last whole sweep: about the size of the state
        self._sized = written  # bytes of the state, no less, when it was last encoded as a whole
        self._changed = 0  # bytes of the changes since
        self._changed_in_sweep = 0 if sweep is None else self._written - sweep.bytes
        self._needed = written  # bytes since `base`
        self._before_sweep = before_sweep
        self._sweep = sweep

    @property
    def sweep_began(self) -> bool:
        """Whether the last commit began a sweep: its first record is where the channel may be truncated once the sweep
        is through, which is when `base` is its sequence number."""
        return self._sweep_sequence == self.checkpoint.sequence

    @property
    def written(self) -> int:
        """The bytes of the changelog since `base`: what a recovery reads."""
        return self._needed

    @property
    def memory_bytes(self) -> int:
        """What the state takes in memory, about, and never counted too low: a key that was changed since the state was
        last encoded as a whole counts again. `measure` makes it exact."""
        return self._sized + self._changed + KEY_BYTES * self.state.keys

    def measure(self) -> None:
        """Encode the whole state, for its size. Raises as `next_commit` does."""
        self._sized = sum(
            len(body) for table in self.state.tables.values() for _, body in self._changes(table, list(table.data))
        )
        self._changed = 0

    def next_commit(self) -> list[bytes]:
        """The records that store what has changed since the last call, and `checkpoint` with them; none where nothing
        has. Raises `InvalidRequest` for what the codec cannot encode, `MessageTooLarge` for a value that no record can
        hold."""
        bodies = [
            body
            for table in self.state.tables.values()
            if table.changed
            for _, body in self._changes(table, list(table.changed))
        ]
        if not bodies:
            return []
        sequence, base = self.checkpoint.sequence + 1, self.base
        changed_bytes = sum(map(len, bodies))
        self._written += changed_bytes
        self._changed += changed_bytes
        self._changed_in_sweep += changed_bytes
        if self._sweep is None and self._written >= max(SWEEP_FROM_BYTES, 2 * self._swept):
            self._sweep = _Sweep(sequence, [(table, list(table.data)) for table in self.state.tables.values()])
            self._written = self._changed_in_sweep = changed_bytes
            self._before_sweep = self._needed
        if self._sweep is not None:
            bodies += self._swept_bodies(self._sweep, max(SWEEP_BYTES, changed_bytes))
        for table in self.state.tables.values():
            table.changed.clear()
        self._needed += sum(map(len, bodies))
        if self.base > base:
            self._needed -= self._before_sweep
        self.checkpoint = Checkpoint(self.checkpoint.life, sequence)
        return [self._record(body, number, len(bodies)) for number, body in enumerate(bodies)]

    @property
    def _sweep_sequence(self) -> int:
        """The commit with which the newest sweep began."""
        return self.base if self._sweep is None else self._sweep.sequence

    def _swept_bodies(self, sweep: _Sweep, limit: int) -> list[bytes]:
        """What the sweep writes with this commit. Behind its last key, it is the base."""
        bodies: list[bytes] = []
        swept = 0
        while swept < limit:
            part = sweep.next_keys()
            if part is None:
                self.base, self._swept, self._sweep = sweep.sequence, sweep.bytes + swept, None
                self._sized, self._changed = self._swept, self._changed_in_sweep
                break
            for keys, body in self._changes(*part):
                bodies.append(body)
                swept += len(body)
                sweep.passed(keys)
                if swept >= limit:
                    break
        sweep.bytes += swept
        self._written += swept
        return bodies

    def _changes(self, table: KeyedTable[Any, Any], keys: list[Any]) -> Iterator[tuple[list[Any], bytes]]:
        """The bodies that store what the table has for each of `keys`, or that it has nothing; each with its keys."""
        for at in range(0, len(keys), KEYS_AT_ONCE):
            yield from self._split(table, keys[at : at + KEYS_AT_ONCE])

    def _split(self, table: KeyedTable[Any, Any], keys: list[Any]) -> Iterator[tuple[list[Any], bytes]]:
        body = self._body(table, keys)
        size = len(body)
        if size <= self._limit or (len(keys) == 1 and size + RECORD_OVERHEAD_BYTES <= self._largest):
            yield keys, body
            return
        if len(keys) == 1:
            raise MessageTooLarge(
                f"the value of {keys[0]!r} in the table {table.name!r} takes {size} bytes, and a record of the "
                f"changelog at most {self._largest}: split it over several keys",
                size=size,
                limit=self._largest,
            )
        del body  # it may be large
        half = len(keys) // 2
        yield from self._split(table, keys[:half])
        yield from self._split(table, keys[half:])

    def _body(self, table: KeyedTable[Any, Any], keys: list[Any]) -> bytes:
        data = table.data
        kept = [key for key in keys if key in data]
        gone = [key for key in keys if key not in data] if len(kept) < len(keys) else []
        try:
            values = self._codec.encode([data[key] for key in kept])
            return cast(bytes, msgpack.packb((table.name, msgpack.packb(kept), values, msgpack.packb(gone))))
        except Exception as error:  # a codec's error may be any
            raise InvalidRequest(f"the table {table.name!r} cannot be stored: {error}") from error

    def _record(self, body: bytes, number: int, of: int) -> bytes:
        return encode(
            Record(
                RecordType.STATE,
                producer=self.checkpoint.life,
                pseq=self.checkpoint.sequence,
                part=BatchPart(0, number, of),
                tags={
                    "base": self.base,
                    "sweep": self._sweep_sequence,
                    "swept": self._swept if self._sweep is None else self._sweep.bytes,
                },
                body=body,
            )
        )


class _Sweep:
    """One pass over `keys`, by table: those that the state had when the pass began, at the commit `sequence`. A key
    that came later was written when it came. `bytes` have been written so far."""

    def __init__(self, sequence: int, keys: list[tuple[KeyedTable[Any, Any], list[Any]]], swept: int = 0) -> None:
        self.sequence = sequence
        self.bytes: int = swept
        self._left = keys[::-1]
        self._at = 0  # in the keys of the last table of `_left`
        self._at_once = 1  # how many keys are encoded together: few where a record holds few, or all would be encoded

    def next_keys(self) -> tuple[KeyedTable[Any, Any], list[Any]] | None:
        """The next keys that are still in their table, until they are `passed`; None behind the last."""
        while self._left:
            table, keys = self._left[-1]
            while self._at < len(keys):
                there = [key for key in keys[self._at : self._at + self._at_once] if key in table.data]
                if there:
                    return table, there
                self._at += self._at_once
            self._left.pop()
            self._at = 0
        return None

    def passed(self, keys: list[Any]) -> None:
        """`keys`, the next ones, have been written, in one record."""
        self._at = self._left[-1][1].index(keys[-1], self._at) + 1
        self._at_once = min(2 * len(keys), SWEPT_AT_ONCE)


class StateRecovery:
    """Makes a state again out of the records of its changelog, given in their order, until `done`."""

    def __init__(self, checkpoint: Checkpoint, codec: Codec) -> None:
        self.state: KeyedState = KeyedState()
        self.checkpoint: Checkpoint = checkpoint
        self.base: int = 1
        self.begin_ts: int = 0  # of the first record that counts
        self.sweep_at: tuple[int, bytes, int] | None = None  # commit, id and timestamp where the newest sweep began
        self._codec = codec
        self._first: tuple[int, int] | None = None  # sequence and part, as are the next two
        self._last = (0, 0)
        self._next = (0, 0)
        self._bytes = 0
        self._before: dict[int, int] = {}  # by the commit with which a sweep began, the bytes before
        self._sweep = 1  # the commit with which the newest one began; `base`, where that is through
        self._swept = 0
        self._since: dict[str, set[Any]] = {}  # by table, the keys that were written since, while it is under way
        self._complete = checkpoint.sequence == 0

    @property
    def done(self) -> bool:
        """Whether the state is that of the checkpoint."""
        return self._complete

    def feed(self, record: Record, timestamp: int = 0, id: bytes = b"") -> None:
        """Apply a record, whose entry has the `timestamp` and the `id`; those of other lives, and repetitions, are
        passed over. Raises `CorruptLog` where records that are needed are missing, or cannot be read."""
        part = record.part
        if record.type is not RecordType.STATE or record.producer != self.checkpoint.life or part is None:
            return
        at = (record.pseq, part.number)
        if self._complete or at <= self._last:
            return
        if self._first is None:
            self._first, self.begin_ts = at, timestamp
        elif at != self._next:
            raise CorruptLog(f"the changelog goes from {self._last} to {at}: what lies between is missing")
        ends = part.number + 1 == part.of
        self._last, self._next = at, (record.pseq + 1, 0) if ends else (record.pseq, part.number + 1)
        self.base = cast(int, record.tags.get("base"))
        self._sweep = cast(int, record.tags.get("sweep", self.base))
        self._swept = cast(int, record.tags.get("swept", 0))
        if at == (self._sweep, 0):
            self.sweep_at = self._sweep, id, timestamp
            self._before[self._sweep] = self._bytes
            self._since = {}
        self._apply(record)
        self._bytes += len(record.body)
        if ends and record.pseq == self.checkpoint.sequence:
            if self._first > (self.base, 0):
                raise CorruptLog(
                    f"the changelog begins with {self._first}, and all since commit {self.base} is needed: something "
                    "has removed the rest"
                )
            self._complete = True

    def changelog(self, limit: int) -> Changelog:
        """The changelog that goes on with the recovered state, and with the sweep under way."""
        before = self._before.get(self.base, 0)
        sweep, before_sweep = None, 0
        if self._sweep > self.base:
            keys = [
                (table, list(table.data.keys() - self._since.get(name, ())))
                for name, table in self.state.tables.items()
            ]
            sweep, before_sweep = _Sweep(self._sweep, keys, self._swept), self._before[self._sweep] - before
        return Changelog(
            self.state,
            self.checkpoint,
            codec=self._codec,
            limit=limit,
            base=self.base,
            written=self._bytes - before,
            swept=self._swept,
            sweep=sweep,
            before_sweep=before_sweep,
        )

    def _apply(self, record: Record) -> None:
        try:
            name, keys, values, gone = cast("tuple[str, bytes, bytes, bytes]", msgpack.unpackb(record.body))
            data, kept = self.state.table(name).data, _keys(keys)
            data.update(zip(kept, self._codec.decode(values), strict=True))
            for key in _keys(gone):
                data.pop(key, None)
            if self._sweep > self.base:
                self._since.setdefault(name, set()).update(kept)
        except Exception as error:  # a codec's error may be any
            raise CorruptLog(
                f"commit {record.pseq} of the changelog cannot be read: {error}. Was it written with another codec?"
            ) from error


def _keys(data: bytes) -> Sequence[Any]:
    return cast("Sequence[Any]", msgpack.unpackb(data, use_list=False, strict_map_key=False))
