"""Ephemeral channels: in the memory of the process that created them, never in the store."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import count

from ...runtime.errors import PositionLost
from ...runtime.log.wal import ChannelPolicy, Entry, From, FromId, FromTime, Start
from .stored_channel import encode_id, id_before


class EphemeralChannel:
    """The last entries of a channel, `ephemeral_bytes` of its policy and little more. The caller holds the lock of the
    channels."""

    def __init__(self, name: str, policy: ChannelPolicy, created: bytes) -> None:
        self.name: str = name
        self.policy: ChannelPolicy = policy
        self.dropped: bool = False
        self.removed_to: bytes = created  # the id of the last entry that was forgotten, or one before all
        self.latest: bytes | None = None
        self._entries: list[Entry] = []
        self._bytes = 0

    @property
    def first_id(self) -> bytes | None:
        return self._entries[0].id if self._entries else None

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.latest = entry.id
        self._bytes += len(entry.payload)
        if self._bytes > self.policy.ephemeral_bytes:
            self._forget()

    def _forget(self) -> None:
        """Forget the oldest entries, and some more than needed, so that it does not happen at every append."""
        forgotten = 0
        while self._bytes > self.policy.ephemeral_bytes * 7 // 8 and forgotten < len(self._entries) - 1:
            self._bytes -= len(self._entries[forgotten].payload)
            forgotten += 1
        self._remove(forgotten)

    def remove_before(self, id: bytes) -> None:
        self._remove(bisect_left(self._entries, id, key=lambda entry: entry.id))

    def _remove(self, number: int) -> None:
        if number:
            self.removed_to = self._entries[number - 1].id
            del self._entries[:number]
            self._bytes = sum(len(entry.payload) for entry in self._entries)

    def behind(self, id: bytes, most: int) -> Sequence[Entry]:
        """The entries behind `id`, so many at most. What was forgotten is passed over."""
        at = bisect_right(self._entries, id, key=lambda entry: entry.id)
        return self._entries[at : at + most]

    def at(self, timestamp: int) -> bytes | None:
        """The id of the first entry with this timestamp or a later one."""
        return next((entry.id for entry in self._entries if entry.timestamp >= timestamp), None)

    def start(self, start: Start) -> bytes:
        """The id behind which a reader begins. Raises `PositionLost`."""
        end = self.latest or self.removed_to
        match start:
            case From.EARLIEST:
                return self.removed_to
            case From.LATEST:
                return end
            case FromTime(timestamp):
                found = self.at(timestamp)
                return end if found is None else id_before(found)
            case FromId(id, inclusive):
                at = bisect_left(self._entries, id, key=lambda entry: entry.id)
                if self._entries[at : at + 1] and self._entries[at].id == id:
                    return id_before(id) if inclusive else id
                if id == self.removed_to and not inclusive:
                    return id
                raise PositionLost(
                    f"channel {self.name} does not go on at {id.hex()}: it was forgotten, or never there",
                    requested=id,
                    first_available=self.first_id,
                    channel=self.name,
                )


class EphemeralIds:
    """The ids of the entries in a log's ephemeral channels, while one process has it open: they begin with the time at
    which it was opened, so they differ from those of other times, and ascend over these."""

    def __init__(self, opened_ms: int) -> None:
        self._opened_ms, self._numbers = opened_ms, count(1)

    def next(self) -> bytes:
        return encode_id(self._opened_ms, next(self._numbers))
