"""What waits for the next commit: rows in the order of the log, and who is told when they are durable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias, cast

from ...runtime.errors import TidewalError
from ...runtime.wakeup import Hub
from ...runtime.wal import OnAppended, Payload
from .frame import CONTROL, ROW_BYTES

Row: TypeAlias = tuple[int, int, int, Payload]  # channel number, id, timestamp, body; as in a frame's table
# Who waits for how many rows: a future of a hub for one of them, or a callback.
WaitingTask: TypeAlias = tuple[Hub, "asyncio.Future[bytes]", int]
WaitingCall: TypeAlias = tuple[None, OnAppended, int]
Waiting: TypeAlias = WaitingTask | WaitingCall

_log = logging.getLogger(__name__)


class Write:
    """What one submit asks for: rows that are in one frame or none, of `size` bytes with their lines in its table.

    `done` gets an id for each row. `written`, if any, is called before the sync. `urgent`: its control records take
    effect in the journal's table before `done` is called.
    """

    __slots__ = ("done", "rows", "size", "urgent", "written")

    def __init__(
        self,
        done: OnAppended,
        rows: Sequence[Row] = (),
        size: int = 0,
        written: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
    ) -> None:
        self.done, self.rows, self.size, self.written, self.urgent = done, rows, size, written, urgent


def control(record: bytes, wall_ms: int, done: OnAppended, *, creates: int = 0) -> Write:
    """A write of one control record; `creates` is the number of the channel that it creates."""
    return Write(done, [(CONTROL, creates, wall_ms, record)], ROW_BYTES + len(record), urgent=True)


class Pending:
    """Writes that gather, in order. Belongs to the registry's lock until the journal's writer takes it."""

    __slots__ = ("rows", "size", "urgent", "waiting", "written")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.waiting: list[Waiting] = []  # those whom nobody has told yet
        self.size = 0
        self.written: list[Callable[[], None]] = []
        self.urgent = False  # whether some write may be

    def add(self, write: Write) -> None:
        self.rows += write.rows
        self.waiting.append((None, write.done, len(write.rows)))
        self.size += write.size
        self.urgent = self.urgent or write.urgent
        if write.written is not None:
            self.written.append(write.written)

    def add_one(self, row: Row, size: int, hub: Hub, future: asyncio.Future[bytes]) -> None:
        """A write of one row, for which a task waits."""
        self.rows.append(row)
        self.waiting.append((hub, future, 1))
        self.size += size

    def take(self, count: int, size: int) -> Pending:
        """Split off the first writes: at most `count` and, but for the first, `size` bytes. `written` stays behind:
        who may be told before the sync may be told after it, too."""
        taken, at = Pending(), 0
        taken.urgent = self.urgent
        for waiting in self.waiting[:count]:
            rows = self.rows[at : at + waiting[2]]
            if taken.waiting and taken.size + _size(rows) > size:
                break
            taken._move(waiting, rows)
            at += len(rows)
        del self.rows[:at], self.waiting[: len(taken.waiting)]
        self.size -= taken.size
        return taken

    def divide(self, good: Callable[[Row], bool]) -> tuple[Pending, Pending]:
        """The writes whose rows are all good, and the others."""
        parts, at = (Pending(), Pending()), 0
        for waiting in self.waiting:
            rows = self.rows[at : at + waiting[2]]
            parts[not all(map(good, rows))]._move(waiting, rows)
            at += len(rows)
        parts[0].written, parts[0].urgent = self.written, self.urgent
        return parts

    def _move(self, waiting: Waiting, rows: list[Row]) -> None:
        self.waiting.append(waiting)
        self.rows += rows
        self.size += _size(rows)

    def tell(self, ids: list[bytes]) -> None:
        """Give everybody the ids of his rows."""
        waiting, self.waiting = self.waiting, []
        at = 0
        for hub, group in groupby(waiting, _hub):
            if hub is not None:
                futures = [future for _, future, _ in cast("Iterator[WaitingTask]", group)]
                hub.settle_all(futures, ids[at : at + len(futures)])
                at += len(futures)
                continue
            for _, done, count in cast("Iterator[WaitingCall]", group):
                _call(done, ids[at : at + count])
                at += count

    def fail(self, error: TidewalError) -> None:
        """Give the error to everybody who was not told before."""
        waiting, self.waiting = self.waiting, []
        for hub, group in groupby(waiting, _hub):
            if hub is not None:
                for _, future, _ in cast("Iterator[WaitingTask]", group):
                    hub.settle(future, error)
                continue
            for _, done, _ in cast("Iterator[WaitingCall]", group):
                _call(done, error)


def _hub(waiting: Waiting) -> Hub | None:
    return waiting[0]


def _size(rows: Sequence[Row]) -> int:
    return sum([ROW_BYTES + len(row[3]) for row in rows])


def _call(done: OnAppended, result: list[bytes] | TidewalError) -> None:
    try:
        done(result)
    except Exception:
        _log.exception("an append's callback failed")
