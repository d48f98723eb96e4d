"""What the owning process knows of a channel beyond the journal: the next id, the tail in memory, who waits for more.

A tail is a list of batches, one per commit, shared by all readers without copies. Whoever reads takes the list object
and then looks what has been forgotten: adding appends to that list, forgetting replaces it, so a reader on another
thread sees a whole state at any time.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...runtime.groups.progress import Progress
from ...runtime.wal import ChannelPolicy, Delivery, Durability, Entry
from .channels import ChannelState, decode_id, encode_id
from .losses import Losses
from .wakeup import Hub

MERGE_BYTES = 1024 * 1024  # batches handed to a reader at once, unless a single one is larger
ENTRY_OVERHEAD_BYTES = 200  # what an entry costs in memory beside its payload


@dataclass(slots=True)
class Batch:
    """Entries of one channel that became visible together."""

    first_id: int
    last_id: int
    entries: Sequence[Entry]
    size: int
    max_timestamp: int

    @property
    def payload_bytes(self) -> int:
        return self.size - ENTRY_OVERHEAD_BYTES * len(self.entries)


def make_batch(entries: Sequence[Entry]) -> Batch:
    if len(entries) == 1:
        entry = entries[0]
        id = int.from_bytes(entry.id, "big")
        return Batch(id, id, entries, len(entry.payload) + ENTRY_OVERHEAD_BYTES, entry.timestamp)
    size = sum([len(entry.payload) for entry in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)
    highest = max([entry.timestamp for entry in entries])
    return Batch(decode_id(entries[0].id), decode_id(entries[-1].id), entries, size, highest)


def _last_id(batch: Batch) -> int:
    return batch.last_id


class Tail:
    """The newest entries of one channel. One thread at a time adds and forgets; any thread reads."""

    def __init__(self, forgotten_to: int, forgotten_timestamp: int) -> None:
        self.batches: list[Batch] = []
        self.forgotten_to = forgotten_to  # highest id that is not here any more
        self.forgotten_timestamp = forgotten_timestamp  # highest timestamp among those
        self.size = 0

    def add(self, batch: Batch) -> None:
        self.size += batch.size
        self.batches.append(batch)

    def forget(self, count: int) -> None:
        """Forget the oldest `count` batches."""
        gone = self.batches[:count]
        if gone:
            self.size -= sum(batch.size for batch in gone)
            self.forgotten_timestamp = max(self.forgotten_timestamp, max(batch.max_timestamp for batch in gone))
            self.forgotten_to = gone[-1].last_id  # before the list: see above
            self.batches = self.batches[count:]

    def take(self, next_id: int) -> Sequence[Entry] | None:
        """What there is from `next_id` on, up to `MERGE_BYTES`: empty when it is yet to come, None when forgotten."""
        batches = self.batches
        if next_id <= self.forgotten_to:
            return None
        if not batches or batches[-1].last_id < next_id:
            return ()
        place = len(batches) - 1
        if batches[place].first_id > next_id:
            place = bisect_left(batches, next_id, key=_last_id)
        first = batches[place]
        entries = first.entries
        if first.first_id < next_id:
            entries = [entry for entry in entries if decode_id(entry.id) >= next_id]
        if place + 1 == len(batches) or first.size >= MERGE_BYTES:
            return entries
        merged, size = list(entries), first.size
        for batch in batches[place + 1 :]:
            size += batch.size
            if size > MERGE_BYTES:
                break
            merged.extend(batch.entries)
        return merged


@dataclass(slots=True, eq=False)
class Channel:
    """A channel as the owner holds it. `next_id` and `queued` belong to the registry's lock."""

    number: int
    name: str
    policy: ChannelPolicy
    next_id: int
    floor: int  # below the first id it ever gave out
    removed_to: int  # retention took everything up to here
    visible_to: int  # highest id that readers may see
    tail: Tail
    truncated_to: int = 0
    holds: dict[str, int] = field(default_factory=dict[str, int])
    groups: dict[str, Progress] = field(default_factory=dict[str, Progress])  # the journal's table changes it
    losses: Losses = ()  # what a repair could not save
    queued: int = 0  # entries of an ephemeral channel that wait for a commit they belong to
    created: bool = True
    dropped: bool = False
    synced: bool = field(init=False)  # an append is acknowledged when it is on the disk
    waiters: set[tuple[Hub, asyncio.Future[None]]] = field(default_factory=set[tuple[Hub, asyncio.Future[None]]])

    def __post_init__(self) -> None:
        self.synced = not self.policy.ephemeral and self.policy.acks is Durability.ALL

    @property
    def kept_from(self) -> int:
        return min(self.holds.values(), default=1 << 63)

    @property
    def done_to(self) -> int:
        """Consumer groups need nothing up to this id, all of them; 0 without groups and where groups do not matter."""
        if self.policy.delivery is Delivery.KEEP:
            return 0
        return min([int.from_bytes(group.acked_to, "big") for group in list(self.groups.values())], default=0)

    @property
    def first_id(self) -> int:
        """The first id that counts: neither removed nor, unless somebody holds it, truncated or done in a queue."""
        first_needed = self.truncated_to
        if self.policy.delivery is Delivery.QUEUE:
            first_needed = max(first_needed, self.done_to + 1)
        return max(self.removed_to + 1, min(first_needed, self.kept_from))

    @property
    def first_visible(self) -> int:
        """The id at which `From.EARLIEST` starts."""
        if self.policy.ephemeral:
            return self.tail.forgotten_to + 1
        return min(self.first_id, self.visible_to + 1)

    @property
    def latest_id(self) -> bytes | None:
        """The last visible id; None when there was none ever."""
        return encode_id(self.visible_to) if self.visible_to > self.floor else None

    def deliver(self, batch: Batch) -> None:
        """Make a batch visible and wake the readers."""
        self.tail.add(batch)
        self.visible_to = batch.last_id
        if self.waiters:
            self.wake()

    def wake(self) -> None:
        # Readers add themselves and then look again, so one that came too late for this swap has seen the entries.
        waiters, self.waiters = self.waiters, set()
        for hub, future in waiters:
            hub.settle(future, None)


