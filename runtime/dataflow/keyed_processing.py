"""Process what a group's member gets, with state by key that is stored in the log, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeAlias

from ..arguments import checked
from ..errors import Closed, Fenced, InvalidRequest, TidewalError, Unsupported
from ..groups.work import check_awaitable
from ..log.wal import Append, Delivered, Wal
from .changelog import Codec, MsgpackCodec
from .keyed_channel import D, KeyedChannel, KeyedCommit, changelog_of, recover
from .keyed_state import KeyedState

KeyedHandler: TypeAlias = Callable[[Delivered, KeyedState], Awaitable[Sequence[Append]]]
_Handler: TypeAlias = Callable[[D, KeyedState], Awaitable[Sequence[Append]]]


class KeyedMember(Protocol[D]):
    """What `process_keyed` needs of a `GroupMember`, or of what delivers its channels in another form."""

    @property
    def id(self) -> str: ...

    @property
    def channels(self) -> frozenset[str]: ...

    async def __anext__(self) -> D: ...

    def metadata(self, channel: str) -> bytes: ...

    def redeliver(self, delivered: D) -> None: ...

    async def commit(
        self, delivered: Sequence[D], outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]: ...


COMMIT_INTERVAL_S = 0.1
MAX_UNCOMMITTED = 100_000  # entries and outputs, of all channels: a commit has to hold what they have changed


@checked
async def process_keyed(
    wal: Wal,
    member: KeyedMember[D],
    handle: _Handler[D],
    name: str,
    *,
    commit_interval_s: float = COMMIT_INTERVAL_S,
    codec: Codec | None = None,
    stop: asyncio.Event | None = None,
) -> None:
    """Call `handle` with each batch and the state of its channel, one after the other, until `stop` is set, the member
    leaves or the log is closed. What `handle` returns is appended, exactly once, in one commit with the changes of the
    state and the group's position; so is what it does to the state, and nothing else that it does.

    Each input channel has a state of its own, which lies in memory here and in the log: the channel
    `NAME-changelog.INPUT` has its changes. The member that gets the input channel next (after a crash, a restart or a
    move) reads the state from there before its first batch. To seek in an input channel, or to drop the group, begins a
    new and empty state. `name` is that of the program: no other one, and no other group, of the log may use it.

    Commits happen every `commit_interval_s` seconds while there is something to commit, 0: behind each batch. `codec`
    encodes the values of the state; the same one must read them again. Once `stop` is set, what was processed is
    committed, and the call returns; the member stays in its group.

    Raises what `handle`, iterating, committing and appending raise, and `CorruptLog` or `Unavailable` for a state that
    cannot be read. What is not committed then goes back and is delivered again, with the state of the last commit, so
    processing may be started again, with this member, or with another one once this has left (`aclose`). A batch whose
    channel another member gets meanwhile (`Fenced`) is left to that one. Raises `Unsupported` (`capability`) on a log
    without `atomic_commits`, and `InvalidRequest` for a name that cannot be part of a channel's, and for a `handle`
    that is not async."""
    if not wal.capabilities.atomic_commits:
        raise Unsupported(f"{wal.name}:// has no commits of outputs with positions", capability="atomic_commits")
    if not name:
        raise InvalidRequest("a program with state needs a name: its changelogs are called after it")
    await _Program(wal, member, handle, name, commit_interval_s, codec or MsgpackCodec(), stop).run()


class _Program(Generic[D]):
    """One call of `process_keyed`."""

    def __init__(
        self,
        wal: Wal,
        member: KeyedMember[D],
        handle: _Handler[D],
        name: str,
        commit_interval_s: float,
        codec: Codec,
        stop: asyncio.Event | None,
    ) -> None:
        self._wal, self._member, self._handle = wal, member, handle
        self._name, self._interval_s, self._codec = name, commit_interval_s, codec
        self._channels: dict[str, KeyedChannel[D]] = {}
        self._uncommitted = 0
        self._commit_at: float | None = None  # None while there is nothing to commit
        self._next: asyncio.Task[D] | None = None
        self._stop = asyncio.ensure_future((stop or asyncio.Event()).wait())

    async def run(self) -> None:
        try:
            while (delivered := await self._next_batch()) is not None:
                await self._process(delivered)
        except Closed:
            if not self._has_left():
                raise
        finally:
            await self._give_back()

    async def _next_batch(self) -> D | None:
        """The next batch; None once the member has left, or all is committed and the program is to stop. Commits
        whenever it is time, with or without a batch."""
        now = asyncio.get_running_loop().time
        while True:
            if self._stop.done():
                await self._commit()
                return None
            if self._commit_at is not None and (now() >= self._commit_at or self._uncommitted >= MAX_UNCOMMITTED):
                await self._commit()
            if self._next is None:
                self._next = asyncio.ensure_future(_take(self._member))
            left_s = None if self._commit_at is None else self._commit_at - now()
            await asyncio.wait({self._next, self._stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if self._next.done() and not self._stop.done():
                task, self._next = self._next, None
                try:
                    return task.result()
                except _HasLeft:
                    return None

    async def _process(self, delivered: D) -> None:
        try:
            channel = await self._channel(delivered)
            answer = self._handle(delivered, channel.state)
            check_awaitable(answer, self._handle)
            outputs = await answer
        except BaseException as error:
            self._member.redeliver(delivered)
            self._channels.pop(delivered.channel, None)
            if isinstance(error, Fenced) and error.fields.get("channel") == delivered.channel:
                return
            raise
        channel.add(delivered, outputs)
        self._uncommitted += len(delivered.entries) + len(outputs)
        if self._commit_at is None:
            self._commit_at = asyncio.get_running_loop().time() + self._interval_s

    async def _channel(self, delivered: D) -> KeyedChannel[D]:
        """The state of the batch's channel, as of the batch before."""
        known = self._channels.get(delivered.channel)
        if known is not None and known.epoch == delivered.assignment_epoch:
            return known
        self._forget_lost()
        if delivered.channel.startswith(changelog_of(self._name, "")):
            raise InvalidRequest(
                f"the group reads {delivered.channel}, which is a changelog of this very program: join with patterns "
                "that do not match it"
            )
        metadata = self._member.metadata(delivered.channel)
        channel = await recover(self._wal, self._name, self._member.id, delivered, metadata, self._codec)
        self._channels[delivered.channel] = channel
        return channel

    def _forget_lost(self) -> None:
        """Free the states of channels that are with other members now."""
        for name in self._channels.keys() - self._member.channels:
            del self._channels[name]

    async def _commit(self) -> None:
        """Commit all that was processed, in one commit; without the channels that are with other members by now."""
        self._commit_at, self._uncommitted = None, 0
        commits: list[KeyedCommit[D]] = [
            channel.next_commit() for channel in self._channels.values() if channel.delivered
        ]
        while commits:
            try:
                ids = await self._member.commit(
                    [delivered for commit in commits for delivered in commit.delivered],
                    [output for commit in commits for output in commit.outputs],
                    metadata={commit.channel: commit.metadata for commit in commits},
                )
            except Fenced as error:
                lost = error.fields.get("channel")
                self._channels.pop(str(lost), None)
                left = [commit for commit in commits if commit.channel != lost]
                if len(left) == len(commits) or error.fields.get("outcome_unknown"):
                    raise
                commits = left
                continue
            for commit in commits:
                channel = self._channels[commit.channel]
                await channel.committed(self._wal, ids[: len(commit.outputs)])
                del ids[: len(commit.outputs)]
            return

    async def _give_back(self) -> None:
        """Give back what is not committed, and a batch that has come and was not processed."""
        self._stop.cancel()
        task = self._next
        if task is not None:
            task.cancel()
            with suppress(_HasLeft, asyncio.CancelledError, TidewalError):
                self._member.redeliver(await task)
        for channel in self._channels.values():
            for delivered in channel.delivered:
                self._member.redeliver(delivered)
        self._channels.clear()

    def _has_left(self) -> bool:
        return not self._member.channels


class _HasLeft(Exception):
    """The member has left its group, or the log is closed."""


async def _take(member: KeyedMember[D]) -> D:
    """The next batch. A task cannot end with `StopAsyncIteration`."""
    try:
        return await member.__anext__()
    except StopAsyncIteration:
        raise _HasLeft from None
