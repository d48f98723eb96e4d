"""A coordinator client that passes each call on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ..log.wal import Append, From, GroupInfo
from .coordinator_client import Ack, CoordinatorClient, MemberAssignment

T = TypeVar("T")


class ForwardingClient(ABC):
    """`CoordinatorClient` that passes each call on to another one: over a thread, or to the owner of a log that may
    change."""

    @abstractmethod
    async def _call(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        """The result of `call` on the other client. What a member calls under its assignment is passed on once."""

    async def _call_again(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        """As `_call`, for joining and for what needs no member: that may be repeated."""
        return await self._call(call)

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        await self._call_again(lambda client: client.join(group, member, channels, start, session_timeout_s))

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
        return await self._call_again(lambda client: client.groups())

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        await self._call_again(lambda client: client.seek_group(group, channel, upto))

    async def drop_group(self, group: str) -> None:
        await self._call_again(lambda client: client.drop_group(group))
