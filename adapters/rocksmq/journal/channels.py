"""What the journal says about channels: a table that commits and recovery change by the same records.

Control records (msgpack lists in channel number 0 of a frame) create and drop channels, truncate, hold, move the
positions of consumer groups, note what other processes appended, count the owner's incarnations ("boots"), and snapshot
the whole table. Each segment begins with a snapshot, so no older segment is needed to know the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from struct import Struct
from typing import Any, cast

import msgpack

from ....runtime.errors import FormatTooNew, InvalidRequest
from ....runtime.groups.progress import Change, GroupProgress
from ....runtime.log.policy_codec import decode_policy, encode_policy
from ....runtime.log.wal import ChannelPolicy, Delivery, Payload
from .dedup_table import DedupTable
from .losses import Loss, Losses

ID_BYTES = 8
# Where an owner may have lost ids with its end, those of the next incarnation begin at `boot << INCARNATION_SHIFT`.
INCARNATION_SHIFT = 40
CHANNEL_BYTES = 64  # what a channel takes in a snapshot beside its name, at most ...
POSITION_BYTES = 16  # ... a group's position in a channel, beside the group's name
METADATA_BYTES = 3  # ... the metadata of a position, beside its length
SINGLE_ACK_BYTES = 10  # ... and each single acknowledgement
HOLD_BYTES = 11  # ... a hold, beside its name
LOSS_BYTES = 40

encode_id: Callable[[int], bytes] = Struct(">Q").pack  # the id of a number


def decode_id(id: bytes) -> int:
    """The number of an id. Raises `InvalidRequest` for bytes that are no id of a RocksMQ."""
    if len(id) != ID_BYTES:
        raise InvalidRequest(f"{id!r} is no message id of rocksmq: {ID_BYTES} bytes are expected")
    return int.from_bytes(id, "big")


@dataclass(slots=True)
class JournalledChannel:
    """The journalled facts of one channel. Ids are numbers; `floor` lies below the first id that it ever assigned."""

    number: int
    name: str
    policy: ChannelPolicy
    floor: int = 0
    last_id: int = 0
    max_timestamp: int = 0
    truncated_to: int = 0  # ids below may go
    holds: dict[str, int] = field(default_factory=dict[str, int])
    groups: dict[str, GroupProgress] = field(default_factory=dict[str, GroupProgress])
    losses: Losses = ()

    @property
    def size(self) -> int:
        """The bytes that it takes in a snapshot, about."""
        positions = sum([_position_bytes(group, progress) for group, progress in self.groups.items()])
        holds = sum([HOLD_BYTES + len(holder) for holder in self.holds])
        return CHANNEL_BYTES + len(self.name) + positions + holds + LOSS_BYTES * len(self.losses)


def _position_bytes(group: str, progress: GroupProgress | None) -> int:
    if progress is None:
        return 0
    metadata = METADATA_BYTES + len(progress.metadata) if progress.metadata else 0
    return POSITION_BYTES + len(group) + SINGLE_ACK_BYTES * len(progress.acked) + metadata


def _position(progress: GroupProgress) -> list[object]:
    """A position as the snapshot has it: without metadata where there is none."""
    position: list[object] = [progress.acked_to, runs_of_ids(progress.acked)]
    return [*position, progress.metadata] if progress.metadata else position


def create(state: JournalledChannel) -> bytes:
    """The control record that creates a channel."""
    return _pack("create", state.number, state.name, encode_policy(state.policy), state.floor)


def drop(number: int) -> bytes:
    """The control record that drops the channel with that number."""
    return _pack("drop", number)


def truncate(number: int, id: int) -> bytes:
    """The control record after which the channel's entries below `id` may be removed."""
    return _pack("truncate", number, id)


def hold(number: int, holder: str, id: int | None) -> bytes:
    """The control record of a hold on the entries from `id` on; None ends the holder's hold."""
    return _pack("hold", number, holder, id)


def acked(number: int, change: Change) -> bytes:
    """The control record of one change of a group's position in the channel with that number."""
    return _pack("acked", number, change.group, change.upto, change.ids, change.reset, change.metadata)


def forget(group: str) -> bytes:
    """The control record that removes a group's positions in all channels."""
    return _pack("forget", group)


def boot(number: int) -> bytes:
    """The control record that begins the owner's incarnation with that number."""
    return _pack("boot", number)


def _pack(*record: object) -> bytes:
    return cast(bytes, msgpack.packb(record))


