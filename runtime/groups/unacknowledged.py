"""What was delivered of one channel and is not acknowledged yet, in the order of the channel."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..errors import InvalidRequest
from ..log.wal import Delivered, Entry


class AckPlan(NamedTuple):
    """What to store: all ids ≤ `upto` are done (None: says nothing), and the single `ids` behind it. `batch` is the
    last id of the batch they were delivered with."""

    batch: bytes
    upto: bytes | None
    ids: tuple[bytes, ...]


class _Singles:
    """Which entries of one batch are done, where they are acknowledged one by one."""

    def __init__(self, entries: Sequence[Entry], done_to: bytes) -> None:
        self.order = [entry.id for entry in entries]
        self.known = frozenset(self.order)
        self.done: set[bytes] = set()
        self.prefix = bisect_right(self.order, done_to)  # the number of entries from the start that are done

    def left_of(self, ids: frozenset[bytes]) -> frozenset[bytes]:
        done_to = self.order[self.prefix - 1] if self.prefix else b""
        return frozenset(id for id in ids - self.done if id > done_to)

    def prefix_with(self, ids: Collection[bytes]) -> int:
        at = self.prefix
        while at < len(self.order) and (self.order[at] in ids or self.order[at] in self.done):
            at += 1
        return at


class _Batch:
    __slots__ = ("count", "singles", "through")

    def __init__(self, count: int, through: bytes) -> None:
        self.count = count  # of the entries that were delivered
        self.through = through  # the last id passed: behind what was delivered, entries may have been left out
        self.singles: _Singles | None = None


class Unacknowledged:
    """Turns acknowledgements, single ones too, into as few and as cumulative steps as they allow. Costs a little per
    batch, and per entry only where entries are acknowledged one by one."""

    def __init__(self, acked_to: bytes) -> None:
        self._batches: OrderedDict[bytes, _Batch] = OrderedDict()  # by the last id delivered
        self._done_to = acked_to  # everything up to here is done
        self._stored_to = acked_to  # up to here that is stored cumulatively

    def __len__(self) -> int:
        """How many batches are not done."""
        return len(self._batches)

    def is_done(self, id: bytes) -> bool:
        """Whether everything up to that entry is done."""
        return id <= self._done_to

    def delivered(self, entries: Sequence[Entry], through: bytes) -> None:
        """Note a batch, empty where everything up to `through` was done before and left out."""
        if entries:
            self._batches[entries[-1].id] = _Batch(len(entries), through)
        elif self._batches:
            next(reversed(self._batches.values())).through = through
        else:
            self._done_to = through

    def plan(self, delivered: Delivered, ids: Sequence[bytes] | None) -> AckPlan | None:
        """What to store for an acknowledgement of a batch or, without `ids`, of what was delivered up to the end of a
        part of one; None when it is stored already. Changes nothing. Raises `InvalidRequest` for ids that are not in
        `delivered`, and for ids of a part."""
        upto = delivered.entries[-1].id
        last, batch = self._batch_with(upto)
        if ids is None:
            if batch is None:
                return None
            return AckPlan(last, batch.through if upto == last else upto, ())
        if batch is not None and (upto != last or len(delivered.entries) != batch.count):
            raise InvalidRequest("single ids are acknowledged with the whole batch that they were delivered in")
        wanted = frozenset(ids)
        known = None if batch is None else batch.singles
        singles = known or _Singles(delivered.entries, self._done_to)
        if not wanted <= singles.known:
            raise InvalidRequest(f"an id to acknowledge was not delivered with this batch of {delivered.channel}")
        left = singles.left_of(wanted)
        if batch is None or not left:
            return None
        batch.singles = singles
        done = self._done_with(left)
        return AckPlan(last, done, tuple(sorted(id for id in left if done is None or id > done)))

    def _batch_with(self, id: bytes) -> tuple[bytes, _Batch | None]:
        """The batch that has the entry with that id, and its last id; None where all up to there is done."""
        batch = self._batches.get(id)
        if batch is not None or id <= self._done_to:
            return id, batch
        return next((item for item in self._batches.items() if item[0] > id), (id, None))

    def stored(self, plan: AckPlan) -> None:
        """Note that a plan took effect."""
        batch = self._batches.get(plan.batch)
        if plan.upto is not None:
            self._stored_to = max(self._stored_to, plan.upto)
            if batch is not None and plan.upto >= plan.batch:
                self._forget_to(batch.through)  # with what was left out behind it since this plan was made
            else:
                self._forget_to(plan.upto)
        if batch is not None and batch.singles is not None:
            batch.singles.done.update(plan.ids)
        done_to = self._done_with(())
        if done_to is not None:
            self._forget_to(done_to)

    def overdue(self) -> bytes | None:
        """The id up to which all is done though that was not stored cumulatively yet; None where it was."""
        return self._done_to if self._done_to > self._stored_to else None

    def _done_with(self, ids: Collection[bytes]) -> bytes | None:
        """Up to where all would be done with these ids; None for no further than is stored."""
        upto = self.overdue()
        for batch in self._batches.values():
            if batch.singles is None:
                break
            prefix = batch.singles.prefix_with(ids)
            if prefix < len(batch.singles.order):
                return batch.singles.order[prefix - 1] if prefix > batch.singles.prefix else upto
            upto = batch.through
        return upto

    def _forget_to(self, upto: bytes) -> None:
        self._done_to = max(self._done_to, upto)
        while self._batches:
            last, batch = next(iter(self._batches.items()))
            if batch.through > upto:
                singles = batch.singles
                while (
                    singles is not None
                    and singles.prefix < len(singles.order)
                    and (singles.order[singles.prefix] <= upto)
                ):
                    singles.prefix += 1
                return
            del self._batches[last]
