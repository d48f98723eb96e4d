"""For how long a member may hold what it was given without acknowledging it: `ack_timeout_s` of `Wal.join`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import Counter

from ..errors import InvalidRequest
from .member_fetcher import MemberFetcher

LOOKS = 8  # how often within the time it looks at least, and
LOOKS_MAX = 100  # at most


class AckDeadlines:
    """Gives channels back of which something was held for too long, so that it is delivered again.

    The time is the member's: it stands still while the event loop does (a handler that blocks it, SIGSTOP, a suspended
    machine), since nothing could be acknowledged then. While acknowledgements of a channel are under way it is not
    given back: they decide. Costs a few words for each batch that is not acknowledged, and a look at them `LOOKS` times
    or more within the time."""

    def __init__(
        self, timeout_s: float, give_back: Callable[[MemberFetcher], None], given_back: Counter | None = None
    ) -> None:
        """Raises `InvalidRequest` for no time. `given_back` counts the channels."""
        if not timeout_s > 0:
            raise InvalidRequest(f"ack_timeout_s is {timeout_s}, and must be over 0", argument="ack_timeout_s")
        self.timeout_s = timeout_s
        self._give_back, self._given_back = give_back, given_back
        self._deadlines: dict[
            MemberFetcher, dict[bytes, float]
        ] = {}  # by the last id of a batch, on this member's time
        self._now = 0.0
        self._looked, self._pause_s = 0.0, 0.0  # when it looked last, by the loop's clock, and for how long it waits
        self._held = asyncio.Event()

    def begin(self, fetcher: MemberFetcher, last: bytes) -> None:
        """Count from now for what was delivered of a channel up to the entry with the id `last`."""
        if not self._held.is_set():
            self._looked, self._pause_s = asyncio.get_running_loop().time(), 0.0
            self._held.set()
        self._deadlines.setdefault(fetcher, {})[last] = self._time() + self.timeout_s

    def extend(self, fetcher: MemberFetcher, last: bytes, timeout_s: float | None) -> None:
        """Give the batch in which the entry `last` lies `timeout_s` seconds from now (None: the whole time), if it has
        less. What is acknowledged has no need of it."""
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidRequest(f"timeout_s is {timeout_s}, and must be over 0", argument="timeout_s")
        of_channel = self._deadlines.get(fetcher, {})
        batch = min((each for each in of_channel if each >= last), default=None)
        if batch is not None:
            of_channel[batch] = max(of_channel[batch], self._time() + (timeout_s or self.timeout_s))

    async def run(self, is_current: Callable[[MemberFetcher], bool]) -> None:
        """Look, until cancelled; channels that are not current are forgotten."""
        loop = asyncio.get_running_loop()
        while True:
            await self._held.wait()
            nearest = min((min(each.values()) for each in self._deadlines.values()), default=self._now)
            self._pause_s = max(self.timeout_s / LOOKS_MAX, min(self.timeout_s / LOOKS, nearest - self._time()))
            await asyncio.sleep(self._pause_s)
            self._now = self._time()
            self._looked, self._pause_s = loop.time(), 0.0
            self._deadlines = {
                fetcher: left
                for fetcher, deadlines in self._deadlines.items()
                if is_current(fetcher) and (left := _not_done(fetcher, deadlines))
            }
            self._look()

    def _time(self) -> float:
        """Now, on the member's time: of what the loop needed to come back to it no more counts than it has waited."""
        return self._now + min(asyncio.get_running_loop().time() - self._looked, self._pause_s)

    def _look(self) -> None:
        for fetcher, deadlines in list(self._deadlines.items()):
            if min(deadlines.values()) <= self._now and not fetcher.acks_in_flight:
                del self._deadlines[fetcher]
                self._give_back(fetcher)
                if self._given_back is not None:
                    self._given_back.inc()
        if not self._deadlines:
            self._held.clear()


def _not_done(fetcher: MemberFetcher, deadlines: dict[bytes, float]) -> dict[bytes, float]:
    return {last: at for last, at in deadlines.items() if not fetcher.unacknowledged.is_done(last)}
