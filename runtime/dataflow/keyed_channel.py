"""The state of one input channel: recovered from its changelog, and what of it waits to be committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

from ..clock import physical_ms
from ..errors import BadRecord, ChannelNotFound, PositionLost, TidewalError, Unavailable
from ..groups.metadata_layers import Layer, unwrap
from ..groups.work import Batch
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


class KeyedBatch(Batch, Protocol):
    """What a member delivers of one channel: `Delivered`, or what holds its entries in another form."""

    @property
    def entries(self) -> Sequence[Entry]: ...


D = TypeVar("D", bound=KeyedBatch)


class KeyedCommit(NamedTuple, Generic[D]):
    """What a commit holds of one input channel."""

    channel: str
    delivered: list[D]
    outputs: list[Append]
    metadata: bytes


class KeyedChannel(Generic[D]):
    """The state of one input channel in one assignment epoch. `delivered` are the batches that are not committed.

    `commit_alone` is how many entries are still to be committed batch by batch: with retries those that may have been
    processed and not committed when an attempt failed, so that the one at fault is found."""

    def __init__(
        self,
        channel: str,
        epoch: int,
        changelog: Changelog,
        changelog_channel: str,
        snapshot_ms: int = 0,
        sweep_at: tuple[int, bytes, int] | None = None,
    ) -> None:
        self.epoch = epoch
        self.commit_alone = 0
        self.snapshot_ms: int = snapshot_ms  # log time of the oldest record that is needed
        self.delivered: list[D] = []
        self._channel = channel
        self._changelog = changelog
        self._changelog_channel = changelog_channel
        self._outputs: list[Append] = []
        self._records = 0  # of the changelog, in the commit under way
        self._newest_ms = snapshot_ms
        self._sweep_at = sweep_at  # commit, id and log time where the newest sweep began
        self._truncated = changelog.base

    @property
    def state(self) -> KeyedState:
        return self._changelog.state

    @property
    def keys(self) -> int:
        """How many keys the state has."""
        return self.state.keys

    @property
    def memory_bytes(self) -> int:
        """`Changelog.memory_bytes`."""
        return self._changelog.memory_bytes

    @property
    def changelog_bytes(self) -> int:
        """`Changelog.written`."""
        return self._changelog.written

    @property
    def watermarks(self) -> dict[str, int]:
        """The watermark of each of the windows over the state, ms."""
        return self.state.watermarks

    def measure(self) -> None:
        """`Changelog.measure`."""
        self._changelog.measure()

    def add(self, delivered: D, outputs: Sequence[Append]) -> None:
        """Commit the batch and its outputs with the next commit."""
        self.delivered.append(delivered)
        self._outputs += outputs

    def next_commit(self) -> KeyedCommit[D]:
        """What has to be committed now. Raises what `Changelog.next_commit` raises."""
        newest = max((entry.timestamp for entry in self.delivered[-1].entries), default=0)
        self._newest_ms = physical_ms(newest)
        self.snapshot_ms = self.snapshot_ms or self._newest_ms
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
            self._sweep_at = self._changelog.checkpoint.sequence, ids[0], self._newest_ms
        if self._sweep_at is not None and self._truncated < self._changelog.base == self._sweep_at[0]:
            self._truncated, self.snapshot_ms = self._changelog.base, self._sweep_at[2]
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
    _, metadata = unwrap(Layer.ATTEMPTS, metadata)
    snapshot_ms, sweep_at = 0, None
    if metadata:
        recovery = await _recovered(wal, channel, Checkpoint.from_bytes(metadata), codec)
        changelog, snapshot_ms = recovery.changelog(limit), physical_ms(recovery.begin_ts)
        if recovery.sweep_at is not None:
            sequence, first, timestamp = recovery.sweep_at
            sweep_at = sequence, first, physical_ms(timestamp)
    else:
        life = f"{member}.{delivered.assignment_epoch}"
        changelog = Changelog(KeyedState(), Checkpoint(life, 0), codec=codec, limit=limit)
    return KeyedChannel(delivered.channel, delivered.assignment_epoch, changelog, channel, snapshot_ms, sweep_at)


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
                    recovery.feed(decode(entry.payload, entry.id), entry.timestamp, entry.id)
    return recovery
