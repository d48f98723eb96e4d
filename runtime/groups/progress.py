"""How far a consumer group has got in a channel, and the durable steps that move it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..errors import InvalidRequest
from ..log.wal import Append, ChannelPolicy, OnAppended
from .coordinator_client import Ack


class Change(NamedTuple):
    """One step of a group in a channel, as it is stored: all ids ≤ `upto` are done (None: says nothing), and the single
    `ids` are. With `reset` the position becomes `upto`, backward too, and single ids are forgotten."""

    group: str
    channel: str
    upto: bytes | None
    ids: tuple[bytes, ...] = ()
    reset: bool = False


@dataclass(slots=True)
class GroupProgress:
    """A group's position in one channel. Everything ≤ `acked_to` (b"" lies before all ids) and in `acked` is done."""

    acked_to: bytes = b""
    acked: set[bytes] = field(default_factory=set[bytes])

    def apply(self, change: Change) -> None:
        """Let one step take effect; a step behind the position changes nothing."""
        if change.reset:
            self.acked_to, self.acked = change.upto or b"", set()
            return
        if change.upto is not None and change.upto > self.acked_to:
            self.acked_to = change.upto
            self.acked = {id for id in self.acked if id > self.acked_to}
        self.acked.update(id for id in change.ids if id > self.acked_to)


def check_new(ack: Ack, progress: GroupProgress, outputs: Sequence[Append]) -> None:
    """Raise `InvalidRequest` for outputs of what is acknowledged already: they were committed with it."""
    if outputs and ack.upto is not None and ack.upto <= progress.acked_to:
        raise InvalidRequest(f"these entries of {ack.channel} are acknowledged: their outputs were committed before")


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
