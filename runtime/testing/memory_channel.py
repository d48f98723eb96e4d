"""One channel of the memory WAL, and submits in flight to channels."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import PositionLost, TidewalError
from ..groups.progress import Change, GroupProgress
from ..log.wal import ChannelPolicy, Delivery, Entry, OnAppended
from ..loop_bridge import call_on


def sequence_id(sequence: int) -> bytes:
    """The id of the entry with this number in its channel."""
    return sequence.to_bytes(8, "big")


@dataclass(slots=True)
class MemoryChannel:
    """A list of entries; those before `first` were removed."""

    policy: ChannelPolicy
    entries: list[Entry] = field(default_factory=list[Entry])
    first: int = 1  # sequence of entries[0]
    size: int = 0  # bytes
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    holds: dict[str, bytes] = field(default_factory=dict[str, bytes])
    groups: dict[str, GroupProgress] = field(default_factory=dict[str, GroupProgress])
    dropped: bool = False

    @property
    def end(self) -> int:
        """The sequence that the next entry gets."""
        return self.first + len(self.entries)

    def add(self, payload: bytes, timestamp: int) -> bytes:
        """Append an entry and return its id."""
        id = sequence_id(self.end)
        self.entries.append(Entry(id, timestamp, payload))
        self.size += len(payload)
        if self.policy.ephemeral and self.size > self.policy.ephemeral_bytes:
            self._forget()
        return id

    def remove_before(self, id: bytes) -> None:
        """Remove the entries before `id`, as far as no hold keeps them."""
        keep = min([id, *self.holds.values()])
        self._remove(bisect.bisect_left(self.entries, keep, key=lambda entry: entry.id))

    def apply(self, change: Change) -> None:
        """Apply a step of a group, and remove the entries that the policy removes with it."""
        self.groups.setdefault(change.group, GroupProgress()).apply(change)
        if self.policy.delivery is not Delivery.KEEP:
            acked_to = min(progress.acked_to for progress in self.groups.values())
            self.remove_before(acked_to + b"\0")  # the least id behind it

    def lost(self, name: str, requested: bytes) -> PositionLost:
        """The error for a position that is not in the channel of that name."""
        first = sequence_id(self.first)
        return PositionLost(
            f"position {requested.hex()} is not in channel {name}, its first is {first.hex()}",
            requested=requested,
            first_available=first,
            channel=name,
        )

    def wake(self) -> None:
        """Let waiting readers look again; callable on any thread."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            _wake(waiter)

    def _forget(self) -> None:
        """Remove the oldest entries, and some more than needed, so that it does not happen at every append."""
        count, size = 0, self.size
        while size > self.policy.ephemeral_bytes * 7 // 8 and count < len(self.entries) - 1:
            size -= len(self.entries[count].payload)
            count += 1
        self._remove(count)

    def _remove(self, count: int) -> None:
        self.size -= sum(len(entry.payload) for entry in self.entries[:count])
        del self.entries[:count]
        self.first += count


def _wake(waiter: asyncio.Future[None]) -> None:
    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    call_on(waiter.get_loop(), wake)


@dataclass(slots=True)
class InflightSubmit:
    """Entries and steps of groups in flight, and their result: the entries' ids, or an error."""

    entries: list[tuple[MemoryChannel, bytes, int]]
    changes: list[tuple[MemoryChannel, Change]]
    done: OnAppended
    written: bool = True
    error: TidewalError | None = None


def write(queue: Sequence[InflightSubmit]) -> Callable[[], None]:
    """Write what is to be written, under the log's lock. Call the function that is returned without the lock: `done`
    may append."""
    answers: list[tuple[OnAppended, list[bytes] | TidewalError]] = []
    for submitted in queue:
        ids: list[bytes] = []
        if submitted.written:
            ids = [channel.add(payload, timestamp) for channel, payload, timestamp in submitted.entries]
            for channel, change in submitted.changes:
                channel.apply(change)
        for channel, _, _ in submitted.entries:
            channel.wake()
        answers.append((submitted.done, ids if submitted.error is None else submitted.error))

    def answer() -> None:
        for done, result in answers:
            done(result)

    return answer
