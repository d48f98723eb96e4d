"""How transactions over several pchannels were decided: a part of the state of the cluster's members, so all nodes read
the same, and the first decision of an attempt counts.

    decide    transaction, ts,          the attempt [producer, pseq, attempt] is committed at `ts`, or the first free
              channels, began,          timestamp behind it, in these pchannels, or with `ts` 0 aborted. A commit counts
              positions                 unless the attempt is decided, another one of the same write is committed,
                                        `KEPT` decisions or more were made since its author, which counted `began` of
                                        them then, has begun it, or it moves `positions` of a group that it may not
                                        move any more (`decided_positions.py`)
    written   incarnation, channels     by pchannel the transactions that a member, their owner, has written there

A commit is open until all its channels have it, whoever owns them then. What is closed is kept until `KEPT` decisions
were made since: a late commit of an attempt that was aborted does not count before, and was begun too long ago then.
Who asks later asks the owners, which know what is written.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import PreconditionFailed
from ..ownership.prepared import TransactionId
from ..replicated.records import Event, typed
from .decided_positions import DecidedPositions, PositionMoves

TRANSACTIONS_LEVEL = 2  # the feature level from which members know these records
DECIDE, WRITTEN = "decide", "written"
KEPT = 4_096  # decisions for which one that is closed is kept


@dataclass(slots=True)
class TransactionDecision:
    """A decision: the timestamp of a commit, 0 for an abort; and the pchannels that do not have it yet."""

    ts: int
    channels: set[str]


class _Closed(NamedTuple):
    """A decision that nothing waits for any more: its timestamp, and how many were made when it was closed."""

    ts: int
    made: int


class TransactionDecisions:
    """The decisions, as all that have read the same records know them. `count` is how many were made, `positions` are
    those of groups that committed transactions have moved."""

    def __init__(self) -> None:
        self.count: int = 0
        self.positions: DecidedPositions = DecidedPositions()
        self._open: dict[TransactionId, TransactionDecision] = {}
        self._closed: OrderedDict[TransactionId, _Closed] = OrderedDict()
        self._committed: set[tuple[str, int]] = set()  # writes of which an attempt is

    def __len__(self) -> int:
        return len(self._open) + len(self._closed)

    def find(self, transaction: TransactionId) -> int | None:
        """The timestamp at which the attempt is committed, 0 where it is aborted; None where that is not decided."""
        found = self._open.get(transaction) or self._closed.get(transaction)
        return None if found is None else found.ts

    def outcome_of(self, transaction: TransactionId) -> int | None:
        """The same, where it may be decided by another attempt of the same write: then this one is aborted."""
        found = self.find(transaction)
        return 0 if found is None and transaction[:2] in self._committed else found

    def is_committed(self, producer: str, pseq: int) -> bool:
        """Whether an attempt of that write is known to be committed."""
        return (producer, pseq) in self._committed

    def unwritten(self, channel: str) -> list[TransactionId]:
        """The transactions of which it is not known here that `channel` has what they write."""
        return [id for id, decision in self._open.items() if channel in decision.channels]

    @property
    def awaited_channels(self) -> set[str]:
        """The channels that are not known to have all that is committed for them."""
        return set[str]().union(*(decision.channels for decision in self._open.values()))

    @property
    def used(self) -> bool:
        """Whether anything was decided, or is to be."""
        return bool(self.count or len(self.positions))

    @property
    def latest(self) -> int:
        """The highest timestamp of a commit that is known; 0 for none."""
        return max((each.ts for each in (*self._open.values(), *self._closed.values())), default=0)

    @property
    def open(self) -> int:
        """How many commits are not known to be in all their channels."""
        return len(self._open)

    # ---- events -----------------------------------------------------------------------------------------------------

    def decide(self, event: Event) -> None:
        """Apply a decision. Raises `PreconditionFailed` where it does not count."""
        id, ts, began = _id(event["transaction"]), typed(event["ts"], int), typed(event["began"], int)
        channels = {typed(channel, str) for channel in event["channels"]}
        if self.find(id) is not None:
            raise PreconditionFailed(f"{id} is decided already")
        if ts and id[:2] in self._committed:
            raise PreconditionFailed(f"another attempt of {id} is committed")
        if ts and (self.count - began >= KEPT or not channels):
            raise PreconditionFailed(f"{id} was begun too long ago: it may have been aborted")
        if ts and (moves := event.get("positions")) is not None:
            self.positions.move(PositionMoves.from_wire(moves))
        self.count += 1
        self._forget()
        if ts:
            ts = self._unused(ts)
            self._committed.add(id[:2])
            self._open[id] = TransactionDecision(ts, channels)
        else:
            self._close(id, 0)

    def _unused(self, ts: int) -> int:
        """The first timestamp from `ts` on that no open commit has: two at one time in one channel were no order, and
        readers that have the first would take the second for late. A closed one lies below all that is undecided in its
        channels."""
        used = {decision.ts for decision in self._open.values()}
        while ts in used:
            ts += 1
        return ts

    def written(self, event: Event) -> None:
        """Apply what owners say is written."""
        for channel, wire in event["channels"].items():
            for id in map(_id, wire):
                decision = self._open.get(id)
                if decision is not None:
                    decision.channels.discard(channel)
                    if not decision.channels:
                        del self._open[id]
                        self._close(id, decision.ts)

    def _close(self, id: TransactionId, ts: int) -> None:
        self._closed[id] = _Closed(ts, self.count)
        self._forget()

    def _forget(self) -> None:
        """Forget what no commit can contradict any more: one that was begun before it does not count. That many were
        closed since says nothing of that: they may have been decided before."""
        while self._closed and next(iter(self._closed.values())).made <= self.count - KEPT:
            gone, decision = self._closed.popitem(last=False)
            if decision.ts:
                self._committed.discard(gone[:2])

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def to_wire(self) -> dict[str, Any]:
        """The form that msgpack can pack."""
        return {
            "count": self.count,
            "open": [(list(id), each.ts, sorted(each.channels)) for id, each in self._open.items()],
            "closed": [(list(id), *decision) for id, decision in self._closed.items()],
            "positions": self.positions.to_wire(),
        }

    @classmethod
    def from_wire(cls, wire: Any) -> TransactionDecisions:
        """The decisions of a wire form. Raises `ValueError`, `TypeError` or `LookupError` for a malformed one."""
        found = cls()
        found.count = typed(wire["count"], int)
        for id, ts, channels in wire["open"]:
            found._open[_id(id)] = TransactionDecision(typed(ts, int), {typed(channel, str) for channel in channels})
        for id, ts, made in wire["closed"]:
            found._closed[_id(id)] = _Closed(typed(ts, int), typed(made, int))
        for id, decision in (*found._open.items(), *found._closed.items()):
            if decision.ts:
                found._committed.add(id[:2])
        if (positions := wire.get("positions")) is not None:
            found.positions = DecidedPositions.from_wire(positions)
        return found


def _id(wire: Any) -> TransactionId:
    producer, pseq, attempt = wire
    return TransactionId(typed(producer, str), typed(pseq, int), typed(attempt, str))


def decided(
    transaction: TransactionId, ts: int, channels: list[str], began: int, positions: PositionMoves | None = None
) -> Event:
    """The event of a decision."""
    event: Event = {"kind": DECIDE, "transaction": list(transaction), "ts": ts, "channels": channels, "began": began}
    return event if positions is None else {**event, "positions": positions.to_wire()}
