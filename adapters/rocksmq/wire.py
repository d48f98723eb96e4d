"""Frames of the socket protocol on a non-blocking socket: `Inbox` receives and splits them, `Outbox` sends.

Both ends use them, on an event loop's thread; only `Outbox.send` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from ...runtime.log.payloads import Received
from ...runtime.log.wal import Payload
from .protocol import HEADER, ROW, ProtocolFrame, split

BUFFER_BYTES = 128 * 1024  # of each connection; larger frames get memory of their own
SECOND_LOOK_S = 0.02
PIECES = 512  # buffers in one call; the system's limit is 1,024


class Inbox:
    """Receives frames. `check` gets the three numbers of each header, and raises for a frame that may not come."""

    def __init__(self, connection: socket.socket, check: Callable[[int, int, int], None]) -> None:
        self.wanted: int = 0  # size of a large frame that waits for `make_room`
        self.short: bool = False  # whether fewer bytes came than there was room for
        self._socket, self._check = connection, check
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0  # of what the buffer holds
        self._large: memoryview | None = None
        self._large_end = 0

    def receive(self) -> int:
        """Receive what has come; how many bytes, 0 at the end. Raises `OSError`, also when nothing has come."""
        if self._large is not None:
            room = self._large[self._large_end :]
            taken = self._socket.recv_into(room)
            self._large_end += taken
        else:
            room = self._buffer[self._end :]
            taken = self._socket.recv_into(room)
            self._end += taken
        self.short = taken < len(room)
        return taken

    def next(self) -> ProtocolFrame | None:
        """The next whole frame, None until more was received. Raises what `check` raises."""
        large = self._large
        if large is not None:
            if self._large_end < len(large):
                return None
            self._large = None
            return split(large, lasting=True)
        start, held = self._start, self._end - self._start
        if not held:
            return None
        if held >= HEADER.size:
            head_bytes, rows, payload_bytes = HEADER.unpack_from(self._buffer, start)
            self._check(head_bytes, rows, payload_bytes)
            size = HEADER.size + head_bytes + rows * ROW.size + payload_bytes
            if size <= held:
                if size == held:
                    self._start = self._end = 0
                else:
                    self._start += size
                return split(self._buffer[start : start + size], lasting=False)
            self.wanted = size if size > BUFFER_BYTES else 0
        if start:
            self._buffer[:held] = bytes(self._buffer[start : self._end])
            self._start, self._end = 0, held
        return None

    def make_room(self) -> None:
        """Allocate memory for the large frame that is wanted."""
        large = memoryview(Received(self.wanted))
        self._large_end = self._end - self._start
        large[: self._large_end] = self._buffer[self._start : self._end]
        self._large, self.wanted, self._start, self._end = large, 0, 0, 0

    @property
    def partial(self) -> bool:
        """Whether there are bytes that were not taken with `next`."""
        return self._end > 0 or self._large is not None


class SecondLook:
    """Reads a socket again a moment after it was read. Where data and an error are there at once, uvloop calls a reader
    only once, so a reader that stops before the socket says that nothing is left could miss the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> None:
        self._loop, self._look = loop, look
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look again in `SECOND_LOOK_S` seconds, unless a look is due already."""
        if self._timer is None:
            self._timer = self._loop.call_later(SECOND_LOOK_S, self._fire)

    def stop(self) -> None:
        """Cancel the look that is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._look()


class Outbox:
    """Sends buffers in the order of the calls: at once where the socket takes them, the rest as it gets room.

    `failed` is called on the loop when the socket breaks, `drained` whenever no buffer waits any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        failed: Callable[[OSError], None],
        drained: Callable[[], None],
    ) -> None:
        self.lock: threading.Lock = threading.Lock()
        self.size: int = 0  # bytes that wait
        self.moved_at: float = 0.0  # when the socket took the last bytes (`time.monotonic`), while some wait
        self._loop, self._socket, self._failed, self._drained = loop, connection, failed, drained
        self._queue: deque[Payload] = deque()
        self._watching = False
        self._closed = False

    def send(self, buffers: Sequence[Payload]) -> None:
        """Send the buffers of one frame. Never blocks; does nothing once the connection is broken or closed."""
        with self.lock:
            if self._closed:
                return
            if not self._queue:
                try:
                    sent = self._push(buffers)
                except OSError as error:
                    self._break(error)
                    return
                rest = _behind(buffers, sent)
                if not rest:
                    return
                self.moved_at = time.monotonic()
                buffers = rest
            self._queue.extend(buffers)
            self.size += sum([len(buffer) for buffer in buffers])
            if not self._watching:
                self._watching = True
                self._loop.call_soon_threadsafe(self._watch)

    def close(self) -> None:
        """Send nothing from now on. On the loop, before the socket is closed."""
        with self.lock:
            self._closed = True
            self._queue.clear()
            self.size = 0
        self._loop.remove_writer(self._socket.fileno())

    def _push(self, buffers: Sequence[Payload]) -> int:
        """Hand over what the socket takes now; how many bytes."""
        try:
            if len(buffers) == 1:
                return self._socket.send(buffers[0])
            return self._socket.sendmsg(buffers[:PIECES])
        except (BlockingIOError, InterruptedError):
            return 0

    def _break(self, error: OSError) -> None:
        """The socket is broken. Under the lock."""
        self._closed = True
        self._queue.clear()
        self.size = 0
        self._loop.call_soon_threadsafe(self._failed, error)

    def _watch(self) -> None:
        with self.lock:
            if not self._closed:
                self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        with self.lock:
            if self._closed:
                return
            buffers = list(islice(self._queue, PIECES))
            try:
                sent = self._push(buffers)
            except OSError as error:
                self._loop.remove_writer(self._socket.fileno())
                self._break(error)
                return
            if sent:
                self.moved_at = time.monotonic()
                self.size -= sent
                for _ in buffers:
                    self._queue.popleft()
                self._queue.extendleft(reversed(_behind(buffers, sent)))
            if self._queue:
                return
            self._watching = False
            self._loop.remove_writer(self._socket.fileno())
        self._drained()


def _behind(buffers: Sequence[Payload], sent: int) -> list[Payload]:
    """What is left of the buffers after the first `sent` bytes."""
    for place, buffer in enumerate(buffers):
        if sent < len(buffer):
            first = memoryview(buffer)[sent:] if sent else buffer
            return [first, *buffers[place + 1 :]]
        sent -= len(buffer)
    return []
