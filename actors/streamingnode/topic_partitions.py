"""How an owner ends and begins the partitions of a topic that gets another number of them.

From `epoch_ready` in the catalog on, an owner that has read it takes no message for an earlier epoch. Each partition of
that gets EPOCH_END behind its last message, and the catalog learns its id and timestamp (`partition_ended`). An owner
that comes later has read `epoch_ready`, too: whoever wrote EPOCH_END had read it before, and the grant came after that.
So a second owner, where the first died before the catalog had the end, writes another EPOCH_END behind no message.

A partition of the new epoch is opened to doors once all its predecessors have ended, the clock has passed their
timestamps, and EPOCH_BEGIN names their ends in it (`partition_begun`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar, cast

import msgpack

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.topic_epochs import PartitionEnd
from ...runtime.catalog.topics import READY
from ...runtime.clock import HybridClock
from ...runtime.errors import TidewalError
from ...runtime.log.record import Record, RecordType
from ...runtime.ownership import ChannelOwner

AGAIN_S = 0.1  # until a record that the log has refused is written again

_EVENTS: Final = {RecordType.EPOCH_END: "partition_ended", RecordType.EPOCH_BEGIN: "partition_begun"}
_log = logging.getLogger("tidewal.streamingnode")

Result = TypeVar("Result")

Propose = Callable[[str, dict[str, tuple[Any, ...]]], Awaitable[None]]
"""Writes an event of this node's about some channels into the catalog."""


class TopicPartitions:
    """Ends and begins partitions that this node owns. `active` has the term of each channel that it has activated."""

    def __init__(
        self,
        catalog: CatalogLog,
        owner: ChannelOwner,
        clock: HybridClock,
        active: Mapping[str, int],
        propose: Propose,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self._catalog, self._owner, self._clock = catalog, owner, clock
        self._active, self._propose, self._spawn = active, propose, spawn
        self._at_work: set[tuple[str, int]] = set()  # channels, with the terms

    def look(self) -> None:
        """End and begin what is due. Called when the catalog or `active` has changed."""
        for topic in self._catalog.catalog.topics:
            if topic.state == READY and topic.epoch > 1:
                for channel in topic.unended:
                    self._start(channel, RecordType.EPOCH_END)
                for channel in topic.unbegun:
                    if all(each in topic.ends for each in topic.predecessors(channel)):
                        self._start(channel, RecordType.EPOCH_BEGIN)

    def _start(self, channel: str, kind: RecordType) -> None:
        term = self._active.get(channel)
        if term is not None and (channel, term) not in self._at_work:
            self._at_work.add((channel, term))
            self._spawn(self._write(channel, term, kind), f"epoch of {channel}")

    async def _write(self, channel: str, term: int, kind: RecordType) -> None:
        try:
            appended = await self._again(channel, term, lambda: self._append(channel, kind))
            if appended is not None:
                at = tuple(appended) if kind is RecordType.EPOCH_END else ()
                await self._again(channel, term, lambda: self._propose(_EVENTS[kind], {channel: (term, *at)}))
        finally:
            self._at_work.discard((channel, term))
        if appended is not None:
            self.look()  # what became due of the channel meanwhile was passed over

    async def _again(self, channel: str, term: int, step: Callable[[], Awaitable[Result]]) -> Result | None:
        """What `step` returns, once it succeeds; None where this node gives the channel up before."""
        while self._active.get(channel) == term:
            try:
                return await step()
            except TidewalError as error:
                _log.info("the epoch of %s is noted later: %s", channel, error)
                await asyncio.sleep(AGAIN_S)
        return None

    async def _append(self, channel: str, kind: RecordType) -> PartitionEnd | None:
        """Append the record; returns where it is, None where the topic is gone, or another term is to write it."""
        topic = self._catalog.catalog.topics.of_channel(channel)
        if topic is None or channel not in topic.places:
            return None
        before = [] if kind is RecordType.EPOCH_END else topic.predecessors(channel)
        ends = {name: topic.ends[name] for name in before}
        for end in ends.values():
            self._clock.observe(end.ts)
        body = cast(bytes, msgpack.packb([(name, *end) for name, end in ends.items()]))
        record = Record(kind, tags={"topic": topic.id, "epoch": topic.places[channel][0]}, body=body)
        appended = await self._owner.append([(channel, record)])
        return PartitionEnd(appended.ids[0], appended.ts) if appended.ids else None
