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

    async def keep(self, url: str) -> Wal:
        """Open the log at `url`, which was migrated, so that other processes find that it was."""
        ...

    def owned_by_one(self, url: str) -> bool:
        """Whether one process of one machine owns the log at `url`, so that no other writes to it but through that."""
        ...

    def written_by_several(self, url: str) -> bool:
        """Whether several processes write to the log at `url`, and none of them owns it."""
        ...


class SettingsOpener:
    """Opens logs with the settings of this process, which have the credentials."""

    def __init__(self, settings: Settings, metrics: Metrics | None, *, owns: bool) -> None:
        """`owns`: whether the node owns the log that it works on, where one process does."""
        self._settings, self._metrics, self._owns = settings, metrics, owns

    async def open(self, url: str) -> Wal:
        """`LogOpener.open`."""
        return await open_wal(url, own=self._owns, **wal_options(self._settings, url, self._metrics))

    async def open_alone(self, url: str) -> Wal:
        """`LogOpener.open_alone`."""
        backend = find_backend(url)
        options: dict[str, Any] = {"serve": False} if backend.capabilities().one_node else {}
        return await backend.open(url, own=True, **{**wal_options(self._settings, url), **options})

    async def keep(self, url: str) -> Wal:
        """`LogOpener.keep`."""
        return await find_backend(url).open(url, own=True, **wal_options(self._settings, url))

    def owned_by_one(self, url: str) -> bool:
        """`LogOpener.owned_by_one`."""
        capabilities = find_backend(url).capabilities()
        return capabilities.one_node and capabilities.one_machine

    def written_by_several(self, url: str) -> bool:
        """`LogOpener.written_by_several`."""
        return not find_backend(url).capabilities().one_node


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

    def use(self, url: str, wal: Wal) -> None:
        """Go on with the log at `url`, which is open; the one before is closed."""
        self.url, self.wal = url, wal

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
            self._kept.append(await self.opener.keep(url))
        except TidewalError as error:  # the node goes on all the same
            _log.warning("%s is not open any more, and processes that use it wait for it: %s", shown_url(url), error)

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*self._keeping)
        for wal in (self.wal, *self._kept):
            await wal.close()
