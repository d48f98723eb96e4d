"""Moves for the sake of load: off members that bear more than they should, and from the most used to the least used.

Each move lowers what is over the capacities, or else the higher use of the two members that it concerns, and makes
nothing of more importance worse. So a series of moves ends, and none is ever taken back while the weights stay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice

from .assignment_draft import AssignmentDraft, DraftNode
from .assignment_plan import AssignableChannel, AssignmentRules, MoveReason

WORTH = 0.9  # of the difference of two members: a heavier channel would only exchange their places, or nearly so
TRIES = 1_000  # channels that are looked at for one member, so that a cluster that cannot be balanced costs little time

OnMove = Callable[[AssignableChannel, DraftNode, DraftNode, MoveReason, str], None]


class LoadBalancer:
    """Moves channels of a draft: of each node those in `movable`, pairs of a channel and the incarnation that has it.
    A channel that was moved is moved again only where `again` is set. `on_move` carries a move out."""

    def __init__(
        self,
        draft: AssignmentDraft,
        channels: Mapping[str, AssignableChannel],
        movable: Iterable[tuple[str, str]],
        rules: AssignmentRules,
        on_move: OnMove,
        *,
        again: bool = False,
    ) -> None:
        self._draft, self._channels, self._rules = draft, channels, rules
        self._on_move, self._again = on_move, again
        self._moved: set[str] = set()
        self._movable: dict[str, list[tuple[int, str]]] = {node.member.incarnation: [] for node in draft.takers}
        for name, incarnation in movable:
            if incarnation in self._movable:
                self._movable[incarnation].append((channels[name].weight, name))
        for weighed in self._movable.values():
            weighed.sort()

    # ---- capacities -------------------------------------------------------------------------------------------------

    def relieve(self, limit: float) -> None:
        """Move channels off members that bear more than their capacity, at most `limit`, while others have room."""
        over = [node for node in self._draft.takers if node.load > node.capacity]
        for node in sorted(over, key=lambda node: node.capacity - node.load):
            for weight, name in self._by_relief(node):
                if limit < 1 or node.load <= node.capacity:
                    break
                target = self._with_room(node, self._channels[name], weight)
                if target is not None:
                    detail = f"load {node.load} of {node.capacity:g}"
                    self._move((weight, name), node, target, MoveReason.CAPACITY, detail)
                    limit -= 1

    def _by_relief(self, node: DraftNode) -> list[tuple[int, str]]:
        """The lightest channel that is enough comes first, then the heavier, then the lighter ones."""
        weighed = self._movable[node.member.incarnation]
        enough = bisect_right(weighed, (node.load - node.capacity, ""))
        return weighed[enough:] + weighed[:enough][::-1]

    def _with_room(self, source: DraftNode, channel: AssignableChannel, weight: int) -> DraftNode | None:
        roomy = [node for node in self._draft.takers if node.load + weight <= node.capacity]
        roomy = [node for node in roomy if self._may_go(channel, source, node)]
        return min(roomy, key=lambda node: (node.use, node.member.name), default=None)

    # ---- evenness ---------------------------------------------------------------------------------------------------

    def even_out(self, limit: float) -> None:
        """Move channels from the most used to the least used members until they are balanced, at most `limit`."""
        mean = self._draft.mean_use()
        progress = True
        while progress and limit >= 1:
            progress = False
            exhausted: set[str] = set()  # from these nothing could be moved, in this pass
            while limit >= 1 and (step := self._next(mean, exhausted)) is not None:
                source, target, weighed = step
                detail = f"use {source.use / mean:.2f} and {target.use / mean:.2f} of the mean"
                self._move(weighed, source, target, MoveReason.BALANCE, detail)
                limit -= 1
                progress = True

    def _next(self, mean: float, exhausted: set[str]) -> tuple[DraftNode, DraftNode, tuple[int, str]] | None:
        by_use = sorted(self._draft.takers, key=lambda node: (node.use, node.member.name))
        gap = self._rules.tolerance * mean
        for source in reversed(by_use):
            if source.use - by_use[0].use <= gap:
                return None
            if source.member.incarnation in exhausted:
                continue
            for target in by_use:
                if source.use - target.use <= gap:
                    break
                weighed = self._best(source, target, mean)
                if weighed is not None:
                    return source, target, weighed
            exhausted.add(source.member.incarnation)
        return None

    def _best(self, source: DraftNode, target: DraftNode, mean: float) -> tuple[int, str] | None:
        """The heaviest channel that leaves the target below the source, else the lightest that is worth it.
        Of many that cannot go there only the first are tried."""
        difference, least = source.use - target.use, self._rules.min_gain * mean
        even = difference / (1 / source.size + 1 / target.size)  # what makes their uses equal
        most = min(WORTH * difference, difference - least) * target.size
        weighed = self._movable[source.member.incarnation]
        low = bisect_left(weighed, least * source.size, key=_weight)
        middle = max(low, bisect_right(weighed, even, key=_weight))
        high = bisect_right(weighed, most, key=_weight)
        tries = TRIES // len(self._draft.takers) + 1
        for index in islice(chain(range(middle - 1, low - 1, -1), range(middle, high)), tries):
            if self._may_go(self._channels[weighed[index][1]], source, target):
                return weighed[index]
        return None

    def _may_go(self, channel: AssignableChannel, source: DraftNode, target: DraftNode) -> bool:
        return channel.name not in self._moved and self._draft.may_go(channel, source, target)

    def _move(
        self, weighed: tuple[int, str], source: DraftNode, target: DraftNode, why: MoveReason, detail: str
    ) -> None:
        self._movable[source.member.incarnation].remove(weighed)
        if self._again:
            insort(self._movable[target.member.incarnation], weighed)
        else:
            self._moved.add(weighed[1])
        self._on_move(self._channels[weighed[1]], source, target, why, detail)


def _weight(weighed: tuple[int, str]) -> int:
    return weighed[0]
