"""The acknowledgements and commits of a member, one step after the other: each step stores whole positions of channels.

While one step is in flight acknowledgements are collected, and stored together in the next. A commit with outputs is a
transaction of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from ....runtime.errors import TidewalError, Unavailable
from ....runtime.groups.coordinator_client import Ack
from ....runtime.groups.progress import Change, GroupProgress, check_new
from ....runtime.log.wal import Delivery
from ..catalog import KafkaChannel
from ..channel_access import ChannelAccess, EncodedEntries
from ..cluster import Cluster
from ..positions import HALF_BYTES, Row
from ..send_queue import ROW_BYTES
from .assigned_topics import AssignedTopic, epoch_over
from .offsets import offset_behind, to_position
from .requests import CommittedOffset
from .session import Session
from .transaction import Aborted, TransactionalProducer

ATTEMPTS = 3  # at a transaction that Kafka or another producer of its name has aborted

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class CommitStep:
    """One call of `commit`."""

    acks: Sequence[Ack]
    assigned_topics: Sequence[AssignedTopic]
    outputs: EncodedEntries
    channels: Mapping[str, KafkaChannel]  # of the outputs
    answer: asyncio.Future[list[bytes]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class OffsetCommitter:
    """The commits of one session. Belongs to the I/O loop."""

    def __init__(
        self,
        session: Session,
        cluster: Cluster,
        management: ChannelAccess,
        producer: Callable[[KafkaChannel], TransactionalProducer],
        connection: Callable[[KafkaChannel], int],
    ) -> None:
        """`producer` returns the producer for an input channel, `connection` the connection for appends to a
        channel."""
        self._session, self._cluster, self._management = session, cluster, management
        self._producer, self._connection = producer, connection
        self._steps: deque[CommitStep] = deque()
        self._undecided: dict[CommitStep, None] = {}  # in order
        self._running: asyncio.Task[None] | None = None

    async def commit(
        self, acks: Sequence[Ack], outputs: EncodedEntries, channels: Mapping[str, KafkaChannel]
    ) -> list[bytes]:
        """`CoordinatorClient.commit`, of at least one acknowledgement; `channels` are those of the outputs by name.
        Once begun it is completed, also when the caller is cancelled."""
        step = CommitStep(
            acks,
            [self._session.assigned_topics.find(ack.channel, ack.assignment_epoch) for ack in acks],
            outputs,
            channels,
        )
        for assigned in step.assigned_topics:
            assigned.commits_in_flight += 1
        self._steps.append(step)
        self._undecided[step] = None
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(step.answer)

    async def finish(self, assigned: AssignedTopic | None = None) -> None:
        """Return when all steps in flight are decided, or those in the epoch of `assigned`."""
        if answers := [step.answer for step in self._undecided if assigned is None or assigned in step.assigned_topics]:
            await asyncio.wait(answers)

    async def _run(self) -> None:
        try:
            while self._steps:
                if self._steps[0].outputs.names:
                    await self._transact(self._steps.popleft())
                else:
                    await self._acknowledge(self._take_acknowledgements())
        finally:
            self._running = None
            for step in self._steps:  # cancelled: the log is closed
                self._answer(step, Unavailable("the log was closed meanwhile"))
            self._steps.clear()

    def _take_acknowledgements(self) -> list[CommitStep]:
        steps: list[CommitStep] = []
        while self._steps and not self._steps[0].outputs.names:
            steps.append(self._steps.popleft())
        return steps

    async def _acknowledge(self, steps: Sequence[CommitStep]) -> None:
        accepted: list[CommitStep] = []
        progress: dict[AssignedTopic, GroupProgress] = {}
        positions: dict[str, CommittedOffset] = {}
        for step in steps:
            try:
                moved = self._moved(step, progress)
                positions |= {assigned.channel.key: to_position(assigned.channel, at) for assigned, at in moved.items()}
            except TidewalError as error:
                self._answer(step, error)
                continue
            progress |= moved
            accepted.append(step)
        if accepted:
            await self._decide(accepted, self._store(positions, progress), "acknowledging")

    async def _store(
        self, positions: Mapping[str, CommittedOffset], progress: Mapping[AssignedTopic, GroupProgress]
    ) -> list[bytes]:
        await self._session.offset_store.store(positions)
        await self._stored(progress)
        return []

    async def _transact(self, step: CommitStep) -> None:
        result = await self._decide([step], self._transaction(step), "a commit")
        if isinstance(result, TidewalError) and result.fields.get("outcome_unknown"):
            for assigned in step.assigned_topics:  # the position, read again, shows the outcome
                self._session.assigned_topics.renew_epoch(assigned)

    async def _decide(
        self, steps: Sequence[CommitStep], work: Coroutine[Any, Any, list[bytes]], what: str
    ) -> list[bytes] | TidewalError:
        """Do the `work` of steps, and answer each with the ids or the error, which is also the result."""
        result: list[bytes] | TidewalError = Unavailable("the log was closed meanwhile", outcome_unknown=True)
        try:
            result = await work
        except TidewalError as error:
            result = error
        except Exception as error:  # unexpected: raised in the caller
            _log.exception("%s failed", what)
            result = Unavailable(f"{what} failed: {error!r}", outcome_unknown=True)
        finally:
            for step in steps:
                self._answer(step, result)
        return result

    async def _transaction(self, step: CommitStep) -> list[bytes]:
        for name in step.channels:
            await self._cluster.retrying(
                f"commit to {name}", lambda name=name: self._management.ensure(step.channels[name])
            )
        moved = self._moved(step, {})
        positions = {assigned.channel.key: to_position(assigned.channel, at) for assigned, at in moved.items()}
        batches, indexes = self._batches(step)
        topics = {channel.key: self._connection(channel) for channel in step.channels.values()}
        producer = self._producer(
            min((assigned.channel for assigned in step.assigned_topics), key=lambda each: each.incarnation)
        )
        group_id = self._session.group_id

        async def store(name: str, identity: tuple[int, int]) -> None:
            await self._session.offset_store.store_within(name, identity, positions)

        offsets = await self._attempts(step, lambda: producer.commit(group_id, batches, topics, store))
        ids = [b""] * len(step.outputs.names)
        for channel in step.channels.values():
            numbers = (
                at + number
                for at, rows in zip(offsets[channel.key], batches[channel.key], strict=True)
                for number in range(len(rows))
            )
            for index, number in zip(indexes[channel.name], numbers, strict=True):
                ids[index] = channel.prefix + number.to_bytes(HALF_BYTES, "big")
        await self._stored(moved)
        return ids

    async def _attempts(
        self, step: CommitStep, attempt: Callable[[], Awaitable[dict[str, list[int]]]]
    ) -> dict[str, list[int]]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Aborted):
                return await attempt()
            self._check(step)
        raise Unavailable("a transaction was aborted on every attempt; none of it took effect")

    def _batches(self, step: CommitStep) -> tuple[dict[str, list[list[Row]]], dict[str, list[int]]]:
        """The outputs as batches by channel's key, and their indexes by channel."""
        names, rows, sizes = step.outputs
        indexes: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            indexes.setdefault(name, []).append(index)
        limit = self._cluster.options.batch_bytes
        batches: dict[str, list[list[Row]]] = {}
        for name, own in indexes.items():
            split = _split_rows([rows[index] for index in own], [sizes[index] for index in own], limit)
            batches[step.channels[name].key] = list(split)
        return batches, indexes

    def _moved(
        self, step: CommitStep, before: Mapping[AssignedTopic, GroupProgress]
    ) -> dict[AssignedTopic, GroupProgress]:
        """The progress of the group in each channel after the step, based on `before`. Raises `Fenced`, and
        `InvalidRequest` for outputs of entries that are acknowledged already."""
        self._check(step)
        moved: dict[AssignedTopic, GroupProgress] = {}
        for ack, assigned in zip(step.acks, step.assigned_topics, strict=True):
            progress = moved[assigned] = deepcopy(moved.get(assigned) or before.get(assigned) or assigned.progress)
            check_new(ack, progress, step.outputs.names)
            progress.apply(Change(self._session.group, ack.channel, ack.upto, ack.ids, metadata=ack.metadata))
        return moved

    def _check(self, step: CommitStep) -> None:
        for ack, assigned in zip(step.acks, step.assigned_topics, strict=True):
            if assigned.over:
                raise epoch_over(ack.channel, ack.assignment_epoch)

    async def _stored(self, progress: Mapping[AssignedTopic, GroupProgress]) -> None:
        for assigned, at in progress.items():
            assigned.progress = at
            if not assigned.over:
                await forget(self._management, assigned.channel, at.acked_to)

    def _answer(self, step: CommitStep, result: list[bytes] | TidewalError) -> None:
        self._undecided.pop(step, None)
        for assigned in step.assigned_topics:
            self._session.assigned_topics.decided(assigned)
        if step.answer.done():
            return
        if isinstance(result, TidewalError):
            step.answer.set_exception(result)
            step.answer.exception()  # retrieved: the caller may not wait any more
        else:
            step.answer.set_result(result)


async def forget(management: ChannelAccess, channel: KafkaChannel, position: bytes) -> None:
    """Remove the entries of a queue before its group's position. A failure is logged: the next step removes them."""
    if channel.policy.delivery is Delivery.QUEUE:
        try:
            await management.remove_before(channel, offset_behind(channel, position))
        except TidewalError as error:
            _log.warning(
                "acknowledged entries of %s cannot be removed: %s", channel.name, error, extra={"channel": channel.name}
            )


def _split_rows(rows: Sequence[Row], sizes: Sequence[int], limit: int) -> Iterable[list[Row]]:
    """The rows in batches of `limit` bytes, or of one larger row."""
    batch: list[Row] = []
    room = limit
    for row, size in zip(rows, sizes, strict=True):
        if batch and room < size + ROW_BYTES:
            yield batch
            batch, room = [], limit
        batch.append(row)
        room -= size + ROW_BYTES
    yield batch
