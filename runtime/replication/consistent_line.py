"""One line across the channels of a replica of a log of nodes: all that was said up to one time, and nothing else.

The channels of a replica end at different times. What a promotion without the source goes on from is the last line that
a replicator has drawn, and saved in the replica: its time, up to which the owners of all channels have promised that
they are complete, the states of the nodes, and where groups stood before.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..clock import MAX_TIMESTAMP
from ..errors import CorruptLog
from ..log.names import Names
from ..log.policy_codec import decode_policy, encode_policy
from ..log.record import TIMELESS_TYPES, read_header
from ..log.wal import ChannelPolicy, Entry, FromId, Wal
from ..migration.group_positions import GroupPosition
from ..streams.channel_reader import Granted
from ..streams.stream_base import reading
from .replicated_node import DISORDER

ABOVE = b"\xff" * 64
"""In the place of an id, in a saved state: the replica did not have that entry yet. It lies behind all others."""


@dataclass(frozen=True, slots=True)
class StoredState:
    """A replicated state as of a line: the policy of its channel, and timestamps and payloads of the entries that a
    channel of this state has where they are all that it has."""

    policy: ChannelPolicy
    entries: Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class ConsistentLine:
    """`time` is that of the line. `ends` has the channels of nodes, and the last entry of each that the replica had
    when the line was drawn, b"" for none: of these, what lies above the time (`time_of`) is not of the line, nor what
    came since; `ends_in_source` are the same entries there. Others whose names begin with `prefix`, as those of nodes
    do, came above it, or are being removed. Programs' channels have no such time. `states` are those of the nodes, by
    channel, with ids of the replica, and `groups` the positions in the replica that groups had before the line, with
    what is stored there, by group and channel."""

    time: int
    prefix: str
    ends: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    ends_in_source: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    states: Mapping[str, StoredState] = field(default_factory=dict[str, StoredState])
    groups: Mapping[str, Mapping[str, GroupPosition]] = field(default_factory=dict[str, "Mapping[str, GroupPosition]"])

    def is_of_nodes(self, channel: str) -> bool:
        """Whether nodes own or write the channel: it is not of the line where it is not in `ends`."""
        return channel in self.ends or channel.startswith(self.prefix)

    def time_of(self, channel: str) -> int:
        """Above which time what a channel of `ends` has is not of the line. Dead letters of groups all are: members
        stamp them by clocks of their own, and what they tell of is acknowledged."""
        letters = Names(self.prefix.removesuffix("-")).group_dead_letters
        return MAX_TIMESTAMP if channel == letters else self.time

    def to_wire(self) -> dict[str, Any]:
        """The wire form, for JSON."""
        return {
            "time": self.time,
            "prefix": self.prefix,
            "ends": {name: id.hex() for name, id in self.ends.items()},
            "ends_in_source": {name: id.hex() for name, id in self.ends_in_source.items()},
            "states": {
                name: [
                    encode_policy(state.policy),
                    [[time, b64encode(payload).decode()] for time, payload in state.entries],
                ]
                for name, state in self.states.items()
            },
            "groups": {
                group: {name: [each.id.hex(), each.metadata.hex()] for name, each in positions.items()}
                for group, positions in self.groups.items()
            },
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ConsistentLine | None:
        """The line of a wire form that `to_wire` returned, None for an empty one. Raises `CorruptLog` for others."""
        if not wire:
            return None
        try:
            return cls(
                int(wire["time"]),
                str(wire["prefix"]),
                {name: bytes.fromhex(id) for name, id in wire["ends"].items()},
                {name: bytes.fromhex(id) for name, id in wire["ends_in_source"].items()},
                {
                    name: StoredState(
                        decode_policy(policy), [(int(time), b64decode(payload)) for time, payload in entries]
                    )
                    for name, (policy, entries) in wire["states"].items()
                },
                {
                    group: {name: GroupPosition(*map(bytes.fromhex, each)) for name, each in positions.items()}
                    for group, positions in wire["groups"].items()
                },
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptLog(f"the line of a replica cannot be read: {error!r}") from error


class LineEnd:
    """Finds where a channel of nodes leaves a line, reading it in order from any entry below on.

    An owner stamps in the order of its channel, but for what says nothing of time, and what it writes behind the fence
    of the next owner does not count. So the first record above `time` that counts, and says something of time, is not
    of the line, nor is what lies behind it, or just before it above the time: all else is. `granted` are the grants of
    the channel, for its owners' records alone to count; None where these are not known, or where it has none."""

    def __init__(self, time: int, granted: Granted | None) -> None:
        self.time: int = time
        self._granted = granted
        self._last: tuple[int, int] | None = None  # the highest (term, cseq)
        self.first_above: bytes | None = None  # the id of the first entry that is not of the line, as far as was read

    def read(self, entry: Entry) -> bool:
        """Take the next entry. Whether it is known where the channel leaves the line."""
        header = read_header(entry.payload)
        if header is None:
            return False
        kind, ts, term, cseq = header[:4]
        if not self._counts(entry.id, ts, term, cseq):
            return False
        if ts > self.time:
            self.first_above = self.first_above or entry.id
            return kind not in TIMELESS_TYPES
        if kind not in TIMELESS_TYPES:
            self.first_above = None
        return False

    def _counts(self, id: bytes, ts: int, term: int, cseq: int) -> bool:
        granted = self._granted
        if self._last is None:
            fences: Mapping[int, bytes] = {} if granted is None else granted.fences
            self._last = max((each for each, fence in fences.items() if fence <= id), default=0), 0
        if granted is not None and (not granted.covers(term, ts) or id < granted.fences.get(term, b"")):
            return False
        if term and (term, cseq) <= self._last:
            return False
        self._last = max(self._last, (term, cseq))
        return True


async def first_above(wal: Wal, channel: str, line: LineEnd, latest: bytes) -> bytes | None:
    """The id of the first entry of a channel, up to `latest`, that is not of the line; None for none."""
    start = await wal.id_at(channel, max(0, line.time - DISORDER))
    if start is None or start > latest:
        return None
    async with reading(wal, channel, FromId(start, inclusive=True)) as batches:
        async for entries in batches:
            for entry in entries:
                if entry.id > latest or line.read(entry):
                    return line.first_above
            if entries[-1].id >= latest:
                break
    return line.first_above
