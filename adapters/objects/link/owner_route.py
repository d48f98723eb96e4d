"""How a process that does not own the log gets to the one that does, or comes to own it itself."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Protocol

from ....runtime.direct.address import HostPort
from ....runtime.errors import Closed, Overloaded, TidewalError, Unavailable
from ....runtime.waiting import ended
from ..log_objects import Claimant
from ..log_tail import LogTail
from ..open_log import OpenLog
from ..ownership import Ownership, outcome
from .access import LinkAccess
from .log_link import LinkObserver, LogLink

RETRY_S = 0.2  # between two attempts to find an owner, of a process that must not own the log

_log = logging.getLogger(__name__)


class RouteObserver(LinkObserver, Protocol):
    """What a route tells the log that uses it, on its loop."""

    def on_linked(self) -> None:
        """There is a link to the owner."""
        ...

    def on_unreachable(self, why: Unavailable) -> None:
        """There is none yet; the search goes on."""
        ...


class OwnerRoute:
    """The link of one process to the owner of the log, while there is one. A process is linked where the newest claim
    names an address at which that owner answers. Where none answers it owns the log itself, once that was silent for a
    lease; an owner that cannot be reached and writes keeps it.

    All belongs to one loop.
    """

    def __init__(
        self,
        log: OpenLog,
        tail: LogTail,
        ownership: Ownership,
        access: LinkAccess | None,
        observer: RouteObserver,
        *,
        may_own: bool,
    ) -> None:
        """Without `access` there are no links."""
        self._objects, self._state, self._tail, self._ownership = log.objects, log.state, tail, ownership
        self._access, self._observer, self._may_own = access, observer, may_own
        # For so long an owner is looked for, and longer where this process may own the log and waits for a lease.
        self.patience_s: float = log.settings.delivery_timeout_s
        self._lease_s = log.settings.lease_s  # in which an owner that reaches the store puts a block
        self._link: LogLink | None = None
        self._connecting = asyncio.Lock()
        self._hopeful = False
        self._reaching: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def hopeful(self) -> bool:
        """Whether an owner that takes links may answer soon, where none does now."""
        return self._hopeful

    @property
    def link(self) -> LogLink | None:
        """The link to the owner, None where there is none."""
        return self._link if self._link is not None and self._link.usable else None

    async def reach(self) -> None:
        """Own the log, or be linked to its owner. One search answers all that wait. Raises `Unavailable`."""
        if self._ownership.owns or self.link is not None:
            return
        if self._reaching is None or self._reaching.done():
            self._reaching = asyncio.create_task(self._reach(), name="reach the owner of the log")
        await outcome(self._reaching)

    async def look(self) -> None:
        """Be linked to the owner, where one answers now."""
        if self._access is not None and not self._ownership.owns and not self._connecting.locked():
            with suppress(Unavailable):
                await self._connect()

    async def catch_up(self) -> None:
        """Let the state be that of the log at some moment after the call, by the owner's word or by the store. Raises
        `Unavailable` where neither answers."""
        link = self.link
        if link is not None:
            with suppress(Unavailable, Overloaded):
                place = await link.ask("confirm")
                if self._state.place >= tuple(place):
                    return
        await self._tail.catch_up()

    async def _reach(self) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self.patience_s
        while (failure := await self._connect()) is not None:
            self._observer.on_unreachable(failure)
            try:
                if self._may_own or self._access is None:
                    await self._ownership.acquire()
                    return
                await asyncio.sleep(RETRY_S)
            except Unavailable as error:
                failure = Unavailable(f"{error}; {failure}")
            if not self.hopeful or loop.time() >= give_up_at:
                raise failure

    async def _connect(self) -> Unavailable | None:
        """Be linked to the owner. Returns why that cannot be now."""
        if self._access is None:
            return Unavailable("to write through its owner this process needs cluster.secret")
        async with self._connecting:
            if self.link is not None:
                return None
            await self._tail.catch_up()
            claimant, following = await self._ownership.newest_claim()
            self._hopeful = claimant is None or bool(claimant.address)
            if claimant is None or claimant.writer == self._objects.writer:
                return Unavailable("no other process owns the log")
            if not claimant.address:
                return Unavailable("its owner takes no links: set objects.advertise there")
            try:
                self._link = await self._linked(claimant, self._access)
            except (OSError, ValueError, TidewalError) as error:  # a TimeoutError is an OSError
                reason = str(error) or type(error).__name__
                return Unavailable(f"its owner cannot be reached at {claimant.address}: {reason}")
            if self._watching is not None:
                self._watching.cancel()
            self._watching = asyncio.create_task(self._watch(self._link, following), name="watch the owner of the log")
        _log.info("this process writes through the owner of the log at %s", claimant.address)
        self._observer.on_linked()
        return None

    async def _linked(self, claimant: Claimant, access: LinkAccess) -> LogLink:
        """A new link, over which blocks come already; all before them were read. Raises `OSError` and `Unavailable`."""
        link = LogLink(self._objects.writer.hex(), access.key, claimant.writer.hex(), self._observer)
        await access.network.connect(HostPort.parse(claimant.address), lambda: link)
        try:
            await link.until_established()
            await link.ask("follow")
            await self._tail.catch_up()
        except BaseException:
            link.end(Closed("it is not waited for any more"))
            raise
        return link

    async def _watch(self, link: LogLink, following: int) -> None:
        """End the link once the log has got to epoch `following`, behind the one that the other end owns. That end may
        not reach the store, and not know it; then nothing comes over the link for a lease, and this process looks for
        itself. Where nothing moves in the store either, and it waits to write, it owns the log."""
        while link.usable and self._state.epoch < following:
            before = self._state.place
            await asyncio.sleep(self._lease_s)
            if self._state.place == before:
                with suppress(TidewalError):
                    if not await self._tail.catch_up() and self._may_own and link.awaits_answer:
                        await self._ownership.acquire()
        link.end(Unavailable("the log has got another owner"))

    async def close(self) -> None:
        """End the link: what was submitted over it and is not answered has an unknown outcome."""
        await ended(*(task for task in (self._reaching, self._watching) if task is not None))
        if self._link is not None:
            self._link.end(Closed("this process has closed the log"))
