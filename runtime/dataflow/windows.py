"""Windows of time: which there are, and how they are cut. All times are milliseconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias

from ..arguments import checked
from ..clock import compose, to_datetime
from ..errors import InvalidRequest

WINDOWS_PER_ROW_MAX = 1000


class Window(NamedTuple):
    """The time from `start` up to and without `end`, ms since 1970."""

    start: int
    end: int

    @property
    def start_time(self) -> datetime:
        """`start` as a `datetime`, UTC."""
        return to_datetime(compose(self.start))

    @property
    def end_time(self) -> datetime:
        """`end` as a `datetime`, UTC."""
        return to_datetime(compose(self.end))


@dataclass(frozen=True, slots=True)
class FixedWindows:
    """Windows of `size` ms, one every `every` ms, that lie as if one began `offset` ms behind 1970."""

    size: int
    every: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class SessionWindows:
    """A window per burst of a key: rows that lie less than `gap` ms apart. It ends `gap` ms behind its last row."""

    gap: int


Windows: TypeAlias = FixedWindows | SessionWindows


@checked
def tumbling(size: timedelta, *, offset: timedelta = timedelta()) -> FixedWindows:
    """Windows of `size`, one behind the other: each row is in one. They begin at 1970 UTC plus `offset`, so windows of
    a day begin at midnight UTC, and with `offset=timedelta(hours=-2)` two hours before. Raises `InvalidRequest`."""
    return hopping(size, size, offset=offset)


@checked
def hopping(size: timedelta, every: timedelta, *, offset: timedelta = timedelta()) -> FixedWindows:
    """Windows of `size` that begin `every` so often: a row is in each that covers its time, `size / every` of them.
    Raises `InvalidRequest` where `every` is over `size` (rows between two windows would be in none), and where a row
    would be in more than 1000."""
    windows = FixedWindows(_ms("size", size), _ms("every", every), _whole_ms("offset", offset))
    if windows.every > windows.size:
        raise InvalidRequest(f"a window every {every} of {size} leaves rows between them out; every is at most size")
    per_row = windows.size // windows.every
    if per_row > WINDOWS_PER_ROW_MAX:
        raise InvalidRequest(f"each row would be in {per_row} windows, over {WINDOWS_PER_ROW_MAX}")
    return windows


@checked
def session(gap: timedelta) -> SessionWindows:
    """A window per key and burst of rows: it grows with each row of the key that comes less than `gap` before its first
    or behind its last row, and ends `gap` behind its last one. A row between two joins them. Raises
    `InvalidRequest`."""
    return SessionWindows(_ms("gap", gap))


def milliseconds(name: str, duration: timedelta) -> int:
    """`duration`, the argument `name`, in ms. Raises `InvalidRequest` unless it is 0 or more, in whole ms."""
    ms = _whole_ms(name, duration)
    if ms < 0:
        raise InvalidRequest(f"{name} is {duration}, and must not be negative")
    return ms


def _ms(name: str, duration: timedelta) -> int:
    ms = milliseconds(name, duration)
    if ms == 0:
        raise InvalidRequest(f"{name} is {duration}, and must be over 0")
    return ms


def _whole_ms(name: str, duration: timedelta) -> int:
    if not isinstance(duration, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers are not checked
        raise InvalidRequest(f"{name} is {duration!r}, and must be a datetime.timedelta")
    ms, rest = divmod(duration, timedelta(milliseconds=1))
    if rest:
        raise InvalidRequest(f"{name} is {duration}, and must be whole milliseconds")
    return ms
