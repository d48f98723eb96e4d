"""Logs that a process keeps open from task to task: Spark uses its workers again, and connecting, above all to a
broker, costs more than reading the few rows of a micro-batch.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from .log import Log, open_log

KEPT_MAX: Final = 4

_kept: list[tuple[str, Log]] = []  # those nobody uses, the longest unused first
_lock = threading.Lock()


@contextmanager
def kept_log(url: str) -> Generator[Log]:
    """The log at `url` for one task: one that an earlier task has left, if its connection is there still, or a new one.

    At most `KEPT_MAX` are kept, until the process ends, and none that was in use when something went wrong. Raises
    `ConfigError` for a URL that the bridge cannot read.
    """
    log = _take(url) or open_log(url)
    try:
        yield log
    except BaseException:
        log.close()
        raise
    with _lock:
        _kept.append((url, log))
    close_kept(KEPT_MAX)


def _take(url: str) -> Log | None:
    with _lock:
        place = next((place for place in reversed(range(len(_kept))) if _kept[place][0] == url), None)
        log = None if place is None else _kept.pop(place)[1]
    if log is None or log.alive():
        return log
    log.close()
    return None


@atexit.register
def close_kept(but: int = 0) -> None:
    """Close those that nobody uses, `but` the last ones used."""
    with _lock:
        over = _kept[: max(len(_kept) - but, 0)]
        del _kept[: len(over)]
    for _, log in over:
        log.close()


def _forget() -> None:
    """In a forked process: the connections are the parent's, and its lock may have been held."""
    global _lock
    _lock = threading.Lock()
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
