"""Ephemeral channels as any process has them: in its memory as the owner of the log, else by asking the owner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, cast

from ...runtime.errors import ChannelNotFound, InvalidRequest, Overloaded, Unavailable
from ...runtime.log.checks import not_found
from ...runtime.log.wal import Entry, Start
from ..rocksmq.protocol import decode_start, encode_start
from .ephemeral import EphemeralChannels
from .link.owner_route import OwnerRoute
from .log_state import LogState
from .news import News
from .ownership import Ownership
from .stored_channel import StoredChannel

WAIT_S: Final = 20.0  # how long one question waits at the owner for more entries
RETRY_S: Final = 1.0  # after which it is asked again at the latest, where no owner has answered


class EphemeralAccess:
    """What processes ask of the ephemeral channels, and what the owner answers."""

    def __init__(
        self, state: LogState, memory: EphemeralChannels, ownership: Ownership, route: OwnerRoute, news: News
    ) -> None:
        self._state, self._memory, self._ownership, self._route, self._news = state, memory, ownership, route, news

    # ---- asking ------------------------------------------------------------------------------------------------------

    async def ends(self, channel: str) -> tuple[bytes | None, bytes | None]:
        """The ids of the first and of the last entry, None where there is none, or no owner answers."""
        with suppress(Unavailable):
            first, latest = await self._ask("ends", channel)
            return first, latest
        return None, None

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """`Wal.id_at`."""
        return await self._ask("at", channel, timestamp)

    async def truncate(self, channel: str, id: bytes) -> None:
        """`Wal.truncate`."""
        await self._ask("truncate", channel, id)

    async def read(
        self, channel: str, start: Start, closed: Callable[[], bool], changes: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[Sequence[Entry]]:
        """`Wal.read`. While no owner answers, or has no room for the question, it waits for `changes`. Entries that an
        owner had when it ended are passed over."""
        begun: tuple[int, bytes] | None = None
        while not closed():
            try:
                if begun is None:
                    number, behind = await self._ask("start", channel, encode_start(start))
                    begun = number, behind
                found = await self._ask("following", *begun, wait_s=WAIT_S)
            except (Unavailable, Overloaded):
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await changes()
                continue
            if found and not closed():
                begun = begun[0], found[-1][0]
                yield [Entry(*each) for each in found]

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
            case ["ends", str(channel)]:
                found = self._memory.of(self._channel(channel))
                return found.first_id, found.latest
            case ["at", str(channel), int(timestamp)]:
                return self._memory.of(self._channel(channel)).at(timestamp)
            case ["truncate", str(channel), bytes(id)]:
                return self._memory.of(self._channel(channel)).remove_before(id)
            case ["start", str(channel), list()]:
                stored = self._channel(channel)
                where = decode_start(cast("list[Any]", question[2]))
                if isinstance(where, int):
                    raise InvalidRequest("the request names no start")
                return stored.number, self._memory.of(stored).start(where)
            case ["following", int(number), bytes(behind), int() | float() as wait_s]:
                return await self._following(number, behind, min(wait_s, WAIT_S))
            case _:
                raise InvalidRequest("no question about ephemeral channels")

    def _channel(self, name: str) -> StoredChannel:
        found = self._state.names.get(name)
        if found is None or not found.policy.ephemeral:
            raise not_found(name)
        return found

    async def _following(self, number: int, behind: bytes, wait_s: float) -> list[tuple[bytes, int, bytes]]:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not (found := self._now(number, behind)):
                    await self._news.wait()
                return [(entry.id, entry.timestamp, bytes(entry.payload)) for entry in found]
        return []

    def _now(self, number: int, behind: bytes) -> Sequence[Entry]:
        if not self._ownership.owns:
            raise Unavailable("this process does not own the log any more")
        channel = self._state.channel(number)
        if channel is None:
            raise ChannelNotFound("the channel was dropped")
        return self._memory.of(channel).behind(behind)
