"""The registry: the live channels of an owner, and the short lock under which ids are assigned."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from ....runtime.errors import Overloaded
from ....runtime.log.checks import not_found
from ....runtime.log.wal import ChannelPolicy, Durability
from ..owner.channel_cache import LiveChannel, TailBudget, channel_of
from .channels import CHANNEL_BYTES, INCARNATION_SHIFT, JournalledChannel
from .pending import Row
from .recovery import Recovered


class Registry:
    """Channels by name and by number. A caller that changes it, or a channel's `next_id`, holds `lock` until what
    follows from that is queued with the journal: so the order of ids is the order of the log."""

    def __init__(self, recovered: Recovered, tail_bytes: int, snapshot_bytes: int) -> None:
        """`tail_bytes` bounds the tails of all channels. `snapshot_bytes` is what channels may take in the snapshot
        that begins each segment; with the positions of groups, their single acknowledgements and holds it may be four
        times as much."""
        table = self._table = recovered.table
        self._snapshot_bytes = 4 * snapshot_bytes
        self._room = snapshot_bytes - sum([CHANNEL_BYTES + len(state.name) for state in table.by_number.values()])
        self.lock: threading.Lock = threading.Lock()
        self.names: dict[str, LiveChannel] = {}
        self.by_number: dict[int, LiveChannel] = {}
        self.boot: int = table.boot + 1
        self.budget: TailBudget = TailBudget(tail_bytes)
        self._next_number = table.next_number
        self._floor = table.floor
        self._ephemeral_floor = self.boot << INCARNATION_SHIFT
        for number, state in table.by_number.items():
            forgetful = state.policy.ephemeral or state.policy.acks is not Durability.ALL
            base = self.boot << INCARNATION_SHIFT if forgetful else 0
            channel = channel_of(state, base, recovered.removed_to.get(number, state.floor))
            self.by_number[number] = self.names[state.name] = channel

    def find(self, name: str) -> LiveChannel:
        """The channel of that name. Raises `ChannelNotFound`."""
        try:
            return self.names[name]
        except KeyError:
            raise not_found(name) from None

    def find_all(self, names: Sequence[str]) -> list[LiveChannel]:
        """The channels of these names, in order. Raises `ChannelNotFound`."""
        return [channel or self.find(name) for channel, name in zip(map(self.names.get, names), names, strict=True)]

    def add(self, name: str, policy: ChannelPolicy) -> tuple[LiveChannel, JournalledChannel]:
        """A channel that is yet to be created in the journal, and its state for the control record. Under the lock.
        Raises `Overloaded` when the snapshot that begins each segment has no room for another channel."""
        self.check_snapshot()
        if self._room < CHANNEL_BYTES + len(name):
            raise Overloaded(
                f"{len(self.names)} channels are all that segments of this size have room for", limit="channels"
            )
        self._room -= CHANNEL_BYTES + len(name)
        floor = 0 if policy.ephemeral else self._floor
        state = JournalledChannel(self._next_number, name, policy, floor, last_id=floor)
        channel = channel_of(state, self._ephemeral_floor if policy.ephemeral else 0, floor)
        channel.created = False
        self._next_number += 1
        self.names[name] = self.by_number[state.number] = channel
        return channel, state

    def check_snapshot(self) -> None:
        """To be called for all that adds to the snapshot: channels, holds, positions of groups and their single
        acknowledgements. Raises `Overloaded`. What removes, moves on or replaces is never refused."""
        if self._table.size > self._snapshot_bytes:
            raise Overloaded(
                f"channels, positions of groups, single acknowledgements and holds take {self._table.size} bytes, over"
                f" the {self._snapshot_bytes} that segments of this size have for them: drop groups or channels,"
                " acknowledge what lies before single acknowledgements, or have larger segments",
                limit="snapshot_bytes",
            )

    def remove(self, channel: LiveChannel) -> None:
        """Remove a dropped channel; a later channel of the same name assigns higher ids. Under the lock. Again it does
        nothing: a channel may be dropped while it is created, and then not be created."""
        if channel.dropped:
            return
        channel.dropped = True
        self._room += CHANNEL_BYTES + len(channel.name)
        if self.names.get(channel.name) is channel:
            del self.names[channel.name]
        del self.by_number[channel.number]
        if channel.policy.ephemeral:
            self._ephemeral_floor = max(self._ephemeral_floor, channel.next_id)
        else:
            self._floor = max(self._floor, channel.next_id)
        channel.wake()

    def wake_all(self) -> None:
        """Let all readers look again."""
        for channel in list(self.by_number.values()):
            channel.wake()

    def deliver(self, numbers: Sequence[int], rows: Sequence[Row], size: int) -> None:
        """Make visible what a commit made durable, in order: `rows` of the channels in `numbers`, with payloads of
        `size` bytes together."""
        if numbers.count(numbers[0]) == len(numbers):
            only = self.by_number.get(numbers[0])
            self.budget.added({only: len(rows)}, size)
            if only is not None:
                only.deliver(rows)
            return
        channels = list(map(self.by_number.get, numbers))
        self.budget.added(Counter(channels), size)
        at = 0
        for channel, run in groupby(channels):
            end = at + len(list(run))
            if channel is not None:  # neither dropped nor a control record
                channel.deliver(rows[at:end])
            at = end
