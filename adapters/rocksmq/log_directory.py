"""The directory of a RocksMQ, as tools are given it: a URL or a path."""

from __future__ import annotations

import os

from ...runtime.errors import ConfigError
from ...runtime.log.redaction import shown_url, split_url
from .address import Address


def named_directory(where: str) -> str:
    """The directory that a URL or a path names, whatever is there. Raises `ConfigError` for another URL."""
    scheme = split_url(where).scheme
    path = Address.parse(where).directory if scheme == "rocksmq" else where
    if scheme not in ("", "rocksmq") or not path:
        raise ConfigError(f"{shown_url(where)}: only an embedded log has a directory", key="wal")
    return os.path.abspath(path)


def local_directory(where: str) -> str:
    """The same. Raises `ConfigError` where there is no log."""
    directory = named_directory(where)
    if not os.path.isfile(os.path.join(directory, "FORMAT")):
        below = os.path.join(directory, "log")
        hint = f"; there is one in {below}" if os.path.isfile(os.path.join(below, "FORMAT")) else ""
        raise ConfigError(f"there is no log in {directory}{hint}: check the URL, or run a node first", key="wal")
    return directory
