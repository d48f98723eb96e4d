"""What of a log a migration does not copy as it is: the states of its nodes and of its named producers, which hold ids
and are written anew, when all that they point to is in the new log; and what stays behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

from ..errors import BadRecord, Unavailable
from ..log.ledger_body import is_ledger, ledger_body, undone_batch
from ..log.record import RecordType, decode, record_type
from ..log.wal import ChannelInfo, Wal
from ..ownership.producer_channels import PRODUCER_CHANNELS, ProducerChannels, channels_anew
from ..ownership.producer_state import PRODUCER_PREFIX, ProducerState, producer_with_ids
from .channel_copy import Check, stored_entries
from .compared_channel import ChannelProof
from .moved_state import MovedState, StateKind
from .node_log import STATE_CHANNELS, NodeLog, Places, begins_with, checked_state, id_in_new
from .node_tables import NodeTables

_PRODUCER: StateKind[ProducerState] = StateKind(ProducerState, RecordType.PRODUCER, True, producer_with_ids)
_CHANNELS: StateKind[ProducerChannels] = StateKind(
    ProducerChannels, RecordType.PRODUCER, False, lambda snapshot, _: channels_anew(snapshot)
)


class LogStates:
    """The states of a log as they were when they were read. `node` is what nodes have there, None where none has used
    it; `producers` are the states of named producers, by channel."""

    def __init__(self, node: NodeLog | None, producers: Mapping[str, MovedState[Any]]) -> None:
        self.node: NodeLog | None = node
        self._producers = producers
        self._written: Set[str] = producers.keys() | (node.states.keys() if node is not None else set[str]())
        self._left: Set[str] = node.left if node is not None else frozenset[str]()
        self._ids = defaultdict[str, set[bytes]](set)
        for state in producers.values():
            for channel, ids in state.ids().items():
                self._ids[channel] |= ids

    @classmethod
    async def read_states(cls, old: Wal) -> LogStates:
        """Read the states in `old`, which may be in use. Raises as `NodeLog.read_states` does."""
        return cls(await NodeLog.read_states(old), await _producers(old))

    @classmethod
    async def read(
        cls, old: Wal, tables: NodeTables | None, *, in_use: bool = False, beside: bool = False
    ) -> LogStates:
        """Read all that is needed to leave `old`, whose nodes have filled `tables`. Raises what `NodeLog.read` does,
        and, unless the log is `in_use`, `Unavailable` for a named producer that may be open, where several processes
        can write to the log, of a directory with `beside`, and for a batch of Spark that is not done."""
        found = cls(await NodeLog.read(old, tables, in_use=in_use), await _producers(old))
        if not in_use:
            await found._check_programs(old, beside=beside)
        return found

    @classmethod
    async def check_programs(cls, old: Wal) -> None:
        """Raise `Unavailable` for what ends by itself, or with its program, and not because nodes leave."""
        await cls(None, await _producers(old))._check_programs(old, beside=True)

    async def _check_programs(self, old: Wal, *, beside: bool) -> None:
        if beside or not old.capabilities.one_node:
            self._check_released()
        await check_ledgers(old)

    def _check_released(self) -> None:
        for channel, state in self._producers.items():
            if channel != PRODUCER_CHANNELS and not state.state.released:
                name = channel.removeprefix(PRODUCER_PREFIX)
                raise Unavailable(
                    f"the producer {name} has not ended: stop its program. Where that was killed, open the name once "
                    f"and let it end: open_producer(wal, {name!r}, []). A migration that has begun is first taken back "
                    "with --cancel",
                    channel=channel,
                )

    def is_copied(self, info: ChannelInfo) -> bool:
        """Whether the entries of a channel are copied, and not left behind or written anew."""
        if info.policy.ephemeral or info.policy.temporary:
            return False
        return info.name not in self._written and info.name not in self._left

    def is_left(self, channel: str) -> bool:
        """Whether the entries of a channel stay behind."""
        return channel in self._left

    def ids(self, channel: str) -> Set[bytes]:
        """The ids of a channel that the states, and the nodes' tables, hold."""
        of_node = self.node.ids(channel) if self.node is not None else frozenset[bytes]()
        return of_node | self._ids[channel]

    async def write(self, new: Wal, author: str, places: Places, check: Check) -> dict[str, ChannelProof]:
        """Write the states into their channels in `new`, as `MovedState.write` does."""
        written = {} if self.node is None else await self.node.write_states(new, author, places, check)
        for channel, state in self._producers.items():
            written[channel] = await state.write(new, author, id_in_new(places), check)
        return written


def _type_of_state(channel: str) -> RecordType | None:
    """The type of the records of the state that a channel is named like; None for none."""
    if channel == PRODUCER_CHANNELS or channel.startswith(PRODUCER_PREFIX):
        return RecordType.PRODUCER
    return next((type for ending, type in STATE_CHANNELS.items() if channel.endswith(ending)), None)


async def is_state(wal: Wal, channel: str) -> bool:
    """Whether a channel is named like a state, and begins like one. One that is copied all the same has become it since
    `LogStates` were read: it was empty then, or not there."""
    type = _type_of_state(channel)
    return type is not None and await begins_with(wal, channel, type)


async def _producers(old: Wal) -> Mapping[str, MovedState[Any]]:
    found: dict[str, MovedState[Any]] = {}
    for channel in await old.channels():
        if _type_of_state(channel) is not RecordType.PRODUCER:
            continue
        kind = _CHANNELS if channel == PRODUCER_CHANNELS else _PRODUCER
        # a producer's delay channel, and those of a program, may be named like this
        if await begins_with(old, channel, RecordType.PRODUCER):
            found[channel] = checked_state(await MovedState[Any].read(old, channel, kind))
    return found


async def check_ledgers(wal: Wal) -> None:
    """Raise `Unavailable` where a log has a batch of Spark that is decided and not done."""
    for channel in filter(is_ledger, await wal.channels()):
        bodies: list[dict[str, Any]] = []
        async for entry in stored_entries(wal, await wal.describe(channel)):
            try:
                if record_type(entry.payload) is RecordType.LEDGER:
                    bodies.append(ledger_body(decode(entry.payload)))
            except BadRecord:  # Spark's writer refuses it, there as here
                continue
        if (batch := undone_batch(bodies)) is not None:
            raise Unavailable(
                f"batch {batch} of a Spark query is decided and not done ({channel}): run the query until it is, then "
                "stop it. A migration that has begun is first taken back with --cancel; drop the channel where the "
                "query is not needed any more",
                channel=channel,
            )
