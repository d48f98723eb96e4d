"""The command that starts a node on a log, for the errors of those who found none there."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final
from urllib.parse import unquote

from .redaction import shown_url, split_url

LOG_FOLDER: Final = "log"  # of an embedded log in the directory of its node, beside the tables


def start_command(url: str) -> str:
    """The command for the log at `url`: of an embedded one in the directory of a node it names that directory, since
    with `--wal` alone the node would not find its tables."""
    parts = split_url(url)
    path = PurePath(unquote(parts.path))
    if not parts.netloc and path.name == LOG_FOLDER:
        return f"tidewal run --data {path.parent}"
    return f"tidewal run --wal {shown_url(url)}"