class ChannelTable:
    """All channels as of one point in the journal."""

    def __init__(self) -> None:
        self.by_number: dict[int, JournalledChannel] = {}
        self.clients: DedupTable = DedupTable()
        self.next_number: int = 1
        self.boot: int = 0
        self.floor: int = 0  # no dropped channel ever assigned a higher id
        self.wall_ms: int = 0  # when the last snapshot was taken
        self.size: int = 0  # what all channels take in a snapshot, about; clients have limits of their own
        # the log's own time (`Ages` in `retention.py`): as of the snapshot; now, while the log is open
        self.log_ms: int = 0

    def apply(self, body: Payload) -> None:
        """Let one control record take effect. Raises `FormatTooNew` for one that this version does not know."""
        kind, *arguments = cast("list[Any]", msgpack.unpackb(body))
        effects: dict[str, Callable[..., None]] = {
            "create": self._create,
            "drop": self._drop,
            "truncate": self._truncate,
            "hold": self._hold,
            "acked": self._acked,
            "forget": self._forget,
            "wrote": self.clients.apply,
            "each": self.clients.apply_each,
            "boot": self._boot,
            "snapshot": self._restore,
        }
        effect = effects.get(kind)
        if effect is None:
            raise FormatTooNew(f"the journal has records of a kind that this Tidewal does not know: {kind!r}")
        effect(*arguments)

    def _create(self, number: int, name: str, policy: dict[str, Any], floor: int) -> None:
        known = self.by_number.get(number)  # a record that is read twice
        self.size -= 0 if known is None else known.size
        state = self.by_number[number] = JournalledChannel(number, name, decode_policy(policy), floor, last_id=floor)
        self.size += state.size
        self.next_number = max(self.next_number, number + 1)

    def _drop(self, number: int) -> None:
        gone = self.by_number.pop(number, None)
        if gone is not None:
            self.size -= gone.size
        if gone is not None and not gone.policy.ephemeral:
            self.floor = max(self.floor, gone.last_id)

    def _truncate(self, number: int, id: int) -> None:
        if (state := self.by_number.get(number)) is not None:
            state.truncated_to = max(state.truncated_to, id)

    def _hold(self, number: int, holder: str, id: int | None) -> None:
        if (state := self.by_number.get(number)) is None:
            return
        before = len(state.holds)
        if id is None:
            state.holds.pop(holder, None)
        else:
            state.holds[holder] = id
        self.size += (len(state.holds) - before) * (HOLD_BYTES + len(holder))

    def _acked(
        self,
        number: int,
        group: str,
        upto: bytes | None,
        ids: Sequence[bytes],
        reset: bool,
        metadata: bytes | None = None,  # records from before positions had metadata have none
    ) -> None:
        if (state := self.by_number.get(number)) is None:
            return
        known = state.groups.get(group)
        before = known or GroupProgress()
        after = replace(before, acked=before.acked.copy())  # a copy: other threads read the object
        after.apply(Change(group, state.name, upto, tuple(ids), reset, metadata))
        state.groups[group] = after
        self.size += _position_bytes(group, after) - _position_bytes(group, known)

    def _forget(self, group: str) -> None:
        for state in self.by_number.values():
            progress = state.groups.pop(group, None)
            self.size -= _position_bytes(group, progress)
            if progress is not None and state.policy.delivery is Delivery.QUEUE and progress.acked_to:
                self._truncate(state.number, decode_id(progress.acked_to) + 1)  # what a queue has delivered is gone

    def _boot(self, number: int) -> None:
        self.boot = max(self.boot, number)
        self.drop_temporary()

    def drop_temporary(self) -> None:
        """Drop the temporary channels: none outlives the owner's incarnation."""
        for number in [number for number, state in self.by_number.items() if state.policy.temporary]:
            self._drop(number)

    def advance(self, number: int, last_id: int, max_timestamp: int) -> None:
        """Note that the journal has entries of the channel up to `last_id`, with timestamps up to `max_timestamp`."""
        state = self.by_number.get(number)
        if state is not None:
            state.last_id = max(state.last_id, last_id)
            state.max_timestamp = max(state.max_timestamp, max_timestamp)

    def snapshot(self, wall_ms: int) -> bytes:
        """The record that begins a segment; `wall_ms` (wall clock, milliseconds) bounds the age of all before it."""
        policies: dict[ChannelPolicy, int] = {}
        channels = [
            [
                s.number,
                s.name,
                policies.setdefault(s.policy, len(policies)),
                s.floor,
                s.last_id,
                s.max_timestamp,
                s.truncated_to,
                s.holds,
                {group: _position(progress) for group, progress in s.groups.items()},
            ]
            for s in self.by_number.values()
        ]
        fields = {
            "next_number": self.next_number,
            "boot": self.boot,
            "floor": self.floor,
            "wall_ms": wall_ms,
            "log_ms": self.log_ms,
            "policies": [encode_policy(policy) for policy in policies],
            "channels": channels,
            "clients": self.clients.snapshot(),
            "losses": [[s.number, s.losses] for s in self.by_number.values() if s.losses],
        }
        return _pack("snapshot", fields)

    def _restore(self, fields: dict[str, Any]) -> None:
        """Also from snapshots without groups (or their metadata) and clients, in which each channel carries its own
        policy."""
        self.next_number, self.boot = fields["next_number"], fields["boot"]
        self.floor, self.wall_ms = fields["floor"], fields["wall_ms"]
        self.log_ms = fields.get("log_ms", self.wall_ms)
        policies = [decode_policy(policy) for policy in fields.get("policies", ())]
        self.by_number = {}
        for number, name, policy, floor, last_id, max_timestamp, truncated_to, holds, *groups in fields["channels"]:
            known = policies[policy] if isinstance(policy, int) else decode_policy(policy)
            state = JournalledChannel(number, name, known, floor, last_id, max_timestamp, truncated_to, holds)
            for group, (acked_to, runs, *metadata) in groups[0].items() if groups else ():
                state.groups[group] = GroupProgress(acked_to, set(ids_of_runs(runs)), *metadata)
            self.by_number[number] = state
        self.clients.restore(fields.get("clients", ()))
        for number, losses in fields.get("losses", ()):
            self.by_number[number].losses = tuple(Loss(*each) for each in losses)
        self.size = sum([state.size for state in self.by_number.values()])


def runs_of_ids(ids: Iterable[bytes]) -> list[int]:
    """Ids as runs without gaps: first and count, first and count, …"""
    runs: list[int] = []
    end = -1
    for number in sorted(decode_id(id) for id in ids):
        if number != end:
            runs += (number, 0)
        runs[-1] += 1
        end = number + 1
    return runs


def ids_of_runs(runs: Sequence[int]) -> Iterable[bytes]:
    """The ids of such runs."""
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        for number in range(first, first + count):
            yield encode_id(number)
