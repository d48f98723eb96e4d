"""The coordinator client of group members in a process that shares a log: to the coordinator at the present owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ....runtime.errors import Closed, Unavailable
from ....runtime.groups.coordinator_client import Ack, CoordinatorClient, MemberAssignment
from ....runtime.log.wal import Append, From, GroupInfo
from .owner import Owner

if TYPE_CHECKING:
    from .shared import SharedRocksMQ

T = TypeVar("T")


class SharedCoordinatorClient:
    """`CoordinatorClient` over changes of the owner. A new owner knows no members: they get `Fenced` and join again.
    Joining and what needs no member is repeated here; any other call that a change of the owner cuts off raises
    `Unavailable`."""

    def __init__(self, shared: SharedRocksMQ) -> None:
        self._shared = shared
        self._owner: Owner | None = None
        self._client: CoordinatorClient

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        await self._shared.ask(lambda owner: self._of(owner).join(group, member, channels, start, session_timeout_s))

    async def assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        return await self._call(lambda client: client.assignment(group, member, seen, wait_s))

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        return await self._call(lambda client: client.commit(group, member, acks, outputs))

    async def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        await self._call(lambda client: client.release(group, member, channel, assignment_epoch))

    async def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes) -> None:
        await self._call(lambda client: client.seek(group, member, channel, assignment_epoch, upto))

    async def leave(self, group: str, member: str) -> None:
        await self._call(lambda client: client.leave(group, member))

    async def groups(self) -> list[GroupInfo]:
        return await self._shared.ask(lambda owner: self._of(owner).groups())

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        await self._shared.ask(lambda owner: self._of(owner).seek_group(group, channel, upto))

    async def drop_group(self, group: str) -> None:
        await self._shared.ask(lambda owner: self._of(owner).drop_group(group))

    async def _call(self, call: Callable[[CoordinatorClient], Awaitable[T]]) -> T:
        owner = await self._shared.owner()
        try:
            return await call(self._of(owner))
        except Closed as error:
            if not self._shared.superseded(owner):
                raise
            raise Unavailable("the owner of the log has yielded it") from error

    def _of(self, owner: Owner) -> CoordinatorClient:
        if owner is not self._owner:
            self._owner, self._client = owner, owner.coordinator_client()
        return self._client
