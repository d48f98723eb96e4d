"""A log that may be migrated while it is open: its calls go on with the log that has taken its place.

What a call has begun in the old log ends there. Ids are those of one log, so a reader does not go on: it ends with
`ChannelNotFound`, and a member of a group ends, or raises `Moved`; both begin anew, by `FollowingWal.moves` they know.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from ..errors import ChannelNotFound, Closed, Moved, TidewalError, Unavailable, of_unknown_outcome
from .wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    GroupInfo,
    GroupMember,
    Headers,
    OnAppended,
    Payload,
    Start,
    Wal,
)

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter
    from ..groups.coordinator_client import GroupAcks

T = TypeVar("T")

Follow = Callable[[Moved], Awaitable[Wal]]
"""Opens the log to which another has moved. Raises errors of opening it."""


class FollowingWal:
    """`Wal` over the log that is in use at present.

    It learns that this one is no more from its calls, by `Moved`, and opens the next with `follow`; the old one is
    closed then. Or it is told: between `leave` and `arrive` calls wait, and `submit` raises `Unavailable`. Where the
    next one cannot be opened here, calls raise `Moved`, which says why, and try again each time."""

    def __init__(self, wal: Wal, follow: Follow | None = None) -> None:
        """`close` closes `wal`, or the log that it has moved to by then, where there is a `follow`."""
        self._follow = follow
        self._use(wal)
        self._arrived = asyncio.Event()
        self._arrived.set()
        self._moving = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.moves: int = 0
        """How often another log has come in place of the one before."""

    # ---- moving ------------------------------------------------------------------------------------------------------

    def _use(self, wal: Wal) -> None:
        self._wal = wal
        self.name: str = wal.name
        self.capabilities: Capabilities = wal.capabilities
        self._failure: TidewalError | None = None

    def leave(self) -> None:
        """The log is about to be closed, and another one, or the same again, arrives."""
        if self._arrived.is_set():
            self._arrived.clear()
            self._failure = None
            self.moves += 1

    def arrive(self, wal: Wal) -> None:
        """Go on with `wal`, which this does not close."""
        self._use(wal)
        self._arrived.set()

    def fail(self, error: TidewalError) -> None:
        """No log arrives for now: calls raise `error` until one does, or the log is left again."""
        self._failure = error
        self._arrived.set()

    async def _present(self) -> Wal:
        await self._arrived.wait()
        if self._failure is not None:
            raise self._failure
        return self._wal

    def _has_left(self, wal: Wal) -> bool:
        return not self._closed and (wal is not self._wal or not self._arrived.is_set())

    async def _ask(self, call: Callable[[Wal], Awaitable[T]]) -> T:
        while True:
            wal = await self._present()
            try:
                return await call(wal)
            except Moved as moved:
                await self._move(wal, moved)
            except Closed as error:
                if not self._has_left(wal):
                    raise
                if error.fields.get("outcome_unknown"):
                    raise _left(error) from error

    async def _move(self, wal: Wal, moved: Moved) -> None:
        """Go on with the log to which `wal` has moved. Raises `Moved` where it cannot be opened here, and `Unavailable`
        where it cannot yet."""
        async with self._moving:
            if wal is not self._wal or not self._arrived.is_set():
                return
            if self._failure is not None:
                raise self._failure
            if self._follow is None or self._closed:
                raise moved
            try:
                following = await self._follow(moved)
            except TidewalError as error:
                if error.retryable:
                    raise Unavailable(f"{moved.message}. That one does not answer yet: {error.message}") from error
                raise Moved(
                    f"{moved.message}. It cannot be opened here ({error.message}): its settings are those of this "
                    "process, which is to be started anew with them",
                    url=moved.fields.get("url"),
                ) from error
            self.moves += 1
            self._use(following)
        await wal.close()

    def _move_later(self, wal: Wal, moved: Moved) -> None:
        if self._following is None or self._following.done():
            self._following = self._loop.create_task(self._try_to_move(wal, moved))

    async def _try_to_move(self, wal: Wal, moved: Moved) -> None:
        try:
            await self._move(wal, moved)
        except TidewalError:
            return  # the next call says why

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._ask(lambda wal: wal.create_channel(channel, policy))

    async def channels(self) -> list[str]:
        return await self._ask(lambda wal: wal.channels())

    async def describe(self, channel: str) -> ChannelInfo:
        return await self._ask(lambda wal: wal.describe(channel))

    async def drop_channel(self, channel: str) -> None:
        await self._ask(lambda wal: wal.drop_channel(channel))

    async def latest_id(self, channel: str) -> bytes | None:
        return await self._ask(lambda wal: wal.latest_id(channel))

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._ask(lambda wal: wal.id_at(channel, timestamp))

    async def truncate(self, channel: str, id: bytes) -> None:
        await self._ask(lambda wal: wal.truncate(channel, id))

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._ask(lambda wal: wal.hold(channel, holder, id))

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`. Where the log moves meanwhile, `Unavailable` is raised, or comes through `done`."""
        self._submit(lambda wal, told: wal.submit(entries, told), done)

    def submit_with_acks(self, entries: Sequence[Append], acks: GroupAcks, done: OnAppended) -> None:
        self._submit(lambda wal, told: wal.submit_with_acks(entries, acks, told), done)

    def _submit(self, submit: Callable[[Wal, OnAppended], None], done: OnAppended) -> None:
        wal = self._wal

        def told(result: list[bytes] | TidewalError) -> None:
            done(self._said_of(wal, result) if isinstance(result, TidewalError) else result)

        if not self._arrived.is_set():
            raise _left()
        if self._failure is not None:
            raise self._failure
        try:
            submit(wal, told)
        except (Moved, Closed) as error:
            said = self._said_of(wal, error)
            if said is error:
                raise
            raise said from error

    def _said_of(self, wal: Wal, error: TidewalError) -> TidewalError:
        """What an error of `wal` says of an append. From any thread."""
        if isinstance(error, Moved) and self._follow is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._move_later, wal, error)
            return of_unknown_outcome(_left(error))  # its owner may have taken it before
        return _left(error) if isinstance(error, Closed) and self._has_left(wal) else error

    def refusal(self) -> TidewalError | None:
        return self._wal.refusal()

    async def append(
        self,
        channel: str,
        payload: Payload,
        timestamp: int = 0,
        *,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> bytes:
        return await self._ask(lambda wal: wal.append(channel, payload, timestamp, key=key, headers=headers))

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        return await self._ask(lambda wal: wal.append_many(entries))

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        """`Wal.read`. It ends with `ChannelNotFound` where the log moves."""
        return self._read(channel, lambda wal: wal.read(channel, start))

    def read_where(self, channel: str, start: Start, where: RecordFilter) -> AsyncIterator[Sequence[Entry]]:
        return self._read(channel, lambda wal: wal.read_where(channel, start, where))

    async def _read(
        self, channel: str, read: Callable[[Wal], AsyncIterator[Sequence[Entry]]]
    ) -> AsyncGenerator[Sequence[Entry]]:
        wal = await self._present()
        try:
            async with aclosing(cast("AsyncGenerator[Sequence[Entry], None]", read(wal))) as batches:
                async for entries in batches:
                    yield entries
        except Moved as moved:
            await self._move(wal, moved)
        except Closed:
            if not self._has_left(wal):
                raise
        if self._has_left(wal):
            raise ChannelNotFound(f"the log of {channel} has moved: positions there are others", channel=channel)

    # ---- groups ------------------------------------------------------------------------------------------------------

    async def join(self, group: str, channels: Sequence[str], **options: Any) -> GroupMember:
        """`Wal.join` of the log that is in use: where it moves, the member ends, or raises `Moved`."""
        return await self._ask(lambda wal: wal.join(group, channels, **options))

    async def groups(self) -> list[GroupInfo]:
        return await self._ask(lambda wal: wal.groups())

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        await self._ask(lambda wal: wal.seek_group(group, channel, start))

    async def drop_group(self, group: str) -> None:
        await self._ask(lambda wal: wal.drop_group(group))

    # ---- closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """`Wal.close`, where this follows the log; a log that it was told of is another's to close."""
        self._closed = True
        self._arrived.set()
        if self._following is not None:
            await asyncio.gather(self._following, return_exceptions=True)
        if self._follow is not None:
            await self._wal.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def moves_of(wal: Wal | FollowingWal) -> int:
    """How often another log has come in place of the one before; 0 for a log that does not move."""
    return wal.moves if isinstance(wal, FollowingWal) else 0


def _left(error: TidewalError | None = None) -> Unavailable:
    """The error of a call that the log did not take, or may not have taken, because it moves."""
    unknown = {"outcome_unknown": True} if error is not None and error.fields.get("outcome_unknown") else {}
    return Unavailable("the log is migrated at this moment: repeat it", **unknown)
