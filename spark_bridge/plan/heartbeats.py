"""What the owners of channels announce, as the driver reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...runtime.clock import add_ms
from ...runtime.errors import ChannelNotFound, PositionLost
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.heartbeats import Announcement, heard

HEARTBEATS_MS: Final = 2000  # of all nodes, read at first


class Heartbeats:
    """The last announcement of each owner in `channel`, which is ephemeral and may be absent."""

    def __init__(self, log: BlockingReader, channel: str) -> None:
        self._log = log
        self._channel = channel
        self._read_id: bytes | None = None
        self._last: dict[str, Announcement] = {}

    def now(self) -> Mapping[str, Announcement]:
        """The last announcement by pchannel, after reading those there are now."""
        try:
            latest = self._log.latest_id(self._channel)
            if latest is not None and latest != self._read_id:
                self._read_upto(latest)
        except (ChannelNotFound, PositionLost):  # owners announce again soon
            self._read_id = None
        return self._last

    def _read_upto(self, latest: bytes) -> None:
        after = self._read_id or self._some_time_before(latest)
        for entries in self._log.read(self._channel, after, latest, inclusive=self._read_id is None):
            for entry in entries:
                self._last |= {each.channel: each for each in heard(entry.payload)}
        self._read_id = latest

    def _some_time_before(self, latest: bytes) -> bytes:
        [last] = [entry for batch in self._log.read(self._channel, latest, latest, inclusive=True) for entry in batch]
        return self._log.id_at(self._channel, add_ms(last.timestamp, -HEARTBEATS_MS)) or latest
