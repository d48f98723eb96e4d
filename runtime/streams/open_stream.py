"""Time-ticked streams that hear of time by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ..arguments import checked
from ..errors import InvalidRequest, TidewalError
from ..log.heartbeats import PRODUCER_HEARTBEATS, heard
from ..log.names import DEFAULT_PREFIX, Names, pchannel_of
from ..log.wal import From, FromTime, Wal
from .channel_reader import OnBadRecord
from .messages import Position
from .stream_base import BUFFER_BYTES
from .tt_stream import TtMsgStream

PAUSE_S = 0.5  # before a channel of heartbeats that is not there, or not now, is looked for again


class _FollowingStream(TtMsgStream):
    """Applies what the owners of the channels announce, so that an idle channel does not hold the others back."""

    heartbeats: tuple[str, ...] = ()

    def _start_reading(self) -> None:
        begins = not self._tasks and not self._closed
        super()._start_reading()
        if begins:
            self._tasks += [
                asyncio.create_task(self._follow(channel), name=f"follow {channel}") for channel in self.heartbeats
            ]

    async def _follow(self, channel: str) -> None:
        while True:
            try:
                async for entries in self._wal.read(channel, From.LATEST):
                    for entry in entries:
                        for announcement in heard(entry.payload):
                            self.announce(*announcement)
                return  # the log is closed
            except TidewalError:  # not there yet, or not now: the records themselves tell time meanwhile
                await asyncio.sleep(PAUSE_S)
            except Exception as error:  # the iteration raises it, whatever it is
                self._failure = error
                self._progress.set()
                return


@checked
def open_stream(
    wal: Wal,
    channels: Sequence[str] = (),
    *,
    vchannels: Iterable[str] | None = None,
    start: From | FromTime = From.EARLIEST,
    positions: Iterable[Position] = (),
    prefix: str = DEFAULT_PREFIX,
    buffer_bytes: int = BUFFER_BYTES,
    on_bad: OnBadRecord | None = None,
    stalled_after_s: float | None = None,
) -> TtMsgStream:
    """A `TtMsgStream` of `channels` that named producers own, or of a collection's `vchannels`, in this process or
    another: it follows their heartbeats by itself.

    It begins at `start`, or goes on behind the `positions` that were saved of one pack. `prefix` is that of the nodes
    on the log, where they write to the channels. The other parameters are those of `TtMsgStream`. Raises
    `InvalidRequest` without channels, and what `TtMsgStream.seek` raises."""
    if isinstance(channels, str):
        raise InvalidRequest(f"channels is {channels!r}, and must be a list of names")
    wanted = None if vchannels is None else list(vchannels)
    names = [*channels, *dict.fromkeys(pchannel_of(each) for each in wanted or ())]
    stream = _FollowingStream(
        wal, vchannels=wanted, buffer_bytes=buffer_bytes, on_bad=on_bad, stalled_after_s=stalled_after_s
    )
    stream.heartbeats = (PRODUCER_HEARTBEATS, Names(prefix).heartbeats)
    saved = list(positions)
    if names:
        stream.as_consumer(names, start)
    if saved or not names:
        stream.seek(saved)
    return stream
