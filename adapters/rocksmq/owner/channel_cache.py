"""What the owner knows of a channel beyond the journal: the next id, the tail in memory, the readers that wait.

A tail is one list of rows, shared by all readers. A reader takes the list object and then looks at what has been
forgotten: adding appends to that list, forgetting replaces it, so a reader on another thread sees a whole state at any
time. Rows are plain tuples, and become entries when they are read: the garbage collector does not track plain tuples of
plain values, while a tail of entries would cost it more than all else that an append does.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, repeat
from operator import itemgetter
from typing import cast

from ....runtime.groups.progress import GroupProgress
from ....runtime.log.wal import ChannelPolicy, Delivery, Durability, Entry, Headers, Payload
from ....runtime.loop_bridge import LoopNotifier
from ..journal.channels import JournalledChannel, encode_id
from ..journal.losses import Losses
from ..journal.pending import Row

TAKE_BYTES = 1024 * 1024  # handed to a reader at once, unless one entry is larger
TAKE_ENTRIES = 4096
ENTRY_OVERHEAD_BYTES = 200  # what an entry costs in memory beside its payload

_make_entry = cast("Callable[[tuple[bytes, int, Payload, None, Headers]], Entry]", partial(tuple.__new__, Entry))
_NO_KEYS: Iterable[None] = repeat(None)
_NO_HEADERS: Iterable[Headers] = repeat(())
_id_of, _timestamp_of, _payload_of = itemgetter(1), itemgetter(2), itemgetter(3)


def entries_of(rows: Sequence[Row]) -> list[Entry]:
    """The rows as entries."""
    keys = map(encode_id, map(_id_of, rows))
    columns = zip(keys, map(_timestamp_of, rows), map(_payload_of, rows), _NO_KEYS, _NO_HEADERS)  # noqa: B905 -- endless
    return list(map(_make_entry, columns))


class Tail:
    """The newest entries of one channel. One thread at a time adds and forgets; any thread reads."""

    __slots__ = ("forgotten_timestamp", "forgotten_to", "rows")

    def __init__(self, forgotten_to: int, forgotten_timestamp: int) -> None:
        self.rows: list[Row] = []
        # highest id, and highest timestamp, of the entries that are not here any more
        self.forgotten_to: int = forgotten_to
        self.forgotten_timestamp: int = forgotten_timestamp

    def forget(self, count: int) -> None:
        """Forget the oldest `count` entries."""
        gone = self.rows[:count]
        if gone:
            self.forgotten_timestamp = max(self.forgotten_timestamp, max(map(_timestamp_of, gone)))
            self.forgotten_to = _id_of(gone[-1])  # before the list, because a reader takes the list first
            self.rows = self.rows[count:]

    def clear(self) -> None:
        self.forget(len(self.rows))

    def take(self, next_id: int) -> Sequence[Entry] | None:
        """The entries from `next_id` on, up to `TAKE_BYTES`: empty where there are none yet, None where the tail has
        forgotten that id."""
        rows = self.rows
        end = len(rows)  # now: there may be more in a moment
        if next_id <= self.forgotten_to:
            return None
        following = _id_of(rows[end - 1]) - next_id + 1 if end else 0  # at most so many: ids ascend
        if following <= 0:
            return ()
        first = max(end - following, 0)
        if _id_of(rows[first]) < next_id:  # ids have gaps where an incarnation of the owner ended
            first = bisect_left(rows, next_id, first, end, key=_id_of)
        taken = rows[first : min(end, first + TAKE_ENTRIES)]
        sizes = list(accumulate(map(len, map(_payload_of, taken))))
        return entries_of(taken if sizes[-1] <= TAKE_BYTES else taken[: max(1, bisect_right(sizes, TAKE_BYTES))])


@dataclass(slots=True, eq=False)
class LiveChannel:
    """A channel in the memory of the owner. `next_id`, `queued` and `creators` are guarded by the registry's lock."""

    number: int
    name: str
    policy: ChannelPolicy
    next_id: int
    floor: int  # below the first id that the channel ever assigned
    removed_to: int  # retention removed everything up to here
    visible_to: int  # highest id that readers may see
    tail: Tail
    truncated_to: int = 0
    holds: dict[str, int] = field(default_factory=dict[str, int])
    groups: dict[str, GroupProgress] = field(default_factory=dict[str, GroupProgress])  # the journal's table changes it
    ephemeral_size: int = 0  # of the tail of an ephemeral channel, in memory
    losses: Losses = ()  # what a salvage could not save
    creators: frozenset[bytes | None] = frozenset()  # of a temporary channel: clients, None for the owner's own process
    queued: int = 0  # entries of an ephemeral channel that wait for a commit they belong to
    created: bool = True
    dropped: bool = False
    synced: bool = field(init=False)  # an append is acknowledged when it is on the disk
    plain_bytes: int = field(init=False)  # of an append with nothing special; below 0 where all are special
    waiters: set[tuple[LoopNotifier, asyncio.Future[None]]] = field(
        default_factory=set[tuple[LoopNotifier, asyncio.Future[None]]]
    )

    def __post_init__(self) -> None:
        self.synced = not self.policy.ephemeral and self.policy.acks is Durability.ALL
        self.plain_bytes = self.policy.max_message_bytes if self.synced else -1

    @property
    def kept_from(self) -> int:
        """The first id that a hold keeps; above all ids where there is no hold."""
        return min(self.holds.values(), default=1 << 63)

    @property
    def done_to(self) -> int:
        """No consumer group needs an entry up to this id; 0 without groups, and where the channel's policy keeps
        entries whatever groups acknowledge."""
        if self.policy.delivery is Delivery.KEEP:
            return 0
        return min([int.from_bytes(group.acked_to, "big") for group in list(self.groups.values())], default=0)

    @property
    def first_id(self) -> int:
        """The first id that counts: neither removed nor, unless a holder needs it, truncated or, where delivery is that
        of a queue, acknowledged."""
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
        """The last visible id; None where the channel never had an entry."""
        return encode_id(self.visible_to) if self.visible_to > self.floor else None

    def deliver(self, rows: Sequence[Row]) -> None:
        """Make entries visible and wake the readers. `rows` in order of their ids, at least one."""
        self.tail.rows.extend(rows)
        self.visible_to = _id_of(rows[-1])
        if self.waiters:
            self.wake()

    def publish(self, rows: Sequence[Row]) -> None:
        """`deliver` for an ephemeral channel, which forgets what is over its limit; the newest entry always stays."""
        self.deliver(rows)
        self.ephemeral_size += sum(map(len, map(_payload_of, rows))) + ENTRY_OVERHEAD_BYTES * len(rows)
        limit = self.policy.ephemeral_bytes
        if self.ephemeral_size <= limit:
            return
        count = 0
        for row in self.tail.rows[:-1]:
            if self.ephemeral_size <= limit * 7 // 8:  # so much at once that the list is seldom copied
                break
            self.ephemeral_size -= ENTRY_OVERHEAD_BYTES + len(row[3])
            count += 1
        self.tail.forget(count)

    def wake(self) -> None:
        """Let the readers that wait look again."""
        # Readers add themselves and then look again, so one that came too late for this swap has seen the entries.
        waiters, self.waiters = self.waiters, set()
        for notifier, future in waiters:
            notifier.settle(future, None)


