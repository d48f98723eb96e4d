"""The committed offsets of a group, as one of its members reads and stores them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiokafka.protocol.commit import OffsetCommitRequest

from ....runtime.errors import Overloaded, TidewalError, of_unknown_outcome
from ....runtime.groups.progress import GroupProgress
from ....runtime.log.wal import From
from .. import faults
from ..catalog import KafkaChannel
from ..cluster import LATEST, PAUSE_S, Cluster
from ..topics import place_of
from .coordinator_broker import Code
from .offsets import id_before, to_position
from .requests import CommittedOffset, OffsetFetch, TxnOffsetCommit, by_topic

if TYPE_CHECKING:
    from .session import Session

STALE_S = 0.05  # pause before a request is repeated that arrived during a rebalance
FOREVER = -1  # how long positions are kept: as the brokers' settings say


class Unstable(Exception):
    """An open transaction may still move the position in a partition."""

    def __init__(self, key: str) -> None:
        super().__init__(f"an open transaction may move the position in {key}")
        self.key = key


class OffsetStore:
    """The positions of a group. Belongs to the I/O loop. Kafka accepts positions only from members of the group's
    present generation, so a member that has lost a channel cannot move its position."""

    def __init__(self, cluster: Cluster, session: Session, connection: int) -> None:
        self._cluster, self._session, self._connection = cluster, session, connection

    async def positions(self, keys: Sequence[str]) -> dict[str, CommittedOffset]:
        """The group's positions by partition's key, without those that have none. Raises `Unstable`, and the library's
        errors."""
        coordinator = self._session.coordinator
        request = OffsetFetch(self._session.group_id, keys, stable=True)
        response = await coordinator.ask(request, self._connection)
        coordinator.check(response.error_code)
        asked = {place_of(key): key for key in keys}
        found: dict[str, CommittedOffset] = {}
        for topic, partitions, _ in response.topics:
            for number, offset, _, metadata, code, _ in partitions:
                key = asked[topic, number]
                if coordinator.check(code, but=(Code.UNSTABLE_OFFSET,)):
                    raise Unstable(key)
                if offset >= 0:
                    found[key] = CommittedOffset(offset, metadata or "")
        return found

    async def beginning(self, channel: KafkaChannel, start: From) -> CommittedOffset:
        """The position at which a group without one begins. Raises the library's errors."""
        if start is From.LATEST:
            offset = await self._cluster.offset(channel.topic, LATEST, channel.number) or 0
        else:
            offset, _ = await self._cluster.bounds(*channel.place)
        return to_position(channel, GroupProgress(id_before(channel, offset)))

    async def store(self, positions: Mapping[str, CommittedOffset]) -> None:
        """Store positions by partition's key. Raises what ended the session, `Overloaded` and what `faults.mapped`
        has, with `outcome_unknown` where an attempt may have stored them."""
        session = self._session
        deadline = asyncio.get_running_loop().time() + self._cluster.options.delivery_timeout_s
        topics = by_topic((key, (at.offset, at.metadata)) for key, at in positions.items())
        unsure = False
        while True:
            try:
                await session.settled()
                request = OffsetCommitRequest(
                    session.group_id, session.generation, session.kafka_member, FOREVER, topics
                )
                response = await session.coordinator.ask(request, self._connection)
                if self._moved(*(code for _, partitions in response.topics for _, code in partitions)):
                    return
                pause_s = STALE_S
            except TidewalError as error:
                raise of_unknown_outcome(error) if unsure else error from error.__cause__
            except faults.Foreign as error:
                if faults.outcome(error, faults.Operation.POSITION) is faults.Outcome.UNKNOWN:
                    unsure = True
                    if not faults.answered(error):
                        session.renew()  # this attempt may arrive late, and must not undo later ones
                if faults.final(error) or asyncio.get_running_loop().time() > deadline:
                    raise faults.mapped(error, "store a position", outcome_unknown=unsure) from error
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s)

    async def store_within(
        self, transaction: str, producer: tuple[int, int], positions: Mapping[str, CommittedOffset]
    ) -> None:
        """Store positions by partition's key as part of a transaction, given by its name and its producer's id and
        epoch. Raises what ended the session, `Overloaded`, and what `Cluster.retrying` does."""
        session = self._session

        async def attempt() -> bool:
            request = TxnOffsetCommit(
                transaction,
                producer,
                session.group_id,
                session.generation,
                session.kafka_member,
                list(positions.items()),
            )
            response = await session.coordinator.ask(request, self._connection)
            return self._moved(*(code for _, partitions, _ in response.topics for _, code, _ in partitions))

        while True:
            await session.settled()
            if await self._cluster.retrying("make a position part of a transaction", attempt):
                return
            await asyncio.sleep(STALE_S)

    def _moved(self, *codes: int) -> bool:
        """Whether the positions are stored, by the codes of the answer; False: try again in another generation."""
        stale = (Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS, Code.UNKNOWN_MEMBER)
        code = self._session.coordinator.check(*codes, but=(*stale, Code.METADATA_TOO_LARGE))
        if code == Code.METADATA_TOO_LARGE:
            raise Overloaded(
                "the brokers do not accept so much metadata of a position, or so many single acknowledgements: see"
                " offset.metadata.max.bytes, or acknowledge what lies before them",
                limit="single_acks",
            )
        if code:
            self._session.refused(code)
        return not code
