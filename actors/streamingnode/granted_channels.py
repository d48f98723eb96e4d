"""From a grant in the catalog to a channel that takes appends, and back: each pchannel by itself.

The leader grants, and waits for nothing. This node reads its grants and writes its fence, reads the channel up to it,
and says so in the catalog (`fenced`); once it has read that back, the channel takes appends (guarantee 3). A channel
that cannot be acquired, or in which the outcome of an append is unknown, it gives up in the catalog (`released`), with
the highest timestamp that it has used; the leader grants it anew, under a new term, which decides. A channel that is to
move to another node (`move`) it gives up in the same way, once nothing of it is in flight any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ...runtime.catalog.catalog import PChannelState
from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.clock import add_ms
from ...runtime.cluster.limits import LIMIT_MS, OwnerLimits
from ...runtime.errors import Fenced, PreconditionFailed, TidewalError
from ...runtime.ownership import ChannelGrant, ChannelOwner
from ..node import Node
from .topic_partitions import TopicPartitions
from .unflushed import Unflushed
from .vchannels import VChannels

AGAIN_S = 0.1  # until a channel that could not be acquired is given up; doubled each time
AGAIN_MAX_S = 3.0
DOUBLINGS_MAX = 5  # which pass `AGAIN_MAX_S`
RELEASE_S = 10.0

_log = logging.getLogger("tidewal.streamingnode")

Spawn = Callable[[Coroutine[Any, Any, None], str], object]


class GrantedChannels:
    """Takes what the catalog grants to `node`, and opens it to the doors of the process."""

    def __init__(
        self,
        node: Node,
        catalog: CatalogLog,
        owner: ChannelOwner,
        vchannels: VChannels,
        unflushed: Unflushed,
        spawn: Spawn,
    ) -> None:
        self._node = node
        self._catalog = catalog
        self._owner = owner
        self._vchannels = vchannels
        self._unflushed = unflushed
        self._spawn = spawn
        self._terms: dict[str, int] = {}  # the last one that was begun
        self._active: dict[str, int] = {}  # the terms of the channels that are activated
        self._to_open: dict[str, int] = {}  # of these, with the bytes of a message: they wait for predecessors to end
        self._partitions = TopicPartitions(catalog, owner, node.clock, self._active, self.propose, spawn)
        self._failures: dict[str, int] = {}  # in a row
        self._limits = OwnerLimits(node.clock, rises=node.wal.capabilities.one_machine)
        self._written: object = None  # which channels were open when a limit was stored, and what was written to them

    async def follow(self) -> None:
        """Take each grant as it is read."""
        while True:
            mine = self._mine()
            self._node.local_owner.grant(frozenset(mine))
            for name, state in mine.items():
                if state.term > self._terms.get(name, 0):
                    self._terms[name] = state.term
                    self._spawn(self._take(name, state), f"take {name}")
                elif self._is_to_go(name, state) and name in self._active:
                    self._hand_over(name)
            self._open_begun()
            await self._catalog.changed()

    def _open_begun(self) -> None:
        """Open to doors what has begun, and have partitions of topics ended and begun that are due."""
        begun = [name for name in self._to_open if self._catalog.catalog.topics.has_begun(name)]
        for name in begun:
            self._node.local_owner.open({name: self._to_open.pop(name)})
        self._partitions.look()

    def _mine(self) -> dict[str, PChannelState]:
        channels, owner = self._catalog.catalog.channels, self._node.incarnation
        return {name: state for name, state in channels.items() if state.owner == owner}

    def _granted(self, name: str) -> PChannelState | None:
        """The channel, if the catalog says that it is this node's."""
        state = self._catalog.catalog.channels.get(name)
        return state if state is not None and state.owner == self._node.incarnation else None

    async def extend(self) -> bool:
        """Raise the limits of what is stamped and promised in the channels that are open; returns whether that is done.
        Where the log does not take it, the owner stops at the limits that it has. What was written is always followed
        by a record, with the checkpoints of the next owner."""
        checkpoints = self._owner.checkpoints()
        terms = {name: term for name, term in self._active.items() if self._has(name, term)}
        if not terms:
            return True
        written = terms, self._owner.written_bytes()
        risen = self._limits.risen() if written == self._written else None
        if risen is not None:
            self._owner.renew(risen, terms)
            return True
        stored = self._limits.propose()
        rising = {} if stored.rising is None else {"rising": stored.rising}
        channels = {name: (term, stored.limit, checkpoints[name]) for name, term in terms.items()}
        try:
            await self.propose("renewed", channels, **rising)
        except TidewalError as error:  # one of them may have changed hands
            if not (error.retryable or isinstance(error, Fenced | PreconditionFailed)):
                raise
            _log.warning("the limits of %d channels are not raised now: %s", len(terms), error)
            return False
        self._limits.confirm(stored)
        self._written = written
        self._owner.renew(stored.usable, terms)
        return True

    async def _take(self, name: str, state: PChannelState) -> None:
        term = state.term
        try:
            if term in state.fences:  # this process has had it, before its owner was restarted
                raise PreconditionFailed(f"term {term} of {name} was used")
            if state.limit <= add_ms(self._node.clock.now(), LIMIT_MS // 4):  # the leader's clock is behind this one's
                await self.propose("renewed", {name: (term, self._limits.needed(), b"")})
            message_bytes = (await self._node.wal.describe(name)).max_message_bytes
            self._unflushed.clear(name)
            grant = _grant(name, state)
            self._limits.allow(grant.limit)
            fence = await self._owner.acquire(grant)
            # read back, and so is all that the catalog had when the fence was written: see `vchannels.py`
            await self.propose("fenced", {name: (term, fence)})
            self._vchannels.rebuild([name], self._catalog.catalog.collections.values())
            self._owner.activate(name, term)
        except TidewalError as error:
            if self._has(name, term):
                if not (error.retryable or isinstance(error, Fenced | PreconditionFailed)):
                    raise
                _log.warning("%s is not acquired under term %d: %s", name, term, error)
                await self._give_up(name, term)
            return
        self._failures.pop(name, None)
        self._active[name], self._to_open[name] = term, message_bytes
        self._open_begun()
        now = self._granted(name)
        if now is not None and self._is_to_go(name, now):
            self._hand_over(name)

    def _is_to_go(self, name: str, state: PChannelState) -> bool:
        """Whether the channel is to be given up: for another node, or because its topic or epoch is removed."""
        topic = self._catalog.catalog.topics.of_channel(name)
        return bool(state.target) or (topic is not None and topic.is_to_go(name))

    def _hand_over(self, name: str) -> None:
        """The channel is to move to another node, or to go. Doors hold their writes from here on."""
        term = self._active.pop(name)
        self._close([name])
        self._spawn(self._release_one(name, term), f"release {name}")

    async def _release_one(self, name: str, term: int) -> None:
        try:
            released = await self._owner.release(name)
        except TidewalError as error:  # it has stalled, and is given up for that
            _log.info("%s is not released in good order: %s", name, error)
        else:
            self._unflushed.clear(name)  # now: as soon as the catalog has it this node may get it again
            await self._say_released(name, term, *released)

    def _close(self, names: Iterable[str]) -> None:
        for name in names:
            self._to_open.pop(name, None)
        self._node.local_owner.close(names)

    def stalled(self, channels: Iterable[str]) -> None:
        """The outcome of an append to `channels` is unknown: a new term decides it. Doors hold their writes."""
        named = {name: self._terms[name] for name in channels}
        for name in named:
            self._active.pop(name, None)
        self._close(named)
        for name, term in named.items():
            self._spawn(self._give_up(name, term), f"give {name} up")

    async def _give_up(self, name: str, term: int) -> None:
        """Give the channel up. All that this owner has stamped or promised under `term` is at or below the last time of
        its clock, for it does no more."""
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        if failures > 1:
            await asyncio.sleep(min(AGAIN_S * 2 ** min(failures, DOUBLINGS_MAX), AGAIN_MAX_S))
        await self._say_released(name, term, self._node.clock.last, b"")
        if self._granted(name) is None:  # else the next term decides what is open there
            self._owner.lose(name)
            self._unflushed.clear(name)

    async def _say_released(self, name: str, term: int, limit: int, checkpoint: bytes) -> None:
        while self._has(name, term):
            try:
                await self.propose("released", {name: (term, limit, checkpoint)})
            except TidewalError as error:
                _log.warning("%s is not given up, trying again: %s", name, error)
                await asyncio.sleep(AGAIN_S)

    def _has(self, name: str, term: int) -> bool:
        """Whether the catalog says that the channel is this node's, under this term."""
        state = self._granted(name)
        return state is not None and state.term == term

    async def propose(self, kind: str, channels: dict[str, tuple[Any, ...]], **fields: object) -> None:
        """Write an event of this node's about some channels into the catalog."""
        await self._catalog.propose_own({"kind": kind, "node": self._node.incarnation, "channels": channels, **fields})

    async def release(self, limit: int) -> None:
        """Release all channels at the end: their owner has used no timestamp above `limit`."""
        checkpoints = self._owner.checkpoints()
        channels = {name: (state.term, limit, checkpoints.get(name, b"")) for name, state in self._mine().items()}
        if not channels:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self.propose("released", channels)
        except (TidewalError, TimeoutError) as error:
            _log.warning("the channels are not released, their next owner waits for the lease: %s", error)


def _grant(name: str, state: PChannelState) -> ChannelGrant:
    return ChannelGrant(name, state.term, state.previous_limit, state.limit, state.checkpoint, dict(state.fences))
