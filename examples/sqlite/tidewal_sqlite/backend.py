"""SQLite as a backend: what is known of it before SQLite is loaded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tidewal.adapters import Capabilities, Metric, Wal, WalBackend, counter
from tidewal.runtime.errors import ConfigError

if TYPE_CHECKING:
    from .settings import SqliteSettings


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

    def check_url(self, url: str) -> None:
        path_of(url)

    def absolute_url(self, url: str) -> str:
        return f"sqlite://{path_of(url)}"


def path_of(url: str) -> str:
    """The absolute path of the file that a URL names. Raises `ConfigError`."""
    parts = urlsplit(url)
    if parts.netloc not in ("", ".", "..") or parts.path in ("", "/"):
        raise ConfigError(f"{url!r}: write sqlite:///absolute/path or sqlite://./relative/path", key="wal")
    return os.path.abspath(parts.netloc + unquote(parts.path))


BACKEND = SqliteBackend()
