"""What waits to be appended: a lane per channel, into which batches are sent as fast as they are answered.

There is no linger. While one batch is under way the next one gathers, encoded by who submits: when its turn comes it
goes out at once, as a lone append does.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from ...runtime.errors import (
    ChannelNotFound,
    Closed,
    InvalidRequest,
    Overloaded,
    TidewalError,
    Unavailable,
    of_unknown_outcome,
)
from ...runtime.wal import OnAppended
from . import faults
from .batch import Batch
from .catalog import Channel
from .positions import Row
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
        self._partly = False  # whether something of it is in the log, or may be

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
        if error is not None and error.fields.get("outcome_unknown"):
            self._partly = True
        return not self._missing

    def answer(self) -> None:
        error = self._error
        if error is not None and self._partly:
            error = of_unknown_outcome(error)
        try:
            self._done(self._ids if error is None else error)
        except Exception:  # the fault of who submitted; the channel goes on
            _log.exception("what was to be told of an append failed")


class Part:
    """What of one `submit` goes to one channel."""

    __slots__ = ("failed", "places", "write")

    def __init__(self, write: Write, places: Sequence[int]) -> None:
        """Entries of these places in the submit."""
        self.write, self.places = write, places
        self.failed = False  # what is left of it is not sent


class Span(NamedTuple):
    """Some entries of a part, which make up a batch with others."""

    part: Part
    first: int
    end: int


class Load:
    """A batch that gathers, and whose entries are in it."""

    __slots__ = ("_room", "batch", "spans")

    def __init__(self, batch: Batch, room: int) -> None:
        self.batch, self._room = batch, room
        self.spans: list[Span] = []

    def put(self, part: Part, rows: Sequence[Row], sizes: Sequence[int], first: int) -> int:
        """Take rows of a part, from `first` on, as many as there is room for, and one where there are none. Where the
        rest begins."""
        end, room = first, self._room
        for size in islice(sizes, first, None):
            room -= size + ROW_BYTES
            if room < 0 and (self.spans or end > first):
                break
            end += 1
            self._room = room
        if end > first:
            self.batch.add(rows[first:end])
            self.spans.append(Span(part, first, end))
        return end


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
        self._loads: deque[Load] = deque()  # the last one gathers
        self._stops = 0
        self._free: asyncio.Event | None = None

    def add(self, part: Part, rows: Sequence[Row], sizes: Sequence[int]) -> bool:
        """`sizes` are those of the payloads. Whether `run` has to be started."""
        end = self._loads[-1].put(part, rows, sizes, 0) if self._loads else 0
        while end < len(rows):
            load = Load(self._sender.batch(), self._batch_bytes)
            end = load.put(part, rows, sizes, end)
            self._loads.append(load)
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
        """Append until nothing waits. `flush` is called when the answers of a batch are given: once the next one is on
        its way, for whoever it wakes will want the interpreter."""
        loop = asyncio.get_running_loop()
        while True:
            with self._backlog.lock:
                free = self._free = asyncio.Event() if self._stops else None
                load = self._loads.popleft() if self._loads and free is None else None
                self.running = free is not None or load is not None
            if load is not None:
                loop.call_soon(self._meanwhile, flush)
                await self._append(load.batch, load.spans)
                continue
            flush()
            if free is None:
                return
            await free.wait()

    def _meanwhile(self, flush: Callable[[], None]) -> None:
        """While a batch is under way."""
        with self._backlog.lock:
            full = self._loads[0].batch if len(self._loads) > 1 else None
        try:
            if full is not None:
                self._sender.prepare(full)
        finally:
            flush()

    async def _append(self, batch: Batch, spans: Sequence[Span]) -> None:
        if any(span.part.failed for span in spans):
            await self._append_each(batch, spans)
            return
        try:
            base = await self._sender.send(batch)
        except TidewalError as error:
            if isinstance(error, InvalidRequest) and len(spans) > 1:  # one of them; the others shall not pay for it
                await self._append_each(batch, spans)
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
        self._appended(base, spans)

    async def _append_each(self, batch: Batch, spans: Sequence[Span]) -> None:
        """What makes up a batch, one after the other; without that of which something has failed."""
        rows = batch.rows()
        for span in spans:
            count = span.end - span.first
            own, rows = rows[:count], rows[count:]
            if not span.part.failed:
                await self._append(self._sender.batch(own), [span])

    def _appended(self, base: int, spans: Sequence[Span]) -> None:
        prefix = self.channel.prefix
        offset = base
        for part, first, end in spans:
            ids = [prefix + number.to_bytes(8, "big") for number in range(offset, offset + end - first)]
            offset += end - first
            part.write.appended(part.places[first:end], ids)
            if end == len(part.places):
                self._finish(part, None)
        self.last_offset = offset - 1

    def _fail(self, spans: Sequence[Span], error: TidewalError) -> None:
        for part, _, _ in spans:
            if not part.failed:
                part.failed = True
                self._finish(part, error)

    def _fail_waiting(self, error: TidewalError) -> None:
        """What waits behind a batch that failed for lack of a broker was not sent, and has waited as long."""
        with self._backlog.lock:
            spans = [span for load in self._loads for span in load.spans]
            self._loads.clear()
        self._fail(spans, faults.never_sent(error))

    def _finish(self, part: Part, error: TidewalError | None) -> None:
        if part.write.finished(error):
            self._backlog.release(part.write)
