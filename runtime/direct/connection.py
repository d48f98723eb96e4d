"""One connection between two nodes: what both ends have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, cast

from ..errors import BadRecord, Overloaded, TidewalError, Unavailable
from ..log.record import DECODE_ERRORS
from ..rpc.protocol import MESSAGE_BYTES_MAX
from .frames import FrameSplitter, Head, encode_frame

HANDSHAKE_S = 5.0  # from the beginning of a connection until its ends know each other, TLS included
PING_S = 1.0  # between two signs of life
SILENT_PINGS = 3  # after so many without a word the other end counts as gone
STALLED_PINGS = 10  # after so many in which the other end takes nothing of what is sent
UNSENT_BYTES = 64 * 1024 * 1024  # that wait to be sent; a message passes where nothing waits


class FramedConnection(asyncio.Protocol):
    """Frames on a transport. Both ends ping each other; the connection ends (`ended`, and `on_end` is called, once)
    when the other end closes it, is silent, takes nothing, or breaks the protocol. Until `establish` it takes small
    frames only, and has `HANDSHAKE_S` seconds.

    Sending never waits: what the transport cannot take yet it keeps, up to `UNSENT_BYTES`. All belongs to one loop.
    """

    payload_bytes: ClassVar[int] = MESSAGE_BYTES_MAX
    """The largest payload of a frame that is taken once the ends know each other."""

    def __init__(self) -> None:
        self.ended: TidewalError | None = None
        self.established: bool = False
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._silent = self._stalled = 0  # pings
        self._written = self._taken = 0  # bytes: handed to the transport, and of these no more there
        self._paused = False
        self._changed = asyncio.Event()  # it is established, or has ended

    async def until_established(self) -> None:
        """Wait until both ends know each other. Raises why that will never be."""
        await self._changed.wait()
        if self.ended is not None:
            raise self.ended

    async def until_ended(self) -> TidewalError:
        """Wait for the end, and return its reason."""
        while self.ended is None:
            self._changed.clear()
            await self._changed.wait()
        return self.ended

    # ---- for derived classes ----------------------------------------------------------------------------------------

    def on_frame(self, head: Head, payload: bytes) -> None:
        """A frame has come. `BadRecord` and what a malformed one raises end the connection."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The connection has ended, for the reason `ended`."""

    # ---- of the transport -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._after(HANDSHAKE_S, self._expire)

    def data_received(self, data: bytes) -> None:
        self._silent = 0
        try:
            for head, payload in self._splitter.feed(data):
                if self.ended is None and head != ["ping"]:
                    self.on_frame(head, payload)
        except (BadRecord, *DECODE_ERRORS) as error:
            self.end(Unavailable(f"the other end has broken the protocol: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(Unavailable(f"the connection has ended: {exc or 'the other end has closed it'}"))

    # ---- sending and ending -----------------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """What waits to be sent."""
        return self._transport.get_write_buffer_size()

    def write(self, head: Head, payload: bytes = b"") -> None:
        """Send a frame. Raises `Unavailable` once the connection has ended, and `Overloaded` where too much waits."""
        if self.ended is not None:
            raise self.ended
        waiting = self.unsent_bytes
        if waiting and waiting + len(payload) > UNSENT_BYTES:
            raise Overloaded(f"{waiting} bytes wait to be sent to this node; retry", limit="unsentBytes")
        frame = encode_frame(head, payload)
        self._written += len(frame)
        self._transport.write(frame)

    def establish(self) -> None:
        """The handshake is done: take messages, and send signs of life."""
        self.established = True
        self._splitter.payload_bytes = self.payload_bytes
        self._changed.set()
        self._after(PING_S, self._look)

    def pause(self) -> None:
        """Take no more for now: what the other end sends waits there."""
        self._paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._paused and self.ended is None:
            self._paused, self._silent = False, 0
            self._transport.resume_reading()

    def end(self, error: TidewalError) -> None:
        """End the connection at once. A second call does nothing."""
        if self.ended is not None:
            return
        self.ended = error
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()
        self._changed.set()
        self.on_end()

    # ---- signs of life ----------------------------------------------------------------------------------------------

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)

    def _expire(self) -> None:
        self.end(Unavailable(f"the other end did not show who it is within {HANDSHAKE_S:g} s"))

    def _look(self) -> None:
        """Judge the other end, in pings and not by the clock: after a standstill of this loop nothing is held against
        it."""
        self._after(PING_S, self._look)
        waiting = self.unsent_bytes
        taken = self._written - waiting
        self._stalled = self._stalled + 1 if waiting and taken == self._taken else 0
        self._silent = 0 if self._paused else self._silent + 1
        self._taken = taken
        if self._stalled >= STALLED_PINGS:
            self.end(Unavailable(f"the other end has taken nothing for {STALLED_PINGS * PING_S:g} s"))
        elif self._silent > SILENT_PINGS:
            self.end(Unavailable(f"nothing was heard of the other end for {SILENT_PINGS * PING_S:g} s"))
        elif not waiting:
            self.write(["ping"])
