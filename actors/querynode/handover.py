"""How vchannels leave a QueryNode: it keeps each until all nodes that are to have it say that they have it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ...runtime.catalog.catalog import Collection
from ...runtime.errors import TidewalError
from ...runtime.rpc.client import RpcClient
from .replica_assignment import ReplicaAssignment

LOOK_S = 0.5  # between two looks at what is others' by now
REPLACED_LOOK_S = 0.1  # the same, of a node that waits for its end
ANSWER_S = 1.0  # for a node to say what it has


class Holdings(Protocol):
    """The vchannels of which this node has the rows up to now."""

    def held(self) -> Sequence[tuple[Collection, Sequence[str]]]:
        """The collections as the catalog has them, and the vchannels of each."""
        ...

    async def discard(self, collection: Collection, vchannels: Iterable[str]) -> None:
        """Let go of these vchannels."""
        ...


class Handover:
    """Asks other QueryNodes what they have and keep, and lets go of what is theirs by then. So whichever nodes join,
    leave and are drained, each vchannel is at some node, as long as one that has it lives: also where nodes know of
    different members for a moment, for what a node would let go of itself it does not say that it has."""

    def __init__(
        self, holdings: Holdings, assignment: ReplicaAssignment, rpc: RpcClient, role: str, incarnation: str
    ) -> None:
        """`incarnation` is that of this node."""
        self._holdings, self._assignment = holdings, assignment
        self._rpc, self._role, self._own = rpc, role, incarnation

    async def run(self) -> None:
        """Look from time to time: what is kept for too long costs memory, no question."""
        while True:
            await asyncio.sleep(LOOK_S)
            for collection, vchannels in self._holdings.held() if self._assignment.has_others() else ():
                if surplus := self._surplus(collection, vchannels):
                    there = await self.holders(collection, surplus)
                    still = self._surplus(collection, surplus)  # others may have become this node's again meanwhile
                    handed = [
                        each for each in still if there[each].issuperset(self._assignment.nodes(collection, each))
                    ]
                    await self._holdings.discard(collection, handed)

    def _surplus(self, collection: Collection, vchannels: Iterable[str]) -> list[str]:
        """Those that this node is not to have, by the members as they are now."""
        self._assignment.refresh()
        return [each for each in vchannels if self._own not in self._assignment.nodes(collection, each)]

    async def until_replaced(self) -> None:
        """Wait until other nodes have what this one has, as far as others are to have it."""
        while await self._is_needed():  # noqa: ASYNC110 -- what is waited for is at other nodes
            await asyncio.sleep(REPLACED_LOOK_S)

    async def _is_needed(self) -> bool:
        self._assignment.refresh()
        for collection, vchannels in self._holdings.held():
            others = [each for each in vchannels if {*self._assignment.nodes(collection, each)} - {self._own}]
            there = await self.holders(collection, others)
            if not all(there[vchannel] for vchannel in others):
                return True
        return False

    async def holders(self, collection: Collection, vchannels: Sequence[str]) -> Mapping[str, set[str]]:
        """Which of the other nodes that are to have these vchannels have them and keep them, as far as they answer."""
        nodes = {node for each in vchannels for node in self._assignment.nodes(collection, each)} - {self._own}
        answers = await asyncio.gather(*(self._held_by(node, collection) for node in nodes))
        has = dict(zip(nodes, answers, strict=True))
        return {each: {node for node, held in has.items() if each in held} for each in vchannels}

    async def _held_by(self, node: str, collection: Collection) -> Sequence[str]:
        try:
            params = {"to": node, "id": collection.id}
            return (await self._rpc.call(self._role, "held", params, deadline_s=ANSWER_S)).values["vchannels"]
        except TidewalError:
            return ()
