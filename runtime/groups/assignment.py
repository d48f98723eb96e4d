"""Assign channels to members: as evenly as the subscriptions allow, and with as few moves as that needs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import TypeAlias

Subscribers: TypeAlias = frozenset[str]


def assign(subscribers: Mapping[str, Subscribers], current: Mapping[str, str | None]) -> dict[str, str]:
    """Assign each channel that has subscribers to one of them; returns the member of each channel.

    `subscribers` names the members that subscribe to each channel, `current` the member that has it now, None for none.
    No other assignment is more even: no channel, nor a chain of channels, can go from a member to one that has two
    fewer. A channel stays with its `current` member as long as that subscribes to it and evenness does not need the
    channel elsewhere. The result depends on the contents of the arguments alone, not on their order.
    """
    return _Assigner(subscribers, current).channels()


class _Assigner:
    """Channels with the same subscribers are alike, so the search for a better assignment runs over these kinds."""

    def __init__(self, subscribers: Mapping[str, Subscribers], current: Mapping[str, str | None]) -> None:
        self._held: dict[str, dict[Subscribers, list[str]]] = {}  # by member and kind, channels in order
        self._count: dict[str, int] = {}
        for kind in set(subscribers.values()):
            for member in kind:
                self._held.setdefault(member, defaultdict(list))
                self._count.setdefault(member, 0)
        unassigned: list[str] = []
        for channel in sorted(subscribers):
            holder = current.get(channel)
            if holder is not None and holder in subscribers[channel]:
                self._give(holder, subscribers[channel], channel)
            elif subscribers[channel]:
                unassigned.append(channel)
        for channel in unassigned:
            kind = subscribers[channel]
            self._give(min(kind, key=lambda member: (self._count[member], member)), kind, channel)
        self._even_out()

    def channels(self) -> dict[str, str]:
        given = {c: member for member, kinds in self._held.items() for channels in kinds.values() for c in channels}
        return dict(sorted(given.items()))

    def _give(self, member: str, kind: Subscribers, channel: str) -> None:
        self._held[member][kind].append(channel)
        self._count[member] += 1

    def _even_out(self) -> None:
        while any(self._move_one_from(member) for member in sorted(self._count, key=lambda m: (-self._count[m], m))):
            pass

    def _move_one_from(self, member: str) -> bool:
        """Move one channel away from the member, over other members where needed, to the nearest that has two fewer."""
        enough = self._count[member] - 2
        if min(self._count.values()) > enough:
            return False
        came_from: dict[str, tuple[str, Subscribers] | None] = {member: None}
        waiting = deque([member])
        while waiting:
            giver = waiting.popleft()
            for taker, kind in self._takers(giver):
                if taker in came_from:
                    continue
                came_from[taker] = giver, kind
                if self._count[taker] <= enough:
                    self._move_along(taker, came_from)
                    return True
                waiting.append(taker)
        return False

    def _takers(self, giver: str) -> list[tuple[str, Subscribers]]:
        """The members to which one of the giver's channels may go, those with the fewest channels first."""
        kinds = [kind for kind, channels in self._held[giver].items() if channels]
        takers = {taker: kind for kind in sorted(kinds, key=sorted, reverse=True) for taker in kind if taker != giver}
        return sorted(takers.items(), key=lambda item: (self._count[item[0]], item[0]))

    def _move_along(self, taker: str, came_from: Mapping[str, tuple[str, Subscribers] | None]) -> None:
        step = came_from[taker]
        while step is not None:
            giver, kind = step
            channel = self._held[giver][kind].pop()
            self._count[giver] -= 1
            self._give(taker, kind, channel)
            taker, step = giver, came_from[giver]
