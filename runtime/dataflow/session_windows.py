"""Session windows over one state. The table `name` holds the sessions of each key."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import count
from typing import Any, Generic, cast

from .keyed_state import KeyedState, KeyedTable
from .window_output import A, Aggregate, K, LateRow, Row, V, Watermark, WindowOutput, WindowResult, by_end
from .windows import SessionWindows, Window

# A session is a list, as it is stored: the times of its first and last row, the aggregate, the windows (start, end)
# that were emitted of it and not replaced yet, and whether it has changed since.
_FIRST, _LAST, _VALUE, _EMITTED, _DUE = range(5)


class SessionWindowOperator(Generic[K, V, A]):
    """A heap says which key has a session that ends, or is to be forgotten, next. It holds one time per key, which may
    be too early: then the key is looked at once more."""

    def __init__(self, aggregate: Aggregate[V, A], windows: SessionWindows, state: KeyedState) -> None:
        self._of = aggregate
        self._gap = windows.gap
        self._table: KeyedTable[K, list[list[Any]]] = state.table(aggregate.name)
        self._watermark = Watermark(aggregate.name, aggregate.disorder, state)
        self._numbers = count()  # keys need no order
        self._heap: list[tuple[int, int, K]] = []
        self._next: dict[K, int] = {}  # when to look at a key; what the heap has for another time does not count
        for key in self._table.data:
            self._schedule(key)

    def update(self, rows: Iterable[Row[K, V]], told: int) -> WindowOutput[K, V, A]:
        """As `Windowed.update`; `told` in ms."""
        late: list[LateRow[K, V]] = []
        newest, time = self._watermark.newest, self._watermark.time
        ended: dict[K, None] = {}
        for key, at, value in rows:
            if at > newest:
                newest = at
                time = max(time, newest - self._of.disorder)
            session = self._add(key, at, value, time)
            if session is None:
                late.append(LateRow(key, at, value, (Window(at, at + self._gap),)))
            elif session[_LAST] + self._gap <= time:
                ended[key] = None
        self._watermark.store(newest, told)
        results = [result for key in self._to_look_at(ended) for result in self._look_at(key)]
        results.sort(key=by_end)
        return WindowOutput(results, late)

    def _add(self, key: K, at: int, value: V, time: int) -> list[Any] | None:
        """The session that the row is in now, with the watermark at `time`; None for a row that is too late."""
        sessions = self._table.data.get(key)
        if sessions is None:
            sessions = []
        gap, forgotten = self._gap, time - self._gap - self._of.lateness
        joined = [each for each in sessions if each[_LAST] > forgotten and each[_FIRST] - gap < at < each[_LAST] + gap]
        if not joined and at <= forgotten:
            return None
        session: list[Any] = self._merged(joined) if joined else [at, at, self._of.new(), [], True]
        session[_FIRST], session[_LAST] = min(at, session[_FIRST]), max(at, session[_LAST])
        session[_VALUE] = self._of.add(session[_VALUE], value)
        session[_DUE] = True
        if len(joined) != 1:
            sessions = [each for each in sessions if not any(each is other for other in joined)]
            self._table.data[key] = [*sessions, session]
        self._table.changed.add(key)
        self._look_again(key, session[_LAST] + gap)  # one that was emitted before is due again, wherever it ends now
        return session

    def _merged(self, joined: list[list[Any]]) -> list[Any]:
        """One session of several, in the order of time."""
        session, *others = sorted(joined, key=lambda each: cast(int, each[_FIRST]))
        for other in others:
            assert self._of.merge is not None  # `Windowed` sees to it
            session[_LAST] = max(session[_LAST], other[_LAST])
            session[_VALUE] = self._of.merge(session[_VALUE], other[_VALUE])
            session[_EMITTED] = [*session[_EMITTED], *other[_EMITTED]]
        return session

    def _to_look_at(self, ended: dict[K, None]) -> dict[K, None]:
        """The keys with sessions that have ended, or changed behind their end, or are to be forgotten."""
        while self._heap and self._heap[0][0] <= self._watermark.time:
            at, _, key = heapq.heappop(self._heap)
            if self._next.get(key) == at:
                del self._next[key]
                ended[key] = None
        return ended

    def _look_at(self, key: K) -> list[WindowResult[K, A]]:
        """Emit the sessions of `key` that have ended, and forget those that nothing can be added to any more."""
        time = self._watermark.time
        results: list[WindowResult[K, A]] = []
        kept: list[list[Any]] = []
        for session in self._table.data[key]:
            end = session[_LAST] + self._gap
            if end <= time and session[_DUE]:
                window = Window(session[_FIRST], end)
                replaces = tuple(Window(*each) for each in session[_EMITTED])
                results.append(WindowResult(key, window, session[_VALUE], replaces))
                session[_EMITTED], session[_DUE] = [tuple(window)], False
            if end + self._of.lateness > time:
                kept.append(session)
        if kept:
            self._table.data[key] = kept
        else:
            del self._table.data[key]
            self._next.pop(key, None)
        self._table.changed.add(key)
        if kept:
            self._schedule(key)
        return results

    def _schedule(self, key: K) -> None:
        ends = (each[_LAST] + self._gap + (0 if each[_DUE] else self._of.lateness) for each in self._table.data[key])
        self._look_again(key, min(ends))

    def _look_again(self, key: K, at: int) -> None:
        known = self._next.get(key)
        if known is None or at < known:
            self._next[key] = at
            heapq.heappush(self._heap, (at, next(self._numbers), key))
