"""One client of the server: what it may cost the owner, and when its connection is cut."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ....runtime.errors import BadRecord, Closed, Overloaded, TidewalError, Unavailable, to_wire
from ....runtime.log.wal import OnAppended, Payload
from ..protocol import HEAD_BYTES, ROW, ProtocolFrame, encode
from ..wire import Inbox, Outbox, SecondLook
from .reader import Reader

if TYPE_CHECKING:
    from .server import Server

HELLO_BYTES = 4 * 1024
APPEND_OVERHEAD_BYTES = 1024  # what an append costs in memory beside its frame
READERS = 16
RECEIVES = 16  # at once from one connection, before other connections get their turn; more than a socket holds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may cost. Where a limit makes the owner wait, only the connection waits that reached it.

    `connections`: more are answered with `Overloaded` and closed; each has a buffer of 128 KiB. `receiving_bytes`: of
    requests over 128 KiB that are being received, over all connections; one that finds no room waits for its turn.
    `in_flight_bytes`: of appends of a connection that are not answered yet; above it, nothing more is read from it.
    `outbox_bytes`: of answers that a client has not taken; above it, its requests are not read and its readers make
    no further answer. `waiting_requests`: of a connection, that are neither answered at once nor cancelled; more get
    `Overloaded`.
    `stalled_s`: for a frame from its first byte to its last, and for an answer until the client takes some of it; then
    the connection is cut. `hello_s`: for the hello of a new connection. `idle_s`: without any request. All `*_s` are
    seconds.
    """

    connections: int = 64
    receiving_bytes: int = 128 * 1024 * 1024
    in_flight_bytes: int = 32 * 1024 * 1024
    outbox_bytes: int = 8 * 1024 * 1024
    waiting_requests: int = 4096
    hello_s: float = 5.0
    stalled_s: float = 30.0
    idle_s: float = 600.0


class ReceiveMemory:
    """The bytes of large requests that are being received, over all connections. First come, first served."""

    def __init__(self, limit: int) -> None:
        self.reserved: int = 0
        self._limit = limit
        self._waiting: deque[Connection] = deque()

    def reserve(self, connection: Connection, size: int) -> bool:
        """Whether there is room for `size` bytes; if not, `resume_soon` of the connection is called when it may ask
        again. A request larger than the limit gets room when no other has any."""
        first = not self._waiting or self._waiting[0] is connection
        if first and (not self.reserved or self.reserved + size <= self._limit):
            self.reserved += size
            self.leave(connection)
            return True
        if connection not in self._waiting:
            self._waiting.append(connection)
        return False

    def release(self, size: int) -> None:
        self.reserved -= size
        if size and self._waiting:
            self._waiting[0].resume_soon()

    def leave(self, connection: Connection) -> None:
        """Let the connection wait no longer; the next in turn may ask."""
        if connection in self._waiting:
            self._waiting.remove(connection)
            if self._waiting:
                self._waiting[0].resume_soon()


