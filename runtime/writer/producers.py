"""Producer identities: how a retry is recognised, whoever owns the channel (guarantee 5)."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, cast

import msgpack

from ..errors import BadRecord, OutcomeUnknown
from ..record import DECODE_ERRORS

REMEMBERED_PER_PRODUCER = 256  # more than a client may have in flight
PRODUCERS_MAX = 100_000
EXPIRY_MS = 24 * 3600 * 1000


class Outcome(NamedTuple):
    """What became of one batch: its timestamp and its number of rows."""

    ts: int
    rows: int


_Wire = tuple[tuple[str, int, tuple[tuple[int, tuple[int, int]], ...]], ...]


class _Producer:
    __slots__ = ("last_ms", "outcomes")

    def __init__(self) -> None:
        self.outcomes: OrderedDict[int, Outcome] = OrderedDict()
        self.last_ms = 0


class ProducerTable:
    """The last outcomes of each producer, by its own numbering. An entry not used for `EXPIRY_MS` is forgotten, as
    are the least recently used over `PRODUCERS_MAX`."""

    def __init__(self) -> None:
        self._producers: OrderedDict[str, _Producer] = OrderedDict()

    def find(self, producer: str, pseq: int) -> Outcome | None:
        """The outcome of (producer, pseq), None when it never happened. Raises `OutcomeUnknown` for a number so low
        that it is forgotten."""
        known = self._producers.get(producer)
        if known is None:
            return None
        outcome = known.outcomes.get(pseq)
        if outcome is None and len(known.outcomes) >= REMEMBERED_PER_PRODUCER and pseq < next(iter(known.outcomes)):
            raise OutcomeUnknown(
                f"batch {pseq} of producer {producer} is too old to tell whether it happened: read before writing again"
            )
        return outcome

    def remember(self, producer: str, pseq: int, outcome: Outcome, now_ms: int) -> None:
        """Keep an outcome; parts of one batch add up their rows."""
        known = self._producers.get(producer)
        if known is None:
            known = self._producers[producer] = _Producer()
            self._expire(now_ms)
        self._producers.move_to_end(producer)
        known.last_ms = now_ms
        known.outcomes[pseq] = outcome
        while len(known.outcomes) > REMEMBERED_PER_PRODUCER:
            known.outcomes.popitem(last=False)

    def _expire(self, now_ms: int) -> None:
        while len(self._producers) > 1:
            oldest = next(iter(self._producers.values()))
            if len(self._producers) <= PRODUCERS_MAX and oldest.last_ms >= now_ms - EXPIRY_MS:
                return
            self._producers.popitem(last=False)

    def merge(self, other: ProducerTable) -> None:
        """Take over what another channel's log tells."""
        for name, producer in other._producers.items():
            for pseq, outcome in producer.outcomes.items():
                if name not in self._producers or pseq not in self._producers[name].outcomes:
                    self.remember(name, pseq, outcome, producer.last_ms)

    def to_bytes(self) -> bytes:
        """The table as msgpack, version 1."""
        table = [(name, entry.last_ms, list(entry.outcomes.items())) for name, entry in self._producers.items()]
        return cast(bytes, msgpack.packb((1, table)))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ProducerTable:
        """The table that `to_bytes` wrote. Raises `BadRecord`."""
        table = cls()
        try:
            version, entries = cast("tuple[int, _Wire]", msgpack.unpackb(data, use_list=False))
            if version != 1:
                raise ValueError(f"version {version}")
            for name, last_ms, outcomes in entries:
                for pseq, (ts, rows) in outcomes:
                    table.remember(name, pseq, Outcome(ts, rows), last_ms)
        except DECODE_ERRORS as error:
            raise BadRecord(f"unreadable producer snapshot: {error}", reason="producers") from error
        return table
