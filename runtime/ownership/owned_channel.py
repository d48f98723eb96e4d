"""The state of one pchannel that a channel owner owns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..arguments import checked_fields
from ..clock import add_ms
from ..errors import Unavailable
from .acks import AckManager
from .prepared import PreparedTransactions
from .producers import ProducerTable

if TYPE_CHECKING:
    from .batch import AppendPart


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


class ReleasedChannel(NamedTuple):
    """What the catalog must have of a channel that was given up in good order: its owner has used no timestamp above
    `limit`, and the next one must read from `checkpoint`."""

    limit: int
    checkpoint: bytes


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
REMEMBERED_MS = 5_000  # for how long an owner knows where its channels ended: what a question through the log may take

OnReached = Callable[[ChannelPoint | None], None]


@dataclass(slots=True)
class OwnedChannel:
    """One channel under one term. Guarded by the channel owner's lock.

    What is in flight, and what is known of producers, goes on from one term of the owner to the next."""

    channel: str
    term: int
    limit: int  # no timestamp above it
    checkpoint: bytes = b""
    acks: AckManager[AppendPart] = field(default_factory=AckManager["AppendPart"])
    producers: ProducerTable = field(default_factory=ProducerTable)
    prepared: PreparedTransactions = field(default_factory=PreparedTransactions)
    fenced: bool = False  # the fence is in the log, and what stands below it is known
    open: bool = False
    stalled: bool = False  # an append's outcome is unknown: nothing follows under this term
    cseq: int = 0  # the last number given out
    acked: ChannelPoint = _NOTHING
    acked_ts: int = 0
    ticked: int = 0  # the time that the log itself has: of the last stored tick; a fence says nothing of it
    ticking: bool = False  # a tick is in flight
    unsaved: int = 0  # records behind the checkpoint, which a next owner would have to read
    unsaved_bytes: int = 0
    written_bytes: int = 0  # of the records of appends that are durable, under this term
    _points: deque[tuple[int, ChannelPoint]] = field(default_factory=deque[tuple[int, ChannelPoint]])
    _awaited: list[tuple[int, OnReached]] = field(default_factory=list[tuple[int, OnReached]])

    def successor(self, term: int, limit: int, checkpoint: bytes) -> OwnedChannel:
        """The same channel under a new term of the same owner, whose fence decides what is open under this one."""
        self.stalled = True
        self.give_up_awaited()
        return OwnedChannel(self.channel, term, limit, checkpoint, self.acks, self.producers)

    def next(self, size: int = 0) -> int:
        """The number of a new record with `size` bytes."""
        self.cseq += 1
        self.unsave(1, size)
        return self.cseq

    def take_back(self, count: int = 1, size: int = 0) -> None:
        """Undo `next`: the newest `count` numbers, for `size` bytes, were not used."""
        self.cseq -= count
        self.saved(count, size)

    def unsave(self, count: int, size: int) -> None:
        """Count records that a next owner would have to read."""
        self.unsaved += count
        self.unsaved_bytes += size

    def saved(self, count: int, size: int) -> None:
        """Undo `unsave`: a next owner does not have to read so many."""
        self.unsaved -= count
        self.unsaved_bytes -= size

    @property
    def undecided(self) -> bool:
        """Whether an append's outcome is not known yet."""
        return any(part.present is None for part in self.acks.items())

    def promises(self, ts: int) -> bool:
        """Whether `ts` may be stamped or promised."""
        return self.open and not self.stalled and ts <= self.limit

    def watermark(self, now: int) -> int:
        """The highest time at or below which nothing is open, nor will be: `now` where there is nothing. Transactions
        that are prepared get a timestamp at or above that of their PREPARE."""
        return min(self.acks.watermark(now), self.prepared.first_ts - 1)

    # ---- what is durable --------------------------------------------------------------------------------------------

    def ack(self, cseq: int, id: bytes, ts: int) -> None:
        """Note that a batch's record is durable, and so is all before it. Its `ts` is above those before it, but for
        that of the fence: a transaction that was prepared before that may be committed behind it."""
        if cseq > self.acked.cseq:
            self.acked = ChannelPoint(self.term, cseq, id)
            self.acked_ts = ts = max(ts, self.acked_ts)
            self._points.append((ts, self.acked))
            while len(self._points) > 1 and self._points[1][0] <= add_ms(ts, -REMEMBERED_MS):
                self._points.popleft()

    def point_at(self, time: int) -> ChannelPoint | None:
        """The last record at or before `time`, nothing at or before it being open; None where that is forgotten."""
        if time >= self.acked_ts:
            return self.acked
        return next((point for ts, point in reversed(self._points) if ts <= time), None)

    def ack_control(self, cseq: int, id: bytes) -> None:
        """Note that a tick or a snapshot is durable. That says nothing of batches below it that are still open."""
        if not len(self.acks) and cseq > self.acked.cseq:
            self.acked = ChannelPoint(self.term, cseq, id)

    def await_time(self, time: int, reached: OnReached) -> None:
        """Call `reached` with the last record at or before `time`, once nothing at or before it is open, or with None
        where this term does not get there. `time` is at or above that of the last acknowledged record."""
        self._awaited.append((time, reached))

    def reach(self, time: int) -> None:
        """Nothing at or before `time` is open, and nothing above it is acknowledged yet."""
        if self._awaited:
            due = [reached for awaited, reached in self._awaited if awaited <= time]
            self._awaited = [each for each in self._awaited if each[0] > time]
            for reached in due:
                reached(self.acked)

    def give_up_awaited(self) -> None:
        """This term determines nothing any more."""
        awaited, self._awaited = self._awaited, []
        for _, reached in awaited:
            reached(None)


def promising_channel(owned: Mapping[str, OwnedChannel], channel: str, ts: int) -> OwnedChannel:
    """The `channel` of those that are `owned`. Raises `Unavailable` unless `ts` may be stamped or promised for it."""
    own = owned.get(channel)
    if own is None or not own.open:
        raise Unavailable(f"this node does not own {channel} yet; retry", channel=channel)
    if own.stalled:
        raise Unavailable(f"the outcome of an earlier append to {channel} is being determined; retry", channel=channel)
    if ts > own.limit:
        raise Unavailable(
            f"the lease's timestamp limit of {channel} is reached and not renewed yet; retry", channel=channel
        )
    return own


Promising = Callable[[], list[tuple[OwnedChannel, int]]]
"""The channels for which a time may be promised, and these times. Raises `Unavailable` past the lease."""
