"""Logging as it was: a command configures that of its process, which is the one of all tests here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_restored() -> Iterator[None]:
    """Restores what `tidewal.cli.logging_setup.configure` changes."""
    loggers = [logging.getLogger(), logging.getLogger("tidewal")]
    handlers, levels = list(loggers[0].handlers), [each.level for each in loggers]
    try:
        yield
    finally:
        loggers[0].handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
