"""The committed offsets of a group, as one of its members reads and moves them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from aiokafka.protocol.commit import OffsetCommitRequest

from ....runtime.errors import Overloaded, TidewalError, of_unknown_outcome
from ....runtime.groups.progress import Progress
from ....runtime.wal import From
from .. import faults
from ..catalog import Channel
from ..cluster import LATEST, PARTITION, PAUSE_S, Cluster
from .coordinator import Code, Coordinator
from .offsets import id_before, to_position
from .requests import OffsetFetch, Position, TxnOffsetCommit

STALE_S = 0.05  # before a request is repeated that met the group in the middle of a change
FOREVER = -1  # how long positions are kept: as the brokers' settings say


class Standing(Protocol):
    """What a member is in its group at the moment."""

    group_id: str
    coordinator: Coordinator
    kafka_member: str
    generation: int

    async def settled(self) -> None:
        """Return once the member knows its generation, and what it has in it. Raises what ended the session."""
        ...

    def refused(self, code: int) -> None:
        """A request was answered that the group or the member is not as we thought. Raises what ended the session."""
        ...

    def renew(self) -> None:
        """Have the group begin another generation: what was sent in this one and is still under way is refused."""
        ...


class Unstable(Exception):
    """An open transaction may move the position in a topic."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"a transaction is open that may move the position in {topic}")
        self.topic = topic


class Committed:
    """Belongs to the I/O loop. Kafka takes positions only from members of the group's present generation, so nobody who
    has lost a channel can move them."""

    def __init__(self, cluster: Cluster, standing: Standing, connection: int) -> None:
        self._cluster, self._standing, self._connection = cluster, standing, connection

    async def positions(self, topics: Sequence[str]) -> dict[str, Position]:
        """By topic where the group is, as far as it has been there. Raises `Unstable`, and the library's errors."""
        coordinator = self._standing.coordinator
        request = OffsetFetch(self._standing.group_id, topics, stable=True)
        response = await coordinator.ask(request, self._connection)
        coordinator.check(response.error_code)
        found: dict[str, Position] = {}
        for topic, ((_, offset, _, metadata, code, _),), _ in response.topics:
            if coordinator.check(code, but=(Code.UNSTABLE_OFFSET,)):
                raise Unstable(topic)
            if offset >= 0:
                found[topic] = Position(offset, metadata or "")
        return found

    async def beginning(self, channel: Channel, start: From) -> Position:
        """Where a group begins that has not been there. Raises the library's errors."""
        if start is From.LATEST:
            offset = await self._cluster.offset(channel.topic, LATEST) or 0
        else:
            offset, _ = await self._cluster.bounds(channel.topic)
        return to_position(channel, Progress(id_before(channel, offset)))

    async def store(self, positions: Mapping[str, Position]) -> None:
        """Move the group, by topic. Raises what ended the session, `Overloaded` and what `faults.mapped` has, with
        `outcome_unknown` where an attempt may have moved it."""
        standing = self._standing
        deadline = asyncio.get_running_loop().time() + self._cluster.options.delivery_timeout_s
        topics = [(topic, [(PARTITION, at.offset, at.metadata)]) for topic, at in positions.items()]
        unsure = False
        while True:
            try:
                await standing.settled()
                request = OffsetCommitRequest(
                    standing.group_id, standing.generation, standing.kafka_member, FOREVER, topics
                )
                response = await standing.coordinator.ask(request, self._connection)
                if self._moved(*(code for _, partitions in response.topics for _, code in partitions)):
                    return
                pause_s = STALE_S
            except TidewalError as error:
                raise of_unknown_outcome(error) if unsure else error from error.__cause__
            except faults.Foreign as error:
                if faults.outcome(error, faults.Operation.POSITION) is faults.Outcome.UNKNOWN:
                    unsure = True
                    if not faults.answered(error):
                        standing.renew()  # this attempt may arrive later, and must not undo what comes after it
                if faults.final(error) or asyncio.get_running_loop().time() > deadline:
                    raise faults.mapped(error, "store a position", outcome_unknown=unsure) from error
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s)

    async def store_within(
        self, transaction: str, producer: tuple[int, int], positions: Mapping[str, Position]
    ) -> None:
        """Move the group as part of a transaction. Raises what ended the session, `Overloaded`, and what
        `Cluster.retrying` does."""
        standing = self._standing

        async def attempt() -> bool:
            request = TxnOffsetCommit(
                transaction,
                producer,
                standing.group_id,
                standing.generation,
                standing.kafka_member,
                list(positions.items()),
            )
            response = await standing.coordinator.ask(request, self._connection)
            return self._moved(*(code for _, partitions, _ in response.topics for _, code, _ in partitions))

        while True:
            await standing.settled()
            if await self._cluster.retrying("make a position part of a transaction", attempt):
                return
            await asyncio.sleep(STALE_S)

    def _moved(self, *codes: int) -> bool:
        """Whether the answer says so; False: try again in another generation."""
        stale = (Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS, Code.UNKNOWN_MEMBER)
        code = self._standing.coordinator.check(*codes, but=(*stale, Code.METADATA_TOO_LARGE))
        if code == Code.METADATA_TOO_LARGE:
            raise Overloaded("the brokers take no such number of single acknowledgements", limit="single_acks")
        if code:
            self._standing.refused(code)
        return not code
