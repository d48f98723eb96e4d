"""The pending messages that are due first, in bounded memory."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Set
from typing import Final

from .delayed import DelayedId, DelayedMessage
from .pending import OVERHEAD_BYTES, DelayedPlace, Pending, Stored, pending_of

BUFFER_BYTES: Final = 64 * 1024 * 1024


class DelayBuffer:
    """What one pass over a delay channel has found pending behind the id `done`: all of it, or what is due first in
    about `limit` bytes.

    What does not fit is left out: then the buffer has all that is pending below `horizon`, and nothing from there on.
    A cancellation is kept until its message is due, in the message's place: the message may be read again. From then on
    the buffer itself knows: all that was due by what was dealt with last was read before, and is kept until it is dealt
    with, so what else is read of that is a copy that comes late. `bytes` are those of all that is not handed out."""

    def __init__(
        self, limit: int, done: bytes = b"", horizon: bytes | None = None, left_out: DelayedPlace | None = None
    ) -> None:
        """`horizon` and `left_out` are those of an earlier pass, where this one begins behind what it has left out."""
        self.bytes: int = 0
        self.done: bytes = done
        self.horizon: bytes | None = horizon
        self.left_out: DelayedPlace | None = left_out  # the first place of what was left out
        self._limit = limit
        self._pending: dict[bytes, Pending] = {}
        self._order: list[bytes] = []  # a heap of ids; those that are not pending any more are skipped
        self._handed_out: dict[bytes, None] = {}  # in order
        self._finished = done  # the highest id that was dealt with; lower ones may have been given back

    def fit(self, limit: int) -> None:
        """Take about `limit` bytes from now on."""
        self._limit = limit
        self._shrink()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left to hand out, and something was left out: another pass tells what is next."""
        return self.horizon is not None and self._next() is None

    @property
    def next_due_ms(self) -> int | None:
        """When the first is due by the wall clock; None where the buffer is empty."""
        following = self._next()
        return following.due_ms if following is not None else None

    def _next(self) -> Pending | None:
        while self._order and self._order[0] not in self._pending:
            heapq.heappop(self._order)
        return self._pending[self._order[0]] if self._order else None

    @property
    def first_place(self) -> DelayedPlace | None:
        """The first place in the delay channel of anything that is pending; None for nothing."""
        places = [pending.place for pending in self._pending.values()]
        return min(places if self.left_out is None else [*places, self.left_out], default=None)

    def add(self, stored: Stored, place: DelayedPlace) -> None:
        """Take in what was read at `place`, each in the channel's order."""
        id, channel, _ = stored
        known = self._pending.get(id)
        if known is None:
            if id <= self._finished:
                return
            if self.horizon is not None and id >= self.horizon:
                self._leave_out(place)
                return
            heapq.heappush(self._order, id)
        elif channel and not known.channel:
            return  # cancelled, and a copy of the message from before that
        pending = self._pending[id] = pending_of(stored, place)
        if id not in self._handed_out:
            self.bytes += pending.size - (known.size if known is not None else 0)
        if self.bytes > self._limit:
            self._shrink()

    def _shrink(self) -> None:
        """Leave out the half that is due last, of what is not handed out, until the rest fits. The first one is kept,
        and what was given back below what was dealt with: `horizon` lies above that."""
        while self.bytes > self._limit and len(self._order) > 1:
            ids = sorted(id for id in self._order if id in self._pending)
            kept = ids[: max(1, len(ids) // 2, bisect_right(ids, self._finished))]
            for id in ids[len(kept) :]:
                pending = self._pending.pop(id)
                self.bytes -= pending.size
                self._leave_out(pending.place)
                self.horizon = id if self.horizon is None else min(self.horizon, id)
            self._order = kept
            if len(kept) == len(ids):
                return

    def _leave_out(self, place: DelayedPlace) -> None:
        if self.left_out is None or place < self.left_out:
            self.left_out = place

    def hand_out(self, upto: int, wall_ms: int, count: int, size: int) -> list[DelayedMessage]:
        """The first messages with an effective due time at or below `upto`, up to the first one that is not due by the
        wall clock; each once: at most `count`, and no more once they have `size` bytes. Cancelled ones are passed over.
        Call `finish` when the messages are released."""
        found: list[DelayedMessage] = []
        order, get, handed_out = self._order, self._pending.get, self._handed_out
        end = DelayedId(upto + 1, 0, 0).to_bytes()
        while order and order[0] < end and len(found) < count and size > 0:
            id = order[0]
            pending = get(id)
            message = pending.message() if pending is not None else None
            if message is not None and message.due_ms > wall_ms:
                break
            heapq.heappop(order)
            if pending is None:
                continue
            handed_out[id] = None
            taken = pending.size
            self.bytes -= taken  # what is on its way makes no room by leaving out what comes next
            if message is not None:
                found.append(message)
                size -= taken
        return found

    def finish(self, given_back: Set[bytes] = frozenset()) -> None:
        """All that was handed out is dealt with, but for the ids that are given back: they are handed out again."""
        finished = [id for id in self._handed_out if id not in given_back]
        for id in finished:
            del self._pending[id]
        for id in given_back:
            self.bytes += self._pending[id].size
            heapq.heappush(self._order, id)
        self._finished = max([self._finished, *finished[-1:]])
        lowest = self._order[0] if self._next() is not None else None
        if lowest is None or self._finished < lowest:
            self.done = max(self.done, self._finished)
        else:
            self.done = max([self.done, *(id for id in finished if id < lowest)])
        self._handed_out = {}

    def batches(self, count: int, size: int) -> list[list[Pending]]:
        """What is pending, in batches of one channel and at most `count`, which end once their contents have `size`
        bytes."""
        batches: list[list[Pending]] = []
        growing: dict[str, tuple[list[Pending], int]] = {}  # the batch of each channel, and how many bytes it takes yet
        for pending in self._pending.values():
            batch, left = growing.get(pending.channel, (list[Pending](), 0))
            if left <= 0 or len(batch) >= count:
                batch, left = list[Pending](), size
                batches.append(batch)
            batch.append(pending)
            growing[pending.channel] = batch, left - (pending.size - OVERHEAD_BYTES)
        return batches
