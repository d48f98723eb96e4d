"""Find the backend of a URL among the installed adapters, and open logs with it."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..arguments import checked
from ..errors import ConfigError, InvalidRequest
from ..extras import install_command
from .backend import WalBackend
from .migration_state import check_in_use
from .read_only import ReadOnlyWal
from .redaction import shown_url, split_url
from .wal import Wal

ENTRY_POINTS = "tidewal.wal"
OWN_OPTIONS = ("read_only", "settings", "metrics")  # of all logs, beside `own`
SILENT_S = 1.0  # of brokers that are asked to answer, until the log says that they are waited for

_log = logging.getLogger("tidewal.opening")


@checked
async def open_wal(url: str | Path, *, read_only: bool = False, **options: Any) -> Wal:
    """Open the log at `url` ("NAME://…") with the backend of that name; `options` are the adapter's. A path, or a text
    with a `/` that is no URL, is the directory of an embedded log, or of a node, which has it in `log`. Raises
    `ConfigError` for a scheme that no installed adapter has and for an adapter whose packages are missing,
    `InvalidRequest` for an option that there is not, `Moved` for a log that was migrated to another one, `Unavailable`
    while that has not ended, and what the adapter raises.

    `read_only` opens a log that is there and changes nothing: no directory, topic or namespace is made, no ownership is
    taken over, now or later, and every call that writes raises `ReadOnly`. Where there is no log, or no process that
    owns its directory, this raises `Unavailable`."""
    url = _url_of(url)
    entry = _entry_point(url)
    backend = _opening(_load(entry), url)
    for name in options:
        near = get_close_matches(name, OWN_OPTIONS, n=1, cutoff=0.8)
        if near and name not in OWN_OPTIONS:  # an adapter may pass over what it has not
            raise InvalidRequest(f"open_wal has no option {name!r}; did you mean {near[0]!r}?", argument=name)
    with _missing_package(entry), _unknown_option(entry.name, options), _waiting_told(backend, url):
        if read_only:
            return ReadOnlyWal(await backend.open(url, read_only=True, **options))
        wal = await backend.open(url, **options)
    try:
        await check_in_use(wal, shown_url(url))
    except BaseException:
        await wal.close()
        raise
    return wal


def _url_of(where: str | Path) -> str:
    """The URL of a path. A word without a `/` is one where such a directory is there: else it is a misspelt URL."""
    is_path = isinstance(where, Path) or (bool(where) and not split_url(where).scheme)
    if not is_path or (isinstance(where, str) and "/" not in where and not Path(where).is_dir()):
        return str(where)
    from ..config.loading import url_of  # late: who has a URL does without settings

    return url_of(str(where))


@contextmanager
def _unknown_option(scheme: str, options: Mapping[str, object]) -> Generator[None]:
    """Name an option that the adapter does not have."""
    try:
        yield
    except TypeError as error:
        unknown = next((name for name in options if f"unexpected keyword argument '{name}'" in str(error)), None)
        if unknown is None:
            raise
        raise InvalidRequest(f"{scheme}:// has no option {unknown!r} of open_wal", argument=unknown) from error


@checked
def find_backend(url: str) -> WalBackend:
    """The backend that opens `url`. Raises `ConfigError` as `open_wal` does."""
    return _opening(_load(_entry_point(url)), url)


def backend_name(url: str) -> str:
    """The name of the backend that a URL means: its scheme, without what follows a `+`, or that of the backend that has
    a scheme of another name. "" for what is no URL."""
    scheme = split_url(url).scheme
    name = scheme.partition("+")[0]
    if _named(name):
        return name
    return next((backend.name for backend in installed_backends() if scheme in backend.schemes), name)


def url_forms() -> str:
    """How the URLs of the installed backends are written, for errors and help."""
    return ", ".join(backend.url_form for backend in installed_backends() if backend.schemes and backend.shared)


def installed_backends() -> list[WalBackend]:
    """The backends of all installed adapters, by name. One that cannot be loaded is left out: `open_wal` says why."""
    entries = {entry.name: entry for entry in reversed(_entry_points(tuple(sys.path)))}
    found: list[WalBackend] = []
    for _, entry in sorted(entries.items()):
        with suppress(ConfigError):
            found.append(_load(entry))
    return found


@cache
def _entry_points(_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Those of the adapters on the path. They are kept: to find them Python reads a file of each installed package,
    which is a seventh of the time of a short command."""
    return tuple(entry_points(group=ENTRY_POINTS))


def _named(name: str) -> EntryPoint | None:
    return next((entry for entry in _entry_points(tuple(sys.path)) if entry.name == name), None)


def _entry_point(url: str) -> EntryPoint:
    if (found := _named(backend_name(url))) is None:
        _entry_points.cache_clear()  # it may have been installed since
        found = _named(backend_name(url))
    if found is None:
        raise _unknown(url)
    return found


def _load(entry: EntryPoint) -> WalBackend:
    with _missing_package(entry):
        backend: object = entry.load()
    if not isinstance(backend, WalBackend):
        raise ConfigError(f"the entry point {entry.name} = {entry.value} is no WalBackend: install it again", key="wal")
    return backend


def _opening(backend: WalBackend, url: str) -> WalBackend:
    """`backend`, if it opens `url`."""
    if split_url(url).scheme not in backend.schemes:
        raise _unknown(url, announced=not backend.schemes)
    return backend


def _unknown(url: str, *, announced: bool = False) -> ConfigError:
    forms = ", ".join(backend.url_form for backend in installed_backends() if backend.schemes)
    missing = f"{split_url(url).scheme}:// is not there yet" if announced else f"no adapter for {shown_url(url)!r}"
    return ConfigError(f"{missing}; known are {forms}: set wal to one of these, or mq.type", key="wal")


@contextmanager
def _waiting_told(backend: WalBackend, url: str) -> Generator[None]:
    """Say in the log where brokers do not answer at once: they are given several seconds, in which a program would seem
    to hang."""
    loop = asyncio.get_running_loop()
    where = split_url(shown_url(url)).netloc.rpartition("@")[2]  # without credentials
    timer = loop.call_later(SILENT_S, _log.warning, "waiting for %s to answer", where) if backend.needs_host else None
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


@contextmanager
def _missing_package(entry: EntryPoint) -> Generator[None]:
    """Say what to install where an import fails."""
    try:
        yield
    except ImportError as error:
        distribution = entry.dist.name if entry.dist is not None else "tidewal"
        raise ConfigError(
            f"{entry.name}:// needs the package {error.name or error}, which is not installed: "
            + install_command(entry.name, distribution),
            key="wal",
        ) from error
