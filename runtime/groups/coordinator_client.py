"""How a group's member talks to the coordinator, which may run in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

from ..log.wal import Append, From, GroupInfo
from ..replicated.records import typed


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", typed(value, list))


class Ack(NamedTuple):
    """What is done of one channel, under the assignment epoch of its delivery: all ids ≤ `upto` (None: says nothing),
    and the single `ids`. `metadata` is stored with the position; None leaves what is stored there."""

    channel: str
    assignment_epoch: int
    upto: bytes | None
    ids: tuple[bytes, ...] = ()
    metadata: bytes | None = None

    @classmethod
    def from_wire(cls, wire: Any) -> Ack:
        """The one of these fields in a list. Raises one of `DECODE_ERRORS` for anything else."""
        channel, epoch, upto, ids, *rest = _list(wire)  # records from before positions had metadata end here
        (metadata,) = rest or (None,)
        return cls(
            typed(channel, str),
            typed(epoch, int),
            None if upto is None else typed(upto, bytes),
            tuple(typed(id, bytes) for id in _list(ids)),
            None if metadata is None else typed(metadata, bytes),
        )


class GroupAcks(NamedTuple):
    """What one member of a group has done, of several channels perhaps. `tokens` are those of the fences under which a
    transaction moves the position of each channel (`cluster/decided_positions.py`); without any, the log stores the
    positions in one commit with the transaction."""

    group: str
    member: str
    acks: Sequence[Ack]
    tokens: Mapping[str, int] = MappingProxyType({})

    def to_wire(self) -> list[object]:
        """As a request has it."""
        acks = [[*ack[:3], list(ack.ids), ack.metadata] for ack in self.acks]
        return [self.group, self.member, acks, dict(self.tokens)]

    @classmethod
    def from_wire(cls, wire: Any) -> GroupAcks:
        """What `to_wire` has made. Raises one of `DECODE_ERRORS` for anything else."""
        group, member, wire_acks, tokens = wire
        acks = [Ack.from_wire(ack) for ack in _list(wire_acks)]
        named = cast("dict[Any, Any]", typed(tokens, dict))
        known = {typed(channel, str): typed(token, int) for channel, token in named.items()}
        if known and any(ack.channel not in known or not ack.upto or ack.metadata is None or ack.ids for ack in acks):
            raise ValueError("an acknowledgement without a token, or one of single entries")
        return cls(typed(group, str), typed(member, str), acks, known)


@dataclass(frozen=True, slots=True)
class AssignedChannel:
    """One channel that a member has. In a new assignment epoch the member starts behind `acked_to` (b"": before all
    ids) and leaves out the entries in `acked`; `metadata` is what is stored with the position then."""

    epoch: int
    acked_to: bytes
    acked: frozenset[bytes]
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class MemberAssignment:
    """The channels that a member has. Versions grow, over the incarnations of the log's owner too. The channels in
    `revoking` (all of them are in `held` as well) are to be released once everything delivered of them is acknowledged.
    """

    version: int
    held: Mapping[str, AssignedChannel] = field(default_factory=dict[str, AssignedChannel])
    revoking: frozenset[str] = frozenset()


class CoordinatorClient(Protocol):
    """What a backend does for consumer groups: the coordinator's calls as coroutines; its errors come through. Every
    method may raise `Unavailable` when the owner of the log is gone (`outcome_unknown` where something may have
    happened), and `Closed` once the log is closed.
    """

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        """Become a member, and keep the session alive from then on, on a thread that a busy loop cannot starve. The
        same member may join again: its channels are taken from it first. Raises what `Wal.join` raises for names,
        channels and timeouts."""
        ...

    async def assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        """The channels that the member has now; with `seen`, wait up to `wait_s` seconds for a version other than
        `seen`. Raises `Fenced` for an unknown member."""
        ...

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        """Append the outputs and store what is done, with its metadata, together or not at all. Returns the outputs'
        ids. Raises `Fenced` for an assignment epoch that is over, and what appending raises."""
        ...

    async def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        """End the assignment epoch. Once all that was begun under it is decided the channel goes, from its position
        then, to its target: under a new epoch to this member, unless the channel is being revoked. An epoch that is
        over already is fine."""
        ...

    async def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes) -> None:
        """Move the position, backward too; the member gets the channel again under a new assignment epoch. Raises
        `Fenced`."""
        ...

    async def leave(self, group: str, member: str) -> None:
        """End the session; the other members get the channels at once. An unknown member is fine."""
        ...

    async def groups(self) -> list[GroupInfo]:
        """`Wal.groups`."""
        ...

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        """`Wal.seek_group`, to the position `upto`, the last id that counts as done; b"" for the one before the first
        entry that is kept."""
        ...

    async def drop_group(self, group: str) -> None:
        """`Wal.drop_group`."""
        ...
