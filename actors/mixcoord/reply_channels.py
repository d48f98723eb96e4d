"""Reply channels of killed clients: where the log does not notice that a process is gone, the leader drops them."""

from __future__ import annotations

import asyncio
import logging

from ...runtime.errors import ChannelNotFound, Closed, TidewalError
from ...runtime.log.names import Names
from ...runtime.log.wal import Wal
from ...runtime.metrics.metrics import Metrics

SWEEP_INTERVAL_S = 3600.0
SILENT_SWEEPS = 6  # in a row without a new entry: six signs of life of the channel's client are missing then

_log = logging.getLogger("tidewal.mixcoord")


class ReplyChannels:
    """Looks at all reply channels every `SWEEP_INTERVAL_S` and drops the temporary ones that have not moved for
    `SILENT_SWEEPS` intervals.

    Intervals are counted by this process and not measured by a clock: after its machine was suspended, clients on the
    same machine have as long as before to write a sign of life. Nothing of it is stored, so a new leader begins to
    count anew.
    """

    def __init__(self, wal: Wal, names: Names, metrics: Metrics) -> None:
        self._wal, self._prefix = wal, names.replies("")
        self._dropped = metrics.counter("mixcoord_reply_channel_dropped_total")
        # By channel: its last entry, and the number of sweeps since that came.
        self._unchanged: dict[str, tuple[bytes | None, int]] = {}

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
        self._unchanged = {channel: state for channel, state in self._unchanged.items() if channel in channels}
        for channel in sorted(channels):
            try:
                await self._drop_if_silent(channel)
            except ChannelNotFound:  # its client has closed meanwhile
                self._unchanged.pop(channel, None)
            except TidewalError as error:
                if error.retryable or isinstance(error, Closed):  # the other channels would fail alike
                    raise
                _log.warning("reply channel %s stays for now: %s", channel, error, extra={"channel": channel})

    async def _drop_if_silent(self, channel: str) -> None:
        latest = await self._wal.latest_id(channel)
        before, sweeps = self._unchanged.get(channel, (latest, -1))
        sweeps = sweeps + 1 if latest == before else 0
        self._unchanged[channel] = latest, sweeps
        if sweeps < SILENT_SWEEPS or not (await self._wal.describe(channel)).policy.temporary:
            return
        await self._wal.drop_channel(channel)
        self._dropped.inc()
        _log.info(
            "dropped %s: its client has given no sign of life for %g s",
            channel,
            sweeps * SWEEP_INTERVAL_S,
            extra={"channel": channel},
        )
