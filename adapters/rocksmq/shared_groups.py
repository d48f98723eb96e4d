"""The link of group members in a process that shares a log: to the coordinator of whoever owns it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from ...runtime.errors import Closed, Unavailable
from ...runtime.groups.link import Ack, GroupLink, Shares
from ...runtime.wal import Append, From
from .owner import Owner

T = TypeVar("T")


class Owners(Protocol):
    """What `SharedRocksMQ` tells of owners."""

    async def owner(self) -> Owner: ...

    def left(self, owner: Owner) -> bool: ...

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
        return await self._call(lambda link: link.shares(group, member, seen, wait_s))

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        return await self._call(lambda link: link.commit(group, member, acks, outputs))

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        await self._call(lambda link: link.release(group, member, channel, lease))

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        await self._call(lambda link: link.seek(group, member, channel, lease, upto))

    async def leave(self, group: str, member: str) -> None:
        await self._call(lambda link: link.leave(group, member))

    async def _call(self, call: Callable[[GroupLink], Awaitable[T]]) -> T:
        owner = await self._owners.owner()
        try:
            return await call(self._of(owner))
        except Closed as error:
            if not self._owners.left(owner):
                raise
            raise Unavailable("the owner of the log has given it up") from error

    def _of(self, owner: Owner) -> GroupLink:
        if owner is not self._owner:
            self._owner, self._link = owner, owner.group_link()
        return self._link
