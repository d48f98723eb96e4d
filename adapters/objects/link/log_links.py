"""The links of one open log: to the owner, or from the processes that write through this one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ....runtime.errors import InvalidRequest, TidewalError, Unavailable
from ....runtime.log.wal import Append, OnAppended
from ....runtime.waiting import ended
from ..block import Block
from ..committer import Committer
from ..control import Control
from ..log_tail import LogTail
from ..open_log import OpenLog
from ..ownership import Ownership
from .access import LinkAccess
from .link_server import LinkServer
from .linked_groups import LinkedGroupService
from .log_link import LogLink
from .owner_route import RETRY_S, OwnerRoute


class SubmitHere(Protocol):
    """Queues entries and control entries that this process writes as the owner, or not at all."""

    def __call__(self, entries: Sequence[Append], controls: Sequence[Control], done: OnAppended) -> None: ...


@dataclass(frozen=True, slots=True)
class LinkUser:
    """What the open log does for its links: `answer_ephemeral` answers as the owner what is asked about ephemeral
    channels; `groups` are those of the owner, None in another process. `changed` is called where a link was made or is
    gone."""

    submit_here: SubmitHere
    answer_ephemeral: Callable[[Sequence[Any]], Awaitable[object]]
    groups: Callable[[], LinkedGroupService | None]
    changed: Callable[[], None]


class LogLinks:
    """Both ends of links, for one open log: what it asks of the owner, and what it answers as the owner."""

    def __init__(
        self,
        log: OpenLog,
        tail: LogTail,
        committer: Committer,
        ownership: Ownership,
        access: LinkAccess | None,
        user: LinkUser,
        *,
        may_own: bool,
    ) -> None:
        """Without `access` this process is linked to none."""
        self._log, self._tail, self._user = log, tail, user
        self._committer, self._ownership = committer, ownership
        self._server = None if access is None else LinkServer(access, self)
        self.route: OwnerRoute = OwnerRoute(log, tail, ownership, access, self, may_own=may_own)
        self._reading: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._unread = False

    # ---- as the owner ------------------------------------------------------------------------------------------------

    @property
    def owns(self) -> bool:
        """`LinkedOwner.owns`."""
        return self._committer.owns

    async def listen(self) -> str:
        """Take links from now on; the address for the claim, "" where there is none."""
        return "" if self._server is None else await self._server.listen(self._log.objects.writer.hex())

    def push(self, block: Block) -> None:
        """Send an acknowledged block to all that follow."""
        if self._server is not None:
            self._server.push(block)

    def dismiss(self) -> None:
        """Let others look for the owner anew: this process is it no more."""
        if self._server is not None:
            self._server.dismiss()

    def retire(self) -> None:
        """Let others look for another owner: this process writes what it has taken, and then is it no more."""
        if self._server is not None:
            self._server.retire()

    def submit_here(self, entries: Sequence[Append], controls: Sequence[Control], done: OnAppended) -> None:
        """`LinkedOwner.submit_here`."""
        self._user.submit_here(entries, controls, done)

    async def answer(self, client: bytes, method: str, arguments: Sequence[Any]) -> object:
        """`LinkedOwner.answer`."""
        match [method, *arguments]:
            case ["confirm"]:
                await self._ownership.confirm()
                if not self.owns:
                    raise Unavailable("this process does not own the log any more")
                return list(self._log.state.place)
            case [str(group_method), *_] if group_method == "beat" or group_method.startswith("group."):
                groups = self._user.groups()
                if groups is None:
                    raise Unavailable("this process does not own the log any more")
                return await groups.ask(client, method, arguments)
            case ["ephemeral", *question]:
                return await self._user.answer_ephemeral(question)
            case _:
                raise InvalidRequest(f"{method[:100]!r} with these arguments is no question of links")

    # ---- to the owner ------------------------------------------------------------------------------------------------

    def on_block(self, epoch: int, number: int, data: bytes) -> None:
        """`LinkObserver.on_block`."""
        if not self._tail.offer(self._log.objects.decode(epoch, number, data)):
            self.on_unsent_block()

    def on_unsent_block(self) -> None:
        """`LinkObserver.on_unsent_block`."""
        self._unread = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read(), name="read what was not sent")

    async def _read(self) -> None:
        while self._unread:
            self._unread = False
            try:
                await self._tail.catch_up()
            except Unavailable:
                self._unread = True
                await asyncio.sleep(RETRY_S)
            except TidewalError as error:
                self._log.news.fail(error)

    def on_room(self) -> None:
        """`LinkObserver.on_room`."""
        self._committer.wake()

    def on_unusable(self, link: LogLink) -> None:
        """`LinkObserver.on_unusable`."""
        self._committer.wake()
        self._user.changed()

    def on_linked(self) -> None:
        """`RouteObserver.on_linked`."""
        self._committer.wake()
        self._user.changed()

    def on_unreachable(self, why: Unavailable) -> None:
        """`RouteObserver.on_unreachable`."""
        self._committer.obstacle = str(why)

    def on_queued(self) -> None:
        """Something is queued that this process cannot write itself: send it to the owner, or come to own the log."""
        link = self.route.link
        if link is not None:
            self._committer.send_over(link)
        elif self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._reach_for_queue(), name="reach the owner of the log")

    async def _reach_for_queue(self) -> None:
        while self._committer.waiting and not self.owns and self.route.link is None:
            try:
                await self.route.reach()
            except TidewalError as error:
                if not (isinstance(error, Unavailable) and self.route.hopeful):
                    self._committer.refuse(error)
                else:  # each submit waits for as long as it may
                    await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """End all links."""
        if self._server is not None:
            await self._server.close()
        await self.route.close()
        await ended(*(task for task in (self._reading, self._sending) if task is not None))
