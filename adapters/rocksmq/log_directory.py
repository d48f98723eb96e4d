"""The directory of a RocksMQ, as tools are given it: a URL or a path."""

from __future__ import annotations

import os

from ...runtime.errors import ConfigError, DirectoryUnwritable
from ...runtime.log.redaction import shown_url, split_url
from .address import Address


def named_directory(where: str) -> str:
    """The directory that a URL or a path names, whatever is there. Raises `ConfigError` for another URL."""
    scheme = split_url(where).scheme
    path = Address.parse(where).directory if scheme == "rocksmq" else where
    if scheme not in ("", "rocksmq") or not path:
        raise ConfigError(f"{shown_url(where)}: only an embedded log has a directory", key="wal")
    return os.path.abspath(path)


def found_directory(where: str) -> str:
    """The same; of a node's directory, that of its log in `log/`. Raises as `check_access`."""
    directory = named_directory(where)
    below = os.path.join(directory, "log")
    return below if not has_log(directory) and has_log(below) else directory


def local_directory(where: str) -> str:
    """The same. Raises `ConfigError` where there is no log."""
    directory = found_directory(where)
    if not has_log(directory):
        raise ConfigError(f"there is no log in {directory}: check the URL, or run a node first", key="wal")
    return directory


def has_log(directory: str) -> bool:
    """Whether there is a log in the directory itself. Raises as `check_access`."""
    check_access(directory)
    return os.path.isfile(os.path.join(directory, "FORMAT"))


def check_access(directory: str) -> None:
    """Raise `DirectoryUnwritable` where this user may not read the log in the directory. One that is not there is
    fine."""
    try:
        os.stat(os.path.join(directory, "FORMAT"))
        os.scandir(os.path.join(directory, "journal")).close()
    except PermissionError as error:
        raise DirectoryUnwritable(
            f"permission denied: {error.filename}: run this as the user that owns it", path=directory
        ) from error
    except OSError:
        pass
