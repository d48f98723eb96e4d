"""Which writes an owner slows down, and which it refuses, because a limit is near or reached.

What of a vchannel is not in its table yet is looked at with each batch, what members report of their memory every
`LOOK_S`. A batch that is slowed down goes into the log at once, and its acknowledgement waits: nothing has to be held,
order stays, and clients that wait for acknowledgements write no faster. Those that do not wait are refused once they
are `HELD_MAX_S` ahead.

Deletes pass: they are what frees memory. So does all that is no row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from ...runtime.catalog.catalog import Collection
from ...runtime.clock import Clock
from ...runtime.cluster.pressure import (
    NODE_MEMORY,
    ROW_MEMORY,
    Subject,
    Throttle,
    Usage,
    WaterMarks,
    throttle_of,
    throttles_of,
)
from ...runtime.config.settings import Settings
from ...runtime.errors import Overloaded
from ...runtime.log.record import Record
from ...runtime.metrics.metrics import Metrics
from .unflushed import Unflushed
from .vchannels import VChannels

LOOK_S = 0.5
HELD_MAX_S = 1.0  # for which an acknowledgement waits: far below what clients wait for
PAID_MAX_S = 1.0  # of a pace, by one batch: a huge one at a slow pace would keep all other clients out for minutes
FACTOR = "streamingnode_write_factor"
DESCRIBED_MAX = 16  # limits that a report names
SLOWEST_RATE = 512 * 1024  # bytes a second, however near to a high water mark; as in Milvus

MAX_UNFLUSHED = "streamingNode.maxUnflushedBytes"
APPEND_RATE = "streaming.walRateLimit.appendRate"


_factor = attrgetter("factor")
_log = logging.getLogger("tidewal.streamingnode")


class Pace:
    """What may be let in by and by: `rate` bytes a second, or one larger batch each `PAID_MAX_S`. `throttle` is why,
    None for a rate that is always so."""

    def __init__(self, limit: str, rate: float = SLOWEST_RATE) -> None:
        self.limit = limit
        self.rate = rate
        self.throttle: Throttle | None = None
        self._due_s = 0.0  # when what was let in is within the rate

    def concerns(self, collection: int) -> bool:
        """Whether rows of the collection with this id go by it."""
        return self.throttle is None or self.throttle.usage.concerns(collection)

    def ahead_s(self, now_s: float) -> float:
        """For how many seconds nothing may come, so that what was let in is within the rate."""
        return max(0.0, self._due_s - now_s)

    def take(self, size: int, now_s: float) -> float:
        """Let a batch of `size` bytes in, which costs `PAID_MAX_S` at most; returns for how many seconds then nothing
        may come."""
        self._due_s = max(self._due_s, now_s) + min(size / self.rate, PAID_MAX_S)
        return self._due_s - now_s


class WritePressure:
    """The limits at one owner. `usages` returns what the members say of theirs. On the loop, but for `described`."""

    def __init__(
        self,
        settings: Settings,
        unflushed: Unflushed,
        vchannels: VChannels,
        usages: Callable[[], Iterable[Usage]],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._marks = _marks_of(settings)
        self._unflushed_marks = WaterMarks(settings.streaming_node.unflushed_low_water_level, 1.0)
        self._unflushed_bytes = settings.streaming_node.max_unflushed_bytes
        self._full_rate = settings.quota_and_limits.limit_writing.slowdown_rate
        self._unflushed, self._vchannels, self._usages, self._clock = unflushed, vchannels, usages, clock
        self._metrics = metrics
        self._delays = metrics.histogram("streamingnode_write_delay_seconds")
        self._reported: dict[Subject, Throttle] = {}  # by what members report
        self._refusing: list[Throttle] = []  # of them
        self._refused: set[str] = set()  # vchannels, until they are below their low water mark
        self._paces: dict[Subject, Pace] = {}
        self._slowing: list[Pace] = []  # those that do not go by what is unflushed
        self._shown: tuple[Throttle, ...] = ()
        rate = settings.streaming.wal_rate_limit.append_rate
        self._always = [Pace(APPEND_RATE, rate.slowdown_threshold)] if rate.enabled else []
        self.look()

    # ---- batches ----------------------------------------------------------------------------------------------------

    def check(self, collection: Collection, records: Sequence[tuple[str, Record]]) -> list[Pace]:
        """By which paces the rows in `records` go. Raises `Overloaded`, which names limit, value, mark and
        collection."""
        if not _add_rows(records):
            return []
        for refusing in self._refusing:
            if refusing.usage.concerns(collection.id):
                raise _refusal(refusing, collection.name)
        paces = [each for each in self._slowing if each.concerns(collection.id)]
        tightest: Throttle | None = None
        for vchannel, size in _sizes(records).items():
            throttle = self._unflushed_throttle(collection, vchannel, size)
            if throttle is not None and (tightest is None or throttle.factor < tightest.factor):
                tightest = throttle
        if tightest is not None:
            if tightest.refuses:
                raise _refusal(tightest, collection.name)
            paces = [*paces, self._pace(tightest)]
        for pace in paces:
            if pace.ahead_s(self._clock.monotonic()) > HELD_MAX_S:
                raise _too_fast(pace, collection.name)
        return paces

    def check_messages(self, topic_id: int, topic: str) -> list[Pace]:
        """The same for messages of a topic, which take no memory of QueryNodes and go into no table: the limits of all
        that is written hold."""
        for refusing in self._refusing:
            if refusing.usage.limit != ROW_MEMORY and refusing.usage.concerns(topic_id):
                raise _refusal(refusing, topic)
        paces = [each for each in self._slowing if each.limit != ROW_MEMORY and each.concerns(topic_id)]
        for pace in paces:
            if pace.ahead_s(self._clock.monotonic()) > HELD_MAX_S:
                raise _too_fast(pace, topic)
        return paces

    def charge(self, paces: Iterable[Pace], records: Sequence[tuple[str, Record]]) -> float:
        """Count what was let in by `paces`; returns for how many seconds its acknowledgement is to wait."""
        now_s, size = self._clock.monotonic(), sum(_sizes(records).values())
        delay_s = min(HELD_MAX_S, max((pace.take(size, now_s) for pace in paces), default=0.0))
        self._delays.observe(delay_s)
        return delay_s

    def _unflushed_throttle(self, collection: Collection, vchannel: str, size: int = 0) -> Throttle | None:
        """What follows from what of `vchannel` is not in its table, where `size` bytes more are to come. With nothing
        unflushed any batch passes."""
        held, bound = self._unflushed.held(vchannel), max(1, self._unflushed_bytes // len(collection.vchannels))
        if held + size < self._unflushed_marks.low * bound:
            self._refused.discard(vchannel)
            return None
        usage = Usage(MAX_UNFLUSHED, held, bound, collection=collection.name)
        throttle = throttle_of(usage, self._unflushed_marks, refused=vchannel in self._refused)
        if held and held + size > bound:
            throttle = Throttle(usage, 0.0, int(self._unflushed_marks.low * bound), bound)
        if throttle is not None and throttle.refuses and held >= throttle.low:
            self._refused.add(vchannel)
        else:  # also where one batch is too large for now, and others are not
            self._refused.discard(vchannel)
        return throttle

    def _pace(self, throttle: Throttle) -> Pace:
        usage = throttle.usage
        pace = self._paces.get(usage.subject)
        if pace is None:
            pace = self._paces[usage.subject] = Pace(usage.limit)
        pace.rate, pace.throttle = max(throttle.factor * self._full_rate, SLOWEST_RATE), throttle
        return pace

    # ---- what members report ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look every `LOOK_S` at what the members report."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Look at what the members report by now, and show what follows from all limits."""
        refused = {subject for subject, throttle in self._reported.items() if throttle.refuses}
        self._reported = throttles_of(self._usages(), self._marks, refused)
        reported = self._reported.values()
        self._refusing = [each for each in reported if each.refuses]
        self._slowing = [*self._always, *(self._pace(each) for each in reported if not each.refuses)]
        now_s = self._clock.monotonic()
        self._paces = {subject: pace for subject, pace in self._paces.items() if pace.ahead_s(now_s)}
        self._refused &= self._vchannels.all().keys()
        own = [self._unflushed_throttle(each, vchannel) for vchannel, each in self._vchannels.all().items()]
        self._show([*reported, *(each for each in own if each is not None)])

    def _show(self, throttles: Iterable[Throttle]) -> None:
        """Of each subject the tightest, as of the shards of a collection."""
        before = {each.usage.subject: each for each in self._shown}
        found = {each.usage.subject: each for each in sorted(throttles, key=_factor, reverse=True)}
        for limit, _, collection in before.keys() - found.keys():
            self._metrics.remove(FACTOR, limit=limit, collection_name=collection)
        for subject, each in found.items():
            if each.refuses and not (subject in before and before[subject].refuses):
                _log.warning("%s", _refusal(each, _whose(each.usage)).message)
        self._shown = tuple(sorted(found.values(), key=_factor))
        for each in reversed(self._shown):  # of the members that a limit is about, the tightest one is shown
            usage = each.usage
            self._metrics.gauge(FACTOR, limit=usage.limit, collection_name=usage.collection).set(each.factor)

    def described(self) -> list[Mapping[str, Any]] | None:
        """What slows writes down or refuses them, as reports have it, the tightest first; None for nothing."""
        return [each.to_wire() for each in self._shown[:DESCRIBED_MAX]] or None


