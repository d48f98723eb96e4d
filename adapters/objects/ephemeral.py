"""The entries of ephemeral channels: in the memory of the process that owns the log, never in the store."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Final

from ...runtime.errors import PositionLost
from ...runtime.log.wal import Append, ChannelPolicy, Entry, From, FromId, FromTime, Start
from .log_state import LogState
from .stored_channel import StoredChannel, encode_id, id_before

READ_ENTRIES: Final = 256  # what a reader gets at once,
READ_BYTES: Final = 2 * 1024 * 1024  # ... or so much, and one entry at least
FIRST_EPOCH: Final = 1 << 63  # in the place of the epoch, ids of ephemeral entries have it more than those in the store


class EphemeralChannel:
    """The last entries of a channel, `ephemeral_bytes` of its policy and little more."""

    def __init__(self, name: str, policy: ChannelPolicy, created: bytes) -> None:
        self.name: str = name
        self.policy: ChannelPolicy = policy
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

    def behind(self, id: bytes) -> Sequence[Entry]:
        """The next entries behind `id`, as many as a reader gets at once. What was forgotten is passed over."""
        at = bisect_right(self._entries, id, key=lambda entry: entry.id)
        found = self._entries[at : at + READ_ENTRIES]
        sizes = accumulate(len(entry.payload) for entry in found)
        return found[: max(1, bisect_right(list(sizes), READ_BYTES))]

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
                if id < self.removed_to or (id == self.removed_to and not inclusive):
                    return self.removed_to  # as a reader that falls behind: what was forgotten is passed over
                raise PositionLost(
                    f"channel {self.name} does not go on at {id.hex()}: it was forgotten, or never there",
                    requested=id,
                    first_available=self.first_id,
                    channel=self.name,
                )


class EphemeralChannels:
    """The entries of all ephemeral channels, at the process that owns the log. They are lost with its epoch; their ids
    ascend over epochs, and no entry of the store has one of them. All belongs to the loop of the log."""

    def __init__(self, added: Callable[[], None]) -> None:
        """`added` is called after each append."""
        self._added = added
        self._channels: dict[int, EphemeralChannel] = {}
        self._epoch = 0
        self._numbers = count(1)

    def begin(self, epoch: int) -> None:
        """This process owns the log in `epoch`. What it had in an earlier one is lost."""
        self._epoch, self._numbers = epoch, count(1)
        self._channels.clear()

    def of(self, channel: StoredChannel) -> EphemeralChannel:
        """The entries of a channel of the log's state."""
        found = self._channels.get(channel.number)
        if found is None:
            began = encode_id(FIRST_EPOCH + self._epoch, 0)
            found = self._channels[channel.number] = EphemeralChannel(channel.name, channel.policy, began)
        return found

    def append(self, channel: StoredChannel, entry: Append) -> bytes:
        """Append an entry; its id. It is not kept where the channel was dropped while the entry waited for a block."""
        id = encode_id(FIRST_EPOCH + self._epoch, next(self._numbers))
        if not channel.dropped:
            self.of(channel).add(Entry(id, entry.timestamp, bytes(entry.payload)))
            self._added()
        return id

    def forget(self, state: LogState) -> None:
        """Forget the entries of channels that were dropped."""
        for number in [number for number in self._channels if state.channel(number) is None]:
            del self._channels[number]
