"""Time-ticked streams that hear of time by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ..arguments import checked
from ..errors import ChannelNotFound, InvalidRequest, TidewalError
from ..log.heartbeats import PRODUCER_HEARTBEATS, heard
from ..log.names import DEFAULT_PREFIX, Names, pchannel_of
from ..log.wal import From, FromId, FromTime, Start, Wal
from .channel_reader import OnBadRecord
from .messages import Position
from .stream_base import BUFFER_BYTES
from .tt_stream import TtChannel, TtMsgStream

CHANNEL_DEADLINE_S = 10.0
LOOK_S = 0.1  # between two looks for a channel that is not made yet
PAUSE_S = 0.5  # before a channel of heartbeats that is not there, or not now, is looked for again


class _FollowingStream(TtMsgStream):
    """Applies what the owners of the channels announce, so that an idle channel does not hold the others back."""

    heartbeats: tuple[str, ...] = ()
    channel_deadline_s: float = CHANNEL_DEADLINE_S

    def _start_reading(self) -> None:
        begins = not self._reading and not self._closed
        super()._start_reading()
        if begins:
            for channel in self.heartbeats:
                self._run_task(self._follow(channel), name=f"follow {channel}")

    async def _placed(self, channel: TtChannel) -> Start:
        if not isinstance(channel.start, FromId):  # there was an entry, so a channel that is missing was dropped
            await self._wait_for_channel(channel)
        return await super()._placed(channel)

    async def _wait_for_channel(self, channel: TtChannel) -> None:
        """Until the channel is there. All that a channel has which is made now comes behind the stream's start."""
        now = asyncio.get_running_loop().time
        deadline_s = now() + self.channel_deadline_s
        while True:
            try:
                await self._wal.describe(channel.name)
                return
            except ChannelNotFound:
                if now() >= deadline_s:
                    raise _not_made(channel.name, self.channel_deadline_s) from None
                if channel.start is From.LATEST:
                    channel.start = From.EARLIEST
            except TidewalError:
                return  # reading waits for what may pass, and raises the rest
            await asyncio.sleep(LOOK_S)

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


def _not_made(channel: str, waited_s: float) -> ChannelNotFound:
    return ChannelNotFound(
        f"there is no channel {channel}, and nothing has made it within {waited_s:g} s: check its name, start its "
        "producer (open_producer makes its channels), or give it more time (channel_deadline_s)",
        channel=channel,
    )


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
    channel_deadline_s: float = CHANNEL_DEADLINE_S,
    where: str | None = None,
) -> TtMsgStream:
    """A `TtMsgStream` of `channels` that named producers own, or of a collection's `vchannels`, in this process or
    another: it follows their heartbeats by itself.

    It begins at `start`, or goes on behind the `positions` that were saved of one pack. `prefix` is that of the nodes
    on the log, where they write to the channels. The other parameters are those of `TtMsgStream`. Raises
    `InvalidRequest` without channels, `InvalidFilter`, and what `TtMsgStream.seek` raises.

    A reader may be there before the writer: iterating waits `channel_deadline_s` seconds for each channel that is not
    made yet, then raises `ChannelNotFound`; 0 looks once. A channel of a saved position is there, or was dropped: then
    it raises that at once. `stalled_after_s` counts while it waits, too."""
    if isinstance(channels, str):
        raise InvalidRequest(f"channels is {channels!r}, and must be a list of names")
    wanted = None if vchannels is None else list(vchannels)
    names = [*channels, *dict.fromkeys(pchannel_of(each) for each in wanted or ())]
    stream = _FollowingStream(
        wal, vchannels=wanted, buffer_bytes=buffer_bytes, on_bad=on_bad, stalled_after_s=stalled_after_s, where=where
    )
    stream.heartbeats = (PRODUCER_HEARTBEATS, Names(prefix).heartbeats)
    stream.channel_deadline_s = channel_deadline_s
    saved = list(positions)
    if names:
        stream.as_consumer(names, start)
    if saved or not names:
        stream.seek(saved)
    return stream
