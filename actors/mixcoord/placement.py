"""What operators ask of the leader: which nodes are to be left alone, where channels are to be, and what would move."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.placement_wishes import DRAINED, PlacementWishes
from ...runtime.cluster.assignment_plan import ChannelMove
from ...runtime.cluster.channel_assignment import assign_channels
from ...runtime.cluster.decisions import ClusterView
from ...runtime.cluster.named_members import members_named
from ...runtime.cluster.roles import STREAMING_NODE
from ...runtime.cluster.state import ClusterState, NodeMember
from ...runtime.errors import DeadlineExceeded, InvalidRequest, Unavailable
from ...runtime.nearest import nearest
from ...runtime.rpc.protocol import Params
from ..node import Node
from ..requests import Answer, Method, Nothing
from .requests import BalanceParams, CordonParams, MoveParams

if TYPE_CHECKING:
    from ...runtime.rpc.server import Request

MOVE_DEADLINE_S = 8.0  # below that of a client's call


class Placement:
    """The methods of the leader for operators. `view` is what it has read."""

    def __init__(self, node: Node, catalog: CatalogLog, view: Callable[[], ClusterView]) -> None:
        self._node, self._catalog, self._view = node, catalog, view
        self._wishing = asyncio.Lock()  # each set of wishes rests on the one before

    def handlers(self) -> dict[str, Method]:
        """The methods, by name."""
        return {
            "cordon": Method(self._cordon, CordonParams),
            "pin": Method(self._pin, MoveParams),
            "balance": Method(self._balance, BalanceParams),
            "move": Method(self._move, MoveParams),
            "placement": Method(self._placement, Nothing),
        }

    # ---- wishes -----------------------------------------------------------------------------------------------------

    async def _cordon(self, request: Request) -> Answer:
        """Let a node get nothing new, or lose what it has, or be as others again. Answers with its name."""
        node, state = request.params["node"], request.params["state"]
        if not state and node in self._catalog.catalog.wishes.nodes:  # which need not be there
            name, roles = node, ()
        else:
            member = members_named(self._cluster, node)[-1]
            name, roles = member.name, member.roles
        if state == DRAINED and STREAMING_NODE in roles and not self._others(name):
            raise InvalidRequest(f"no other node could own the channels of {name}: start one first", argument="node")
        await self._wish(lambda wishes: wishes.with_node(name, state))
        return {"node": name}

    async def _pin(self, request: Request) -> Answer:
        channel, node = request.params["channel"], request.params["node"]
        self._check_channel(channel)
        name = self._member(node).name if node else ""
        await self._wish(lambda wishes: wishes.with_pin(channel, name))
        return {"channel": channel, "node": name}

    async def _balance(self, request: Request) -> Answer:
        on = request.params["on"]
        await self._wish(lambda wishes: PlacementWishes(wishes.nodes, wishes.pins, on))
        return None

    async def _wish(self, change: Callable[[PlacementWishes], PlacementWishes]) -> None:
        async with self._wishing:
            wishes = self._catalog.catalog.wishes
            changed = change(wishes)
            if changed != wishes:
                await self._catalog.append({"kind": "place", "wishes": changed.to_wire()})

    # ---- moves ------------------------------------------------------------------------------------------------------

    async def _move(self, request: Request) -> Answer:
        """Move a channel to a node, and answer once it takes appends there."""
        channel = request.params["channel"]
        self._check_channel(channel)
        member = self._member(request.params["node"])
        self._check_may_have(channel, member)
        state = self._catalog.catalog.channels.get(channel)
        if state is None or state.owner not in self._cluster.members:
            raise Unavailable(f"{channel} has no owner now, and gets one anyway; retry", channel=channel)
        if state.owner == member.incarnation and state.target:  # it may have begun to give the channel up
            raise Unavailable(f"{channel} is moving to {self._shown(state.target)}; retry once it is there")
        if state.owner != member.incarnation:
            to = {channel: (state.term, member.incarnation)}
            await self._catalog.append({"kind": "move", "channels": to, "at_ms": self._view().wall_ms})
        try:
            async with asyncio.timeout(MOVE_DEADLINE_S):
                await self._until_moved(channel, member)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{channel} is not open at {member.name} after {MOVE_DEADLINE_S:g} s; it still moves there where "
                "`tidewal inspect cluster` shows that",
                outcome_unknown=True,
            ) from None
        return {"channel": channel, "node": member.name}

    async def _until_moved(self, channel: str, member: NodeMember) -> None:
        while True:
            state = self._catalog.catalog.channels[channel]
            if state.owner == member.incarnation and state.term in state.fences:
                return
            if member.incarnation not in self._cluster.members or member.incarnation not in (state.owner, state.target):
                raise Unavailable(f"{channel} did not move to {member.name}, which is gone or did not take it; retry")
            await self._catalog.changed()

    def _check_may_have(self, channel: str, member: NodeMember) -> None:
        wishes = self._catalog.catalog.wishes
        if member.draining or member.name in wishes.nodes:
            why = wishes.nodes.get(member.name, "about to end")
            raise InvalidRequest(f"{member.name} is {why}, and gets no channels", argument="node")
        if (pin := wishes.pins.get(channel, member.name)) != member.name:
            raise InvalidRequest(f"{channel} is pinned to {pin}: pin it to {member.name} instead", argument="channel")

    # ---- what there is ----------------------------------------------------------------------------------------------

    async def _placement(self, _: Request) -> Answer:
        """The wishes, how many channels each node has, what moves, and what would move for balance."""
        channels, members = self._catalog.catalog.channels, self._cluster.members
        plan = assign_channels(self._view(), self._catalog.catalog.pchannels, balance=True, moves_max=len(channels))
        owned = Counter(state.owner for state in channels.values())
        return {
            "nodes": {each.name: owned[each.incarnation] for each in self._cluster.with_role(STREAMING_NODE)},
            "wishes": self._catalog.catalog.wishes.to_wire(),
            "moving": [
                {"channel": name, "from": self._shown(state.owner), "to": self._shown(state.target)}
                for name, state in sorted(channels.items())
                if state.target in members
            ],
            "moves": [self._described(move) for move in plan.moves],
            "conditions": [
                {"what": condition.kind.value, "subject": condition.subject, "channels": list(condition.channels)}
                for condition in plan.conditions
            ],
        }

    def _described(self, move: ChannelMove) -> Params:
        return {
            "channel": move.channel,
            "from": self._shown(move.source),
            "to": self._shown(move.target),
            "reason": move.reason.value,
            "detail": move.detail,
        }

    def _shown(self, incarnation: str) -> str:
        member = self._cluster.members.get(incarnation)
        return incarnation if member is None else member.name

    # ---- names ------------------------------------------------------------------------------------------------------

    @property
    def _cluster(self) -> ClusterState:
        return self._node.cluster.state

    def _others(self, name: str) -> list[NodeMember]:
        wishes = self._catalog.catalog.wishes
        owners = self._cluster.with_role(STREAMING_NODE)
        return [each for each in owners if each.name != name and each.name not in wishes.nodes and not each.draining]

    def _member(self, node: str) -> NodeMember:
        """The member that can own channels, by its name or incarnation; of two of one name the later. Raises
        `InvalidRequest`."""
        return members_named(self._cluster, node, STREAMING_NODE)[-1]

    def _check_channel(self, channel: str) -> None:
        there = self._catalog.catalog.channels
        if channel not in there:
            near = nearest(channel, there)
            advice = near or "; `tidewal inspect cluster` shows all"
            raise InvalidRequest(f"the cluster has no pchannel {channel!r}{advice}", argument="channel")
        partition = self._catalog.catalog.topics.partition_of.get(channel)
        if partition is not None:
            raise InvalidRequest(f"{channel} is where {partition} is: name that channel", argument="channel")
