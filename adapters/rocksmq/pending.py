"""What waits for the next commit: rows in the order of the log, and who is told when they are durable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias, cast

from ...runtime.errors import TidewalError
from ...runtime.wakeup import Hub
from ...runtime.wal import OnAppended, Payload
from .frame import CONTROL, ROW_BYTES

Row: TypeAlias = tuple[int, int, int, Payload]  # channel number, id, timestamp, body; as in a frame's table
# The rows of one frame, a sequence for each field.
Columns: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[Payload]]
# Who waits: a future for one row, or a callback for so many, and whether they are the system's own.
Waiting: TypeAlias = "asyncio.Future[bytes] | tuple[OnAppended, int, bool]"

_log = logging.getLogger(__name__)


class Write:
    """What one submit asks for: rows that are in one frame or none, of `size` bytes with their lines in its table.

    `done` gets an id for each row. `written`, if any, is called before the sync. `urgent`: its control records take
    effect in the journal's table before `done` is called. `control`: it is written from the reserve where there is no
    space for data.
    """

    __slots__ = ("control", "done", "hub", "rows", "size", "urgent", "written")

    def __init__(
        self,
        done: OnAppended,
        rows: Sequence[Row] = (),
        size: int = 0,
        written: Callable[[], None] | None = None,
        *,
        urgent: bool = False,
        control: bool = False,
        hub: Hub | None = None,
    ) -> None:
        self.hub = hub  # whose loop waits for it, if it is a loop's
        self.done, self.rows, self.size, self.written, self.urgent = done, rows, size, written, urgent
        self.control = control


def control(record: bytes, wall_ms: int, done: OnAppended, *, creates: int = 0) -> Write:
    """A write of one control record; `creates` is the number of the channel that it creates."""
    return Write(done, [(CONTROL, creates, wall_ms, record)], ROW_BYTES + len(record), urgent=True, control=True)


class Pending:
    """Writes that gather, in order. Belongs to the registry's lock until somebody takes it to commit it."""

    __slots__ = ("calls", "hub", "rows", "shared", "size", "urgent", "waiting", "written")

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.waiting: list[Waiting] = []  # those whom nobody has told yet
        self.hub: Hub | None = None  # whose loop's futures those are
        self.shared = False  # whether anybody else waits, too
        self.calls = 0  # how many of `waiting` are none
        self.size = 0
        self.written: list[Callable[[], None]] = []
        self.urgent = False  # whether some write may be

    def add(self, write: Write) -> None:
        self.rows += write.rows
        self.waiting.append((write.done, len(write.rows), write.control))
        self.calls += 1
        self.hub = self.hub or write.hub
        self.shared = self.shared or write.hub is None or write.hub is not self.hub
        self.size += write.size
        self.urgent = self.urgent or write.urgent
        if write.written is not None:
            self.written.append(write.written)

    def wait(self, hub: Hub, future: asyncio.Future[bytes]) -> None:
        """Let a task wait for the row added last."""
        if self.hub is None:
            self.hub = hub
        if self.hub is hub:
            self.waiting.append(future)
        else:
            self.waiting.append((partial(settle_first, hub, future), 1, False))
            self.calls += 1
            self.shared = True

    def take(self, count: int, size: int) -> Pending:
        """Split off the first writes: at most `count` and, but for the first, `size` bytes. `written` stays behind:
        who may be told before the sync may be told after it, too."""
        taken = Pending()
        taken.urgent = self.urgent
        for waiting, rows in self._writes():
            if taken.waiting and (len(taken.waiting) == count or taken.size + _size(rows) > size):
                break
            taken._move(self.hub, waiting, rows)
        del self.rows[: len(taken.rows)], self.waiting[: len(taken.waiting)]
        self.size -= taken.size
        self.calls -= taken.calls
        return taken

    def split_bad(self, bad: Callable[[Row], bool]) -> Pending:
        """Split off the writes of which a row is bad."""
        return self._split(lambda _, rows: any(map(bad, rows)))

    @property
    def control(self) -> bool:
        """Whether all of it is the system's own."""
        return all(map(_is_control, self.waiting))

    def split_data(self) -> Pending:
        """Split off what is not the system's own."""
        return self._split(lambda waiting, _: not _is_control(waiting))

    def _split(self, bad: Callable[[Waiting, Sequence[Row]], bool]) -> Pending:
        good, refused = Pending(), Pending()
        for waiting, rows in self._writes():
            (refused if bad(waiting, rows) else good)._move(self.hub, waiting, rows)
        self.rows, self.waiting, self.size, self.calls = good.rows, good.waiting, good.size, good.calls
        return refused

    def _writes(self) -> Iterator[tuple[Waiting, list[Row]]]:
        at = 0
        for waiting in self.waiting:
            end = at + (waiting[1] if isinstance(waiting, tuple) else 1)
            yield waiting, self.rows[at:end]
            at = end

    def _move(self, hub: Hub | None, waiting: Waiting, rows: list[Row]) -> None:
        self.waiting.append(waiting)
        self.calls += isinstance(waiting, tuple)
        self.hub = hub
        self.rows += rows
        self.size += _size(rows)

    def tell(self, ids: list[bytes]) -> None:
        """Give everybody the ids of his rows."""
        waiting, self.waiting = self.waiting, []
        if self.hub is not None and not self.calls:
            self.hub.settle_all(cast("list[asyncio.Future[bytes]]", waiting), ids)
            return
        at = 0
        for one in waiting:
            if isinstance(one, tuple):
                done, count, _ = one
                _call(done, ids[at : at + count])
                at += count
            elif self.hub is not None:
                self.hub.settle(one, ids[at])
                at += 1

    def fail(self, error: TidewalError) -> None:
        """Give the error to everybody who was not told before."""
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            if isinstance(one, tuple):
                _call(one[0], error)
            elif self.hub is not None:
                self.hub.settle(one, error)


def _size(rows: Sequence[Row]) -> int:
    return sum([ROW_BYTES + len(row[3]) for row in rows])


def _is_control(waiting: Waiting) -> bool:
    return isinstance(waiting, tuple) and waiting[2]


def settle_first(hub: Hub, future: asyncio.Future[bytes], result: list[bytes] | TidewalError) -> None:
    hub.settle(future, result if isinstance(result, TidewalError) else result[0])


def _call(done: OnAppended, result: list[bytes] | TidewalError) -> None:
    try:
        done(result)
    except Exception:
        _log.exception("an append's callback failed")
