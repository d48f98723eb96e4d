"""Ephemeral channels as any process has them: in its memory as the owner of the log, else by asking the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from ...runtime.errors import ChannelNotFound, Closed, InvalidRequest, Overloaded, Unavailable
from ...runtime.log.wal import Entry, Start
from ..rocksmq.protocol import decode_start, encode_start
from .ephemeral import EphemeralChannel
from .link.owner_route import OwnerRoute
from .open_log import OpenLog
from .ownership import Ownership
from .stored_channel import StoredChannel

WAIT_S: Final = 20.0  # how long one question waits at the owner for more entries
UNKNOWN_S: Final = 5.0  # how long a question waits for its channel to be known to the owner
RETRY_S: Final = 1.0  # after which it is asked again at the latest, where no owner has answered


class EphemeralAccess:
    """What processes ask of the ephemeral channels, and what the owner answers. They are named by their numbers: one
    that was dropped, and made again under its name, is another one. All that asks raises `ChannelNotFound` where the
    owner says that the channel was dropped."""

    def __init__(
        self,
        log: OpenLog,
        ownership: Ownership,
        route: OwnerRoute,
        closed: Callable[[], bool],
        changes: Callable[[], Awaitable[None]],
    ) -> None:
        """`changes` returns when there may be another owner."""
        self._state, self._memory, self._news = log.state, log.memory, log.news
        self._ownership, self._route = ownership, route
        self._closed, self._changes = closed, changes

    # ---- asking ------------------------------------------------------------------------------------------------------

    async def ends(self, channel: StoredChannel) -> tuple[bytes | None, bytes | None] | None:
        """The ids of the first and of the last entry, each None where there is none. None where no owner answers."""
        with suppress(Unavailable):
            first, latest = await self._ask("ends", channel.number)
            return first, latest
        return None

    def check_there(self, channel: StoredChannel) -> None:
        """Raise `ChannelNotFound` where this process knows that the channel was dropped."""
        if channel.dropped:
            raise ChannelNotFound(f"channel {channel.name} was dropped", channel=channel.name)

    async def id_at(self, channel: StoredChannel, timestamp: int) -> bytes | None:
        """`Wal.id_at`."""
        return await self._ask("at", channel.number, timestamp)

    async def truncate(self, channel: StoredChannel, id: bytes) -> None:
        """`Wal.truncate`."""
        await self._ask("truncate", channel.number, id)

    async def start(self, channel: StoredChannel, start: Start) -> bytes:
        """The id behind which a reader begins, from an owner that answers. Raises `PositionLost`."""
        return await self._until_answered("start", channel, encode_start(start))

    async def following(self, channel: StoredChannel, behind: bytes) -> Sequence[Entry]:
        """The next entries behind an id, from an owner that answers; none where none came for a while. Entries that an
        owner had when it ended are passed over."""
        found = await self._until_answered("following", channel, behind, wait_s=WAIT_S)
        return [Entry(*each) for each in found]

    async def _until_answered(
        self, method: str, channel: StoredChannel, *arguments: object, wait_s: float = 0.0
    ) -> Any:
        """The answer of an owner that has room for the question. Raises `Closed`."""
        while True:
            if self._closed():
                raise Closed("the log is closed")
            try:
                return await self._ask(method, channel.number, *arguments, wait_s=wait_s)
            except (Unavailable, Overloaded):
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._changes()
                self.check_there(channel)

    async def _ask(self, method: str, *arguments: object, wait_s: float = 0.0) -> Any:
        if wait_s:
            arguments = (*arguments, wait_s)
        if self._ownership.owns:
            return await self.answer([method, *arguments])
        link = self._route.link
        if link is None:
            raise Unavailable("ephemeral channels are in the memory of the log's owner, which does not answer")
        return await link.ask("ephemeral", method, *arguments, wait_s=wait_s)

    # ---- answering ---------------------------------------------------------------------------------------------------

    async def answer(self, question: Sequence[Any]) -> Any:
        """The owner's answer, as msgpack takes it. Raises `ChannelNotFound`, `PositionLost` and `InvalidRequest`."""
        match question:
            case ["ends", int(number)]:
                found = await self._channel(number)
                return found.first_id, found.latest
            case ["at", int(number), int(timestamp)]:
                return (await self._channel(number)).at(timestamp)
            case ["truncate", int(number), bytes(id)]:
                return (await self._channel(number)).remove_before(id)
            case ["start", int(number), list()]:
                where = decode_start(cast("list[Any]", question[2]))
                if isinstance(where, int):
                    raise InvalidRequest("the request names no start")
                return (await self._channel(number)).start(where)
            case ["following", int(number), bytes(behind), int() | float() as wait_s]:
                return await self._following(number, behind, min(wait_s, WAIT_S))
            case _:
                raise InvalidRequest("no question about ephemeral channels")

    async def _channel(self, number: int) -> EphemeralChannel:
        """The channel with this number. A process that reads the store may know it before the owner does, whose block
        is there and which has no answer yet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(UNKNOWN_S):
                while self._state.highest < number:
                    await self._news.wait()
        return self._now(number)

    async def _following(self, number: int, behind: bytes, wait_s: float) -> list[tuple[bytes, int, bytes]]:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (found := (await self._channel(number)).behind(behind)):
                    await self._news.wait()
                return [(entry.id, entry.timestamp, bytes(entry.payload)) for entry in found]
        return []

    def _now(self, number: int) -> EphemeralChannel:
        if not self._ownership.owns:
            raise Unavailable("this process does not own the log any more")
        channel = self._state.channel(number)
        if channel is None or not channel.policy.ephemeral:
            raise ChannelNotFound("the channel was dropped")
        return self._memory.of(channel)
