"""How far a consumer group has got in a channel, and the durable steps that move it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..errors import InvalidRequest
from ..log.wal import Append, ChannelPolicy, GroupInfo, OnAppended
from .coordinator_client import Ack

MAX_METADATA_BYTES = 2048  # of one position: Kafka's brokers take 4,096 characters for it and for single acks together


class Change(NamedTuple):
    """One step of a group in a channel, as it is stored: all ids ≤ `upto` are done (None: says nothing), and the single
    `ids` are; `metadata` replaces the position's (None: says nothing). With `reset` the position becomes `upto`,
    backward too, and single ids and metadata are forgotten."""

    group: str
    channel: str
    upto: bytes | None
    ids: tuple[bytes, ...] = ()
    reset: bool = False
    metadata: bytes | None = None


@dataclass(slots=True)
class GroupProgress:
    """A group's position in one channel. Everything ≤ `acked_to` (b"" lies before all ids) and in `acked` is done.
    `metadata` is what the members have stored with it."""

    acked_to: bytes = b""
    acked: set[bytes] = field(default_factory=set[bytes])
    metadata: bytes = b""

    def apply(self, change: Change) -> None:
        """Let one step take effect; a step behind the position changes nothing."""
        if change.reset:
            self.acked_to, self.acked, self.metadata = change.upto or b"", set(), b""
            return
        if change.metadata is not None and (change.upto is None or change.upto >= self.acked_to):
            self.metadata = change.metadata
        if change.upto is not None and change.upto > self.acked_to:
            self.acked_to = change.upto
            self.acked = {id for id in self.acked if id > self.acked_to}
        self.acked.update(id for id in change.ids if id > self.acked_to)


def group_info(group: str, progress: Mapping[str, GroupProgress], members: dict[str, frozenset[str]]) -> GroupInfo:
    """What `Wal.groups` says of a group with this progress, by channel, and these members."""
    positions = {channel: each.acked_to or None for channel, each in progress.items()}
    metadata = {channel: each.metadata for channel, each in progress.items() if each.metadata}
    return GroupInfo(group, positions, members, metadata)


def check_new(ack: Ack, progress: GroupProgress, outputs: Sized) -> None:
    """Raise `InvalidRequest` for outputs of what is acknowledged already: they were committed with it."""
    if len(outputs) and ack.upto is not None and ack.upto <= progress.acked_to:
        raise InvalidRequest(f"these entries of {ack.channel} are acknowledged: their outputs were committed before")


def check_metadata(metadata: object) -> None:
    """Raise `InvalidRequest` for metadata of a position that is not bytes, or more than `MAX_METADATA_BYTES`."""
    if metadata is None:
        return
    if not isinstance(metadata, bytes):
        raise InvalidRequest(f"the metadata of a position is bytes, not {type(metadata).__name__}: encode it first")
    if len(metadata) > MAX_METADATA_BYTES:
        raise InvalidRequest(
            f"{len(metadata)} bytes of metadata are over the {MAX_METADATA_BYTES} that a position takes: store them in"
            f" a channel, and its id here"
        )


class GroupBackend(Protocol):
    """What the coordinator needs of its log. No method blocks; all are called under the coordinator's lock, from any
    thread, and must not call back into the coordinator from within (from `done` they may). So the backend must
    not call the coordinator while it holds a lock that one of these methods takes."""

    def channels(self) -> Collection[str]:
        """The names of all durable channels."""
        ...

    def policy(self, channel: str) -> ChannelPolicy:
        """Raises `ChannelNotFound`."""
        ...

    def progress(self, channel: str) -> Mapping[str, GroupProgress]:
        """By group, the positions in a channel, as far as they are durable. Raises `ChannelNotFound`."""
        ...

    def begin(self, channel: str) -> bytes:
        """The id just before the first entry that is kept (or will come, while the channel is empty): a group that
        starts there gets `PositionLost` when retention removes entries that it has not read. Raises
        `ChannelNotFound`."""
        ...

    def end(self, channel: str) -> bytes:
        """The id of the last entry readers may see, b"" while there is none. Raises `ChannelNotFound`."""
        ...

    def commit(self, outputs: Sequence[Append], changes: Sequence[Change], done: OnAppended) -> None:
        """As `Wal.submit`, with changes that become durable with the outputs or not at all, and are in `progress` when
        `done` is called with the ids of the outputs. Raises as `Wal.submit` does."""
        ...

    def forget(self, group: str, done: OnAppended) -> None:
        """Remove all positions of a group, durably."""
        ...
