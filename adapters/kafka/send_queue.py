"""Entries that wait to be appended: one send queue per channel, which sends each batch when the one before is answered.

There is no linger. While one batch is in flight the next one fills, encoded by the submitting threads; it is sent as
soon as the answer arrives, and a lone append is sent at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from ...runtime.errors import (
    ChannelNotFound,
    Closed,
    InvalidRequest,
    TidewalError,
    Unavailable,
    of_unknown_outcome,
)
from ...runtime.log.admission import PendingBytes
from ...runtime.log.wal import OnAppended
from . import faults
from .batch import ProducerBatch
from .catalog import KafkaChannel
from .positions import Row
from .sender import Sender

ROW_BYTES = 64  # what a record counts besides its payload

_log = logging.getLogger(__name__)


class SubmitCall:
    """One call of `submit`, answered once all its parts are appended or have failed."""

    __slots__ = ("_done", "_error", "_ids", "_missing", "_partly", "size")

    def __init__(self, done: OnAppended, count: int, size: int) -> None:
        self._done = done
        self.size: int = size
        self._ids: list[bytes] = [b""] * count
        self._missing = 1
        self._error: TidewalError | None = None
        self._partly = False  # whether entries of it are in the log, or may be

    def split(self, parts: int) -> None:
        """The call has one part for each of so many channels."""
        self._missing = parts

    def appended(self, indexes: Sequence[int], ids: Sequence[bytes]) -> None:
        """The entries at these indexes of the call have been appended under these ids."""
        self._partly = True
        if len(ids) == len(self._ids):
            self._ids = list(ids)
        else:
            for index, id in zip(indexes, ids, strict=True):
                self._ids[index] = id

    def finished(self, error: TidewalError | None) -> bool:
        """A part is appended, or has failed with `error`. Returns whether it was the last one."""
        self._missing -= 1
        self._error = self._error or error
        if error is not None and error.fields.get("outcome_unknown"):
            self._partly = True
        return not self._missing

    def answer(self) -> None:
        """Call `done` with the ids or the error."""
        error = self._error
        if error is not None and self._partly:
            error = of_unknown_outcome(error)
        self._done(self._ids if error is None else error)


class SubmitPart:
    """The entries of one `submit` for one channel."""

    __slots__ = ("call", "failed", "indexes")

    def __init__(self, call: SubmitCall, indexes: Sequence[int]) -> None:
        """The entries at these `indexes` of the call."""
        self.call: SubmitCall = call
        self.indexes: Sequence[int] = indexes
        self.failed: bool = False  # then the rest of the part is not sent


class Span(NamedTuple):
    """The entries of a part that are in one batch, from `first` to before `end`."""

    part: SubmitPart
    first: int
    end: int


class OpenBatch:
    """A batch that is being filled, and the spans of its entries."""

    __slots__ = ("_room", "batch", "spans")

    def __init__(self, batch: ProducerBatch, room: int) -> None:
        self.batch: ProducerBatch = batch
        self._room = room
        self.spans: list[Span] = []

    def put(self, part: SubmitPart, rows: Sequence[Row], sizes: Sequence[int], first: int) -> int:
        """Add rows of a part from `first` on, as many as there is room for, and at least one to an empty batch. Returns
        where the rest begins."""
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


class ChannelSendQueue:
    """The send queue of one channel. `add`, `pause` and `resume` are called on any thread, under the lock of `pending`;
    `run` belongs to the I/O loop."""

    def __init__(self, channel: KafkaChannel, sender: Sender, pending: PendingBytes, batch_bytes: int) -> None:
        self.channel = channel
        self.last_offset: int = -1
        self.running: bool = False
        self._sender, self._pending, self._batch_bytes = sender, pending, batch_bytes
        self._open_batches: deque[OpenBatch] = deque()  # the last one is being filled
        self._pauses = 0
        self._resumed: asyncio.Event | None = None

    def add(self, part: SubmitPart, rows: Sequence[Row], sizes: Sequence[int]) -> bool:
        """Add the rows of a part; `sizes` are those of the payloads in bytes. Returns whether `run` has to be
        started."""
        end = self._open_batches[-1].put(part, rows, sizes, 0) if self._open_batches else 0
        while end < len(rows):
            open_batch = OpenBatch(self._sender.batch(), self._batch_bytes)
            end = open_batch.put(part, rows, sizes, end)
            self._open_batches.append(open_batch)
        started, self.running = self.running, True
        return not started

    def pause(self) -> None:
        """Send no batch until as many calls of `resume`: a reader is looking up the end of the channel."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause`. On the I/O loop."""
        self._pauses -= 1
        if self._resumed is not None and not self._pauses:
            self._resumed.set()

    async def run(self, flush: Callable[[], None]) -> None:
        """Append until the queue is empty. `flush` is called after the calls of a batch are answered, once the next
        batch is sent: the tasks that it wakes compete for the interpreter."""
        loop = asyncio.get_running_loop()
        while True:
            with self._pending.lock:
                resumed = self._resumed = asyncio.Event() if self._pauses else None
                open_batch = self._open_batches.popleft() if self._open_batches and resumed is None else None
                self.running = resumed is not None or open_batch is not None
            if open_batch is not None:
                loop.call_soon(self._prepare_next, flush)
                await self._append(open_batch.batch, open_batch.spans)
                continue
            flush()
            if resumed is None:
                return
            await resumed.wait()

    def _prepare_next(self, flush: Callable[[], None]) -> None:
        """While a batch is in flight: encode the next full one, and `flush`."""
        with self._pending.lock:
            full = self._open_batches[0].batch if len(self._open_batches) > 1 else None
        try:
            if full is not None:
                self._sender.prepare(full)
        finally:
            flush()

    async def _append(self, batch: ProducerBatch, spans: Sequence[Span]) -> None:
        if any(span.part.failed for span in spans):
            await self._append_each(batch, spans)
            return
        try:
            base = await self._sender.send(batch)
        except TidewalError as error:
            if isinstance(error, InvalidRequest) and len(spans) > 1:  # the fault of one span: send each alone
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
        except Exception as error:  # unexpected: the calls fail with it, and the channel goes on
            _log.exception("appending to %s failed", self.channel.name, extra={"channel": self.channel.name})
            self._fail(spans, Unavailable(f"appending failed: {error!r}", outcome_unknown=True))
            return
        self._appended(base, spans)

    async def _append_each(self, batch: ProducerBatch, spans: Sequence[Span]) -> None:
        """Send the spans of a batch one after the other, without those of failed parts."""
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
            part.call.appended(part.indexes[first:end], ids)
            if end == len(part.indexes):
                self._finish(part, None)
        self.last_offset = offset - 1

    def _fail(self, spans: Sequence[Span], error: TidewalError) -> None:
        for part, _, _ in spans:
            if not part.failed:
                part.failed = True
                self._finish(part, error)

    def _fail_waiting(self, error: TidewalError) -> None:
        """Fail the waiting batches too when a batch failed for lack of a broker: they were not sent, and have waited as
        long."""
        with self._pending.lock:
            spans = [span for open_batch in self._open_batches for span in open_batch.spans]
            self._open_batches.clear()
        self._fail(spans, faults.never_sent(error))

    def _finish(self, part: SubmitPart, error: TidewalError | None) -> None:
        if part.call.finished(error):
            self._pending.release(part.call.size, part.call.answer)
