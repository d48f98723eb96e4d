"""What waits to be appended: a lane per channel, out of which batches are made as fast as they are answered.

There is no linger. While one batch is under way the next one gathers; a lone append goes out at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from ...runtime.errors import ChannelNotFound, Closed, InvalidRequest, Overloaded, TidewalError, Unavailable
from ...runtime.wal import OnAppended
from .catalog import Channel
from .positions import Row, to_rows
from .sender import Sender

ROW_BYTES = 64  # what a record counts beside its payload

_log = logging.getLogger(__name__)


class Write:
    """One `submit`: its answer, given once all its parts are in."""

    __slots__ = ("_done", "_error", "_ids", "_missing", "_partly", "size")

    def __init__(self, done: OnAppended, count: int, size: int) -> None:
        self._done, self.size = done, size
        self._ids: list[bytes] = [b""] * count
        self._missing = 1
        self._error: TidewalError | None = None
        self._partly = False  # whether something of it is in the log

    def split(self, parts: int) -> None:
        """It goes to so many channels."""
        self._missing = parts

    def appended(self, places: Sequence[int], ids: Sequence[bytes]) -> None:
        """Entries at these places of the submit have got these ids."""
        self._partly = True
        if len(ids) == len(self._ids):
            self._ids = list(ids)
        else:
            for place, id in zip(places, ids, strict=True):
                self._ids[place] = id

    def finished(self, error: TidewalError | None) -> bool:
        """A part is in, or has failed. Whether it was the last one."""
        self._missing -= 1
        self._error = self._error or error
        return not self._missing

    def answer(self) -> None:
        error = self._error
        if error is not None and self._partly and "outcome_unknown" not in error.fields:
            error = type(error)(error.message, **{**error.fields, "outcome_unknown": True})
        try:
            self._done(self._ids if error is None else error)
        except Exception:  # the fault of who submitted; the channel goes on
            _log.exception("what was to be told of an append failed")


class Part:
    """The entries of one `submit` that go to one channel."""

    __slots__ = ("payloads", "places", "taken", "timestamps", "write")

    def __init__(
        self, write: Write, places: Sequence[int], timestamps: Sequence[int], payloads: Sequence[bytes]
    ) -> None:
        self.write, self.places = write, places
        self.timestamps, self.payloads = timestamps, payloads
        self.taken = 0  # entries that went into batches


class Span(NamedTuple):
    """Some entries of a part, which make up a batch with others."""

    part: Part
    first: int
    end: int


class Backlog:
    """What all lanes of a log share: the lock, and the bytes that are not answered."""

    def __init__(self, limit_bytes: int) -> None:
        self.lock = threading.Lock()
        self.limit_bytes, self.bytes = limit_bytes, 0
        self.closed = False
        self.landed: Callable[[], None] | None = None  # called once nothing is under way any more

    def admit(self, size: int) -> None:
        """Count a submit in, or raise `Overloaded`, `Closed`. Under the lock."""
        if self.closed:
            raise Closed("the log is closed")
        if self.bytes and self.bytes + size > self.limit_bytes:
            raise Overloaded(
                f"{self.bytes} bytes wait for Kafka already, {self.limit_bytes} may", limit="pending_bytes"
            )
        self.bytes += size

    def release(self, write: Write) -> None:
        """A submit is about to be answered."""
        with self.lock:
            self.bytes -= write.size
            landed = self.landed if not self.bytes else None
        write.answer()
        if landed is not None:
            landed()


class Lane:
    """The way into one channel. `add`, `stop` and `go` under the backlog's lock, from any thread; `run` on the I/O
    loop."""

    def __init__(self, channel: Channel, sender: Sender, backlog: Backlog, batch_bytes: int) -> None:
        self.channel = channel
        self.last_offset = -1
        self.running = False
        self._sender, self._backlog, self._batch_bytes = sender, backlog, batch_bytes
        self._parts: deque[Part] = deque()
        self._stops = 0
        self._free: asyncio.Event | None = None

    def add(self, part: Part) -> bool:
        """Whether `run` has to be started."""
        self._parts.append(part)
        started, self.running = self.running, True
        return not started

    def stop(self) -> None:
        """Let no batch begin until `go`: a reader is finding out where the channel ends."""
        self._stops += 1

    def go(self) -> None:
        """The reader has found out. On the I/O loop."""
        self._stops -= 1
        if self._free is not None and not self._stops:
            self._free.set()

    async def run(self, flush: Callable[[], None]) -> None:
        """Append until nothing waits. `flush` is called when the answers of a batch are given."""
        while True:
            with self._backlog.lock:
                free = self._free = asyncio.Event() if self._stops else None
                spans = [] if free is not None else self._take()
                if free is None and not spans:
                    self.running = False
                    return
            if free is not None:
                await free.wait()
                continue
            await self._append(spans)
            flush()

    def _take(self) -> list[Span]:
        """Entries for one batch: as many as its bytes allow, one at least."""
        spans: list[Span] = []
        room, full = self._batch_bytes, False
        while self._parts and not full:
            part = self._parts[0]
            first = end = part.taken
            for payload in islice(part.payloads, first, None):
                room -= len(payload) + ROW_BYTES
                full = room < 0 and (bool(spans) or end > first)
                if full:
                    break
                end += 1
            if end > first:
                spans.append(Span(part, first, end))
                part.taken = end
            if end == len(part.payloads):
                self._parts.popleft()
        return spans

    async def _append(self, spans: Sequence[Span]) -> None:
        try:
            base = await self._sender.send(_rows(spans))
        except TidewalError as error:
            if isinstance(error, InvalidRequest) and len(spans) > 1:  # one of them; the others shall not pay for it
                for span in spans:
                    await self._append([span])
                return
            self._fail(spans, error)
            if isinstance(error, (Unavailable, ChannelNotFound)):
                self._fail_waiting(error)
            return
        except asyncio.CancelledError:
            self._fail(spans, Unavailable("the log was closed meanwhile", outcome_unknown=True))
            self._fail_waiting(Closed("the log is closed"))
            raise
        except Exception as error:  # not foreseen: told to who waits, and the channel goes on
            _log.exception("appending to %s failed", self.channel.name)
            self._fail(spans, Unavailable(f"appending failed: {error!r}", outcome_unknown=True))
            return
        prefix = self.channel.prefix
        offset = base
        for part, first, end in spans:
            ids = [prefix + number.to_bytes(8, "big") for number in range(offset, offset + end - first)]
            offset += end - first
            part.write.appended(part.places[first:end], ids)
            if end == len(part.payloads):
                self._finish(part, None)
        self.last_offset = offset - 1

    def _fail(self, spans: Sequence[Span], error: TidewalError) -> None:
        for part, _, _ in spans:
            with self._backlog.lock:
                if self._parts and self._parts[0] is part:  # its rest is not sent
                    self._parts.popleft()
            self._finish(part, error)

    def _fail_waiting(self, error: TidewalError) -> None:
        """What waits behind a batch that failed for lack of a broker was not sent, and has waited as long."""
        with self._backlog.lock:
            parts = list(self._parts)
            self._parts.clear()
        if isinstance(error, Unavailable):
            error = Unavailable(error.message)
        for part in parts:
            self._finish(part, error)

    def _finish(self, part: Part, error: TidewalError | None) -> None:
        if part.write.finished(error):
            self._backlog.release(part.write)


def _rows(spans: Sequence[Span]) -> list[Row]:
    now_ms = int(time.time() * 1000)
    rows: list[Row] = []
    for part, first, end in spans:
        rows += to_rows(part.timestamps[first:end], part.payloads[first:end], now_ms)
    return rows
