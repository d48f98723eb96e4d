"""Reply channels of killed callers: where the log does not notice that a process is gone, the leader drops them."""

from __future__ import annotations

import asyncio
import logging

from ...runtime.errors import ChannelNotFound, Closed, TidewalError
from ...runtime.metrics import Metrics
from ...runtime.names import Names
from ...runtime.wal import Wal

SWEEP_INTERVAL_S = 3600.0
SILENT_SWEEPS = 6  # in a row, for which a channel has stood still: six signs of life of its caller are missing then

_log = logging.getLogger("tidewal.mixcoord")


class ReplyChannels:
    """Looks at all reply channels every `SWEEP_INTERVAL_S` and drops the temporary ones that have not moved for
    `SILENT_SWEEPS` intervals.

    What counts is intervals that this process has lived through, and no clock: after its machine was suspended, callers
    on the same machine have as long as before to show life. Nothing of it is stored, so a new leader begins to count
    anew.
    """

    def __init__(self, wal: Wal, names: Names, metrics: Metrics) -> None:
        self._wal, self._prefix = wal, names.replies("")
        self._dropped = metrics.counter("mixcoord_reply_channel_dropped_total")
        self._still: dict[str, tuple[bytes | None, int]] = {}  # by channel: its last entry, and sweeps since it came

    async def run(self) -> None:
        """Sweep at once and from then on. Ends with `Closed`, when the log is closed."""
        while True:
            try:
                await self._sweep()
            except TidewalError as error:
                if not error.retryable:
                    raise
                _log.warning("silent reply channels stay for now: %s", error)
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def _sweep(self) -> None:
        channels = {channel for channel in await self._wal.channels() if channel.startswith(self._prefix)}
        self._still = {channel: still for channel, still in self._still.items() if channel in channels}
        for channel in sorted(channels):
            try:
                await self._look_at(channel)
            except ChannelNotFound:  # its caller has closed meanwhile
                self._still.pop(channel, None)
            except TidewalError as error:
                if error.retryable or isinstance(error, Closed):  # so would the others be
                    raise
                _log.warning("reply channel %s stays for now: %s", channel, error)

    async def _look_at(self, channel: str) -> None:
        latest = await self._wal.latest_id(channel)
        before, sweeps = self._still.get(channel, (latest, -1))
        sweeps = sweeps + 1 if latest == before else 0
        self._still[channel] = latest, sweeps
        if sweeps < SILENT_SWEEPS or not (await self._wal.describe(channel)).policy.temporary:
            return
        await self._wal.drop_channel(channel)
        self._dropped.inc()
        _log.info("dropped %s: its caller has shown no life for %g s", channel, sweeps * SWEEP_INTERVAL_S)