class Connection:
    """One connection. It belongs to the server's loop; answers may be sent, and appends counted, from any thread."""

    def __init__(
        self,
        number: int,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        server: Server,
        limits: ConnectionLimits,
        memory: ReceiveMemory,
        frame_bytes: int,
        secret: bytes | None,
    ) -> None:
        self.number: int = number
        self.secret: bytes | None = secret
        self.client: bytes | None = None
        self.greeted = False
        self.closed: bool = False
        self.in_flight: int = 0  # bytes of appends; changed under a lock of its own, which is only held for moments
        self._counting = threading.Lock()
        self.tasks: dict[asyncio.Task[None], int] = {}  # requests that wait, with their seq, and those that end
        self._waiting: dict[int, asyncio.Task[None]] = {}  # those of them that were not cancelled
        self.turn: asyncio.Lock = asyncio.Lock()  # one answer with entries is made at a time
        self.readers: OrderedDict[tuple[str, int], Reader] = OrderedDict()  # by channel and the next id
        self._loop, self._socket, self._server, self._limits = loop, connection, server, limits
        self._memory, self._frame_bytes = memory, frame_bytes
        self._inbox = Inbox(connection, self._check)
        self.outbox: Outbox = Outbox(loop, connection, self._failed, self._drained)
        self._reserved = 0
        self._reading = self._ending = self._resuming = False
        self._room: asyncio.Event = asyncio.Event()
        self._watch = SecondLook(loop, self._read_again)
        self._heard_at = self._frame_at = time.monotonic()
        self._opened_at = self._heard_at

    def start(self) -> None:
        self._read(True)

    # ---- answering ---------------------------------------------------------------------------------------------------

    def answer(self, seq: int, result: object) -> None:
        """Send the result of the request with that number; 0: the client wants no answer. From any thread."""
        if seq:
            self.outbox.send(encode([seq, "ok", result]))

    def fail(self, seq: int, error: BaseException) -> None:
        """Send the error of a request, as `answer` sends results."""
        if isinstance(error, Closed):
            error = Unavailable("the owner of the log is closing")
        if seq:
            self.outbox.send(encode([seq, "error", to_wire(error)]))

    def refuse(self, seq: int, error: TidewalError) -> None:
        """Send the error and end the connection after it."""
        self.outbox.send(encode([seq, "error", to_wire(error)]))
        self._ending = True
        self._read(False)
        if not self.outbox.size:
            self.close()

    def append(self, seq: int, size: int) -> OnAppended:
        """Count an append of `size` bytes as in flight; returns the callback for its outcome, to be called once, from
        any thread."""
        size += APPEND_OVERHEAD_BYTES
        with self._counting:
            self.in_flight += size
        return partial(self._appended, seq, size)

    def append_each(self, seq: int, size: int, count: int) -> OnAppended:
        """`append` for `count` appends of one entry with `size` bytes together; their numbers follow `seq`."""
        size += count * APPEND_OVERHEAD_BYTES
        with self._counting:
            self.in_flight += size
        return partial(self._appended_each, seq, size, count)

    def forget_append(self, size: int, count: int) -> None:
        """Take back `append_each`."""
        with self._counting:
            self.in_flight -= size + count * APPEND_OVERHEAD_BYTES

    def _appended(self, seq: int, size: int, result: list[bytes] | TidewalError) -> None:
        if isinstance(result, TidewalError):
            self.fail(seq, result)
        else:
            self.answer(seq, result)
        self._release_append(size)

    def _appended_each(self, seq: int, size: int, count: int, result: list[bytes] | TidewalError) -> None:
        if isinstance(result, TidewalError):
            for each in range(seq, seq + count):
                self.fail(each, result)
        else:
            self.answer(seq, b"".join(result))
        self._release_append(size)

    def _release_append(self, size: int) -> None:
        limit = self._limits.in_flight_bytes
        with self._counting:
            full = self.in_flight > limit
            self.in_flight -= size
            resume = full and self.in_flight <= limit
        if resume and not self.closed:
            with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
                self._loop.call_soon_threadsafe(self._work)

    def later(self, seq: int, work: Callable[[], Coroutine[object, object, list[Payload] | None]]) -> None:
        """Answer with the buffers that `work` returns, when it is done; it may wait."""
        if self._is_full():
            limit = self._limits.waiting_requests
            self.fail(seq, Overloaded(f"{limit} requests of this connection wait already", limit="waiting_requests"))
            return
        task = self._loop.create_task(self._wait_for(seq, work))
        self.tasks[task], self._waiting[seq] = seq, task
        task.add_done_callback(self._ended)

    def _is_full(self) -> bool:
        """Whether no more requests may wait. Those that were cancelled do not count, as they end when the loop comes to
        them; there may be as many of them again."""
        limit = self._limits.waiting_requests
        return len(self._waiting) >= limit or len(self.tasks) >= 2 * limit

    def cancel(self, seq: int) -> None:
        """Cancel a request that waits; does nothing for one that is answered already."""
        if (task := self._waiting.pop(seq, None)) is not None:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        seq = self.tasks.pop(task)
        if self._waiting.get(seq) is task:
            del self._waiting[seq]

    async def _wait_for(self, seq: int, work: Callable[[], Coroutine[object, object, list[Payload] | None]]) -> None:
        try:
            buffers = await work()
        except TidewalError as error:
            self.fail(seq, error)
        except Exception as error:
            _log.exception("a request to the log failed")
            self.fail(seq, error)
        else:
            if seq and buffers:
                self.outbox.send(buffers)

    async def room(self) -> None:
        """Return when the client has taken enough of its answers to get another."""
        while self.outbox.size > self._limits.outbox_bytes:
            self._room.clear()
            await self._room.wait()

    def keep_reader(self, channel: str, reader: Reader) -> None:
        """Keep the reader of a request for the request that goes on where it ended: it knows the position in the
        files."""
        self.readers[channel, reader.next_id] = reader
        if len(self.readers) > READERS:
            self.readers.popitem(last=False)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _check(self, head_bytes: int, rows: int, payload_bytes: int) -> None:
        body_bytes = rows * ROW.size + payload_bytes
        head_limit, body_limit = (HEAD_BYTES, self._frame_bytes) if self.greeted else (HELLO_BYTES, 0)
        if head_bytes > head_limit or body_bytes > body_limit:
            raise BadRecord(
                f"a request of {head_bytes} + {body_bytes} bytes is over the limit of {head_limit} + {body_limit}",
                reason="size",
            )

    def _readable(self) -> None:
        for _ in range(RECEIVES):
            partial_before = self._inbox.partial
            try:
                taken = self._inbox.receive()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                taken = 0
            if not taken:
                self.close()
                return
            self._heard_at = time.monotonic()
            if not partial_before:
                self._frame_at = self._heard_at
            self._work()
            if not self._reading:
                return
            if self._inbox.short:  # that was all: another receive that returns nothing would cost as much
                self._watch.start()
                return

    def _work(self) -> None:
        """Take what has been received, as far as the limits let."""
        try:
            self._take()
        finally:
            self._server.handled()

    def _take(self) -> None:
        whole = not self._reading  # time spent waiting for the owner is not the client's
        while not (self.closed or self._ending):
            if self.in_flight > self._limits.in_flight_bytes or self.outbox.size > self._limits.outbox_bytes:
                self._read(False)
                return
            try:
                frame = self._inbox.next()
            except BadRecord as error:
                self.refuse(0, error)
                return
            if frame is None:
                break
            whole = True
            self._handle(frame)
        if self.closed or self._ending:
            return
        if self._inbox.wanted:
            if not self._memory.reserve(self, self._inbox.wanted):
                self._read(False)
                return
            self._reserved = self._inbox.wanted
            self._inbox.make_room()
            whole = True
        if whole:
            self._frame_at = time.monotonic()
        self._read(True)

    def _read_again(self) -> None:
        if self._reading:
            self._readable()

    def _handle(self, frame: ProtocolFrame) -> None:
        try:
            self._server.handle(self, frame)
        finally:
            if frame.lasting:
                reserved, self._reserved = self._reserved, 0
                self._memory.release(reserved)

    def resume_soon(self) -> None:
        """Look again at what has been received, in the next turn of the loop."""
        if not self._resuming:
            self._resuming = True
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._work()

    def _drained(self) -> None:
        self._room.set()
        if self._ending:
            self.close()
        elif not self._reading:
            self._work()

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._socket.fileno(), self._readable)
            else:
                self._loop.remove_reader(self._socket.fileno())

    # ---- the end -----------------------------------------------------------------------------------------------------

    def overdue(self, now: float) -> str:
        """Why the connection is to be cut at `now` (`time.monotonic`); empty while it is not."""
        limits = self._limits
        if not self.greeted and now - self._opened_at > limits.hello_s:
            return "said no hello"
        if self.outbox.size and now - self.outbox.moved_at > limits.stalled_s:
            return "takes no answers"
        if self._reading and self._inbox.partial and now - self._frame_at > limits.stalled_s:
            return "sent half a request"
        busy = self.in_flight or self.tasks or self.outbox.size
        return "is idle" if not busy and self._reading and now - self._heard_at > limits.idle_s else ""

    def _failed(self, _: OSError) -> None:
        self.close()

    def close(self) -> None:
        """Cut the connection and release what it holds, but for appends in flight."""
        if self.closed:
            return
        self.closed = True
        self._read(False)
        self.outbox.close()
        self._watch.stop()
        for task in list(self.tasks):
            task.cancel()
        self.readers.clear()
        self._memory.leave(self)
        reserved, self._reserved = self._reserved, 0
        self._memory.release(reserved)
        with contextlib.suppress(OSError):  # the other side may be gone
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._server.gone(self)
