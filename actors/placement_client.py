"""What operators ask of a cluster: which nodes get channels, and where a channel is to be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..runtime.errors import DeadlineExceeded
from ..runtime.rpc.protocol import Params
from .client import Client

DRAIN_S = 60.0
LOOK_S = 0.1  # between two looks at how far a drain has come


class PlacementClient:
    """The leader's methods for operators, over an open `client`. All raise `InvalidRequest` where a node or a channel
    is not there, or cannot be what it is to be."""

    def __init__(self, client: Client) -> None:
        self._rpc = client._rpc  # pyright: ignore[reportPrivateUsage] -- it asks in the client's name, beside it

    async def cordon(self, node: str) -> str:
        """Let a node, by name or incarnation, get no more channels, also after a restart; returns its name."""
        return await self._cordon(node, "cordoned")

    async def uncordon(self, node: str) -> str:
        """Let a node that was cordoned or drained be as others again; returns its name."""
        return await self._cordon(node, "")

    async def drain(
        self, node: str, *, deadline_s: float = DRAIN_S, on_left: Callable[[int], object] = lambda left: None
    ) -> str:
        """`cordon` a node, and move the channels that it has to others; returns its name once it has none. `on_left` is
        called with how many it still has. Raises `DeadlineExceeded`; the node stays drained."""
        name = await self._cordon(node, "drained")
        left = 0
        try:
            async with asyncio.timeout(deadline_s):
                while left := (await self.placement())["nodes"].get(name, 0):
                    on_left(left)
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{name} still has {left} channels after {deadline_s:g} s; they go on moving: see `tidewal balance`"
            ) from None
        return name

    async def _cordon(self, node: str, state: str) -> str:
        return str((await self._rpc.call("mixcoord", "cordon", {"node": node, "state": state})).values["node"])

    async def move(self, channel: str, node: str) -> Params:
        """Move a pchannel to a node, and return once it takes appends there. It may move on later, unless it is
        pinned."""
        return (await self._rpc.call("mixcoord", "move", {"channel": channel, "node": node})).values

    async def pin(self, channel: str, node: str) -> Params:
        """Let a pchannel be on a node whenever that one is there; "" lets it be anywhere again."""
        return (await self._rpc.call("mixcoord", "pin", {"channel": channel, "node": node})).values

    async def balance(self, *, on: bool) -> None:
        """Whether channels move for balance."""
        await self._rpc.call("mixcoord", "balance", {"on": on})

    async def placement(self) -> Params:
        """How many channels each node has (`nodes`), what operators want (`wishes`), what is `moving`, what would move
        for balance (`moves`), and what is not as it should be (`conditions`)."""
        return (await self._rpc.call("mixcoord", "placement")).values