def _marks_of(settings: Settings) -> dict[str, WaterMarks]:
    rows, memory = settings.quota_and_limits.limit_writing.mem_protection, settings.streaming.wal_rate_limit.node_memory
    marks = {NODE_MEMORY: WaterMarks(memory.slowdown_threshold, memory.reject_threshold)}
    if rows.enabled:
        levels = rows.query_node_memory_low_water_level, rows.query_node_memory_high_water_level
        marks[ROW_MEMORY] = WaterMarks(*levels)
    return marks


def _add_rows(records: Sequence[tuple[str, Record]]) -> bool:
    """Whether any of them is more than deletes."""
    return any("insert" in record.tags or "upsert" in record.tags for _, record in records)


def _sizes(records: Sequence[tuple[str, Record]]) -> dict[str, int]:
    """Bytes by vchannel."""
    sizes: dict[str, int] = {}
    for _, record in records:
        sizes[record.vchannel] = sizes.get(record.vchannel, 0) + len(record.body)
    return sizes


def _whose(usage: Usage) -> str:
    return usage.collection or ("all collections" if usage.collections is None else f"the collections of {usage.node}")


def _refusal(throttle: Throttle, collection: str) -> Overloaded:
    usage = throttle.usage
    where = f" at {usage.node}" if usage.node else ""
    return Overloaded(
        f"writes to {collection} are refused: {usage.value} bytes are used{where} of {usage.limit} ({usage.bound}), "
        f"whose high water mark is {throttle.high}, until fewer than {throttle.low} are; deletes pass; retry later",
        limit=usage.limit,
        value=usage.value,
        mark=throttle.high,
        collection=collection,
    )


def _too_fast(pace: Pace, collection: str) -> Overloaded:
    rate = round(pace.rate)
    throttle = pace.throttle
    value, mark = (rate, rate) if throttle is None else (throttle.usage.value, throttle.low)
    why = "" if throttle is None else f": {value} bytes are used of it, and its low water mark is {mark}"
    return Overloaded(
        f"writes to {collection} come faster than the {rate} bytes a second that {pace.limit} lets in now{why}; "
        "deletes pass; retry after a second",
        limit=pace.limit,
        value=value,
        mark=mark,
        collection=collection,
    )
