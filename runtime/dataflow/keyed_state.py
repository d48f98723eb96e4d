"""State by key: tables that know what has changed in them since it was last stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import NoneType
from typing import Any, Generic, TypeVar, cast, overload

from ..arguments import checked
from ..errors import InvalidRequest

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

# A value of another type may be changed in place by the code that reads it, so reading it counts as a change. Tuples
# are looked into: one may hold a list.
_NOT_CHANGED_IN_PLACE = frozenset({int, float, str, bytes, bool, NoneType})
_ABSENT: Any = object()


def _may_change(value: object) -> bool:
    """Whether a value that is of none of the types above may be changed in place."""
    if type(value) is not tuple:
        return True
    members = cast("tuple[object, ...]", value)
    if _NOT_CHANGED_IN_PLACE.issuperset(map(type, members)):
        return False
    return any(type(member) not in _NOT_CHANGED_IN_PLACE and _may_change(member) for member in members)


class KeyedTable(MutableMapping[K, V], Generic[K, V]):
    """A table of a `KeyedState`: a mapping whose changes are stored with the group's position.

    A key is what msgpack encodes and Python hashes: text, bytes, numbers, and tuples of these. A value is what the
    state's codec encodes. A list, dictionary or other value that can be changed in place, and a tuple with one in it,
    is stored again whenever it was read in this table, so that `table[key].append(x)` is not lost; keep no such value
    beyond the step that read it.
    """

    __slots__ = ("changed", "data", "name")

    def __init__(self, name: str, data: dict[K, V] | None = None) -> None:
        self.name: str = name
        self.data: dict[K, V] = {} if data is None else data
        self.changed: set[K] = set()  # keys that were set, removed, or read with a value that may change in place

    def __getitem__(self, key: K) -> V:
        value = self.data[key]
        if type(value) not in _NOT_CHANGED_IN_PLACE and _may_change(value):
            self.changed.add(key)
        return value

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V) -> V: ...
    @overload
    def get(self, key: K, /, default: T) -> V | T: ...
    def get(self, key: K, /, default: object = None) -> object:
        """The value of `key`, or `default`."""
        value = self.data.get(key, _ABSENT)
        if value is _ABSENT:
            return default
        if type(value) not in _NOT_CHANGED_IN_PLACE and _may_change(value):
            self.changed.add(key)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.data[key] = value
        self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        del self.data[key]
        self.changed.add(key)

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __iter__(self) -> Iterator[K]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    @checked
    def merge(self, values: Mapping[K, V], combine: Callable[[V, V], V]) -> None:
        """Set each key of `values` to its value there, combined with the one that the table has: `combine(old, new)`.
        What a batch adds to the state in one call: `counts.merge(Counter(words), operator.add)`."""
        data = self.data
        for key, value in values.items():
            old: Any = data.get(key, _ABSENT)
            data[key] = value if old is _ABSENT else combine(old, value)
        self.changed.update(values)

    def __repr__(self) -> str:
        return f"KeyedTable({self.name!r}, {len(self.data)} keys)"


class KeyedState:
    """The state that a program keeps for one input channel: tables by name. It is there again, as of the group's
    position, wherever the channel is processed next. It lies in memory as a whole."""

    def __init__(self) -> None:
        self.tables: dict[str, KeyedTable[Any, Any]] = {}
        self._derived: dict[str, object] = {}
        self.watermarks: dict[str, int] = {}  # ms, of the windows of each name: shown as metrics

    @checked
    def table(self, name: str) -> KeyedTable[Any, Any]:
        """The table with that name, empty where there was none."""
        found = self.tables.get(name)
        if found is None:
            if not name or not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- unchecked callers
                raise InvalidRequest(f"a table's name is text that is not empty, not {name!r}")
            found = self.tables[name] = KeyedTable(name)
        return found

    @checked
    def derived(self, name: str, build: Callable[[], T]) -> T:
        """What was built for `name` before, or `build()` the first time: what an operator derives from its tables, such
        as an index, and builds again when the state has moved or was recovered. It is not stored."""
        found = self._derived.get(name, _ABSENT)
        if found is _ABSENT:
            found = self._derived[name] = build()
        return cast("T", found)

    @property
    def keys(self) -> int:
        """How many keys all tables have."""
        return sum(len(table.data) for table in self.tables.values())

    @property
    def changed(self) -> bool:
        """Whether there is anything to store."""
        return any(table.changed for table in self.tables.values())
