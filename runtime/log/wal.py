"""The WAL interface: what Tidewal needs of a log, one page.

A WAL holds *channels*, each a totally ordered sequence of entries. Channel owners append, channel readers read, and the
roles manage channels. Adapters are found by URL scheme through the entry-point group `tidewal.wal`
(`runtime/streams/factory.py`). Message ids are opaque bytes that sort like their order in the channel.

Foreign exceptions never pass this interface: an adapter raises the errors of `runtime/errors.py` only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self, TypeAlias

from ..arguments import checked_fields
from ..clock import to_datetime, to_timestamp
from ..errors import InvalidRequest, TidewalError

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter
    from ..groups.coordinator_client import GroupAcks

Payload: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]
"""The headers of an entry in a foreign topic: names, which may repeat, and values."""


class Tombstone(bytes):
    """The payload of an entry that has none, which is not the same as an empty one: in a compacted topic it deletes
    the key. It is empty bytes, so it may be handled as any payload."""

    __slots__ = ()


TOMBSTONE: Final = Tombstone()


class Durability(Enum):
    """When an append is acknowledged."""

    ALL = "all"  # synced to disk, or replicated as the backend's policy asks
    ONE = "one"  # written, not synced
    NONE = "none"  # handed over


class Delivery(Enum):
    """What happens to entries that consumer groups have acknowledged. Retention by time and size applies in every case,
    so a group that does not acknowledge keeps nothing for ever."""

    KEEP = "keep"  # publish and subscribe: nothing; any number of groups and readers
    UNTIL_ACKED = "until_acked"  # publish and subscribe: what every group has acknowledged may be removed, where it can
    QUEUE = "queue"  # point to point: one group, and what it has acknowledged is removed at once


NUMBERS_OF_POLICY: Final = ("retention_s", "retention_bytes", "max_message_bytes", "ephemeral_bytes")


@checked_fields()
@dataclass(frozen=True, slots=True)
class ChannelPolicy:
    """How a channel keeps its entries.

    An ephemeral channel is kept in memory, never touches the disk, and forgets its oldest entries over
    `ephemeral_bytes`; a reader that falls behind continues at the oldest entry there is.
    A `temporary` one is ephemeral, and for the process that creates it alone: where the backend notices that this
    process is gone (`Capabilities.drops_temporary`), it drops the channel; a process that still needs it creates it
    again.
    `retention_s` and `retention_bytes` of None keep everything. `delivery` says what happens to entries that consumer
    groups have acknowledged. Sizes are in bytes, `retention_s` is in seconds. Raises `InvalidRequest` for a
    negative one.
    """

    ephemeral: bool = False
    acks: Durability = Durability.ALL
    retention_s: float | None = 14 * 24 * 3600.0
    retention_bytes: int | None = None
    max_message_bytes: int = 5 * 1024 * 1024
    ephemeral_bytes: int = 32 * 1024 * 1024
    delivery: Delivery = Delivery.KEEP
    temporary: bool = False

    def __post_init__(self) -> None:
        for name in NUMBERS_OF_POLICY:
            if (value := getattr(self, name)) is not None and value < 0:
                keeping = "; None keeps everything" if name.startswith("retention") else ""
                raise InvalidRequest(f"{name} of ChannelPolicy is {value}, below 0{keeping}", argument=name)


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """The description of a channel. `first_id` is the id of the first entry that it has now, None where it has
    none; `latest_id` is that of `Wal.latest_id`. `backend_message_bytes` is the largest payload that the backend
    takes there, where it has a limit of its own."""

    name: str
    policy: ChannelPolicy
    first_id: bytes | None
    latest_id: bytes | None
    backend_message_bytes: int | None = None

    @property
    def max_message_bytes(self) -> int:
        """The largest payload that the channel takes, in bytes: larger data must be split before."""
        limit = self.policy.max_message_bytes
        return limit if self.backend_message_bytes is None else min(limit, self.backend_message_bytes)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; what it lacks is declared, not emulated badly."""

    atomic_batches: bool  # one `submit` over several channels is all or nothing
    seek_by_time: bool
    truncate: bool
    multi_process_write: bool
    one_node: bool  # the log itself ensures that one node at a time is open on it
    groups: bool = False
    individual_acks: bool = False  # `GroupMember.acknowledge` with single ids
    atomic_commits: bool = False  # `GroupMember.commit`: positions and outputs together or not at all
    atomic_acks: bool = False  # `submit_with_acks`: appends of owners, and positions, together or not at all
    ephemeral_bounds: bool = True  # an ephemeral channel never keeps much more than its `ephemeral_bytes`
    drops_temporary: bool = False  # a temporary channel is dropped when the process that created it is gone
    read_only: bool = False  # opened for reading only: every call that writes raises `ReadOnly`
    numbered_ids: bool = False  # the last 8 bytes of an id are the number of its entry in the channel, its offset
    shared_segments: bool = False  # all channels lie in the same files: what one keeps, it keeps of all
    one_machine: bool = False  # `one_node`, and all processes that use the log are on one machine
    costly_appends: bool = False  # each is a request that is paid for, and may take a second: nodes renew less often
    foreign_topics: bool = False  # channels are partitions of topics that others made: keys, headers, no framing


