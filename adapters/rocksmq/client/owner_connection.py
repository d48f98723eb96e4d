"""One connection to the owner of a directory, over its socket: `adapters/rocksmq/protocol.py` describes the protocol.

Requests are multiplexed. Answers are read on the loop that opened the connection; appends and notifications are sent
from the thread that makes them, without waiting for the loop. What the loop's own thread appends in one turn of the
loop is sent at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from ....runtime.errors import BadRecord, MessageTooLarge, TidewalError, Unavailable
from ....runtime.log.wal import Append, OnAppended, Payload
from ....runtime.loop_bridge import conclude
from ..address import Address
from ..journal.channels import ID_BYTES
from ..protocol import APPENDS, FRAME_BYTES, HEAD_BYTES, ROW, TIMEOUT_S, encode, encode_request, result_in
from ..wire import Inbox, Outbox, SecondLook

TOGETHER_BYTES = 64 * 1024  # of payloads of appends in one request: with all else, less than the owner's buffer

_Waiting: TypeAlias = "asyncio.Future[object]"
_Append: TypeAlias = tuple[int, int, Sequence[Append], OnAppended]  # number, settled, entries, answered

__all__ = ["Address", "OwnerConnection"]


class OwnerConnection:
    """Use from the loop that opened it, `append` and `notify` from any thread.

    Payloads are sent without a copy, so the caller must not write into one until its append is answered. The caller
    bounds what is in flight: the connection itself holds all that it is given. When the owner closes the connection,
    breaks the protocol, or leaves an append unanswered and sends nothing else for `TIMEOUT_S`, the connection is lost:
    every `ask` ends with `Unavailable`, no callback of an append is called any more, and `on_lost` is, once, unless
    `close` came first.
    """

    boot: int
    frame_bytes: int
    filters: int
    """The language of filters that the owner evaluates; 0 for an owner from before there were any."""
    waiting_requests: int
    """How many requests the owner lets wait at once."""

    @classmethod
    async def open(
        cls, address: Address | str, client: bytes, *, on_lost: Callable[[TidewalError], None]
    ) -> OwnerConnection:
        """Connect; an `address` that is a string is the directory. `client` is this process's random id of 16 bytes.
        Raises `Unavailable`, `Overloaded` (too many connections), `Unsupported` (an owner with another version of the
        protocol), `InvalidRequest` (a wrong token)."""
        if isinstance(address, str):
            address = Address.of_directory(address)
        loop = asyncio.get_running_loop()
        connection = address.new_socket()
        try:
            hello = address.hello(client)
            connection.setblocking(False)
            with address.target() as target:
                if address.directory:
                    connection.connect(target)
                else:
                    async with asyncio.timeout(TIMEOUT_S):
                        await loop.sock_connect(connection, target)
        except OSError as error:  # a TimeoutError is one
            connection.close()
            raise address.unavailable(error) from error
        except BaseException:
            connection.close()
            raise
        opened = cls(address, loop, connection, on_lost)
        try:
            greeting = await opened.ask("hello", *hello)
            opened.boot, opened.frame_bytes = greeting["boot"], greeting["frame_bytes"]
            opened.filters = greeting.get("filters", 0)
            opened.waiting_requests = greeting.get("waiting_requests", 256)  # of an owner that does not say it
        except BaseException:
            await opened.close()
            raise
        return opened

    def __init__(
        self,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_lost: Callable[[TidewalError], None],
    ) -> None:
        """Use `open`."""
        self._address, self._loop, self._socket, self._on_lost = address, loop, connection, on_lost
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._next_seq = 1
        self._sending = threading.Lock()  # for appends, so that they are sent in order
        self._unsent: deque[_Append] = deque()
        self._deferring = False
        self._asking: dict[int, _Waiting] = {}
        self._appending: dict[int, tuple[OnAppended, float]] = {}  # with the time, so that the first is the oldest
        self._inbox = Inbox(connection, _check)
        self._outbox = Outbox(loop, connection, self._failed, _nothing)
        self._watch = SecondLook(loop, self._readable)
        self._lost: TidewalError | None = None
        self._heard_at = time.monotonic()
        self._timer = loop.call_later(TIMEOUT_S / 4, self._check_silence)
        loop.add_reader(connection.fileno(), self._readable)

    async def ask(self, method: str, *arguments: object, wait_s: float = 0.0) -> Any:
        """The owner's answer to one request. Raises what the owner raised, and `Unavailable` when the connection is
        lost or no answer comes in `TIMEOUT_S` + `wait_s` seconds: then with `outcome_unknown`, unless nothing was sent.
        A last argument that is a sequence of `Append` travels as entries do; the answer to `read` has a list of
        `Entry`."""
        if self._lost is not None:
            raise Unavailable(self._lost.message, path=str(self._address))
        self._send_appends()
        seq = self._take_seqs(1)
        buffers = self._encode(seq, method, arguments)
        answer: _Waiting = self._loop.create_future()
        self._asking[seq] = answer
        deadline = self._loop.call_later(TIMEOUT_S + wait_s, self._expire, answer)
        self._outbox.send(buffers)
        try:
            return await answer
        except asyncio.CancelledError:
            if wait_s:  # else the owner answers at once
                self.notify("cancel", seq)
            raise
        finally:
            deadline.cancel()
            self._asking.pop(seq, None)

    def append(self, number: int, settled: int, entries: Sequence[Append], answered: OnAppended) -> None:
        """Send an append; from the loop's own thread, together with all that is appended in this turn of the loop.
        `number` and `settled` as in `Deduplicator.submit`. The order of the calls is the order of the log. Never blocks
        and never raises; `answered` gets the ids or the error, on the loop."""
        self._unsent.append((number, settled, entries, answered))
        if threading.get_ident() != self._thread:
            self._send_appends()
        elif not self._deferring:
            self._deferring = True
            self._loop.call_soon(self._send_deferred)

    def notify(self, method: str, *arguments: object) -> None:
        """Send a request without an answer. Does nothing once the connection is lost. From any thread."""
        self._send_appends()
        self._outbox.send(encode([0, method, *arguments]))

    async def close(self) -> None:
        """Close the connection. A second call does nothing."""
        self._send_appends()
        self._end(Unavailable(f"the connection to {self._address} is closed", path=str(self._address)))

    # ---- sending -----------------------------------------------------------------------------------------------------

    def _take_seqs(self, count: int) -> int:
        """The first of `count` request numbers that follow each other."""
        with self._lock:
            seq = self._next_seq
            self._next_seq += count
        return seq

    def _send_deferred(self) -> None:
        self._deferring = False
        self._send_appends()

    def _send_appends(self) -> None:
        """Send all appends that are not sent yet, in order."""
        unsent = self._unsent
        if unsent:
            with self._sending:
                while unsent and self._lost is None:
                    self._send_together(_take_together(unsent), time.monotonic())

    def _send_together(self, appends: Sequence[_Append], now: float) -> None:
        count = len(appends)
        number, settled, entries, answered = appends[0]
        if count > 1:
            entries = [each[2][0] for each in appends]
        seq = self._take_seqs(count)
        try:
            method = "appends" if len(entries) == count else "append"
            buffers = encode_request(seq, method, (number, settled), entries)
            if len(buffers) > 1 or len(buffers[0]) > HEAD_BYTES:
                self._check_size(buffers, len(entries))
        except TidewalError as error:
            if count == 1:
                self._call_later(answered, error)
            for each in appends if count > 1 else ():
                self._send_together((each,), now)
            return
        for place, each in enumerate(appends, seq):
            self._appending[place] = each[3], now
        self._outbox.send(buffers)

    def _encode(self, seq: int, method: str, arguments: tuple[object, ...]) -> list[Payload]:
        entries = _entries(arguments)
        if entries is None:
            buffers = encode([seq, method, *arguments])
        else:
            buffers = encode_request(seq, method, arguments[:-1], entries)
        if method != "hello":
            self._check_size(buffers, len(entries or ()))
        return buffers

    def _check_size(self, buffers: Sequence[Payload], count: int) -> None:
        size = sum([len(buffer) for buffer in buffers])
        if size <= HEAD_BYTES:
            return
        head_bytes = int.from_bytes(buffers[0][:4], "big")
        if head_bytes > HEAD_BYTES:
            message = f"a request of {head_bytes} bytes without its entries is over the limit of {HEAD_BYTES}"
            raise MessageTooLarge(message, size=head_bytes, limit=HEAD_BYTES)
        if count and size - head_bytes > self.frame_bytes:
            message = f"entries of {size} bytes are over the {self.frame_bytes} that one commit can hold"
            raise MessageTooLarge(message, size=size, limit=self.frame_bytes)

    def _call_later(self, answered: OnAppended, error: TidewalError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits any more
            self._loop.call_soon_threadsafe(answered, error)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            while self._lost is None:
                if not self._inbox.receive():
                    raise ConnectionError("the connection ended")
                self._heard_at = time.monotonic()
                while self._lost is None and (frame := self._inbox.next()) is not None:
                    self._answered(*result_in(frame))
                if self._inbox.wanted:
                    self._inbox.make_room()
                elif self._inbox.short:  # that was all: another receive that returns nothing would cost as much
                    self._watch.start()
                    return
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, BadRecord) as error:
            self._lose(self._address.unavailable(error))

    def _answered(self, seq: int, result: object) -> None:
        appending = self._appending.pop(seq, None)
        if appending is not None:
            if isinstance(result, bytes):
                self._answered_together(seq, appending[0], result)
            else:
                appending[0](cast("list[bytes] | TidewalError", result))
            return
        answer = self._asking.get(seq)
        if answer is not None:
            conclude(answer, result)
        elif seq == 0 and isinstance(result, TidewalError):  # the owner refuses to go on
            self._lose(result)

    def _answered_together(self, seq: int, answered: OnAppended, ids: bytes) -> None:
        if not ids or len(ids) % ID_BYTES:
            raise BadRecord("the owner answered with what are no ids", reason="frame")
        answered([ids[:ID_BYTES]])
        for at in range(ID_BYTES, len(ids), ID_BYTES):
            following = self._appending.pop(seq + at // ID_BYTES, None)
            if following is None:
                raise BadRecord("the owner answered more appends than there were", reason="frame")
            following[0]([ids[at : at + ID_BYTES]])

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _expire(self, answer: _Waiting) -> None:
        if not answer.done():
            silent = TimeoutError("no answer in time")
            answer.set_exception(self._address.unavailable(silent, outcome_unknown=True))

    def _check_silence(self) -> None:
        """Count the connection as lost where the owner leaves an append unanswered and is silent for too long."""
        now = time.monotonic()
        self._timer = self._loop.call_later(TIMEOUT_S / 4, self._check_silence)
        oldest = next(iter(self._appending.copy().values()), None)
        if oldest is not None and now - max(oldest[1], self._heard_at) > TIMEOUT_S:
            self._lose(self._address.unavailable(TimeoutError("no answer in time")))

    def _failed(self, error: OSError) -> None:
        self._readable()  # an owner that refuses to go on says why before it closes the connection
        self._lose(self._address.unavailable(error))

    def _lose(self, error: TidewalError) -> None:
        if self._lost is None:
            self._end(error)
            self._on_lost(error)

    def _end(self, error: TidewalError) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._timer.cancel()
        self._watch.stop()
        self._loop.remove_reader(self._socket.fileno())
        self._outbox.close()
        self._socket.close()
        self._appending.clear()
        if isinstance(error, Unavailable):
            error = Unavailable(error.message, path=str(self._address), outcome_unknown=True)
        for answer in self._asking.values():
            if not answer.done():
                answer.set_exception(error)


def _take_together(unsent: deque[_Append]) -> list[_Append]:
    """The first append, and those behind it that fit into one request: of one entry each, numbered without a gap."""
    together = [unsent.popleft()]
    number, _, entries, _ = together[0]
    size = len(entries[0].payload) if len(entries) == 1 else TOGETHER_BYTES
    while unsent and size < TOGETHER_BYTES and len(together) < APPENDS:
        following, _, entries, _ = unsent[0]
        if following != number + len(together) or len(entries) != 1:
            break
        size += len(entries[0].payload)
        if size > TOGETHER_BYTES:
            break
        together.append(unsent.popleft())
    return together


def _entries(arguments: tuple[object, ...]) -> Sequence[Append] | None:
    """The last argument where it is a sequence of `Append`."""
    last = arguments[-1] if arguments else None
    if isinstance(last, list | tuple) and last and isinstance(last[0], Append):
        return cast("Sequence[Append]", last)
    return None


def _check(head_bytes: int, rows: int, payload_bytes: int) -> None:
    size = head_bytes + rows * ROW.size + payload_bytes
    if size > FRAME_BYTES:
        raise BadRecord(f"an answer of {size} bytes", reason="size")


def _nothing() -> None:
    pass
