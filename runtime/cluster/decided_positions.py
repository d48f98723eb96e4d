"""Positions of groups that transactions have moved: a part of how these were decided, so a transaction's rows and
messages count with the positions that it acknowledges, or neither do.

    fence_position   group, channel,   only the group's member that has asked `author` for it may have transactions
                     author, gone,     move this position from now on. Positions of the channels `gone`, which were
                     gone_groups,      dropped, and of the groups `gone_groups` are forgotten, but for those of a group
                     tokens            that were fenced behind the first `tokens` fences: it has begun anew

A fence has a number, its token, that no other one has. A member asks for one once it has a channel and before its first
transaction there, and marks the position that its backend stores with the token, which the backend refuses where
another member has the channel by now. A member that gets a channel with such a mark asks for a fence as well, which
ends the token before it, and goes on behind what was decided under the token of the mark. So whichever comes first in
the log, a late transaction of the member before or the next member's fence, is known to both.

Without a mark nothing was decided that counts: to seek clears it, and so does a member that has gone on behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import Fenced, PreconditionFailed
from ..groups.coordinator_client import GroupAcks
from ..replicated.records import Event, typed

FENCE_POSITION = "fence_position"
POSITIONS_MAX = 10_000  # of a group in a channel, that transactions have moved
GONE_MAX = 100  # channels, and groups, that one fence has forgotten: it is one record


@dataclass(frozen=True, slots=True)
class DecidedPosition:
    """What transactions have done of one channel for one group. `token` is that of the last fence, `author` who has
    written it. Under the token `decided`, 0 for none, everything up to `upto` was acknowledged last, to be stored with
    that `metadata`."""

    token: int
    author: str
    decided: int = 0
    upto: bytes = b""
    metadata: bytes = b""


class PositionMove(NamedTuple):
    """A step of a group in a channel that a transaction makes under the `token` of a fence."""

    channel: str
    token: int
    upto: bytes
    metadata: bytes


class PositionMoves(NamedTuple):
    """What one transaction acknowledges for one group."""

    group: str
    moves: Sequence[PositionMove]

    @classmethod
    def of(cls, acks: GroupAcks) -> PositionMoves:
        """Acknowledgements that have tokens."""
        return cls(
            acks.group,
            [
                PositionMove(ack.channel, acks.tokens[ack.channel], ack.upto or b"", ack.metadata or b"")
                for ack in acks.acks
            ],
        )

    def to_wire(self) -> list[object]:
        """The form that msgpack can pack."""
        return [self.group, [list(move) for move in self.moves]]

    @classmethod
    def from_wire(cls, wire: Any) -> PositionMoves:
        """What `to_wire` has made. Raises `ValueError`, `TypeError` or `LookupError` for anything else."""
        group, moves = wire
        return cls(
            typed(group, str),
            [
                PositionMove(typed(channel, str), typed(token, int), typed(upto, bytes), typed(metadata, bytes))
                for channel, token, upto, metadata in moves
            ],
        )


class DecidedPositions:
    """The positions, as all that have read the same records know them."""

    def __init__(self) -> None:
        self._tokens = 0  # that were given
        self._positions: dict[tuple[str, str], DecidedPosition] = {}  # by group and channel

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def tokens(self) -> int:
        """How many fences there were."""
        return self._tokens

    @property
    def channels(self) -> set[str]:
        """Those in which a group has a position here."""
        return {channel for _, channel in self._positions}

    @property
    def groups(self) -> set[str]:
        """Those that have a position here."""
        return {group for group, _ in self._positions}

    def find(self, group: str, channel: str) -> DecidedPosition | None:
        """The position of a group in a channel; None where it was never fenced."""
        return self._positions.get((group, channel))

    def moved_since(self, before: DecidedPositions) -> dict[tuple[str, str], int]:
        """The token under which each position, by group and channel, was moved last, of those that transactions have
        moved since these positions were as they are in `before`."""
        known = {key: (each.decided, each.upto) for key, each in before._positions.items()}
        return {
            key: each.decided
            for key, each in self._positions.items()
            if each.decided and known.get(key) != (each.decided, each.upto)
        }

    def check(self, moves: PositionMoves) -> None:
        """Raise `Fenced` where one of the steps may not be made, now or ever: another fence has followed that of its
        token, or what it acknowledges was acknowledged under it before."""
        for move in moves.moves:
            found = self.find(moves.group, move.channel)
            over = found is None or found.token != move.token
            if over or (found is not None and found.decided == move.token and move.upto <= found.upto):
                raise Fenced(
                    f"group {moves.group} goes on in {move.channel} without this transaction, of which nothing is "
                    "written: what it was made from is delivered again, or was acknowledged before",
                    channel=move.channel,
                    term=move.token,
                    group=moves.group,
                )

    def move(self, moves: PositionMoves) -> None:
        """Make the steps of a transaction that is committed. Raises `PreconditionFailed` where one may not be made, and
        changes nothing then."""
        try:
            self.check(moves)
        except Fenced as error:
            raise PreconditionFailed(error.message) from None
        for channel, token, upto, metadata in moves.moves:
            key = moves.group, channel
            self._positions[key] = replace(self._positions[key], decided=token, upto=upto, metadata=metadata)

    def fence(self, event: Event) -> None:
        """Apply a fence. Raises `PreconditionFailed` where there are too many positions."""
        key = typed(event["group"], str), typed(event["channel"], str)
        author = typed(event["author"], str)
        gone, gone_groups = ({typed(name, str) for name in event[kind]} for kind in ("gone", "gone_groups"))
        self._forget(gone, gone_groups, typed(event["tokens"], int))
        found = self._positions.get(key)
        if found is None and len(self._positions) >= POSITIONS_MAX:
            raise PreconditionFailed(f"transactions have moved {POSITIONS_MAX} positions of groups")
        self._tokens += 1
        before = found or DecidedPosition(0, "")
        self._positions[key] = replace(before, token=self._tokens, author=author)

    def _forget(self, channels: Collection[str], groups: Collection[str], tokens: int) -> None:
        for (group, channel), position in list(self._positions.items()):
            if channel in channels or (group in groups and position.token <= tokens):
                del self._positions[group, channel]

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def to_wire(self) -> dict[str, Any]:
        """The form that msgpack can pack."""
        positions = [
            [group, channel, each.token, each.author, each.decided, each.upto, each.metadata]
            for (group, channel), each in self._positions.items()
        ]
        return {"tokens": self._tokens, "positions": positions}

    @classmethod
    def from_wire(cls, wire: Any) -> DecidedPositions:
        """The positions of a wire form. Raises `ValueError`, `TypeError` or `LookupError` for a malformed one."""
        found = cls()
        found._tokens = typed(wire["tokens"], int)
        for group, channel, token, author, decided, upto, metadata in wire["positions"]:
            found._positions[typed(group, str), typed(channel, str)] = DecidedPosition(
                typed(token, int),
                typed(author, str),
                typed(decided, int),
                typed(upto, bytes),
                typed(metadata, bytes),
            )
        return found


def cluster_with_ids(snapshot: Any, id_in: Callable[[str, bytes], bytes]) -> Any:
    """A snapshot of the cluster's state with the ids of another log in its positions: `id_in` returns that of an id in
    a channel. What was fenced in this log moves none there: a commit that comes so late has ids of this log."""
    transactions = snapshot.get("transactions")
    if transactions is None or "positions" not in transactions:
        return snapshot
    positions = [
        [group, channel, 0, *rest, id_in(channel, upto) if upto else b"", metadata]
        for group, channel, _token, *rest, upto, metadata in transactions["positions"]["positions"]
    ]
    moved = {**transactions["positions"], "positions": positions}
    return {**snapshot, "transactions": {**transactions, "positions": moved}}


def position_fence(
    group: str, channel: str, author: str, gone: Collection[str], gone_groups: Collection[str], tokens: int
) -> Event:
    """The event of a fence. `author` is a name that no other fence has, and `tokens` how many fences were known before
    the groups were looked up of which `gone_groups` are gone. Of what is gone it has up to `GONE_MAX` names of a kind:
    the next ones have the others."""
    return {
        "kind": FENCE_POSITION,
        "group": group,
        "channel": channel,
        "author": author,
        "gone": sorted(gone)[:GONE_MAX],
        "gone_groups": sorted(gone_groups)[:GONE_MAX],
        "tokens": tokens,
    }
