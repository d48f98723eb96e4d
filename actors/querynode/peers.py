"""The other QueryNodes: whether they answer now, which is known sooner than that their leases have ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from ...runtime.errors import DeadlineExceeded, TidewalError
from ...runtime.rpc.client import RpcClient
from ...runtime.rpc.server import Request

SILENT_S = 0.25  # without a reply, at least
SILENT_S_MAX = 2.0  # at most
PATIENCE = 4  # so many times as long as the last reply took
REMEMBERED_S = 1.0  # that one was silent
SEEN_MAX = 4_096


class Peers:
    """Asks whether the other QueryNodes live. A node whose loop is busy for `SILENT_S` counts as silent, too: what it
    was asked is asked of another one besides. Where the log is slow, replies take longer, and so does silence: a late
    one still says how long that is."""

    def __init__(self, rpc: RpcClient, role: str, now_s: Callable[[], float]) -> None:
        self._rpc, self._role, self._now_s = rpc, role, now_s
        self._silent_until: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}
        self._patience_s = SILENT_S

    def was_silent(self, incarnation: str) -> bool:
        """Whether that node did not answer when it was asked last, a moment ago."""
        until_s = self._silent_until.get(incarnation, 0.0)
        if until_s <= self._now_s():
            self._silent_until.pop(incarnation, None)
        return until_s > self._now_s()

    async def is_silent(self, incarnation: str) -> bool:
        """Whether that node does not answer now."""
        if self.was_silent(incarnation):
            return True
        asking = self._asking.get(incarnation)
        if asking is None:
            asking = self._asking[incarnation] = asyncio.create_task(self._answers(incarnation))
            asking.add_done_callback(lambda _: self._asking.pop(incarnation))
        done, _ = await asyncio.wait([asking], timeout=self._patience_s)
        if done and not asking.cancelled() and asking.result():
            return False
        self._silent_until[incarnation] = self._now_s() + REMEMBERED_S
        return True

    async def _answers(self, incarnation: str) -> bool:
        """Whether that node answers before it is given up."""
        began_s = self._now_s()
        try:
            await self._rpc.call(self._role, "ping", {"to": incarnation}, deadline_s=2 * SILENT_S_MAX)
        except DeadlineExceeded:
            return False
        except TidewalError:  # it answers, or this node ends
            pass
        self._silent_until.pop(incarnation, None)
        self._patience_s = min(max(PATIENCE * (self._now_s() - began_s), SILENT_S), SILENT_S_MAX)
        return True


class SeenRequests:
    """The last requests that were left to another node."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()

    def add(self, request: Request) -> bool:
        """Remember `request`; returns whether it was there, so that it is a repetition."""
        key = request.client, request.number
        repeated = key in self._seen
        self._seen[key] = None
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        return repeated
