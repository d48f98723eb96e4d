"""A client of a simulated cluster: it appends to one channel, one record after another, wherever its owner is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial

from ...errors import TidewalError
from ...ownership import Appended
from .history import ClusterHistory, HistoryEvent
from .node import SimulatedNode

DEADLINE_S = 1.0  # until an append is repeated; the owner may still write it then
PAUSE_S = 0.1


class SimulatedClient:
    """Asks any node that believes to own the channel, a stopped one too, so that appends reach owners of the past."""

    def __init__(
        self,
        name: str,
        channel: str,
        nodes: Callable[[], Sequence[SimulatedNode]],
        history: ClusterHistory,
        rng: random.Random,
        interval_s: float,
    ) -> None:
        self.stopping: bool = False
        self.acked: int = 0
        self._name, self._channel, self._nodes = name, channel, nodes
        self._history, self._rng, self._interval_s = history, rng, interval_s

    async def run(self) -> None:
        """Append until it is to stop, and the last one was acknowledged."""
        under_way = False
        while under_way or not self.stopping:
            under_way = not await self._try(self.acked + 1)
            self.acked += not under_way
            await asyncio.sleep(self._rng.uniform(0, 2 * (PAUSE_S if under_way else self._interval_s)))

    async def _try(self, pseq: int) -> bool:
        owners = [node for node in self._nodes() if node.owns(self._channel)]
        if not owners:
            return False
        node = self._rng.choice(owners)
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._note("asked", node, pseq)
        node.process.when_running(partial(self._ask, node, pseq, answered))
        done, _ = await asyncio.wait([answered], timeout=DEADLINE_S)
        return bool(done) and answered.result()

    def _ask(self, node: SimulatedNode, pseq: int, answered: asyncio.Future[bool]) -> None:
        """In the node. The answer is noted whether the client still waits for it or not."""
        try:
            term, future = node.append(self._channel, self._name, pseq)
        except TidewalError as error:
            self._note("failed", node, pseq, note=repr(error))
            if not answered.done():
                answered.set_result(False)
            return
        future.add_done_callback(partial(self._answered, node, pseq, term, answered))

    def _answered(
        self,
        node: SimulatedNode,
        pseq: int,
        term: int,
        answered: asyncio.Future[bool],
        future: asyncio.Future[Appended],
    ) -> None:
        if node.process.dead or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._note("failed", node, pseq, note=repr(error))
        else:
            ids = future.result().ids
            self._note("acked", node, pseq, term=term if ids else 0, id=ids[0] if ids else b"")
        if not answered.done():
            answered.set_result(error is None)

    def _note(
        self, kind: str, node: SimulatedNode, pseq: int, *, term: int = 0, id: bytes = b"", note: str = ""
    ) -> None:
        at_s = asyncio.get_running_loop().time()
        self._history.add(HistoryEvent(at_s, kind, self._channel, node.incarnation, term, self._name, pseq, id, note))
