"""What windows give: results and late rows. And what both kinds of windows share: their aggregate and watermark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from .keyed_state import KeyedState, KeyedTable
from .windows import Window

K = TypeVar("K")
V = TypeVar("V")
A = TypeVar("A")

Row: TypeAlias = tuple[K, int, V]


class WindowResult(NamedTuple, Generic[K, A]):
    """The aggregate of a key's rows in a window. `replaces` are the windows of the key that were emitted before and
    that this one stands for now: empty for a first result. A late row that is still accepted makes a new result, which
    replaces the same window, or for sessions all that the row has joined. `value` is the state's own: do not keep or
    change one that can be changed in place."""

    key: K
    window: Window
    value: A
    replaces: tuple[Window, ...] = ()


class LateRow(NamedTuple, Generic[K, V]):
    """A row that came too late for `windows`, and is missing in their results."""

    key: K
    time: int
    value: V
    windows: tuple[Window, ...]


class WindowOutput(NamedTuple, Generic[K, V, A]):
    """What a batch of rows made: results of windows, by their ends, and the rows that came too late."""

    results: list[WindowResult[K, A]]
    late: list[LateRow[K, V]]


@dataclass(frozen=True, slots=True)
class Aggregate(Generic[V, A]):
    """How windows are made of rows, and for how long they wait for them (`disorder`, `lateness`: ms). The parameters of
    `Windowed`, checked."""

    name: str
    new: Callable[[], A]
    add: Callable[[A, V], A]
    merge: Callable[[A, A], A] | None
    disorder: int
    lateness: int


class Watermark:
    """How far the rows of one channel have come, kept in the table `name` + "/time" of its state."""

    def __init__(self, name: str, disorder: int, state: KeyedState) -> None:
        self._table: KeyedTable[str, int] = state.table(f"{name}/time")
        self._disorder = disorder
        self._name, self._shown = name, state.watermarks
        self.newest: int = self._table.get("newest", 0)  # the highest time of a row
        self.told: int = self._table.get("told", 0)  # the highest watermark that `Windowed.update` was given
        if self._table:
            self._shown[name] = self.time

    @property
    def time(self) -> int:
        """No row of a time before this one will follow, or it is late."""
        return max(self.told, self.newest - self._disorder)

    def store(self, newest: int, told: int) -> None:
        """Keep both, which never go back."""
        if newest > self.newest:
            self.newest = self._table["newest"] = newest
        if told > self.told:
            self.told = self._table["told"] = told
        self._shown[self._name] = self.time


def by_end(result: WindowResult[Any, Any]) -> tuple[int, int]:
    """The order of results."""
    return result.window.end, result.window.start
