"""`submit`: entries of any thread, in the order of the calls, to the producers of their channels.

One thread sends. What came while it sent the last burst is the next one, so batches grow with the load and nothing
waits for a linger time.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial

from ...runtime.errors import TidewalError
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_plain, check_size
from ...runtime.log.payloads import as_bytes, check_timestamps
from ...runtime.log.wal import Append, OnAppended
from ...runtime.loop_bridge import EventSignal
from .failures import call_failure
from .producer import FlushingProducer

log: logging.Logger = logging.getLogger("tidewal.pulsar")

PENDING_BYTES = 64 * 1024 * 1024
ENTRY_OVERHEAD_BYTES = 256  # memory of an unanswered entry besides its payload

OpenProducer = Callable[[str], FlushingProducer]


class _Submission:
    """The entries of one `submit`, until all are answered."""

    __slots__ = ("_answered", "_answers", "_done", "_last", "_pending", "channels", "entries", "size")

    def __init__(self, entries: Sequence[Append], done: OnAppended, pending: PendingBytes) -> None:
        self.entries = entries
        self.channels = dict.fromkeys(entry.channel for entry in entries)
        self.size = sum(len(entry.payload) for entry in entries) + ENTRY_OVERHEAD_BYTES * len(entries)
        self._done = done
        self._pending = pending
        self._answers: list[bytes | TidewalError] = [b""] * len(entries)
        self._last = len(entries)
        self._answered = itertools.count(1)  # counts on several threads without a lock

    def answered(self, index: int, result: bytes | TidewalError) -> None:
        self._answers[index] = result
        if next(self._answered) == self._last:
            self._settle()

    def _settle(self) -> None:
        ids = [answer for answer in self._answers if type(answer) is bytes]
        if len(ids) == len(self._answers):
            self.finish(ids)
            return
        errors = [answer for answer in self._answers if isinstance(answer, TidewalError)]
        error = next((error for error in errors if error.fields.get("outcome_unknown")), errors[0])
        if ids:  # some are stored
            error.fields["outcome_unknown"] = True
        self.finish(error)

    def finish(self, result: list[bytes] | TidewalError) -> None:
        """Answer the call: with an error, too, where nothing was sent."""
        self._pending.release(self.size, partial(self._done, result))


class Appender:
    """Accepts submissions from any thread, and sends them on its own thread."""

    def __init__(
        self,
        open_producer: OpenProducer,
        executor: Executor,
        pending: PendingBytes,
        checked: Callable[[Sequence[Append]], list[Append]] | None = None,
    ) -> None:
        """`open_producer` blocks, and runs on the executor. `checked` (`plain`) returns entries with payloads that do
        not change, and raises for what channels cannot carry."""
        self._open_producer, self._checked = open_producer, checked or plain
        self._executor = executor
        self._pending = pending
        self._paused: Counter[str] = Counter()
        self._arrived: deque[_Submission] = deque()
        self._waiting: list[_Submission] = []  # for producers that are being opened
        self._to_flush: deque[FlushingProducer] = deque()
        self._producers: dict[str, FlushingProducer] = {}
        self._opening: dict[str, Future[FlushingProducer]] = {}
        self._failed: dict[
            str, TidewalError
        ] = {}  # in this round: all submissions that waited for the producer get the same error
        self._signal = EventSignal()
        self._signalled = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="tidewal-pulsar-append", daemon=True)
        self._thread.start()

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`: `done` is called once with the ids or the error. Raises `Overloaded`, `MessageTooLarge`,
        `Closed`."""
        self.queue(entries, done)
        self.wake()

    def wake(self) -> None:
        """Let the sending thread send the queued submissions."""
        if not self._signalled:
            self._signalled = True
            self._signal.set()

    def flush_later(self, producer: FlushingProducer) -> None:
        """Flush the producer on the sending thread."""
        self._to_flush.append(producer)
        self.wake()

    def queue(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`submit` without its last step, `wake`."""
        own = self._checked(entries)
        for entry in own:
            producer = self._producers.get(entry.channel)
            if producer is not None:
                _check_size(entry, producer)
        submission = _Submission(own, done, self._pending)
        with self._pending.lock:
            self._pending.admit(submission.size)
            self._arrived.append(submission)

    def pause(self, channel: str) -> None:
        """Hold back entries for the channel that are submitted from now on, until as many calls of `resume`."""
        with self._pending.lock:
            self._paused[channel] += 1

    def resume(self, channel: str) -> None:
        with self._pending.lock:
            self._paused[channel] -= 1
            if not self._paused[channel]:
                del self._paused[channel]
        self.wake()

    def forget(self, channel: str) -> None:
        """The channel was dropped: close its producer; the next append opens one if the channel exists again."""
        producer = self._producers.pop(channel, None)
        if producer is not None:
            producer.close()

    def close(self) -> None:
        """Refuse new submissions, wait until all are answered (within the client's timeout), and close the producers.
        Blocks."""
        answered = threading.Event()
        self._pending.close(answered.set)
        answered.wait()
        self._ended = True
        self.wake()
        self._thread.join()
        self._signal.close()
        for producer in self._producers.values():
            producer.close()

    def _run(self) -> None:
        while not self._ended:
            self._signal.wait()
            self._signalled = False  # before the queue is read: later submissions signal again
            touched: dict[FlushingProducer, None] = {}
            self._failed.clear()
            try:
                self._retry(touched)
                while self._arrived:
                    self._take(self._arrived.popleft(), touched)
            finally:
                while self._to_flush:
                    touched[self._to_flush.popleft()] = None
                for producer in touched:
                    producer.flush()

    def _retry(self, touched: dict[FlushingProducer, None]) -> None:
        waiting, self._waiting = self._waiting, []
        for submission in waiting:
            self._take(submission, touched)

    def _take(self, submission: _Submission, touched: dict[FlushingProducer, None]) -> None:
        """Send the submission, or let it wait for producers, after earlier ones that wait for one of its channels."""
        if any(not submission.channels.keys().isdisjoint(earlier.channels) for earlier in self._waiting):
            self._waiting.append(submission)
            return
        try:
            ready = [self._ready(channel) for channel in submission.channels]  # begins to open all of them
            if not all(ready):
                self._waiting.append(submission)
                return
            for entry in submission.entries:
                _check_size(entry, self._producers[entry.channel])
        except TidewalError as error:
            submission.finish(error)
            return
        for index, entry in enumerate(submission.entries):
            producer = self._producers[entry.channel]
            touched[producer] = None
            try:
                producer.send(entry, index, submission.answered)
            except Exception as error:  # the message cannot be built: nothing was sent
                submission.answered(index, call_failure(error, f"an append to {entry.channel}", channel=entry.channel))

    def _ready(self, channel: str) -> bool:
        """Whether the channel has a producer and is not paused; if it has none, one is opened. Raises what opening it
        raised."""
        producer = self._producers.get(channel)
        if producer is not None and not producer.broken:
            return channel not in self._paused
        if channel in self._failed:
            raise self._failed[channel]
        opening = self._opening.get(channel)
        if opening is None:
            if producer is not None:
                self.forget(channel)
            self._opening[channel] = future = self._executor.submit(self._open_producer, channel)
            future.add_done_callback(lambda _: self.wake())
            return False
        if not opening.done():
            return False
        del self._opening[channel]
        try:
            self._producers[channel] = opening.result()
        except Exception as error:
            failure = self._failed[channel] = call_failure(error, f"no producer for {channel}", channel=channel)
            raise failure from error
        return channel not in self._paused


def plain(entries: Sequence[Append]) -> list[Append]:
    """The entries with payloads that do not change. Raises `InvalidRequest`, and `Unsupported` for keys, headers and
    tombstones."""
    check_plain([entry.key for entry in entries], [entry.headers for entry in entries])
    check_timestamps([entry.timestamp for entry in entries])
    return [
        entry if type(entry.payload) is bytes else entry._replace(payload=as_bytes(entry.payload)) for entry in entries
    ]


def _check_size(entry: Append, producer: FlushingProducer) -> None:
    check_size(entry.channel, len(entry.payload), producer.max_message_bytes)
