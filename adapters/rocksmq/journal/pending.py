"""What waits for the next commit: rows in the order of the log, and what is called when they are durable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, cast

from ....runtime.errors import TidewalError
from ....runtime.log.wal import OnAppended, Payload
from ....runtime.loop_bridge import LoopNotifier
from .frame import CONTROL, ROW_BYTES

Row: TypeAlias = tuple[int, int, int, Payload]  # channel number, id, timestamp, body; as in a frame's table
# The rows of one frame, a sequence for each field.
Columns: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[Payload]]
# What waits for a write: a future for one row, or a callback, its number of rows, and whether it is a control write.
Waiting: TypeAlias = "asyncio.Future[bytes] | tuple[OnAppended, int, bool]"

_log = logging.getLogger(__name__)


class PendingWrite:
    """The rows of one submit, which are in one frame or none, of `size` bytes with their lines in its table.

    `done` gets an id for each row, or the error. `written`, if any, is called before the sync. `urgent`: its control
    records take effect in the journal's table before `done` is called. `control`: a control write, which goes into the
    reserve where there is no space for data.
    """

    __slots__ = ("control", "done", "notifier", "rows", "size", "urgent", "written")

    def __init__(
        self,
        done: OnAppended,
        rows: Sequence[Row] = (),
        size: int = 0,
        written: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
        control: bool = False,
        notifier: LoopNotifier | None = None,
    ) -> None:
        self.notifier: LoopNotifier | None = notifier  # whose loop waits for it, if it is a loop's
        self.done: OnAppended = done
        self.rows: Sequence[Row] = rows
        self.size: int = size
        self.written: Callable[[], None] | None = written
        self.urgent: bool = urgent
        self.control: bool = control


def control(record: bytes, wall_ms: int, done: OnAppended, *, creates: int = 0) -> PendingWrite:
    """A write of one control record at `wall_ms` (wall clock, milliseconds); `creates` is the number of the channel
    that it creates, if it does."""
    return PendingWrite(done, [(CONTROL, creates, wall_ms, record)], ROW_BYTES + len(record), urgent=True, control=True)


class PendingWrites:
    """Writes that gather, in order. Guarded by the registry's lock until the loop or thread with the turn takes it to
    commit it."""

    __slots__ = ("calls", "notifier", "rows", "shared", "size", "urgent", "waiting", "written")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.waiting: list[Waiting] = []  # what is not acknowledged yet
        self.notifier: LoopNotifier | None = None  # of the loop to which the futures in `waiting` belong
        self.shared: bool = False  # whether another loop or a thread waits, too
        self.calls: int = 0  # how many of `waiting` are callbacks
        self.size: int = 0
        self.written: list[Callable[[], None]] = []
        self.urgent: bool = False  # whether some write may be urgent

    def add(self, write: PendingWrite) -> None:
        """Add a write behind the others."""
        self.rows += write.rows
        self.waiting.append((write.done, len(write.rows), write.control))
        self.calls += 1
        self.notifier = self.notifier or write.notifier
        self.shared = self.shared or write.notifier is None or write.notifier is not self.notifier
        self.size += write.size
        self.urgent = self.urgent or write.urgent
        if write.written is not None:
            self.written.append(write.written)

    def wait(self, notifier: LoopNotifier, future: asyncio.Future[bytes]) -> None:
        """Let a future, of the notifier's loop, wait for the row added last."""
        if self.notifier is None:
            self.notifier = notifier
        if self.notifier is notifier:
            self.waiting.append(future)
        else:
            self.waiting.append((partial(settle_first, notifier, future), 1, False))
            self.calls += 1
            self.shared = True

    def take(self, count: int, size: int) -> PendingWrites:
        """Split off the first writes: at most `count` and, but for the first, `size` bytes. `written` stays behind: a
        write that may be acknowledged before the sync may be acknowledged after it, too."""
        taken = PendingWrites()
        taken.urgent = self.urgent
        for waiting, rows in self._writes():
            if taken.waiting and (len(taken.waiting) == count or taken.size + _size(rows) > size):
                break
            taken._move(self.notifier, waiting, rows)
        del self.rows[: len(taken.rows)], self.waiting[: len(taken.waiting)]
        self.size -= taken.size
        self.calls -= taken.calls
        return taken

    def split_bad(self, bad: Callable[[Row], bool]) -> PendingWrites:
        """Split off the writes with a row for which `bad` is true."""
        return self._split(lambda _, rows: any(map(bad, rows)))

    @property
    def control(self) -> bool:
        """Whether all writes are control writes."""
        return all(map(_is_control, self.waiting))

    def split_data(self) -> PendingWrites:
        """Split off the writes that are no control writes."""
        return self._split(lambda waiting, _: not _is_control(waiting))

    def _split(self, bad: Callable[[Waiting, Sequence[Row]], bool]) -> PendingWrites:
        good, refused = PendingWrites(), PendingWrites()
        for waiting, rows in self._writes():
            (refused if bad(waiting, rows) else good)._move(self.notifier, waiting, rows)
        self.rows, self.waiting, self.size, self.calls = good.rows, good.waiting, good.size, good.calls
        return refused

    def _writes(self) -> Iterator[tuple[Waiting, list[Row]]]:
        at = 0
        for waiting in self.waiting:
            end = at + (waiting[1] if isinstance(waiting, tuple) else 1)
            yield waiting, self.rows[at:end]
            at = end

    def _move(self, notifier: LoopNotifier | None, waiting: Waiting, rows: list[Row]) -> None:
        self.waiting.append(waiting)
        self.calls += isinstance(waiting, tuple)
        self.notifier = notifier
        self.rows += rows
        self.size += _size(rows)

    def acknowledge(self, ids: list[bytes]) -> None:
        """Give each write the ids of its rows; `ids` are those of all rows."""
        waiting, self.waiting = self.waiting, []
        if self.notifier is not None and not self.calls:
            self.notifier.settle_all(cast("list[asyncio.Future[bytes]]", waiting), ids)
            return
        at = 0
        for one in waiting:
            if isinstance(one, tuple):
                done, count, _ = one
                _call(done, ids[at : at + count])
                at += count
            elif self.notifier is not None:
                self.notifier.settle(one, ids[at])
                at += 1

    def fail(self, error: TidewalError) -> None:
        """Give the error to each write that is not acknowledged yet."""
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            if isinstance(one, tuple):
                _call(one[0], error)
            elif self.notifier is not None:
                self.notifier.settle(one, error)


def _size(rows: Sequence[Row]) -> int:
    return sum([ROW_BYTES + len(row[3]) for row in rows])


def _is_control(waiting: Waiting) -> bool:
    return isinstance(waiting, tuple) and waiting[2]


def settle_first(notifier: LoopNotifier, future: asyncio.Future[bytes], result: list[bytes] | TidewalError) -> None:
    """Settle the future, of the notifier's loop, with the first of the ids or with the error."""
    notifier.settle(future, result if isinstance(result, TidewalError) else result[0])


def _call(done: OnAppended, result: list[bytes] | TidewalError) -> None:
    try:
        done(result)
    except Exception:
        _log.exception("an append's callback failed")
