"""The owner of a directory as another process sees it: either that is this process by now, or it is behind a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ...runtime.errors import TidewalError
from ...runtime.groups.link import GroupLink
from ...runtime.remote import Address, encode_policy, info_of
from ...runtime.wal import Append, ChannelInfo, ChannelPolicy, Entry, GroupInfo, OnAppended
from .group_link import RemoteLink
from .link import Link

READS, ASKS = 128, 64  # requests that wait for answers at once: together well below what the owner lets a process have


class Owner(Protocol):
    """What `RocksMQ` and `Distant` have in common: each call as `Wal` has it, appends with a number."""

    @property
    def boot(self) -> int:
        """The number of the owner's life, another for each opening of the directory."""
        ...

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None: ...

    async def drop_channel(self, channel: str) -> None: ...

    async def channels(self) -> list[str]: ...

    async def describe(self, channel: str) -> ChannelInfo: ...

    async def latest_id(self, channel: str) -> bytes | None: ...

    async def id_at(self, channel: str, timestamp: int) -> bytes | None: ...

    async def truncate(self, channel: str, id: bytes) -> None: ...

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None: ...

    def submit_from(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> None: ...

    def group_link(self) -> GroupLink: ...

    async def groups(self) -> list[GroupInfo]: ...

    async def move_group(self, group: str, channel: str, upto: bytes) -> None: ...

    async def drop_group(self, group: str) -> None: ...

    async def close(self) -> None: ...


class Distant:
    """An `Owner` in another process. Everything raises `Unavailable` once the link is lost."""

    def __init__(self) -> None:
        """Use `open`."""
        self.lost = False
        self.link: Link
        self._reads, self._asks = asyncio.Semaphore(READS), asyncio.Semaphore(ASKS)
        self._groups: RemoteLink

    @classmethod
    async def open(cls, address: Address, client: bytes, on_lost: Callable[[Distant], None]) -> Distant:
        """Connect to the owner at `address`. `on_lost` is called on the loop, once, when the link is lost. Raises
        `Unavailable`, `Overloaded`."""
        distant = cls()

        def lost(_: TidewalError) -> None:
            distant.lost = True
            on_lost(distant)

        distant.link = await Link.open(address, client, on_lost=lost)
        distant._groups = RemoteLink(distant.link.ask, distant.link.notify)
        return distant

    @property
    def boot(self) -> int:
        return self.link.boot

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._ask("create", channel, encode_policy(policy))

    async def drop_channel(self, channel: str) -> None:
        await self._ask("drop", channel)

    async def channels(self) -> list[str]:
        return await self._ask("channels")

    async def describe(self, channel: str) -> ChannelInfo:
        return info_of(channel, await self._ask("describe", channel))

    async def latest_id(self, channel: str) -> bytes | None:
        return await self._ask("latest_id", channel)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._ask("id_at", channel, timestamp)

    async def truncate(self, channel: str, id: bytes) -> None:
        await self._ask("truncate", channel, id)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._ask("hold", channel, holder, id)

    async def read(self, channel: str, start: Sequence[object], wait_s: float) -> tuple[Sequence[Entry], bytes]:
        """What there is from `start` (as the protocol pictures it), and the id that comes next."""
        async with self._reads:
            entries, next_id, _ = await self.link.ask("read", channel, start, None, wait_s, wait_s=wait_s)
        return entries, next_id

    def submit_from(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> None:
        """Never fails here: `done` gets what the owner answers, and hears nothing once the link is lost."""
        self.link.append(number, settled, entries, done)

    def group_link(self) -> GroupLink:
        return self._groups

    async def groups(self) -> list[GroupInfo]:
        return await self._groups.groups()

    async def move_group(self, group: str, channel: str, upto: bytes) -> None:
        await self._groups.seek_group(group, channel, upto)

    async def drop_group(self, group: str) -> None:
        await self._groups.drop_group(group)

    async def close(self) -> None:
        self._groups.close()
        await self.link.close()

    async def _ask(self, method: str, *arguments: object) -> Any:
        async with self._asks:
            return await self.link.ask(method, *arguments)
