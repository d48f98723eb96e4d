"""A member of a group that reads topics, for scripts and notebooks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ...runtime.errors import TidewalError
from ...runtime.groups.record_pack import RecordPack
from ...runtime.log.record import TagValue
from ...runtime.log.wal import Append
from .member import TopicMember
from .messages import TopicMessage, TopicPack

T = TypeVar("T")


class WaitFor(Protocol):
    """Runs a call on the loop of a client, and returns what it returns."""

    def __call__(self, call: Coroutine[Any, Any, T], /) -> T: ...


class SyncTopicMember(Iterator[TopicPack]):
    """`TopicMember` with calls that return when they are done: the same parameters, results and errors. Made by
    `SyncClient.subscribe`; close it before its client, or use it as a context manager."""

    def __init__(self, member: TopicMember, wait: WaitFor) -> None:
        """For `SyncClient.subscribe`."""
        self._member, self._wait = member, wait
        self._receiving = asyncio.Lock()  # threads take turns: each pack is one's
        self._next: asyncio.Future[TopicPack | None] | None = None  # on the client's loop, where `receive` has given up

    @property
    def member(self) -> TopicMember:
        """The member itself, for calls on the client's loop."""
        return self._member

    def is_of(self, wait: WaitFor) -> bool:
        """Whether its calls run where those of `wait` do: it is of the same client."""
        return self._wait == wait

    def __enter__(self) -> SyncTopicMember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> TopicPack:
        """The next messages of one of the partitions, however long that takes. Ends after `close`."""
        pack = self.receive()
        if pack is None:
            raise StopIteration
        return pack

    def receive(self, timeout_s: float | None = None) -> TopicPack | None:
        """The next messages of one of the partitions; None where none come within `timeout_s` seconds (None: for ever),
        and after `close`."""
        return self._wait(self._receive(timeout_s))

    async def _receive(self, timeout_s: float | None) -> TopicPack | None:
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit, self._receiving:
                self._next = task = self._next or asyncio.ensure_future(anext(self._member, None))
                await asyncio.wait([task])
                self._next = None
                return task.result()
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    def acknowledge(self, delivered: RecordPack, *, metadata: bytes | None = None) -> None:
        """`RecordMember.acknowledge`."""
        self._wait(self._member.acknowledge(delivered, metadata=metadata))

    def commit(
        self, delivered: Sequence[RecordPack], outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]:
        """`TopicMember.commit`."""
        return self._wait(self._member.commit(delivered, outputs, metadata=metadata))

    def is_acknowledged(self, delivered: RecordPack) -> bool:
        """`RecordMember.is_acknowledged`."""
        return self._wait(self._is_acknowledged(delivered))

    async def _is_acknowledged(self, delivered: RecordPack) -> bool:
        return self._member.is_acknowledged(delivered)

    def redeliver(self, delivered: RecordPack) -> None:
        """`RecordMember.redeliver`."""
        self._wait(self._redeliver(delivered))

    async def _redeliver(self, delivered: RecordPack) -> None:
        self._member.redeliver(delivered)

    def extend_ack_timeout(self, delivered: RecordPack, timeout_s: float | None = None) -> None:
        """`RecordMember.extend_ack_timeout`."""
        self._wait(self._extend_ack_timeout(delivered, timeout_s))

    async def _extend_ack_timeout(self, delivered: RecordPack, timeout_s: float | None) -> None:
        self._member.extend_ack_timeout(delivered, timeout_s)

    def nack(self, delivered: TopicPack, *, reason: str = "", delay_s: float = 0.0) -> None:
        """`TopicMember.nack`."""
        self._wait(self._member.nack(delivered, reason=reason, delay_s=delay_s))

    def reply(
        self, message: TopicMessage, body: bytes | str = b"", *, tags: Mapping[str, TagValue] | None = None
    ) -> None:
        """`TopicMember.reply`."""
        self._wait(self._member.reply(message, body, tags=tags))

    def refuse(self, message: TopicMessage, error: TidewalError) -> None:
        """`TopicMember.refuse`."""
        self._wait(self._member.refuse(message, error))

    def repeat_reply(self, message: TopicMessage) -> bool:
        """`TopicMember.repeat_reply`."""
        return self._wait(self._member.repeat_reply(message))

    def close(self) -> None:
        """Leave the group: its partitions go to the other members."""
        self._wait(self._close())

    async def _close(self) -> None:
        await self._member.aclose()
        if self._next is not None:
            await asyncio.wait([self._next])
            self._next = None