def channel_of(state: JournalledChannel, base: int, removed_to: int) -> LiveChannel:
    """The live channel of a journalled one: ids go on above `base`; retention removed those up to `removed_to`."""
    last = base if state.policy.ephemeral else state.last_id
    return LiveChannel(
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
    """Bounds the bytes that the tails of all durable channels hold together. Belongs to the thread or loop that has the
    turn to commit (`journal/journal.py`)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._commits: deque[tuple[Mapping[LiveChannel | None, int], int]] = deque()  # entries by channel, and the size
        self._size = 0

    def added(self, counts: Mapping[LiveChannel | None, int], size: int) -> None:
        """Count the entries of one commit, by channel; their payloads have `size` bytes."""
        size += ENTRY_OVERHEAD_BYTES * sum(counts.values())
        self._commits.append((counts, size))
        self._size += size

    @property
    def full(self) -> bool:
        return self._size > self._limit

    def trim(self) -> None:
        """Forget the oldest commits, an eighth at a time so that the lists are seldom copied."""
        counts: Counter[LiveChannel | None] = Counter()
        while self._commits and self._size > self._limit * 7 // 8:
            of_commit, size = self._commits.popleft()
            self._size -= size
            counts.update(of_commit)
        for channel, count in counts.items():
            if channel is not None:
                channel.tail.forget(count)
