"""Pursuit: a stream that is far behind joins small packs into larger ones, which cost its reader less."""

from __future__ import annotations

from dataclasses import dataclass

from ..clock import Clock, HybridClock, add_ms, compose, physical_ms
from ..config.settings import MqSettings

LAG_S = 10.0
BUFFER_BYTES = 8 * 1024 * 1024
BUFFER_TIME_S = 60.0


@dataclass(frozen=True, slots=True)
class Pursuit:
    """While a stream's time lies more than `lag_s` behind the wall clock it goes on reading before it hands a pack out,
    until `buffer_bytes` are buffered or it has waited for `buffer_time_s`. A wall clock that jumps changes the size of
    packs, never their content. A stream that is behind because nothing more comes waits for `buffer_time_s` as well.
    """

    clock: Clock
    lag_s: float = LAG_S
    buffer_bytes: int = BUFFER_BYTES
    buffer_time_s: float = BUFFER_TIME_S

    @property
    def goal(self) -> int:
        """The time from which on a stream is not far behind, now."""
        return max(0, add_ms(compose(self.clock.wall_ms()), -round(self.lag_s * 1000)))

    def goes_on(self, time: int, buffered_bytes: int, waited_s: float) -> bool:
        """Whether to read on before records at or before `time` are handed out, with `buffered_bytes` buffered and
        after `waited_s` seconds."""
        behind_ms = self.clock.wall_ms() - physical_ms(time)
        return behind_ms > self.lag_s * 1000 and buffered_bytes <= self.buffer_bytes and waited_s < self.buffer_time_s


def pursuit_of(mq: MqSettings, clock: HybridClock) -> Pursuit | None:
    """What the settings say; None where pursuit is off."""
    if not mq.enable_pursuit_mode:
        return None
    return Pursuit(clock.clock, mq.pursuit_lag, mq.pursuit_buffer_size, mq.pursuit_buffer_time)
