"""The logs that the process of a node has open: the one that it works on, and those that it was moved from."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

from ..runtime.config.loading import wal_options
from ..runtime.config.settings import Settings
from ..runtime.errors import TidewalError
from ..runtime.log.opening import find_backend, open_wal
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.metrics.metrics import Metrics

IN_ANY_STATE = {"in_use_only": False}  # it may get another owner also while it is migrated

_log = logging.getLogger("tidewal.migration")


class LogOpener(Protocol):
    """How a node opens logs."""

    async def open(self, url: str) -> Wal:
        """Open the log at `url` as nodes do. Raises what `open_wal` does."""
        ...

    async def open_alone(self, url: str) -> Wal:
        """Open the log at `url`, whatever its migrations' state, and make it where it is not there. Where one process
        owns it, that is this one, and no other uses it meanwhile. Raises what opening it raises."""
        ...

    async def look_at(self, url: str) -> Wal:
        """Open the log at `url`, whatever its migrations' state, to see what becomes of it, and for other processes to
        see it. Where one process owns it, that is this one while no other is. Raises what opening it raises, and
        `ConfigError` where there is none."""
        ...

    def owned_by_one(self, url: str) -> bool:
        """Whether one process of one machine owns the log at `url`, so that no other writes to it but through that."""
        ...

    def moved_by_command(self, url: str) -> bool:
        """Whether a command may migrate the log at `url` while processes use it, which look for that, and go along."""
        ...


class SettingsOpener:
    """Opens logs with the settings of this process, which have the credentials."""

    def __init__(self, settings: Settings, metrics: Metrics | None, *, owns: bool, is_node: bool = True) -> None:
        """`owns`: whether the node owns the log that it works on, where one process does. A process that is no node
        never owns one, also not to look at it."""
        self._settings, self._metrics, self._owns, self._is_node = settings, metrics, owns, is_node

    async def open(self, url: str) -> Wal:
        """`LogOpener.open`."""
        options = wal_options(self._settings, url, self._metrics)
        if self._is_node and self._is_owned_in_turn(url):  # it looks at the migration's state itself
            options |= IN_ANY_STATE
        return await open_wal(url, own=self._owns, **options)

    async def open_alone(self, url: str) -> Wal:
        """`LogOpener.open_alone`."""
        backend = find_backend(url)
        options: dict[str, Any] = {"serve": False} if backend.capabilities().one_node else {}
        return await backend.open(url, own=True, **{**wal_options(self._settings, url), **options})

    async def look_at(self, url: str) -> Wal:
        """`LogOpener.look_at`."""
        backend, options = find_backend(url), wal_options(self._settings, url)
        if not backend.capabilities().one_node:
            return await self.open_alone(url)
        if not backend.capabilities().one_machine:  # there it is read without its owner
            return await backend.open(url, read_only=True, **options)
        await backend.abandoned(url)  # it raises `ConfigError`: a directory would be made
        own = None if self._is_node else False
        return await backend.open(url, own=own, **options, **IN_ANY_STATE)

    def owned_by_one(self, url: str) -> bool:
        """`LogOpener.owned_by_one`."""
        capabilities = find_backend(url).capabilities()
        return capabilities.one_node and capabilities.one_machine

    def moved_by_command(self, url: str) -> bool:
        """`LogOpener.moved_by_command`."""
        return self._is_owned_in_turn(url) or not find_backend(url).capabilities().one_node

    def _is_owned_in_turn(self, url: str) -> bool:
        """Whether processes use the log at `url` through the one that owns it at the time."""
        backend = find_backend(url)
        section = self._settings.of_backend(backend.name)
        is_linked = section is not None and section.linked and bool(self._settings.cluster.secret.get_secret_value())
        return backend.capabilities().one_node and (backend.capabilities().one_machine or is_linked)


class OpenLogs:
    """The log at `url` that a node works on, `wal`, and those that it was moved from, which say so to others."""

    def __init__(self, opener: LogOpener, url: str, wal: Wal) -> None:
        self.opener: LogOpener = opener
        self.url: str = url
        self.wal: Wal = wal
        self._kept: list[Wal] = []
        self._keeping: list[asyncio.Task[None]] = []

    async def alone(self) -> Wal:
        """Close the log, and open it so that no other process uses it."""
        await self.wal.close()
        self.wal = await self.opener.open_alone(self.url)
        return self.wal

    async def looked_at(self) -> Wal:
        """Close the log, and open it beside other processes, to see what becomes of it."""
        await self.wal.close()
        self.wal = await self.opener.look_at(self.url)
        return self.wal

    async def go_on_with(self, url: str, wal: Wal) -> None:
        """Go on with the log at `url`, which is open. The one before, which was looked at, is kept where one process
        owns it, for those that look there; else it is closed."""
        before, left = self.wal, self.url
        self.url, self.wal = url, wal
        if url != left and self.opener.owned_by_one(left):
            self._kept.append(before)
        else:
            await before.close()

    async def in_use_again(self) -> Wal:
        """Close the log, and open it as nodes do."""
        await self.wal.close()
        self.wal = await self.opener.open(self.url)
        return self.wal

    async def move_to(self, url: str) -> Wal:
        """Go on with the log at `url`. The one before is kept, from soon after, for those that look there."""
        before, left = self.wal, self.url
        self.wal, self.url = await self.opener.open(url), url
        await before.close()
        self._keeping.append(asyncio.create_task(self._keep(left), name=f"open {shown_url(left)} again"))
        return self.wal

    async def _keep(self, url: str) -> None:
        try:
            self._kept.append(await self.opener.look_at(url))
        except TidewalError as error:  # the node goes on all the same
            _log.warning("%s is not open any more, and processes that use it wait for it: %s", shown_url(url), error)

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*self._keeping)
        for wal in (self.wal, *self._kept):
            await wal.close()
