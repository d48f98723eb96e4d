"""Stamp entries that bring no timestamp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, cast

from ..clock import SystemClock, compose
from .wal import Append

_CLOCK = SystemClock()
_make: Callable[[type[Append], tuple[Any, ...]], Append] = cast("Any", tuple.__new__)
_timestamp_of = itemgetter(Append._fields.index("timestamp"))


def present() -> int:
    """The timestamp of an entry that is appended now and brings none: the wall clock's."""
    return compose(_CLOCK.wall_ms())


def stamped(entries: Sequence[Append]) -> Sequence[Append]:
    """`entries`, where those without a timestamp have the present one: the same for all, as they are one commit."""
    timestamps = list(map(_timestamp_of, entries))
    if all(timestamps):
        return entries
    now = present()
    names, payloads, _, keys, headers = zip(*entries, strict=True)
    stamps = [timestamp or now for timestamp in timestamps]
    rows = zip(names, payloads, stamps, keys, headers, strict=True)
    return list(map(_make, map(type, entries), rows))  # in C: this runs for each entry that is appended
