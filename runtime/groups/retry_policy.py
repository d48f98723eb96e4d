"""How often a handler may try an entry, and with which pauses between."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..arguments import checked_fields
from ..errors import InvalidRequest, TidewalError
from ..log.names import Names

GROUP_DEAD_LETTERS = Names().group_dead_letters


@checked_fields()
@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """An entry whose handler fails is tried again after a pause, and after the last of its `attempts` it becomes a dead
    letter of the group, in the channel `dead_letters`. Without that it is in the one of the member:
    `GROUP_DEAD_LETTERS`, or of topics that of their cluster. A failure at a batch of several counts for none of them:
    they are tried one by one then.

    The pause behind attempt n is between a half and the whole of `first_pause_s` * 2**(n-1), at most `last_pause_s`
    (seconds); `seed` makes the pauses of a run the same each time. A handler's error of the types `permanent` makes the
    entry a dead letter at once. One of the types `transient`, and Tidewal's own whose `retryable` is set, is not the
    entry's fault: it counts as no attempt, and the entry is tried again as long as it lasts.

    With `ack_timeout_s` a handler that does not return within so many seconds, counted from when it got the batch, is
    cancelled: that is a failed attempt (`AckTimeout`), and what the handler has made is discarded. `extend_ack_timeout`
    gives it more. A handler that raises `Nack` says itself after which pause it is called again. Raises
    `InvalidRequest`.
    """

    attempts: int = 5
    first_pause_s: float = 0.1
    last_pause_s: float = 30.0
    ack_timeout_s: float | None = None
    permanent: tuple[type[Exception], ...] = ()
    transient: tuple[type[Exception], ...] = ()
    dead_letters: str = ""
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidRequest(f"{self.attempts} attempts are none: at least 1 is needed")
        if not 0 < self.first_pause_s <= self.last_pause_s:
            raise InvalidRequest(f"pauses from {self.first_pause_s} to {self.last_pause_s} s do not grow from above 0")
        if self.ack_timeout_s is not None and not self.ack_timeout_s > 0:
            raise InvalidRequest(f"ack_timeout_s is {self.ack_timeout_s}, and must be over 0", argument="ack_timeout_s")

    def pause_s(self, attempt: int, chance: random.Random) -> float:
        """The pause behind an attempt, the first of which is 1, in seconds."""
        longest_s = min(self.last_pause_s, self.first_pause_s * 2.0 ** min(attempt - 1, 64))
        return longest_s * chance.uniform(0.5, 1.0)

    def is_transient(self, error: Exception) -> bool:
        """Whether the error is not the entry's fault."""
        return isinstance(error, self.transient) or (isinstance(error, TidewalError) and error.retryable)
