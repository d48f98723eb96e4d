"""One question to all vchannels of a collection, wherever their rows are: each is answered exactly once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa

from ...runtime.errors import HandlerFailed, InvalidRequest, TidewalError, Unavailable
from ...runtime.waiting import ended

LOOK_S = 0.25  # without an answer until it is looked whether the node lives; again and again
AGAIN_S = 0.05  # until all nodes are asked again, where none has a vchannel yet
SURVIVED_NOT_MAX = 2  # nodes that did not survive a question, or fell silent over it

AskNode = Callable[[str, Sequence[str]], Awaitable[Mapping[str, pa.Table]]]
"""Ask a node, by its incarnation, for these vchannels: the results of those of them that it has."""


@dataclass(slots=True)
class _Unanswered:
    """What became of the question for one vchannel so far, by node."""

    asked: set[str] = field(default_factory=set[str])
    lost: set[str] = field(default_factory=set[str])  # silent, or no member any more; they may answer all the same
    refused: dict[str, TidewalError | None] = field(default_factory=dict[str, "TidewalError | None"])

    def next_of(self, order: Sequence[str]) -> str:
        """The node to ask now; "" for none."""
        if self.asked:
            return ""
        return next((node for node in order if node not in self.lost and node not in self.refused), "")


class FanOut:
    """One question. Where a node refuses, because it has not loaded a vchannel, lacks memory or is behind, the next in
    the order is asked, and all again while the cluster changes. Where it does not survive the question, or falls silent
    over it, one other node is asked besides: what has ended two is an error, and ends no third."""

    def __init__(
        self,
        vchannels: Sequence[str],
        order: Callable[[str], Sequence[str]],
        ask: AskNode,
        is_lost: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`order` lists the nodes to ask for a vchannel, the best first; `is_lost` looks whether a node that has not
        answered yet is gone or silent."""
        self._order, self._ask, self._is_lost = order, ask, is_lost
        self._vchannels = tuple(vchannels)
        self._left = {vchannel: _Unanswered() for vchannel in vchannels}
        self._results: dict[str, pa.Table] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> list[pa.Table]:
        """The result of each vchannel, in their order. Raises what is wrong with the question; what every node has that
        could answer; `Unavailable` where two nodes did not survive it."""
        try:
            while self._left:
                self._changed.clear()
                refused = self._ask_next()
                self._ask_again(refused)
                with suppress(TimeoutError):
                    async with asyncio.timeout(AGAIN_S if refused else None):
                        await self._changed.wait()
                if self._failure is not None:
                    raise self._failure
        finally:
            await ended(*self._tasks)
        return [self._results[vchannel] for vchannel in self._vchannels]

    def _ask_next(self) -> list[_Unanswered]:
        """Ask for what no node is being asked for. Returns the vchannels for which no node is left to ask."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        refused: list[_Unanswered] = []
        for vchannel, state in self._left.items():
            if len(state.lost) >= SURVIVED_NOT_MAX:
                nodes = " and ".join(sorted(state.lost))
                raise Unavailable(f"{nodes} did not survive this question, or do not answer", channel=vchannel)
            node = state.next_of(self._order(vchannel))
            if node:
                by_node[node].append(vchannel)
            elif not state.asked:
                refused.append(state)
        for node, vchannels in by_node.items():
            self._begin(node, vchannels)
        return refused

    @staticmethod
    def _ask_again(refused: Sequence[_Unanswered]) -> None:
        """Let all nodes that have refused be asked again. Raises an error that repeating does not mend."""
        for state in refused:
            errors = [error for error in state.refused.values() if error is not None and not error.retryable]
            if errors:
                raise errors[0]
            state.refused.clear()

    def _begin(self, node: str, vchannels: Sequence[str]) -> None:
        for vchannel in vchannels:
            self._left[vchannel].asked.add(node)
        task = asyncio.create_task(self._ask_one(node, vchannels))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._changed.set()

    async def _ask_one(self, node: str, vchannels: Sequence[str]) -> None:
        asking = asyncio.ensure_future(self._ask(node, vchannels))
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_S))[0]:
                if await self._is_lost(node) and not asking.done():
                    self._lose(node, vchannels)
                    await asyncio.wait([asking])
            self._take(node, vchannels, asking.result())
        except HandlerFailed:
            self._lose(node, vchannels)
        except InvalidRequest:
            raise
        except TidewalError as error:
            self._refuse(node, vchannels, error)
        finally:
            asking.cancel()

    def _take(self, node: str, vchannels: Sequence[str], results: Mapping[str, pa.Table]) -> None:
        """Take the first result of each vchannel; of those that `node` has not, another one is asked."""
        for vchannel in vchannels:
            if vchannel in results and self._left.pop(vchannel, None) is not None:
                self._results[vchannel] = results[vchannel]
        self._refuse(node, [vchannel for vchannel in vchannels if vchannel not in results], None)

    def _refuse(self, node: str, vchannels: Sequence[str], error: TidewalError | None) -> None:
        for state in self._states(vchannels):
            state.asked.discard(node)
            state.lost.discard(node)
            state.refused[node] = error

    def _lose(self, node: str, vchannels: Sequence[str]) -> None:
        for state in self._states(vchannels):
            state.asked.discard(node)
            state.lost.add(node)
        self._changed.set()

    def _states(self, vchannels: Sequence[str]) -> list[_Unanswered]:
        return [self._left[vchannel] for vchannel in vchannels if vchannel in self._left]
