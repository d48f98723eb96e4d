"""Append to ephemeral channels in the order of the submits, also where some of these wait for a block."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .ephemeral import EphemeralChannels
from .log_state import LogState
from .submits import QueuedSubmit


class EphemeralAppends:
    """Appends to the ephemeral channels of a log that this process owns. An entry that comes with durable ones is
    appended once their block is durable, and later ones of its channel wait behind it."""

    def __init__(self, state: LogState, memory: EphemeralChannels) -> None:
        self._state, self._memory = state, memory
        self._held_up: dict[str, deque[QueuedSubmit]] = {}  # by channel: what waits for a block

    def append(self, submit: QueuedSubmit) -> bool:
        """Append what goes into ephemeral channels alone at once, and settle it. False where the submit is to go into a
        block."""
        names = self._state.names
        if submit.controls:
            return False
        channels = [channel for entry in submit.entries if (channel := names.get(entry.channel)) is not None]
        if len(channels) < len(submit.entries) or not all(channel.policy.ephemeral for channel in channels):
            self._hold_up(submit, {channel.name for channel in channels if channel.policy.ephemeral})
            return False
        if self._is_held_up(submit):
            return False
        appended = zip(channels, submit.entries, strict=True)
        submit.settle([self._memory.append(channel, entry) for channel, entry in appended])
        return True

    def complete(self, submit: QueuedSubmit) -> None:
        """Append the entries of a submit that has waited for its block, and give them their ids."""
        for at, channel in submit.ephemeral:
            submit.ids[at] = self._memory.append(channel, submit.entries[at])

    def _is_held_up(self, submit: QueuedSubmit) -> bool:
        """Whether earlier entries of the same channels wait for a block: then these wait behind them."""
        names = {entry.channel for entry in submit.entries}
        held_up = any(self._waits(name) for name in names)
        if held_up:
            self._hold_up(submit, names)
        return held_up

    def _hold_up(self, submit: QueuedSubmit, names: Iterable[str]) -> None:
        for name in names:
            self._waits(name)  # forgets what is settled
            self._held_up.setdefault(name, deque()).append(submit)

    def _waits(self, name: str) -> bool:
        """Whether something of this channel waits for a block."""
        waiting = self._held_up.get(name)
        while waiting and waiting[0].settled:
            waiting.popleft()
        if waiting is not None and not waiting:
            del self._held_up[name]
        return bool(waiting)
