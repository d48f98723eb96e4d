"""Windows over random rows, batches and recoveries, held against a model that looks at each row and every window."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import compose
from tidewal.runtime.dataflow.keyed_state import KeyedState, KeyedTable
from tidewal.runtime.dataflow.window_output import LateRow, WindowResult
from tidewal.runtime.dataflow.windowed import Windowed
from tidewal.runtime.dataflow.windows import FixedWindows, SessionWindows, Window, hopping, session, tumbling
from tidewal.runtime.errors import InvalidRequest

FAR = compose(10**9)

Rows = list[tuple[str, int, int]]


class Batch(NamedTuple):
    rows: Rows
    told: int  # ms


def ms(value: int) -> timedelta:
    return timedelta(milliseconds=value)


# ---- the model: each row is looked at by itself, and nothing is indexed ----------------------------------------------


class Model:
    """What must be emitted and be late. `accepted` are the rows of each window that is not forgotten."""

    def __init__(self, windows: FixedWindows | SessionWindows, disorder: int, lateness: int) -> None:
        self.windows, self.disorder, self.lateness = windows, disorder, lateness
        self.newest = self.told = 0
        self.accepted: list[tuple[str, Window, Rows]] = []
        self.late: list[LateRow[str, int]] = []

    @property
    def time(self) -> int:
        return max(self.told, self.newest - self.disorder)

    def add(self, row: tuple[str, int, int]) -> None:
        key, at, value = row
        self.newest = max(self.newest, at)
        if isinstance(self.windows, SessionWindows):
            missed = self._add_to_session(row, self.windows.gap)
        else:
            missed = [window for window in self.covering(at, self.windows) if not self._add_to_window(row, window)]
        if missed:
            self.late.append(LateRow(key, at, value, tuple(missed)))

    def covering(self, at: int, windows: FixedWindows) -> list[Window]:
        first = (at - windows.offset) // windows.every * windows.every + windows.offset
        starts = range(first - windows.size // windows.every * windows.every, first + 1, windows.every)
        return [Window(start, start + windows.size) for start in starts if start <= at < start + windows.size]

    def _add_to_window(self, row: tuple[str, int, int], window: Window) -> bool:
        if window.end + self.lateness <= self.time:
            return False
        for key, known, rows in self.accepted:
            if (key, known) == (row[0], window):
                rows.append(row)
                return True
        self.accepted.append((row[0], window, [row]))
        return True

    def _add_to_session(self, row: tuple[str, int, int], gap: int) -> list[Window]:
        key, at, _ = row
        joined = [
            each
            for each in self.accepted
            if each[0] == key
            and each[1].end + self.lateness > self.time
            and any(abs(other[1] - at) < gap for other in each[2])
        ]
        if not joined and at + gap + self.lateness <= self.time:
            return [Window(at, at + gap)]
        rows = [row, *(other for each in joined for other in each[2])]
        times = [each[1] for each in rows]
        self.accepted = [each for each in self.accepted if each not in joined]
        self.accepted.append((key, Window(min(times), max(times) + gap), rows))
        return []

    def ended(self) -> dict[tuple[str, Window], int]:
        """The windows that have ended, with the sums of their rows."""
        return {(key, w): sum(row[2] for row in rows) for key, w, rows in self.accepted if w.end <= self.time}


def as_stored(state: KeyedState) -> KeyedState:
    """The state as another member gets it: the tables, and nothing that is derived from them."""
    moved = KeyedState()
    for name, table in state.tables.items():
        moved.tables[name] = KeyedTable(name, dict(table.data))
    return moved


def emitted(results: list[WindowResult[str, int]], final: dict[tuple[str, Window], int]) -> None:
    """Apply results to what a user has, who follows `replaces`; each must replace just what is there."""
    for result in results:
        for window in result.replaces:
            del final[result.key, window]
        assert (result.key, result.window) not in final
        final[result.key, result.window] = result.value


WINDOWS = st.one_of(
    st.builds(lambda size, offset: tumbling(ms(size), offset=ms(offset)), st.integers(1, 30), st.integers(-20, 20)),
    st.builds(
        lambda every, more, offset: hopping(ms(every + more), ms(every), offset=ms(offset)),
        st.integers(1, 10),
        st.integers(0, 25),
        st.integers(-5, 5),
    ),
    st.builds(lambda gap: session(ms(gap)), st.integers(1, 15)),
)
ROWS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 150), st.integers(-5, 5)), max_size=40)
SMALL_ROWS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100), st.integers(1, 9)), max_size=8)
BATCHES = st.lists(st.builds(Batch, SMALL_ROWS, st.integers(0, 60)), max_size=10)


def windowed(windows: Any, disorder: int, lateness: int) -> Windowed[str, int, int]:
    return Windowed(
        "sums",
        windows,
        new=lambda: 0,
        add=lambda sum, value: sum + value,
        merge=lambda a, b: a + b,
        disorder=ms(disorder),
        lateness=ms(lateness),
    )


@pytest.mark.slow
@settings(max_examples=600)
@given(
    windows=WINDOWS,
    batches=BATCHES,
    disorder=st.integers(0, 20),
    lateness=st.sampled_from([0, 0, 7, 40]),
    moves=st.booleans(),
)
def test_results_and_late_rows_equal_the_model_wherever_the_state_moves(windows, batches, disorder, lateness, moves):
    """Whatever the batches: what has been emitted, with replacements applied, is what the model has by then. A session
    that a row has joined to an open one is replaced when that one ends."""
    operator, state, model = windowed(windows, disorder, lateness), KeyedState(), Model(windows, disorder, lateness)
    final: dict[tuple[str, Window], int] = {}
    for batch in batches:
        results, late = operator.update(state, batch.rows, compose(batch.told))
        assert [each.window.end for each in results] == sorted(each.window.end for each in results)
        emitted(results, final)
        for row in batch.rows:
            model.add(row)
        model.told = max(model.told, batch.told)
        assert late == model.late
        model.late = []
        assert model.ended().items() <= final.items()
        assert isinstance(windows, SessionWindows) or model.ended() == final
        if moves:
            state = as_stored(state)
    emitted(operator.update(state, [], FAR).results, final)
    model.told = 10**9
    assert model.ended() == final
    assert not state.table("sums").data, "all windows are forgotten"


@pytest.mark.slow
@settings(max_examples=300)
@given(windows=WINDOWS, rows=ROWS, cuts=st.lists(st.integers(0, 40)), disorder=st.integers(0, 20))
def test_how_the_rows_are_cut_into_batches_changes_nothing(windows, rows, cuts, disorder):
    outcomes = []
    for edges in ([0, len(rows)], sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})):
        operator, state = windowed(windows, disorder, 0), KeyedState()
        results: list[Any] = []
        late: list[Any] = []
        for first, end in pairwise(edges):
            output = operator.update(state, rows[first:end])
            results += output.results
            late += output.late
        results += operator.update(state, [], FAR).results
        assert all(not each.replaces for each in results)
        outcomes.append((sorted(results), late))
    assert outcomes[0] == outcomes[1]


@given(windows=WINDOWS, rows=ROWS, disorder=st.integers(0, 20), lateness=st.integers(0, 40))
def test_every_row_is_in_its_windows_or_among_the_late(windows, rows, disorder, lateness):
    if isinstance(windows, SessionWindows):
        return  # a session's windows are not known beforehand
    operator: Windowed[str, int, Any] = Windowed(
        "all", windows, new=tuple, add=lambda rows, value: (*rows, value), disorder=ms(disorder), lateness=ms(lateness)
    )
    state, model = KeyedState(), Model(windows, disorder, lateness)
    numbered = [(key, at, number) for number, (key, at, _) in enumerate(rows)]
    found: list[tuple[int, Window]] = []
    final: dict[tuple[str, Window], Any] = {}
    for row in numbered:
        results, late = operator.update(state, [row])
        emitted(results, final)
        found += [(each.value, window) for each in late for window in each.windows]
    emitted(operator.update(state, [], FAR).results, final)
    found += [(number, window) for (_, window), numbers in final.items() for number in numbers]
    expected = [(number, window) for _, at, number in numbered for window in model.covering(at, windows)]
    assert sorted(found) == sorted(expected)


def test_windows_of_a_day_begin_at_midnight():
    operator = windowed(tumbling(timedelta(days=1)), 0, 0)
    at = datetime(2026, 3, 14, 15, 9, tzinfo=UTC)
    [result] = [
        *operator.update(state := KeyedState(), [("a", int(at.timestamp() * 1000), 1)]).results,
        *operator.update(state, [], compose(int(at.timestamp() * 1000) + 86_400_000)).results,
    ]
    assert result.window.start_time == datetime(2026, 3, 14, tzinfo=UTC)
    assert result.window.end_time == datetime(2026, 3, 15, tzinfo=UTC)


def test_a_row_exactly_a_gap_behind_the_last_begins_a_session():
    operator, state = windowed(session(ms(10)), 100, 0), KeyedState()
    operator.update(state, [("a", 0, 1), ("a", 9, 2), ("a", 19, 4)])
    results = operator.update(state, [], FAR).results
    assert [each[:3] for each in results] == [("a", (0, 19), 3), ("a", (19, 29), 4)]


def test_a_late_session_replaces_those_it_joins():
    operator, state = windowed(session(ms(10)), 0, 100), KeyedState()
    first = operator.update(state, [("a", 0, 1), ("a", 15, 2), ("b", 50, 9)])
    assert [each.window for each in first.results] == [(0, 10), (15, 25)]
    [joined] = operator.update(state, [("a", 7, 4)]).results
    assert joined == ("a", (0, 25), 7, ((0, 10), (15, 25)))


@pytest.mark.parametrize("moves", [False, True])
def test_a_session_that_a_late_row_reopens_is_replaced_when_it_ends_again(moves):
    operator, state = windowed(session(ms(10)), 0, 1000), KeyedState()
    operator.update(state, [("a", 0, 1)])
    assert [each.window for each in operator.update(state, [("b", 12, 0)]).results] == [(0, 10)]
    assert operator.update(state, [("a", 5, 2)]).results == []  # it ends at 15 now, and the watermark is at 12
    if moves:
        state = as_stored(state)
    assert operator.update(state, [("b", 15, 0)]).results == [("a", (0, 15), 3, ((0, 10),))]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tumbling(timedelta(0)),
        lambda: tumbling(timedelta(seconds=-1)),
        lambda: tumbling(timedelta(microseconds=1500)),
        lambda: hopping(timedelta(seconds=1), timedelta(seconds=2)),
        lambda: hopping(timedelta(days=1), timedelta(milliseconds=1)),
        lambda: session(timedelta(0)),
        lambda: tumbling(5),  # type: ignore[arg-type]
        lambda: Windowed("a", session(ms(1)), new=int, add=lambda a, b: a),
        lambda: windowed(tumbling(ms(1)), -1, 0),
        lambda: KeyedState().table(""),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(InvalidRequest):
        make()
