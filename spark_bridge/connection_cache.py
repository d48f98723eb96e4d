"""What a process keeps from task to task, since Spark uses its workers again: logs stay open, because connecting, above
all to a broker, costs more than reading the few rows of a micro-batch; and loaded modules are exempt from the garbage
collector.
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

from ..runtime.log.blocking_reader import BlockingReader
from .log import open_log

IDLE_MAX: Final = 4
IDLE_S: Final = 10.0

_idle: list[tuple[str, BlockingReader, float]] = []  # logs not in use, the longest unused first, and since when
_lock = threading.Lock()
_sweeping = False  # a timer is running
_frozen = False


@contextmanager
def cached_log(url: str) -> Generator[BlockingReader]:
    """The log at `url` for one task: one that an earlier task has left, if it is still connected, or a new one.

    At most `IDLE_MAX` idle logs are kept, each for `IDLE_S` (the client of a broker that has ended would search it for
    ever), and none whose task has failed. Raises `ConfigError` for a URL that the bridge cannot read.
    """
    log = _acquire(url) or open_log(url)
    try:
        yield log
    except BaseException:
        log.close()
        raise
    with _lock:
        _idle.append((url, log, time.monotonic()))
    close_idle(IDLE_MAX)
    _sweep_later()
    _freeze_loaded_modules()


def _freeze_loaded_modules() -> None:
    """In a worker of Spark, once: exempt all that is loaded by now from garbage collection. Spark has workers collect
    after each task, which took 50 to 70 ms over all modules, and the next micro-batch waits for it."""
    global _frozen
    if not _frozen and "pyspark.worker" in sys.modules:
        _frozen = True
        gc.collect()
        gc.freeze()


def _acquire(url: str) -> BlockingReader | None:
    with _lock:
        index = next((index for index in reversed(range(len(_idle))) if _idle[index][0] == url), None)
        log = None if index is None else _idle.pop(index)[1]
    if log is None or log.alive():
        return log
    log.close()
    return None


@atexit.register
def close_idle(but: int = 0) -> None:
    """Close the idle logs, except for the `but` last used."""
    with _lock:
        over = _idle[: max(len(_idle) - but, 0)]
        del _idle[: len(over)]
    for _, log, _ in over:
        log.close()


def _sweep_later() -> None:
    global _sweeping
    with _lock:
        if _sweeping or not _idle:
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
        used = sum(since > used_after for _, _, since in _idle)
    close_idle(used)
    _sweep_later()


def _forget() -> None:
    """In a forked process: the connections are the parent's, and its lock may be held."""
    global _lock, _sweeping
    _lock, _sweeping = threading.Lock(), False
    _idle.clear()


os.register_at_fork(after_in_child=_forget)
