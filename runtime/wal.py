"""The WAL interface: what Tidewal asks of a log, one page.

A WAL holds *channels*, each a totally ordered sequence of entries. Who calls: the channel writers append, the channel
readers read, the roles manage channels. Adapters are found by URL scheme through the entry-point group `tidewal.wal`
(`runtime/factory.py`). Message ids are opaque bytes that sort like their order in the channel.

Foreign exceptions never pass this seam: an adapter raises the errors of `runtime/errors.py` only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from .errors import TidewalError

Payload: TypeAlias = bytes | bytearray | memoryview


class Durability(Enum):
    """When an append is acknowledged."""

    ALL = "all"  # synced to disk, or replicated as the backend's policy asks
    ONE = "one"  # written, not synced
    NONE = "none"  # handed over


@dataclass(frozen=True, slots=True)
class ChannelPolicy:
    """How a channel keeps what it is given.

    An ephemeral channel lives in memory, never touches the disk, and forgets its oldest entries over
    `ephemeral_bytes`; a reader that falls behind continues at the oldest entry there is.
    `retention_s` and `retention_bytes` of None keep everything.
    """

    ephemeral: bool = False
    acks: Durability = Durability.ALL
    retention_s: float | None = 14 * 24 * 3600.0
    retention_bytes: int | None = None
    max_message_bytes: int = 5 * 1024 * 1024
    ephemeral_bytes: int = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ChannelInfo:
    """What `describe` tells of a channel. Ids are None while it is empty."""

    name: str
    policy: ChannelPolicy
    first_id: bytes | None
    latest_id: bytes | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; what it lacks is declared, not emulated badly."""

    atomic_batches: bool  # one `submit` over several channels is all or nothing
    seek_by_time: bool
    truncate: bool
    multi_process_write: bool


class Append(NamedTuple):
    """One entry to write: `timestamp` is its hybrid timestamp, kept as the key of seeking by time (0: none)."""

    channel: str
    payload: Payload
    timestamp: int = 0


class Entry(NamedTuple):
    """One entry as read. `payload` may be shared with other readers: never write into it."""

    id: bytes
    timestamp: int
    payload: bytes | memoryview


class From(Enum):
    """Where to start reading when there is no position."""

    EARLIEST = "earliest"
    LATEST = "latest"  # only what is appended after the reader opened


@dataclass(frozen=True, slots=True)
class FromId:
    """Start at a message id, with it or just behind it."""

    id: bytes
    inclusive: bool = False


@dataclass(frozen=True, slots=True)
class FromTime:
    """Start at or before the first entry whose timestamp is ≥ `timestamp`; readers drop what is below."""

    timestamp: int


Start: TypeAlias = From | FromId | FromTime

OnAppended: TypeAlias = Callable[[list[bytes] | TidewalError], None]


class Wal(Protocol):
    """An open log. All coroutines may be cancelled at any time without harm to the log."""

    @property
    def name(self) -> str:
        """The scheme of the backend ("rocksmq"), written into every position."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        """Make the channel durable under that policy. The same name and policy again is fine; another policy raises
        `ChannelExists`. A name is 1-250 characters of `[A-Za-z0-9._-]`, else `InvalidRequest`."""
        ...

    async def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        ...

    async def describe(self, channel: str) -> ChannelInfo:
        """Raises `ChannelNotFound`."""
        ...

    async def drop_channel(self, channel: str) -> None:
        """Remove the channel and its entries; its readers end with `ChannelNotFound`. Absent is fine."""
        ...

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """Queue entries for one commit. Callable from any thread, never blocks; the order of the calls is the order
        of the log. `done` is called once, on a thread of the backend's choosing, with the ids in order when the
        channels' durability is reached, or with the error: a `TidewalError` whose `outcome_unknown` field is set when
        the entries may still be there. With `capabilities.atomic_batches` all entries appear or none.

        Raises at once, having queued nothing: `MessageTooLarge`, `ChannelNotFound`, `Closed`, `JournalFailed`,
        `DiskPressure`, `Overloaded` (`limit` "pending_bytes": too much waits for the backend already; retry after a
        pause), `NotYetSupported` (a process that may only read)."""
        ...

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        """Append one entry and return its id once it is as durable as the channel's policy says."""
        ...

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        """Append entries in one commit; ids in order. One future for all, so prefer it to many `append`s."""
        ...

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        """Entries from `start` on, in order and without gaps, in non-empty batches, for ever: at the end it waits for
        more. The start is fixed when the iterator is first awaited (for `From.LATEST`: entries appended after that).
        Ends (no error) when the WAL is closed. Raises `ChannelNotFound`, and `PositionLost(requested,
        first_available)` when retention has removed what comes next or the id is past the end. Close it with
        `aclose()`. Memory held for a slow reader is bounded: history is read from storage in small pieces."""
        ...

    async def latest_id(self, channel: str) -> bytes | None:
        """The id of the last acknowledged entry, None when there was none ever."""
        ...

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`, None when there is none yet."""
        ...

    async def truncate(self, channel: str, id: bytes) -> None:
        """Entries before `id` may be removed. A smaller id later is harmless."""
        ...

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        """Retention keeps `id` and all after it for `holder`, durably, until it moves on; None lets go. Where space
        runs out because of it, writes are refused (`DiskPressure`), never data removed."""
        ...

    async def close(self) -> None:
        """Finish what was submitted, end all readers, release everything. A second call does nothing. Every later
        call raises `Closed`."""
        ...
