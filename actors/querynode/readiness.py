"""What a QueryNode reports of its vchannels: how many can be asked for, and which cannot, since when and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

NAMED_MAX = 16  # vchannels that a report names

LOADING = "loading"


class Readiness:
    """The report. It names what cannot be asked for, which is little or nothing at most times."""

    def __init__(self, states: Callable[[], Mapping[str, str]], wall_ms: Callable[[], int]) -> None:
        """`states` returns for each vchannel why it cannot be asked for, "" where it can."""
        self._states, self._wall_ms = states, wall_ms
        self._ready, self._turned_ms = False, wall_ms()
        self._since_ms: dict[str, int] = {}

    def __call__(self) -> Mapping[str, object]:
        """`ready` and `waiting` are numbers of vchannels, `since_ms` is the wall clock since when there are none that
        wait, or some, and `vchannels` has some of these: since when each waits, and why. From any thread."""
        now_ms, states = self._wall_ms(), self._states()
        why = {vchannel: reason for vchannel, reason in states.items() if reason}
        self._since_ms = {vchannel: self._since_ms.get(vchannel, now_ms) for vchannel in why}
        if self._ready == bool(why):
            self._ready, self._turned_ms = not why, now_ms
        return {
            "ready": len(states) - len(why),
            "waiting": len(why),
            "since_ms": self._turned_ms,
            "vchannels": {name: [self._since_ms[name], why[name]] for name in islice(sorted(why), NAMED_MAX)},
        }
