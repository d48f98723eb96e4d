"""The state of one input channel: recovered from its changelog, and what of it waits to be committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from ..errors import BadRecord, ChannelNotFound, PositionLost, TidewalError, Unavailable
from ..log.record import decode
from ..log.wal import Append, ChannelPolicy, Entry, From, Wal
from .changelog import Changelog, Checkpoint, Codec, StateRecovery
from .keyed_state import KeyedState

OVERTAKEN_MAX = 3  # times that truncation may be faster than a recovery
RECOVERY_STALLED_S = 30.0  # without a record of a changelog that must have more: a backend publishes within moments

_KEPT = ChannelPolicy(retention_s=None)  # commits truncate it


def changelog_of(name: str, channel: str) -> str:
    """The changelog of the program `name` for the input `channel`."""
    return f"{name}-changelog.{channel}"


class KeyedBatch(Protocol):
    """What a member delivers of one channel: `Delivered`, or what holds its entries in another form."""

    @property
    def channel(self) -> str: ...

    @property
    def entries(self) -> Sequence[Entry]: ...

    @property
    def assignment_epoch(self) -> int: ...


D = TypeVar("D", bound=KeyedBatch)


class KeyedCommit(NamedTuple, Generic[D]):
    """What a commit holds of one input channel."""

    channel: str
    delivered: list[D]
    outputs: list[Append]
    metadata: bytes


class KeyedChannel(Generic[D]):
    """The state of one input channel in one assignment epoch. `delivered` are the batches that are not committed."""

    def __init__(self, channel: str, epoch: int, changelog: Changelog, changelog_channel: str) -> None:
        self.epoch = epoch
        self.delivered: list[D] = []
        self._channel = channel
        self._changelog = changelog
        self._changelog_channel = changelog_channel
        self._outputs: list[Append] = []
        self._records = 0  # of the changelog, in the commit under way
        self._sweep_at: tuple[int, bytes] | None = None  # commit and id where the newest sweep began
        self._truncated = changelog.base

    @property
    def state(self) -> KeyedState:
        return self._changelog.state

    def add(self, delivered: D, outputs: Sequence[Append]) -> None:
        """Commit the batch and its outputs with the next commit."""
        self.delivered.append(delivered)
        self._outputs += outputs

    def next_commit(self) -> KeyedCommit[D]:
        """What has to be committed now. Raises what `Changelog.next_commit` raises."""
        newest = max((entry.timestamp for entry in self.delivered[-1].entries), default=0)
        records = self._changelog.next_commit()
        self._records = len(records)
        outputs = [Append(self._changelog_channel, record, newest) for record in records]
        return KeyedCommit(
            self._channel, self.delivered, outputs + self._outputs, self._changelog.checkpoint.to_bytes()
        )

    async def committed(self, wal: Wal, ids: Sequence[bytes]) -> None:
        """The last `next_commit` is durable; `ids` are those of its outputs. Truncates the changelog behind a sweep."""
        self.delivered, self._outputs = [], []
        if self._records and self._changelog.sweep_began:
            self._sweep_at = self._changelog.checkpoint.sequence, ids[0]
        if self._sweep_at is not None and self._truncated < self._changelog.base == self._sweep_at[0]:
            self._truncated = self._changelog.base
            if wal.capabilities.truncate:
                with suppress(TidewalError):  # the next sweep truncates further on
                    await wal.truncate(self._changelog_channel, self._sweep_at[1])


async def recover(wal: Wal, name: str, member: str, delivered: D, metadata: bytes, codec: Codec) -> KeyedChannel[D]:
    """The state of the channel of `delivered`, the first batch behind the position with `metadata`. Raises
    `CorruptLog`, `Unavailable`, `InvalidRequest`, and what the log raises."""
    channel = changelog_of(name, delivered.channel)
    try:
        info = await wal.describe(channel)
    except ChannelNotFound:
        await wal.create_channel(channel, _KEPT)
        info = await wal.describe(channel)
    limit = info.max_message_bytes
    if metadata:
        changelog = (await _recovered(wal, channel, Checkpoint.from_bytes(metadata), codec)).changelog(limit)
    else:
        life = f"{member}.{delivered.assignment_epoch}"
        changelog = Changelog(KeyedState(), Checkpoint(life, 0), codec=codec, limit=limit)
    return KeyedChannel(delivered.channel, delivered.assignment_epoch, changelog, channel)


async def _recovered(wal: Wal, channel: str, checkpoint: Checkpoint, codec: Codec) -> StateRecovery:
    for _ in range(OVERTAKEN_MAX):
        with suppress(PositionLost):  # the member before truncated behind its last commit: what is needed is there
            return await _recovery(wal, channel, checkpoint, codec)
    return await _recovery(wal, channel, checkpoint, codec)


async def _recovery(wal: Wal, channel: str, checkpoint: Checkpoint, codec: Codec) -> StateRecovery:
    recovery = StateRecovery(checkpoint, codec)
    if recovery.done:
        return recovery
    reader = cast("AsyncGenerator[Sequence[Entry], None]", wal.read(channel, From.EARLIEST))
    async with aclosing(reader):
        while not recovery.done:
            try:
                async with asyncio.timeout(RECOVERY_STALLED_S):
                    entries = await anext(reader)
            except TimeoutError:
                raise Unavailable(
                    f"{channel} does not have commit {checkpoint.sequence}, which the group's position names, and "
                    f"nothing came in {RECOVERY_STALLED_S:.0f} s. Try again; if it was removed, seek in the input to "
                    "begin with an empty state",
                    channel=channel,
                ) from None
            except StopAsyncIteration:
                raise Unavailable(f"the log was closed while {channel} was read", channel=channel) from None
            for entry in entries:
                with suppress(BadRecord):  # a stranger's: one of ours that is missing is told by its number
                    recovery.feed(decode(entry.payload, entry.id))
    return recovery
