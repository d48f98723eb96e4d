"""What stays in a process from task to task, since Spark uses its workers again: logs stay open, because connecting,
above all to a broker, costs more than reading the few rows of a micro-batch; and modules are kept from the collector.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from .log import Log, open_log

KEPT_MAX: Final = 4
IDLE_S: Final = 10.0

_kept: list[tuple[str, Log, float]] = []  # those nobody uses, the longest unused first, with the time since when
_lock = threading.Lock()
_sweeping = False  # a timer is running
_spared = False


@contextmanager
def kept_log(url: str) -> Generator[Log]:
    """The log at `url` for one task: one that an earlier task has left, if its connection is there still, or a new one.

    At most `KEPT_MAX` are kept, each for `IDLE_S` (clients of a broker that has ended would go on looking for it), and
    none that was in use when something went wrong. Raises `ConfigError` for a URL that the bridge cannot read.
    """
    log = _take(url) or open_log(url)
    try:
        yield log
    except BaseException:
        log.close()
        raise
    with _lock:
        _kept.append((url, log, time.monotonic()))
    close_kept(KEPT_MAX)
    _sweep_later()
    _spare_the_collector()


def _spare_the_collector() -> None:
    """In a worker of Spark, once: nothing that is loaded by now is looked at for garbage any more. Spark has workers
    collect after each task, which took 50 to 70 ms over all modules, and the next micro-batch waits for it."""
    global _spared
    if not _spared and "pyspark.worker" in sys.modules:
        _spared = True
        gc.collect()
        gc.freeze()


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
    for _, log, _ in over:
        log.close()


def _sweep_later() -> None:
    global _sweeping
    with _lock:
        if _sweeping or not _kept:
            return
        _sweeping = True
    timer = threading.Timer(IDLE_S, _sweep)
    timer.daemon = True
    timer.start()


def _sweep() -> None:
    global _sweeping
    with _lock:
        _sweeping = False
        used_after = time.monotonic() - IDLE_S
        used = sum(since > used_after for _, _, since in _kept)
    close_kept(used)
    _sweep_later()


def _forget() -> None:
    """In a forked process: the connections are the parent's, and its lock may have been held."""
    global _lock, _sweeping
    _lock, _sweeping = threading.Lock(), False
    _kept.clear()


os.register_at_fork(after_in_child=_forget)
