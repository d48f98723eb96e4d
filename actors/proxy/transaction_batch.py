"""The writes of a transaction to its collections and topics, on their way to the log as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from ...runtime.errors import InvalidRequest, Unsupported
from ...runtime.groups.coordinator_client import GroupAcks
from ...runtime.log.record import Record
from ...runtime.log.wal import Capabilities, Payload
from ...runtime.rpc.protocol import Params
from ..local_owner import WritePart
from ..transaction_commits import is_prepared
from ..transactions.buffer import PARTICIPANTS_MAX, ParticipantWire
from ..write_requests import transaction_of
from .partitioned_messages import PartitionedMessages
from .sharded_rows import ShardedRows


class TransactionBatch:
    """The checked participants of one transaction. They become one append, under one timestamp; or one that is
    `prepared` and committed, where that is over several channels that the log does not take at once, or is to decide
    the position of a group, too (`transaction_commits`)."""

    def __init__(
        self,
        participants: Sequence[ShardedRows | PartitionedMessages],
        log: Capabilities,
        acks: GroupAcks | None = None,
    ) -> None:
        """`acks` are decided with the rest, or without tokens stored in the same commit. Raises `Unsupported` where a
        `log` that can do so much cannot."""
        self.participants = participants
        self._acks = acks
        if acks is not None and not acks.tokens and not log.atomic_acks:
            raise Unsupported(
                "this log does not store the position of a group in the commit of a transaction (docs/backends.md says "
                "which do): nothing was written",
                capability="atomic_acks",
            )
        self.channels: set[str] = set[str]().union(*(each.channels for each in participants))
        self.prepared: bool = is_prepared(self.channels, acks, log)

    @property
    def records(self) -> list[tuple[str, Record]]:
        """The records of all participants, once they are split."""
        return [record for each in self.participants for record in each.records]

    def part(self, params: Params, message_bytes: Mapping[str, int]) -> WritePart:
        """What an owner is asked to append for a request with `params`. Raises `MessageTooLarge`."""
        parts = [each.part(params, message_bytes) for each in self.participants]
        part = transaction_of(parts, params["producer"], params["pseq"], len(self.channels))
        return replace(part, acks=self._acks)


def parts_of(wire: Sequence[ParticipantWire], body: Payload) -> Iterator[tuple[ParticipantWire, memoryview]]:
    """The participants in a request to commit, each with what it gets of the body. Raises `InvalidRequest` for what no
    client of this version sends."""
    ends = list(accumulate(each.size for each in wire))
    if not 1 <= len(wire) <= PARTICIPANTS_MAX or ends[-1] != len(body) or min(each.size for each in wire) < 1:
        raise InvalidRequest(f"a transaction has 1 to {PARTICIPANTS_MAX} parts, which are all that is in its body")
    if len({(each.kind, each.name) for each in wire}) < len(wire):
        raise InvalidRequest("a transaction has one part for each collection and topic")
    view = memoryview(body)
    return ((each, view[end - each.size : end]) for each, end in zip(wire, ends, strict=True))
