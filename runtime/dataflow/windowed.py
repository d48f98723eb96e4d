"""Aggregates by key and window of time, closed by a watermark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Generic, Protocol

from ..arguments import checked
from ..clock import physical_ms
from ..errors import InvalidRequest
from .fixed_windows import FixedWindowOperator
from .keyed_state import KeyedState
from .session_windows import SessionWindowOperator
from .window_output import A, Aggregate, K, Row, V, WindowOutput
from .windows import FixedWindows, SessionWindows, Windows, milliseconds


class _Operator(Protocol[K, V, A]):
    """The windows of one kind over one state."""

    def update(self, rows: Iterable[Row[K, V]], told: int) -> WindowOutput[K, V, A]: ...


class Windowed(Generic[K, V, A]):
    """Aggregates rows `(key, time, value)` by key and window of time; `time` is in ms since 1970.

    The aggregate of a window begins as `new()` and becomes `add(aggregate, value)` with each row. Session windows need
    `merge(aggregate, aggregate)` too, for rows that join two sessions. The aggregate is stored with the state, so the
    state's codec must encode it.

    The watermark moves with the rows: it is the highest time of the channel's rows so far less `disorder`, so rows may
    come out of order by that much without being late. It moves row by row, so whether a row is late does not depend on
    how the log was cut into batches. `update` moves it further with `watermark`. With log time of a channel that has an
    owner, `disorder` 0 is exact, as an owner stamps in log order.

    A window is emitted once, when the watermark has reached its end. It stays `lateness` longer; a row that comes for
    it in that time is accepted, and the window emitted anew behind the batch (`WindowResult.replaces`). Rows that come
    later still are `late`. Each row is in the results of each of its windows, or among the late rows.
    """

    @checked
    def __init__(
        self,
        name: str,
        windows: Windows,
        *,
        new: Callable[[], A],
        add: Callable[[A, V], A],
        merge: Callable[[A, A], A] | None = None,
        disorder: timedelta = timedelta(),
        lateness: timedelta = timedelta(),
    ) -> None:
        """`name` is that of the tables in the state: two `Windowed` of one program need two names. Raises
        `InvalidRequest`."""
        if isinstance(windows, SessionWindows) and merge is None:
            raise InvalidRequest("session windows need merge=: a row between two sessions joins them")
        self.name = name
        self.windows = windows
        self._aggregate = Aggregate(
            name, new, add, merge, milliseconds("disorder", disorder), milliseconds("lateness", lateness)
        )

    @checked
    def update(
        self, state: KeyedState, rows: Iterable[Row[K, V]], watermark: int | None = None
    ) -> WindowOutput[K, V, A]:
        """Add a batch of rows to `state`, the state of their channel, and close the windows that end. `watermark`, a
        hybrid timestamp such as `MsgPack.end_ts`, says that no row of a time before it will follow; None leaves that
        to the rows. An empty batch only closes windows."""
        operator: _Operator[K, V, A] = state.derived(self.name, lambda: self._operator(state))
        return operator.update(rows, 0 if watermark is None else physical_ms(watermark))

    def _operator(self, state: KeyedState) -> _Operator[K, V, A]:
        if isinstance(self.windows, FixedWindows):
            return FixedWindowOperator(self._aggregate, self.windows, state)
        return SessionWindowOperator(self._aggregate, self.windows, state)
