"""The log as Spark's processes read it: read only, blocking, chosen by option `wal`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import cast

from ..runtime.errors import ConfigError
from ..runtime.log.blocking_reader import BlockingReader
from ..runtime.log.opening import find_backend, url_forms
from ..runtime.log.redaction import shown_url, split_url
from ..runtime.log.wal import Entry


def first_entries(batches: Iterator[list[Entry]]) -> list[Entry]:
    """The first entries of the read `batches`, which is closed; none where there are none."""
    try:
        return next(batches, list[Entry]())
    finally:
        cast("Generator[list[Entry]]", batches).close()


def log_url(where: str) -> str:
    """The URL of the log that option `wal` names by its URL, or by a path as commands and `tidewal.connect` take it."""
    if split_url(where).scheme:
        return where
    from ..runtime.config.loading import url_of  # late: tasks have URLs, and do without settings

    return url_of(where)


def open_log(url: str) -> BlockingReader:
    """The log at `url`, which connects at its first call.

    Raises `ConfigError` for a URL that the bridge cannot read.
    """
    try:
        backend = find_backend(url)
        if backend.shared:
            return backend.reader(url)
    except ConfigError as error:
        raise _unreadable(url) from error
    raise _unreadable(url)


def _unreadable(url: str) -> ConfigError:
    return ConfigError(f"option wal is {shown_url(url)!r}; the Spark bridge reads {url_forms()}", key="wal")
