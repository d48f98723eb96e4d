"""A client's writes: each goes to a door under a number, until its outcome is known."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

from ..runtime.errors import DeadlineExceeded, TidewalError, of_unknown_outcome
from ..runtime.log.wal import Payload
from ..runtime.rpc.client import RpcClient
from ..runtime.rpc.protocol import Params, Reply
from .deadlines import in_s, left_s
from .write_requests import is_never_written

AGAIN_S = 0.1  # between two attempts of a write of unknown outcome


class NumberedWrites:
    """Writes of one producer. A door takes them in the order of their numbers, each once."""

    def __init__(self, rpc: RpcClient) -> None:
        self._rpc = rpc
        self._numbers = itertools.count(1)
        self._under_way: dict[int, None] = {}  # numbers, in order

    def next_number(self) -> int:
        """The number of the next write. Ask for it in the step of the loop that begins to send."""
        return next(self._numbers)

    async def send(self, method: str, params: Params, body: Payload, deadline_s: float) -> Reply:
        """Write it under the next number, and return the reply. After an attempt of unknown outcome a refusal says
        nothing about that attempt: it is sent again under the same number until `deadline_s` seconds have passed."""
        return await self.send_as(self.next_number(), method, params, body, deadline_s)

    async def send_as(self, number: int, method: str, params: Params, body: Payload, deadline_s: float) -> Reply:
        """The same, under a `number` that `next_number` has just given."""
        self._under_way[number] = None
        try:
            return await self.send_again(number, method, params, body, deadline_s)
        finally:
            del self._under_way[number]

    async def send_again(self, number: int, method: str, params: Params, body: Payload, deadline_s: float) -> Reply:
        """The same, for a write that was sent before: it has its place already, and no write waits for it any more."""
        named = {**params, "producer": self._rpc.name, "pseq": number}
        return await self._send_until_known(method, named, partial(self._under_way_before, number), body, deadline_s)

    async def send_for(
        self, producer: str, number: int, method: str, params: Params, body: Payload, deadline_s: float
    ) -> Reply:
        """The same, for a write of another `producer`, which waits for each before it sends the next, under numbers of
        its own that only rise."""
        named = {**params, "producer": producer, "pseq": number}
        return await self._send_until_known(method, named, lambda: 0, body, deadline_s)

    async def _send_until_known(
        self, method: str, named: Params, after: Callable[[], int], body: Payload, deadline_s: float
    ) -> Reply:
        until = in_s(deadline_s)
        unknown: TidewalError | None = None

        def timed() -> Params:
            return {**named, "after": after(), "deadline_s": left_s(until)}

        while True:
            try:
                return await self._rpc.call("proxy", method, timed, body, deadline_s=left_s(until))
            except TidewalError as error:
                if is_never_written(error):
                    raise
                if unknown is None and error.fields.get("outcome_unknown"):
                    unknown = error
                if unknown is None:
                    raise
                if not error.retryable or in_s(AGAIN_S) >= until:
                    late = isinstance(error, DeadlineExceeded)  # of the time that earlier attempts had left
                    raise of_unknown_outcome(unknown if late else error) from None
            await asyncio.sleep(AGAIN_S)

    def _under_way_before(self, number: int) -> int:
        """The number of the write before `number` of which the outcome is not known yet; 0 for none. A door that has
        not had that one does not take this one."""
        return next((each for each in reversed(self._under_way) if each < number), 0)
