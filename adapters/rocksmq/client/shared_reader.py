"""A reader that goes on over changes of the log's owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING

from ....runtime.errors import Closed
from ....runtime.log.wal import ChannelInfo, Entry, Start
from ..journal.channels import encode_id
from ..owner.reader import Reader
from ..owner.store import CAPABILITIES, RocksMQ
from ..protocol import decode_start, encode_start
from .owner import Owner, RemoteOwner

if TYPE_CHECKING:
    from ....runtime.filters.record_filter import RecordFilter
    from .shared import SharedRocksMQ

POLL_S = 20.0  # how long one request waits at the owner for more entries
CROWDED_POLL_S = 0.5  # the same while more readers than may wait at once take turns

Answer = tuple[Sequence[Entry], bytes]


class RemoteLog:
    """The log at one owner in another process, with what `check_in_use` calls of a `Wal`."""

    capabilities = CAPABILITIES

    def __init__(self, owner: RemoteOwner) -> None:
        self._owner = owner

    async def describe(self, channel: str) -> ChannelInfo:
        return await self._owner.describe(channel)

    async def read(self, channel: str, start: Start) -> AsyncGenerator[Sequence[Entry]]:
        at: Sequence[object] = encode_start(start)
        while True:
            entries, next_id = await self._owner.read(channel, at, POLL_S)
            at = ["next", next_id]
            if entries:
                yield entries


class SharedReader(AsyncIterator[Sequence[Entry]]):
    """`Wal.read` at the present owner of the log. One task at a time may await it; `aclose` may come from any."""

    def __init__(
        self,
        shared: SharedRocksMQ,
        channel: str,
        start: Start,
        siblings: set[SharedReader],
        where: RecordFilter | None = None,
    ) -> None:
        """With `where` it is `Wal.read_where`."""
        self._shared, self._channel, self._siblings, self._where = shared, channel, siblings, where
        siblings.add(self)
        self._start = encode_start(start)
        self._local: Reader | None = None  # while this process owns the log
        self._asking: asyncio.Future[Answer | None] | None = None
        self._closed = False

    async def __anext__(self) -> Sequence[Entry]:
        while not self._closed:
            if self._local is not None:
                try:
                    return await anext(self._local)
                except StopAsyncIteration:
                    self._leave(self._local)
                    continue
            self._asking = asyncio.ensure_future(self._shared.ask(self._read))
            try:
                answer = await self._asking
            except asyncio.CancelledError:
                if self._closed and not cancelling():
                    break
                raise
            except Closed:
                break
            if answer is None:
                continue
            entries, next_id = answer
            self._start = ["next", next_id]  # here, where no cancellation can come between this and the return
            if entries:
                return entries
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the iteration, also for a task that is waiting in it."""
        self._closed = True
        self._siblings.discard(self)
        if self._asking is not None:
            self._asking.cancel()
        if self._local is not None:
            await self._local.aclose()

    async def _read(self, owner: Owner) -> Answer | None:
        """The next entries of a remote owner; None when this process has become the owner."""
        if isinstance(owner, RemoteOwner):
            # The first question fixes the start without waiting: "latest" must not move from one question to the next.
            wait_s = 0.0
            if self._start[0] == "next":
                wait_s = POLL_S if len(self._siblings) <= owner.reads_at_once else CROWDED_POLL_S
            return await owner.read(self._channel, self._start, wait_s, self._where)
        assert isinstance(owner, RocksMQ)
        if owner.closed:
            raise Closed(f"the log {owner.directory} is closed")
        self._local = Reader(owner, self._channel, decode_start(self._start))
        return None

    def _leave(self, local: Reader) -> None:
        """This process owns the log no more: go on behind what was read there; at the start where nothing was."""
        self._local = None
        if local.next_id:
            self._start = ["next", encode_id(local.next_id)]


def cancelling() -> bool:
    """Whether the running task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
