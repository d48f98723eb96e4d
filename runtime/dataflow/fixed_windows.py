"""Tumbling and hopping windows over one state. The table `name` holds the aggregate of each (start, key)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic

from .keyed_state import KeyedState, KeyedTable
from .window_output import A, Aggregate, K, LateRow, Row, V, Watermark, WindowOutput, WindowResult, by_end
from .windows import FixedWindows, Window

_ABSENT: Any = object()


class FixedWindowOperator(Generic[K, V, A]):
    """Which windows are open is derived from the table; so is which were emitted: those that end at or before the
    watermark."""

    def __init__(self, aggregate: Aggregate[V, A], windows: FixedWindows, state: KeyedState) -> None:
        self._of = aggregate
        self._windows = windows
        self._table: KeyedTable[tuple[int, K], A] = state.table(aggregate.name)
        self._watermark = Watermark(aggregate.name, aggregate.disorder, state)
        self._keys: dict[int, list[K]] = {}  # of the windows that are kept, by their start
        for start, key in self._table.data:
            self._keys.setdefault(start, []).append(key)

    def update(self, rows: Iterable[Row[K, V]], told: int) -> WindowOutput[K, V, A]:
        """As `Windowed.update`; `told` in ms."""
        before = self._watermark.time
        late: list[LateRow[K, V]] = []
        again: dict[tuple[int, K], bool] = {}
        newest = self._add(rows, late, again, before)
        self._watermark.store(newest, told)
        results = [self._emitted_again(slot, before=stood) for slot, stood in again.items()]
        results += self._close(before)
        results.sort(key=by_end)
        return WindowOutput(results, late)

    def _add(
        self, rows: Iterable[Row[K, V]], late: list[LateRow[K, V]], again: dict[tuple[int, K], bool], before: int
    ) -> int:
        """Add the rows and return the highest time. `again` gets what was added to windows that have ended `before`,
        and whether they had anything then. This loop is what a row costs."""
        size, every, offset = self._windows.size, self._windows.every, self._windows.offset
        new, add = self._of.new, self._of.add
        data, changed = self._table.data, self._table.changed.add
        newest, keep = self._watermark.newest, self._of.disorder + self._of.lateness + size
        gone = max(self._watermark.told - self._of.lateness - size, newest - keep)  # the last start that is too late
        ended = before - size
        for row in rows:
            key, time, value = row
            if time > newest:
                newest = time
                if time - keep > gone:
                    gone = time - keep
            start = time - (time - offset) % every
            first = time - size
            while start > first:
                if start <= gone:
                    late.append(LateRow(key, time, value, self._missed(start, first)))
                    break
                slot = (start, key)
                old: Any = data.get(slot, _ABSENT)
                if start <= ended:
                    again.setdefault(slot, old is not _ABSENT)
                if old is _ABSENT:
                    old = new()
                    self._keys.setdefault(start, []).append(key)
                data[slot] = add(old, value)
                changed(slot)
                start -= every
        return newest

    def _missed(self, start: int, first: int) -> tuple[Window, ...]:
        """The windows from the one at `start` down to those that begin behind `first`, the earliest first."""
        starts = range(start, first, -self._windows.every)
        return tuple(Window(each, each + self._windows.size) for each in reversed(starts))

    def _emitted_again(self, slot: tuple[int, K], *, before: bool) -> WindowResult[K, A]:
        window = Window(slot[0], slot[0] + self._windows.size)
        return WindowResult(slot[1], window, self._table.data[slot], (window,) if before else ())

    def _close(self, before: int) -> list[WindowResult[K, A]]:
        """The results of windows that have ended since the watermark was `before`; those that nothing can be added to
        any more are forgotten."""
        time, size = self._watermark.time, self._windows.size
        ended = sorted(start for start in self._keys if start + size <= time)
        data = self._table.data
        results: list[WindowResult[K, A]] = []
        for start in ended:
            keys = self._keys[start]
            if start + size > before:
                window = Window(start, start + size)
                results += [WindowResult(key, window, data[start, key]) for key in keys]
            if start + size + self._of.lateness <= time:
                slots = [(start, key) for key in keys]
                for slot in slots:
                    del data[slot]
                self._table.changed.update(slots)
                del self._keys[start]
        return results