def channel_of(state: ChannelState, base: int, removed_to: int) -> Channel:
    """The live side of a journalled channel; ids go on above `base`."""
    last = base if state.policy.ephemeral else state.last_id
    return Channel(
        number=state.number,
        name=state.name,
        policy=state.policy,
        next_id=max(base, last) + 1,
        floor=base if state.policy.ephemeral else state.floor,
        removed_to=base if state.policy.ephemeral else removed_to,
        visible_to=last,
        tail=Tail(last, state.max_timestamp),
        truncated_to=state.truncated_to,
        holds=dict(state.holds),
        groups=state.groups,
        losses=state.losses,
    )


class TailBudget:
    """Bounds what all tails of durable channels hold together. Belongs to the writer thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order: deque[tuple[Channel, int]] = deque()
        self._size = 0

    def added(self, channel: Channel, batch: Batch) -> None:
        self._order.append((channel, batch.size))
        self._size += batch.size

    def trim(self) -> None:
        """Forget the oldest batches, an eighth at a time so that the lists are seldom copied."""
        if self._size <= self._limit:
            return
        counts: dict[Channel, int] = {}
        while self._order and self._size > self._limit * 7 // 8:
            channel, size = self._order.popleft()
            self._size -= size
            counts[channel] = counts.get(channel, 0) + 1
        for channel, count in counts.items():
            channel.tail.forget(count)


def trim_ephemeral(channel: Channel) -> None:
    """Forget the oldest entries of an ephemeral channel over its limit; the newest batch always stays."""
    tail, limit = channel.tail, channel.policy.ephemeral_bytes
    if tail.size <= limit:
        return
    size, count = tail.size, 0
    for batch in tail.batches[:-1]:
        if size <= limit * 7 // 8:
            break
        size -= batch.size
        count += 1
    tail.forget(count)
