"""SQLite as a backend: what is known of it before a log is opened."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tidewal import errors
from tidewal.adapters import Capabilities, Check, Inspection, Metric, Wal, WalBackend, counter

if TYPE_CHECKING:
    from .settings import SqliteSettings


UPSERT = (3, 24)  # the version of SQLite that brought `ON CONFLICT`


class SqliteBackend(WalBackend):
    """A log in one file, for the processes of a machine."""

    name = "sqlite"
    schemes = ("sqlite",)
    url_form = "sqlite:///absolute/path"

    async def open(self, url: str, *, own: bool | None = None, read_only: bool = False, **options: Any) -> Wal:
        """Open `sqlite:///absolute/path` or `sqlite://./relative/path`; the options are those of `SqliteWal.open`."""
        from .wal import SqliteWal

        return await SqliteWal.open(path_of(url), read_only=read_only, **options)

    def settings(self) -> type[SqliteSettings]:
        from .settings import SqliteSettings

        return SqliteSettings

    def metrics(self) -> list[Metric]:
        return [counter("sqlite_commit_total", "Commits of the log: appends that wait together share one.")]

    def capabilities(self) -> Capabilities:
        """Ephemeral channels have no bound: only `truncate` removes entries."""
        return Capabilities(
            atomic_batches=True,
            seek_by_time=True,
            truncate=True,
            multi_process_write=True,
            one_node=False,
            ephemeral_bounds=False,
        )

    def checks(self, path: Path) -> list[Check]:
        recent = sqlite3.sqlite_version_info >= UPSERT
        advice = "" if recent else "install a Python whose SQLite is 3.24 or newer"
        return [Check("SQLite", "ok" if recent else "missing", sqlite3.sqlite_version, advice)]

    def inspect(self, url: str) -> Inspection:
        """The size of the file."""
        size = os.path.getsize(path_of(url))
        return Inspection("file", {"bytes": size}, [f"{size:,} bytes"])

    def check_url(self, url: str) -> None:
        path_of(url)

    def absolute_url(self, url: str) -> str:
        return f"sqlite://{path_of(url)}"


def path_of(url: str) -> str:
    """The absolute path of the file that a URL names. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise errors.ConfigError(f"{url!r}: write sqlite:///absolute/path or sqlite://./relative/path", key="wal")
    return os.path.abspath(parts.netloc + unquote(parts.path))


BACKEND = SqliteBackend()