class Append(NamedTuple):
    """One entry to write: `timestamp` is its hybrid timestamp, kept as the key of seeking by time. With 0, `append`,
    `append_many` and `GroupMember.commit` stamp the entry with the present time by the wall clock of the machine that
    appends, to the millisecond; `submit` leaves it without a time.

    `key` and `headers` are for foreign topics (`Capabilities.foreign_topics`), where the payload may be `TOMBSTONE` and
    the channel a topic: then the key decides the partition. Other logs refuse them with `Unsupported`."""

    channel: str
    payload: Payload
    timestamp: int = 0
    key: bytes | None = None
    headers: Headers = ()


class ControlAppend(Append):
    """An entry that lets the system go on while data has to wait: an event of the catalog, a fence, a tick, a flush
    event. A log that refuses data for lack of space (`DiskPressure`) takes a submit of these alone from a reserve that
    it keeps for them, so they are few and small. Between processes they count as data."""

    __slots__ = ()


class Entry(NamedTuple):
    """One entry as read. `payload` may be shared with other readers: never write into it. `key` and `headers` are
    those of an entry in a foreign topic; there a `payload` that is a `Tombstone` says that the entry has none."""

    id: bytes
    timestamp: int
    payload: bytes | memoryview
    key: bytes | None = None
    headers: Headers = ()

    @property
    def time(self) -> datetime:
        """The physical part of the timestamp, UTC."""
        return to_datetime(self.timestamp)


class From(Enum):
    """Where to start reading when there is no position."""

    EARLIEST = "earliest"
    LATEST = "latest"  # only what is appended after the reader opened


@checked_fields()
@dataclass(frozen=True, slots=True)
class FromId:
    """Start at a message id, with it or just behind it."""

    id: bytes
    inclusive: bool = False


@checked_fields()
@dataclass(frozen=True, slots=True)
class FromTime:
    """Start at or before the first entry that there is whose timestamp is ≥ `timestamp`; readers drop what is below.
    A reader drops entries without a time too; a group whose position is moved there gets those before the first one
    that has a time.
    Entries that retention has removed are not noticed: a reader that must not miss any goes on at a position."""

    timestamp: int

    @classmethod
    def at(cls, moment: datetime) -> Self:
        """Start at the time `moment`, which has a time zone. Raises `InvalidRequest`."""
        return cls(to_timestamp(moment))


Start: TypeAlias = From | FromId | FromTime

OnAppended: TypeAlias = Callable[[list[bytes] | TidewalError], None]


