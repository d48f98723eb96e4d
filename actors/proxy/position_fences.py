"""Fences of groups' positions, as a door writes them for members (`runtime/cluster/decided_positions.py`)."""

from __future__ import annotations

import itertools

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.cluster.decided_positions import POSITIONS_MAX, DecidedPosition, DecidedPositions, position_fence
from ...runtime.errors import ChannelNotFound, Overloaded, PreconditionFailed, Unavailable
from ...runtime.log.checks import check_name
from ..node import Node


class PositionFences:
    """The fences that one door writes. `name` is its own, never used before."""

    def __init__(self, node: Node, catalog: CatalogLog, name: str) -> None:
        self._node, self._catalog, self._name = node, catalog, name
        self._numbers = itertools.count(1)

    @property
    def _positions(self) -> DecidedPositions:
        return self._node.cluster.state.transactions.positions

    async def fence(self, group: str, channel: str) -> DecidedPosition:
        """Let the member that asks for this alone have transactions move the group's position in a channel;
        returns what was decided until then. Raises `ChannelNotFound` for a channel that has no owner, `Overloaded`
        (`limit` "decided_positions"), `Unavailable` where another member has asked meanwhile, and what the log
        raises."""
        check_name("group", group)
        if channel not in self._catalog.catalog.channels and channel not in (await self._catalog.catch_up()).channels:
            raise ChannelNotFound(f"{channel} is no channel of a topic, or was dropped", channel=channel)
        author = f"{self._name}-{next(self._numbers)}"
        tokens = self._positions.tokens
        gone, gone_groups = await self._dropped(), await self._dropped_groups(group, channel)
        event = position_fence(group, channel, author, gone, gone_groups, tokens)
        try:
            await self._node.cluster.log.propose(event)
        except PreconditionFailed as error:
            raise Overloaded(f"{error.message}: drop groups that are not used", limit="decided_positions") from None
        found = self._positions.find(group, channel)
        if found is None or found.author != author:
            raise Unavailable(f"another member of {group} has asked for {channel} meanwhile; retry", channel=channel)
        return found

    async def _dropped(self) -> set[str]:
        """The channels that have a position and are gone with their topics."""
        known = self._positions.channels  # each was in the catalog before: one that is read so far has it
        if known <= self._catalog.catalog.channels.keys():
            return set()
        return known.difference((await self._catalog.catch_up()).channels)

    async def _dropped_groups(self, group: str, channel: str) -> set[str]:
        """The groups that have a position and were dropped: looked up where there is no room without."""
        positions = self._positions
        if len(positions) < POSITIONS_MAX or positions.find(group, channel) is not None:
            return set()
        known = positions.groups
        return known.difference({each.name for each in await self._node.wal.groups()})
