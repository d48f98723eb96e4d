"""What the keyed states of one program show at `/metrics`, by group and input channel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..metrics.metrics import CHANNEL, Metrics

_STATE = (
    "wal_keyed_state_keys",
    "wal_keyed_state_bytes",
    "wal_keyed_changelog_bytes",
    "wal_keyed_snapshot_unix_seconds",
)
_WATERMARK = "wal_keyed_watermark_unix_seconds"


class ShownState(Protocol):
    """What is shown of the state of one channel."""

    @property
    def keys(self) -> int: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def changelog_bytes(self) -> int: ...

    @property
    def snapshot_ms(self) -> int: ...

    @property
    def watermarks(self) -> dict[str, int]: ...


class KeyedMetrics:
    """Without `metrics` it shows nothing."""

    def __init__(self, metrics: Metrics | None, group: str) -> None:
        self._metrics, self._group = metrics, group
        self._shown: set[str] = set()

    def show(self, channel: str, state: ShownState) -> None:
        """Show the state as it is now: once per commit."""
        if self._metrics is None:
            return
        self._shown.add(channel)
        labels = {"group": self._group, CHANNEL: channel}
        values = (state.keys, state.memory_bytes, state.changelog_bytes, state.snapshot_ms / 1000)
        for name, value in zip(_STATE, values, strict=True):
            self._metrics.gauge(name, **labels).set(value)
        for window, ms in state.watermarks.items():
            self._metrics.gauge(_WATERMARK, window=window, **labels).set(ms / 1000)

    def keep(self, channels: Collection[str]) -> None:
        """Show no other channels any more: these are the member's."""
        if self._metrics is None:
            return
        for channel in self._shown.difference(channels):
            self._shown.remove(channel)
            for name in (*_STATE, _WATERMARK):
                self._metrics.remove(name, group=self._group, **{CHANNEL: channel})