class Delivered(NamedTuple):
    """Entries of one channel as a group's member gets them, in order. `assignment_epoch` numbers the assignment of the
    channel to the member: what was delivered in an earlier one cannot be acknowledged any more."""

    channel: str
    entries: Sequence[Entry]
    assignment_epoch: int

    @property
    def first(self) -> bytes:
        """The id of the first entry."""
        return self.entries[0].id

    @property
    def handled(self) -> Sequence[Entry]:
        """The entries that are to be processed: all."""
        return self.entries

    def parts(self) -> list[Delivered]:
        """The entries one by one, each as a part of this batch that can be acknowledged or committed by itself, in
        order: an acknowledgement says that all before is done."""
        return [self._replace(entries=self.entries[at : at + 1]) for at in range(len(self.entries))]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The state of a consumer group: for each channel the id up to which all is done (where it began, before it has
    acknowledged anything; None: before all ids), and for each member the channels it has now. `metadata` is what is
    stored with the positions, by channel, as of the same moment: of those with which something is."""

    name: str
    positions: dict[str, bytes | None]
    members: dict[str, frozenset[str]]
    metadata: dict[str, bytes] = field(default_factory=dict[str, bytes])


class GroupMember(Protocol):
    """One member of a consumer group: an async iterator over the entries of the channels assigned to it.

    One task at a time iterates. At least once: what is not acknowledged when the member leaves, crashes or loses a
    channel is delivered again, to the member that has the channel then. Exactly once: `commit` with the outputs. At
    most once: acknowledge before processing. A batch that is neither acknowledged nor given back (`redeliver`) does not
    come again while the member has the channel, and the acknowledgement of a later one covers it: it says that all
    before is done. A channel that goes to another member is released once all that was delivered of it is acknowledged,
    or after the session timeout. A thread keeps the session alive (or the member runs in the owner's process), so a
    handler may block the loop for any time.
    """

    @property
    def id(self) -> str: ...

    @property
    def group(self) -> str:
        """The name of the group."""
        ...

    @property
    def channels(self) -> frozenset[str]:
        """The channels this member has now."""
        ...

    def __aiter__(self) -> AsyncIterator[Delivered]: ...

    async def __anext__(self) -> Delivered:
        """The next entries of one of the channels; each channel gets its turn. Ends (no error) after `aclose` and when
        the log is closed. Raises `PositionLost` when retention has cut the group off, unless it joined with
        `reset_to`."""
        ...

    async def acknowledge(
        self, delivered: Delivered, ids: Sequence[bytes] | None = None, *, metadata: bytes | None = None
    ) -> None:
        """Acknowledge all that was delivered of the channel up to the end of `delivered`, which may be a part of a
        batch (`Delivered.parts`); with `ids` just those of its entries. `metadata` (at most 2 KiB) replaces what is
        stored with the group's position in the channel, in the same step; None leaves it, and so does an
        acknowledgement of what is acknowledged already. Durable when it returns; after an error or a cancellation it
        may be repeated. Raises `Fenced` when the assignment epoch is over (the entries are delivered again, to this
        member or another), `InvalidRequest` for ids that are not in `delivered` and for metadata that is too large."""
        ...

    async def annotate(self, of: str | Delivered, metadata: bytes) -> None:
        """Store `metadata` with the group's position in a channel, which does not move: of the channel with that name,
        or of what was `delivered` in this assignment epoch. b"" clears it. Durable when it returns. Raises `Fenced`
        when the member has the channel no more, and `InvalidRequest` as `acknowledge` does."""
        ...

    def metadata(self, channel: str) -> bytes:
        """What is stored with the group's position in a channel that this member has: as of the beginning of its
        assignment, and what it has stored itself since; b"" for nothing. Raises `Fenced` for a channel that it does not
        have."""
        ...

    def redeliver(self, delivered: Delivered) -> None:
        """Give back a batch that cannot be processed now. What was delivered of the channel and is not acknowledged,
        this batch or another, cannot be acknowledged any more and is delivered again: in order, from the position once
        commits in flight are decided. Returns at once. An assignment epoch that is over already is fine."""
        ...

    def extend_ack_timeout(self, delivered: Delivered, timeout_s: float | None = None) -> None:
        """Give what was delivered `timeout_s` seconds from now (None: the `ack_timeout_s` it joined with), if it has
        less. Does nothing for a member without one. Raises `Fenced` when it is given back already, and
        `InvalidRequest` for no time."""
        ...

    @property
    def ack_timeout_s(self) -> float | None:
        """For how long it may hold a batch without acknowledging it."""
        ...

    async def commit(
        self, delivered: Sequence[Delivered], outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]:
        """Append `outputs` and acknowledge `delivered`, cumulatively, in one commit: both happen or none. Outputs
        are stamped as by `append_many`. `metadata`, by channel, is stored in it as by `acknowledge`. The ids of the
        outputs, in order. Raises what `acknowledge` and `append_many` raise, and `InvalidRequest` for a batch that is
        acknowledged already, and while a commit of an earlier batch of its channel is under way. When the outcome is
        not known (an error with `outcome_unknown`, a cancellation) `delivered` goes back as with `redeliver`: what was
        committed is not delivered again, the rest is, and to commit the same batches again raises `Fenced`."""
        ...

    def pause(self, of: str | Delivered) -> None:
        """Deliver nothing more of a channel, or of the one of a batch, until `resume`, or until the channel is assigned
        anew. Raises `Fenced` for a channel that this member does not have, and for a batch of an assignment that is
        over."""
        ...

    def resume(self, channel: str) -> None:
        """Deliver the channel again. One that is not paused, or is not this member's any more, is fine."""
        ...

    async def seek(self, channel: str, start: Start) -> None:
        """Go on at `start` in a channel that this member has, backward too: the group's position there is moved,
        durably, and its metadata is cleared. What was delivered of it before cannot be acknowledged any more. What lies
        before the new position counts as done: in a queue it is removed. A time is looked up as by `Wal.seek_group`.
        Raises `Fenced`, `PositionLost`."""
        ...

    async def aclose(self) -> None:
        """Leave the group; its channels go to the other members at once. Returns when that is done; a second call waits
        for the same. It goes on when the call is cancelled."""
        ...


class Wal(Protocol):
    """An open log. All coroutines may be cancelled at any time without harm to the log. `async with` closes it.

    Consumer groups are an optional part: where `capabilities.groups` is not set, `join`, `groups`, `seek_group` and
    `drop_group` raise `Unsupported`. An adapter derives from `WalBase` (`wal_base.py`), which has what all have in
    common, or from `GroupWal` (`runtime/groups/group_wal.py`), which has the groups too.
    """

    name: str
    """The name of the backend, written into every position."""

    capabilities: Capabilities

    @abstractmethod
    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        """Create the channel, durably, with `policy`. The same name and policy again is fine; another policy raises
        `ChannelExists`. A name is 1-250 characters of `[A-Za-z0-9._-]`, else `InvalidRequest`."""
        ...

    @abstractmethod
    async def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        ...

    @abstractmethod
    async def describe(self, channel: str) -> ChannelInfo:
        """Describe the channel. Raises `ChannelNotFound`."""
        ...

    @abstractmethod
    async def drop_channel(self, channel: str) -> None:
        """Remove the channel and its entries; its readers end with `ChannelNotFound`. A missing channel is fine."""
        ...

    @abstractmethod
    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """Queue entries for one commit. Callable from any thread, never blocks; the order of the calls is the order
        of the log. `done` is called once, on any thread, with the ids in order when the
        channels' durability is reached, or with the error: a `TidewalError` whose `outcome_unknown` field is set when
        the entries may still be there. With `capabilities.atomic_batches` all entries appear or none.

        Raises at once, having queued nothing: `InvalidRequest` (a payload is not bytes), `MessageTooLarge`,
        `Unsupported` (a key, headers or a tombstone for a channel that cannot carry them), `ChannelNotFound`, `Closed`,
        `JournalFailed`, `DiskPressure`, `Overloaded` (`limit` "pending_bytes": too
        much waits for the backend already; retry after a pause). Where the log is in another process these may come
        through `done` instead."""
        ...

    def submit_with_acks(self, entries: Sequence[Append], acks: GroupAcks, done: OnAppended) -> None:
        """`submit`, with acknowledgements of a group's member in the same commit: all of it or nothing, in its place
        among what is submitted before and after. For owners, whose entries are numbered and stamped.

        Raises as `submit` does; `Fenced` (`group`) where the member, or an assignment epoch, is over, for ever;
        `InvalidRequest` for what is acknowledged already, and as `GroupMember.acknowledge` does; and `Unsupported`
        without `capabilities.atomic_acks`, and in a process that does not own the log."""
        ...

    def refusal(self) -> TidewalError | None:
        """The error with which `submit` refuses data at present, for lack of space or because the log has failed; None
        where it takes data, or where this process does not know. Callable from any thread, never blocks."""
        return None

    async def append(
        self,
        channel: str,
        payload: Payload,
        timestamp: int = 0,
        *,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> bytes:
        """Append one entry and return its id once it is as durable as the channel's policy says. `timestamp`, `key` and
        `headers` as `Append` says: without a timestamp the entry gets the present time."""
        ...

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        """Append entries in one commit; ids in order. Those without a timestamp get the present time, the same for
        all. One future for all, so prefer it to many `append`s."""
        ...

    @abstractmethod
    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        """Entries from `start` on, in order and without gaps, in non-empty batches, for ever: at the end it waits for
        more. The start is fixed when the iterator is first awaited (for `From.LATEST`: entries appended after that).
        Ends (no error) when the WAL is closed. Raises `ChannelNotFound`, and `PositionLost(channel,
        requested, first_available)` when retention has removed what comes next or the id is past the end. Close it with
        `aclose()`. Memory held for a slow reader is bounded: history is read from storage in small parts."""
        ...

    def read_where(self, channel: str, start: Start, where: RecordFilter) -> AsyncIterator[Sequence[Entry]]:
        """`read` for a reader that delivers only records which pass `where`. The log may leave out others: in the place
        of each run of them is a `LeftOut`. It need not, and so does each log that has nobody between the disk and the
        reader; the reader filters what it gets."""
        return self.read(channel, start)

    @abstractmethod
    async def latest_id(self, channel: str) -> bytes | None:
        """The id of the last acknowledged entry, None when there was none ever."""
        ...

    @abstractmethod
    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`, None when there is none yet. While a transaction
        is open there, the id may be one in it that has no entry: the entry lies behind it then, never before."""
        ...

    @abstractmethod
    async def truncate(self, channel: str, id: bytes) -> None:
        """Entries before `id` may be removed. A smaller id later is harmless."""
        ...

    @abstractmethod
    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        """Keep `id` and all after it from retention, for `holder`, durably, until it calls again; None removes the
        hold. Where space runs out because of it, writes are refused (`DiskPressure`), and no data is removed."""
        ...

    async def join(
        self,
        group: str,
        channels: Sequence[str],
        *,
        start: From = From.EARLIEST,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
        ack_timeout_s: float | None = None,
    ) -> GroupMember:
        """Become a member of a consumer group, made by its first member. The group's channels are assigned to its
        members, each channel to one member at a time; different groups each get everything.

        `channels` are names, or patterns with `*` that also match channels created later. A group without a position in
        a channel begins at `start`, in channels created after it joined always at the first entry. Where retention has
        cut the group off, it goes on at `reset_to`, and a metric counts it; None raises `PositionLost`. A member whose
        process sends no heartbeat for `session_timeout_s` seconds loses its channels. A batch that it holds for
        `ack_timeout_s` seconds without acknowledging it (None: for ever) is given back, as by `redeliver`; code that
        blocks the event loop does not use up that time. Raises `InvalidRequest` (a bad
        name, an ephemeral channel, a second group on a queue), `ChannelNotFound` for a name without `*`."""
        ...

    async def groups(self) -> list[GroupInfo]:
        """All consumer groups that have positions or members, by name."""
        ...

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        """Move a group's position in a channel that no member has now, and clear its metadata; a new group begins
        there. What lies before the position counts as done: in a queue it is removed. At a time (`FromTime`), entries
        without one that lie before the first that has one count as not before it: they are delivered. Raises
        `InvalidRequest` while a member has the channel, `PositionLost`, `ChannelNotFound`."""
        ...

    async def drop_group(self, group: str) -> None:
        """Forget the group's positions. Raises `InvalidRequest` while it has members. A missing group is
        fine."""
        ...

    async def close(self) -> None:
        """Finish what was submitted, end all readers, release everything. A second call does nothing. Every later
        call raises `Closed`."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
