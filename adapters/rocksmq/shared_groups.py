"""The link of group members in a process that shares a log: to the coordinator of whoever owns it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from ...runtime.groups.link import Ack, GroupLink, Shares
from ...runtime.wal import Append, From
from .owner import Owner

T = TypeVar("T")


class Owners(Protocol):
    """What `SharedRocksMQ` tells of owners."""

    async def owner(self) -> Owner: ...

    async def ask(self, call: Callable[[Owner], Awaitable[T]]) -> T: ...


class SharedGroupLink:
    """`GroupLink` over changes of the owner. A new owner knows no members: they get `Fenced` and join again. Only
    joining is repeated here; whoever was cut off in the middle of another call gets `Unavailable`."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._owner: Owner | None = None
        self._link: GroupLink

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        await self._owners.ask(lambda owner: self._of(owner).join(group, member, channels, start, session_timeout_s))

    async def shares(self, group: str, member: str, seen: int | None, wait_s: float) -> Shares:
        return await (await self._now()).shares(group, member, seen, wait_s)

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        return await (await self._now()).commit(group, member, acks, outputs)

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        await (await self._now()).release(group, member, channel, lease)

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        await (await self._now()).seek(group, member, channel, lease, upto)

    async def leave(self, group: str, member: str) -> None:
        await (await self._now()).leave(group, member)

    async def _now(self) -> GroupLink:
        return self._of(await self._owners.owner())

    def _of(self, owner: Owner) -> GroupLink:
        if owner is not self._owner:
            self._owner, self._link = owner, owner.group_link()
        return self._link
