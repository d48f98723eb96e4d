"""What a handler raises to give back what it got."""

from __future__ import annotations

from ..arguments import checked
from ..delays.delayed import DELAY_MAX_MS
from ..errors import InvalidRequest


class Nack(Exception):
    """A handler of `process` raises it to give back what it got, to be tried again `delay_s` seconds from now (None:
    after the policy's pause). It counts as an attempt like any other error of the handler; with `transient=(Nack,)` in
    the policy it counts as none. The delay is kept by the member: one that gets the channel meanwhile tries at once.
    Raises `InvalidRequest` for a delay that is negative, or over 366 days."""

    @checked
    def __init__(self, reason: str = "", *, delay_s: float | None = None) -> None:
        if delay_s is not None and not 0 <= delay_s <= DELAY_MAX_MS / 1000:
            raise InvalidRequest(f"delay_s is {delay_s}, and must be from 0 to 366 days in seconds", argument="delay_s")
        super().__init__(reason)
        self.reason: str = reason
        self.delay_s: float | None = delay_s
