"""The state of one pchannel that a channel owner owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..arguments import checked_fields


@checked_fields()
@dataclass(frozen=True, slots=True)
class ChannelGrant:
    """The right to own `channel`, from the catalog: the term, the limit of the previous owner's timestamps, the new
    owner's own limit, the id from which the log must be read to know what happened before, and the fences of all terms.
    """

    channel: str
    term: int
    previous_limit: int
    limit: int
    checkpoint: bytes = b""
    fences: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


class ChannelPoint(NamedTuple):
    """The last acknowledged record of a channel."""

    term: int
    cseq: int
    id: bytes


class SyncPoint(NamedTuple):
    """One time, and per channel the last record at or before it: everything acknowledged by now is in it."""

    time: int
    channels: dict[str, ChannelPoint]


_NOTHING = ChannelPoint(0, 0, b"")


@dataclass(slots=True)
class OwnedChannel:
    """One channel under one term. Guarded by the channel owner's lock."""

    channel: str
    term: int
    limit: int  # no timestamp above it
    checkpoint: bytes = b""
    open: bool = False
    cseq: int = 0  # the last number given out
    pending: int = 0  # records of batches that are not decided
    acked: ChannelPoint = _NOTHING
    acked_ts: int = 0
    ticked: int = 0  # the time that the log itself has: of the last stored tick, or of the fence
    since_checkpoint: int = 0  # records that a next owner would have to read

    def next(self) -> int:
        """The number of a new record."""
        self.cseq += 1
        self.since_checkpoint += 1
        return self.cseq

    def take_back(self) -> None:
        """Undo `next`: the newest number was not used."""
        self.cseq -= 1
        self.since_checkpoint -= 1

    def ack(self, cseq: int, id: bytes, ts: int) -> None:
        """Note that a batch's record is durable, and so is all before it."""
        if cseq > self.acked.cseq:
            self.acked = ChannelPoint(self.term, cseq, id)
            self.acked_ts = ts

    def ack_control(self, cseq: int, id: bytes) -> None:
        """Note that a tick or a snapshot is durable. That says nothing of batches below it that are still open."""
        if not self.pending and cseq > self.acked.cseq:
            self.acked = ChannelPoint(self.term, cseq, id)
