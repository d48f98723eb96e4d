"""Producer identities: how a retry is recognised under any owner of the channel (guarantee 5)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgpack

from ..errors import BadRecord, OutcomeUnknown, check_version
from ..log.record import DECODE_ERRORS
from ..log.wal import Payload

REMEMBERED_PER_PRODUCER = 256  # more than a client may have in flight
OUTCOMES_MAX = 65_536  # of a channel
PRODUCERS_MAX = 100_000  # of a channel
EXPIRY_MS = 24 * 3600 * 1000
OUTCOMES_PER_PAGE = 16_384
VERSION = 3  # of a snapshot: that with offsets of sources
WITHOUT_SOURCES = 2  # what is written where there are none: an older Tidewal reads it

_NEVER = -1


class BatchOutcome(NamedTuple):
    """The outcome of one batch in one channel: its timestamp, its number of rows, the digest that its producer gave it,
    if any, and for how many channels it is. A named producer's batch without rows was given up.

    A log without atomic batches may have it in some of these channels only: each of them answers for itself."""

    ts: int
    rows: int
    digest: int = 0
    channels: int = 1


_Wire = tuple[tuple[str, int, int, tuple[tuple[int, tuple[Any, ...]], ...]], ...]


class _Producer:
    __slots__ = ("forgotten", "last_ms", "outcomes")

    def __init__(self, forgotten: int) -> None:
        self.outcomes: OrderedDict[int, BatchOutcome] = OrderedDict()  # by number, the lowest first
        self.forgotten = forgotten  # the highest number whose outcome was forgotten
        self.last_ms = 0


class ProducerTable:
    """The last outcomes of each producer in one channel, by its own numbering.

    Outcomes are forgotten beyond `REMEMBERED_PER_PRODUCER`, when the producer was silent for `EXPIRY_MS`, and beyond
    `OUTCOMES_MAX` of all, those of the longest silent producers first; the highest forgotten number is kept then.
    Beyond `PRODUCERS_MAX` the longest silent producers are forgotten altogether.

    A source is a producer whose numbers only rise and name its records, not its batches: of it the highest is kept, and
    never forgotten."""

    def __init__(self) -> None:
        self._producers: OrderedDict[str, _Producer] = OrderedDict()  # the longest silent first
        self._silent: OrderedDict[str, int] = OrderedDict()  # name -> the highest number forgotten
        self._outcomes = 0
        self._offsets: dict[str, bytes] = {}  # of sources

    def find(self, producer: str, pseq: int) -> BatchOutcome | None:
        """The outcome of (producer, pseq), None when it never happened in this channel. Raises `OutcomeUnknown` for a
        number so low that it is forgotten; its field `forgotten` is the highest such number, which did happen. A
        producer that waits for each answer before it sends the next number knows from that field that this one
        happened, too."""
        outcome = self.remembered(producer, pseq)
        if outcome is None and pseq <= (forgotten := self.forgotten(producer)):
            raise OutcomeUnknown(
                f"batch {pseq} of producer {producer} is too old to tell whether it happened: "
                "read before writing again",
                forgotten=forgotten,
            )
        return outcome

    def forgotten(self, producer: str) -> int:
        """The highest number of `producer` whose outcome was forgotten; -1 for none."""
        known = self._producers.get(producer)
        return known.forgotten if known is not None else self._silent.get(producer, _NEVER)

    def remembered(self, producer: str, pseq: int) -> BatchOutcome | None:
        """The outcome of (producer, pseq) where it is remembered."""
        known = self._producers.get(producer)
        return known.outcomes.get(pseq) if known is not None else None

    def highest(self, producer: str) -> int:
        """The highest number of which anything is known; 0 for none."""
        known = self._producers.get(producer)
        if known is None:
            return max(0, self._silent.get(producer, 0))
        return max(0, known.forgotten, next(reversed(known.outcomes), 0))

    def remember(self, producer: str, pseq: int, outcome: BatchOutcome, now_ms: int) -> None:
        """Keep an outcome. Numbers come in any order, and always the lowest are forgotten: no number above them is
        taken for forgotten that never happened."""
        known = self._known(producer, now_ms)
        before = known.outcomes.get(pseq)
        if before is None and pseq <= known.forgotten:
            return
        self._outcomes -= len(known.outcomes)
        late = before is None and pseq < next(reversed(known.outcomes), pseq)
        known.outcomes[pseq] = outcome
        if late:
            known.outcomes = OrderedDict(sorted(known.outcomes.items()))
        while len(known.outcomes) > REMEMBERED_PER_PRODUCER:
            gone, _ = known.outcomes.popitem(last=False)
            known.forgotten = max(known.forgotten, gone)
        self._outcomes += len(known.outcomes)
        self._expire(now_ms)

    def _known(self, producer: str, now_ms: int) -> _Producer:
        known = self._producers.get(producer)
        if known is None:
            known = self._producers[producer] = _Producer(self._silent.pop(producer, _NEVER))
        self._producers.move_to_end(producer)
        known.last_ms = max(known.last_ms, now_ms)
        return known

    def _expire(self, now_ms: int) -> None:
        while len(self._producers) > 1:
            name, oldest = next(iter(self._producers.items()))
            if self._outcomes <= OUTCOMES_MAX and oldest.last_ms >= now_ms - EXPIRY_MS:
                break
            del self._producers[name]
            self._outcomes -= len(oldest.outcomes)
            self._silent[name] = max(oldest.forgotten, max(oldest.outcomes, default=_NEVER))
        while len(self._silent) > PRODUCERS_MAX:
            self._silent.popitem(last=False)

    def source_offset(self, source: str) -> bytes:
        """The highest offset of `source` in this channel; b"" for none."""
        return self._offsets.get(source, b"")

    def reach(self, source: str, offset: bytes) -> None:
        """All that `source` has for this channel up to `offset` is there."""
        self._offsets[source] = max(offset, self.source_offset(source))

    def merge(self, other: ProducerTable) -> None:
        """Add what a snapshot of the same channel says."""
        for source, offset in other._offsets.items():
            self.reach(source, offset)
        for name, forgotten in other._silent.items():
            self.forget(name, forgotten)
        for name, producer in other._producers.items():
            for pseq, outcome in producer.outcomes.items():
                known = self._producers.get(name)
                before = known.outcomes.get(pseq) if known is not None else None
                if before is None or before.channels > outcome.channels == 1:  # one given up after a part was written
                    self.remember(name, pseq, outcome, producer.last_ms)
            self.forget(name, producer.forgotten)

    def forget(self, name: str, upto: int) -> None:
        """Take all up to the number `upto` for happened, whether their outcomes are known or not."""
        known = self._producers.get(name)
        if known is not None:
            known.forgotten = max(known.forgotten, upto)
        elif upto > _NEVER:
            self._silent[name] = max(self._silent.get(name, _NEVER), upto)

    def pages(self) -> list[bytes]:
        """The table as msgpack, in pages of bounded size; `merge` of all is the table. At least one."""
        entries: list[tuple[str, int, int, list[tuple[int, BatchOutcome]]]] = [
            (name, 0, forgotten, []) for name, forgotten in self._silent.items()
        ]
        entries += [
            (name, entry.last_ms, entry.forgotten, list(entry.outcomes.items()))
            for name, entry in self._producers.items()
        ]
        pages: list[bytes] = []
        first = outcomes = 0
        for at, entry in enumerate(entries, 1):
            outcomes += len(entry[3]) + 1
            if outcomes >= OUTCOMES_PER_PAGE or at == len(entries):
                pages.append(cast(bytes, msgpack.packb((WITHOUT_SOURCES, entries[first:at]))))
                first, outcomes = at, 0
        if self._offsets:
            pages.append(cast(bytes, msgpack.packb((VERSION, [], self._offsets))))
        return pages or [cast(bytes, msgpack.packb((WITHOUT_SOURCES, [])))]

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, channel: str = "") -> ProducerTable:
        """The table of `channel` in one page. Raises `BadRecord`, and `FormatTooNew` for a later version."""
        table = cls()
        try:
            version, entries, *sources = cast("tuple[Any, ...]", msgpack.unpackb(data, use_list=False))
            check_version("a producer snapshot", version, VERSION)
            for source, offset in (dict(sources[0]) if sources else {}).items():
                table.reach(str(source), bytes(offset))
            for name, last_ms, forgotten, outcomes in cast(_Wire, entries):
                for pseq, fields in outcomes:
                    outcome = _first_version(fields, channel) if version == 1 else BatchOutcome(*fields)
                    if outcome is not None:
                        table.remember(name, pseq, outcome, last_ms)
                table.forget(name, forgotten)
        except DECODE_ERRORS as error:
            raise BadRecord(f"unreadable producer snapshot: {error}", reason="producers") from error
        return table


def _first_version(fields: tuple[Any, ...], channel: str) -> BatchOutcome | None:
    """The outcome of version 1, which told of all channels: `present` names those that have a part of a batch, and is
    empty where all of it is there. None: `channel` has nothing of it."""
    present = fields[3] if len(fields) > 3 else ()
    return None if present and channel not in present else BatchOutcome(*fields[:3], *fields[4:])


def given_up(producer: str, pseq: int) -> bytes:
    """A table in one page that says of (producer, pseq) that it is done with, and has no rows."""
    table = ProducerTable()
    table.remember(producer, pseq, BatchOutcome(0, 0), 0)
    return table.pages()[0]


def without_sources(page: Payload, is_left_out: Callable[[str], bool]) -> Payload:
    """A page of a table without the offsets of the sources that are left out, by their names; the page itself where it
    has none of these. Raises `BadRecord` as `ProducerTable.from_bytes` does."""
    try:
        version, entries, *rest = cast("tuple[Any, ...]", msgpack.unpackb(page, use_list=False))
        offsets = dict(rest[0]) if rest else {}
    except DECODE_ERRORS as error:
        raise BadRecord(f"unreadable producer snapshot: {error}", reason="producers") from error
    kept = {source: offset for source, offset in offsets.items() if not is_left_out(source)}
    return page if len(kept) == len(offsets) else cast(bytes, msgpack.packb((version, entries, kept)))
