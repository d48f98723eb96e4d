"""The StreamingNode as the other roles of its process find it: they call it directly, without the log between them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..runtime.errors import Unavailable
from ..runtime.groups.coordinator_client import GroupAcks
from ..runtime.log.record import Record, RecordType
from ..runtime.ownership import Appended, SyncPoint
from ..runtime.ownership.prepared import TransactionId


@dataclass(slots=True)
class WritePart:
    """What a door asks an owner to append: records of rows or of messages (`kind`), each with its pchannel. Rows fit
    the collection of this id and schema version, as the door knows it; of messages, delayed ones and what cancels
    these, they are the name and the id of their topic, and its epoch. `producer` and `pseq` are the client's.
    `channels` counts the pchannels of the whole write, of which this may be the part of one owner.

    A transaction has `participants`: what it writes to each collection and topic. Its `records` are those of all, which
    one owner appends at once or not at all, or each owner prepares for its channels; name, id, version and kind are
    then theirs. Its `acks`, of a member of a group, are stored in the same commit."""

    collection: str
    collection_id: int
    schema_version: int
    records: Sequence[tuple[str, Record]]
    producer: str
    pseq: int
    rows: int
    digest: int = 0
    channels: int = 0
    kind: RecordType = RecordType.ROWS
    participants: Sequence[WritePart] = ()
    acks: GroupAcks | None = None


class PChannelOwner(Protocol):
    """What the roles of a process ask of the owner of pchannels."""

    def append(self, part: WritePart) -> asyncio.Future[Appended]:
        """Append `part` as one batch, in the order of the calls. The future ends when it is durable. Raises, having
        changed nothing: `CollectionNotFound`, `TopicNotFound` and `InvalidRows` where the door's catalog is old,
        `Overloaded`, `Unavailable`, `OutcomeUnknown` where it would come behind a later one of its producer, and what
        `ChannelOwner.append` raises."""
        ...

    def prepare_part(self, part: WritePart, attempt: str) -> asyncio.Future[Appended]:
        """Prepare `part`, which is that of one owner of a transaction over several channels, as this attempt. The
        future ends when that is durable, with the timestamp of the PREPARE, or as `repeated` where it is written.
        Raises as `append` does, and what `ChannelOwner.prepare` raises."""
        ...

    async def settle(self, channels: Sequence[str], transaction: TransactionId) -> Appended:
        """The outcome of a transaction that is to be committed, once it is written to these channels. Raises
        `Unavailable`."""
        ...

    async def append_from(
        self, source: str, channel: str, records: Sequence[tuple[bytes, Record]], *, after: bytes
    ) -> bytes:
        """Append to a partition of a topic what a source has for it, as `ChannelOwner.append_from` does; returns the
        highest offset of the source that the partition has then. Without `records` that is the answer of an owner whose
        lease holds: for a partition that has ended it is final. Raises `TopicEpochEnded` where it is over and
        takes nothing, `PreconditionFailed`, `Unavailable`, and what `ChannelOwner.append_from` raises."""
        ...

    async def flush(self, collection_id: int, channels: Sequence[str]) -> int:
        """Ask the DataNode to store all that was acknowledged to these channels of a collection before this, and wait
        until it has; returns the timestamp up to which it has. Raises `CollectionNotFound`, and what is wrong with the
        tables."""
        ...

    async def sync(self, channels: Iterable[str], *, at: int = 0, exact: bool = False) -> SyncPoint:
        """The present time, or the first from `at` on, and the last acknowledged record of each of `channels` at or
        before it; `exact` as for `ChannelOwner.sync`. Raises `Unavailable`."""
        ...


class LocalOwner:
    """Which owner this process has, and which pchannels it has open: those that take appends now.

    It outlives the StreamingNode, which joins at its start and leaves when it ends, also after a crash. All pchannels
    are closed in between, so a role that waits for them gets the next owner.
    """

    def __init__(self) -> None:
        self.message_bytes: dict[str, int] = {}  # the open channels: how large a message of each may be
        self.granted: frozenset[str] = frozenset()  # the channels that the catalog says are this process'
        self._owner: PChannelOwner | None = None
        self._openings = 0
        self._opening: dict[str, int] = {}  # by the open channel: the number of the opening that it was in
        self._changed = asyncio.Event()

    @property
    def owner(self) -> PChannelOwner:
        """The owner. There is one while any channel is open. Raises `Unavailable` where there is none."""
        if self._owner is None:
            raise Unavailable("the StreamingNode of this process does not run now; retry")
        return self._owner

    @property
    def joined(self) -> bool:
        """Whether an owner runs."""
        return self._owner is not None

    def is_open(self, channels: Iterable[str]) -> bool:
        """Whether all of `channels` are open."""
        return all(channel in self.message_bytes for channel in channels)

    def terms(self, channels: Iterable[str]) -> Hashable | None:
        """None where not all of `channels` are open; otherwise a value that changes with each opening of one of them,
        as by a new owner or under a new term."""
        try:
            return tuple([self._opening[channel] for channel in channels])
        except KeyError:
            return None

    def changed(self) -> Coroutine[Any, Any, object]:
        """Wait until channels are opened or closed after this call: also where what it returns is awaited later."""
        return self._changed.wait()

    # ---- for the StreamingNode --------------------------------------------------------------------------------------

    def join(self, owner: PChannelOwner) -> None:
        """`owner` is that of this process from now on; it has nothing open yet."""
        self._owner = owner
        self.close_all()

    def belongs_to(self, owner: PChannelOwner) -> bool:
        """Whether `owner` is that of this process now."""
        return self._owner is owner

    def leave(self, owner: PChannelOwner) -> None:
        """`owner` ends: it takes nothing more."""
        if self.belongs_to(owner):
            self._owner = None
            self.close_all()

    def grant(self, channels: frozenset[str]) -> None:
        """The catalog says that these channels are this process'."""
        if channels != self.granted:
            self.granted = channels
            self.wake()

    def open(self, message_bytes: Mapping[str, int]) -> None:
        """These channels take appends from now on."""
        self._openings += 1
        self._opening.update(dict.fromkeys(message_bytes, self._openings))
        self.message_bytes.update(message_bytes)
        self.wake()

    def close(self, channels: Iterable[str]) -> None:
        """These channels take no appends until they are opened again."""
        for channel in channels:
            self.message_bytes.pop(channel, None)
            self._opening.pop(channel, None)
        self.wake()

    def close_all(self) -> None:
        """No channel takes appends until it is opened again."""
        self.message_bytes.clear()
        self._opening.clear()
        self.wake()

    def wake(self) -> None:
        """Something is to be looked at again by those who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
