"""What a member acknowledges and commits, one step after the other: each step tells the whole position of a channel.

While one step is under way acknowledgements gather, and go together in the next. A commit with outputs is a transaction
of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from ....runtime.errors import TidewalError, Unavailable
from ....runtime.groups.link import Ack
from ....runtime.groups.progress import Change, Progress, check_new
from ....runtime.wal import Append, Delivery
from ..catalog import Channel
from ..cluster import Cluster
from ..lane import ROW_BYTES
from ..management import Management
from ..positions import HALF_BYTES, Row, to_rows
from .holdings import Hold, lease_over
from .offsets import offset_behind, to_position
from .requests import Position
from .session import Session
from .transaction import Aborted, Producer

ATTEMPTS = 3  # at a transaction that Kafka or a predecessor has aborted

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Step:
    """One call of `commit`."""

    acks: Sequence[Ack]
    holds: Sequence[Hold]
    outputs: Sequence[Append]
    channels: Mapping[str, Channel]  # of the outputs
    answer: asyncio.Future[list[bytes]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Committer:
    """The commits of one session. Belongs to the I/O loop."""

    def __init__(
        self,
        session: Session,
        cluster: Cluster,
        management: Management,
        producer: Callable[[Channel], Producer],
        connection: Callable[[Channel], int],
    ) -> None:
        """`producer` commits for an input channel, `connection` is for appending to a channel."""
        self._session, self._cluster, self._management = session, cluster, management
        self._producer, self._connection = producer, connection
        self._steps: deque[Step] = deque()
        self._undecided: dict[Step, None] = {}  # in order
        self._running: asyncio.Task[None] | None = None

    async def commit(
        self, acks: Sequence[Ack], outputs: Sequence[Append], channels: Mapping[str, Channel]
    ) -> list[bytes]:
        """`GroupLink.commit`, of one acknowledgement at least. Once begun it is carried through, whoever waits."""
        step = Step(acks, [self._session.holdings.find(ack.channel, ack.lease) for ack in acks], outputs, channels)
        for hold in step.holds:
            hold.commits_in_flight += 1
        self._steps.append(step)
        self._undecided[step] = None
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(step.answer)

    async def finish(self, hold: Hold | None = None) -> None:
        """Return when all is decided that is under way now, or of it what was begun under one lease."""
        if answers := [step.answer for step in self._undecided if hold is None or hold in step.holds]:
            await asyncio.wait(answers)

    async def _run(self) -> None:
        try:
            while self._steps:
                if self._steps[0].outputs:
                    await self._transact(self._steps.popleft())
                else:
                    await self._acknowledge(self._take_acknowledgements())
        finally:
            self._running = None
            for step in self._steps:  # cancelled: the log is closed
                self._answer(step, Unavailable("the log was closed meanwhile"))
            self._steps.clear()

    def _take_acknowledgements(self) -> list[Step]:
        steps: list[Step] = []
        while self._steps and not self._steps[0].outputs:
            steps.append(self._steps.popleft())
        return steps

    async def _acknowledge(self, steps: Sequence[Step]) -> None:
        accepted: list[Step] = []
        progress: dict[Hold, Progress] = {}
        positions: dict[str, Position] = {}
        for step in steps:
            try:
                moved = self._moved(step, progress)
                positions |= {hold.channel.topic: to_position(hold.channel, at) for hold, at in moved.items()}
            except TidewalError as error:
                self._answer(step, error)
                continue
            progress |= moved
            accepted.append(step)
        result: list[bytes] | TidewalError = []
        try:
            if accepted:
                await self._session.committed.store(positions)
                await self._stored(progress)
        except TidewalError as error:
            result = error
        except Exception as error:  # not foreseen: told to who waits
            _log.exception("acknowledging failed")
            result = Unavailable(f"acknowledging failed: {error!r}", outcome_unknown=True)
        except asyncio.CancelledError:
            result = Unavailable("the log was closed meanwhile", outcome_unknown=True)
            raise
        finally:
            for step in accepted:
                self._answer(step, result)

    async def _transact(self, step: Step) -> None:
        result: list[bytes] | TidewalError = Unavailable("the log was closed meanwhile", outcome_unknown=True)
        try:
            result = await self._transaction(step)
        except TidewalError as error:
            result = error
        except Exception as error:  # not foreseen: told to who waits
            _log.exception("a commit failed")
            result = Unavailable(f"a commit failed: {error!r}", outcome_unknown=True)
        finally:
            self._answer(step, result)
        if isinstance(result, TidewalError) and result.fields.get("outcome_unknown"):
            for hold in step.holds:  # the position tells what happened
                self._session.holdings.lease_anew(hold)

    async def _transaction(self, step: Step) -> list[bytes]:
        for name in {output.channel for output in step.outputs}:
            await self._cluster.retrying(
                f"commit to {name}", lambda name=name: self._management.ensure(step.channels[name])
            )
        moved = self._moved(step, {})
        positions = {hold.channel.topic: to_position(hold.channel, at) for hold, at in moved.items()}
        batches, places = self._batches(step)
        topics = {channel.topic: self._connection(channel) for channel in step.channels.values()}
        producer = self._producer(min((hold.channel for hold in step.holds), key=lambda each: each.incarnation))
        group_id = self._session.group_id

        async def store(name: str, identity: tuple[int, int]) -> None:
            await self._session.committed.store_within(name, identity, positions)

        offsets = await self._attempts(step, lambda: producer.commit(group_id, batches, topics, store))
        ids = [b""] * len(step.outputs)
        for channel in step.channels.values():
            numbers = (
                at + number
                for at, rows in zip(offsets[channel.topic], batches[channel.topic], strict=True)
                for number in range(len(rows))
            )
            for place, number in zip(places[channel.name], numbers, strict=True):
                ids[place] = channel.prefix + number.to_bytes(HALF_BYTES, "big")
        await self._stored(moved)
        return ids

    async def _attempts(
        self, step: Step, attempt: Callable[[], Awaitable[dict[str, list[int]]]]
    ) -> dict[str, list[int]]:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(Aborted):
                return await attempt()
            self._check(step)
        raise Unavailable("a transaction was aborted again and again; nothing of it happened")

    def _batches(self, step: Step) -> tuple[dict[str, list[list[Row]]], dict[str, list[int]]]:
        """The outputs as batches by topic, and by channel which of the outputs they are."""
        places: dict[str, list[int]] = {}
        for place, output in enumerate(step.outputs):
            places.setdefault(output.channel, []).append(place)
        limit = self._cluster.options.batch_bytes
        now_ms = int(time.time() * 1000)
        batches: dict[str, list[list[Row]]] = {}
        for name, own in places.items():
            outputs = [step.outputs[place] for place in own]
            payloads = [bytes(output.payload) for output in outputs]
            rows = to_rows([output.timestamp for output in outputs], payloads, now_ms)
            batches[step.channels[name].topic] = list(_pieces(rows, [len(each) for each in payloads], limit))
        return batches, places

    def _moved(self, step: Step, before: Mapping[Hold, Progress]) -> dict[Hold, Progress]:
        """How far the group is in each channel once the step is done. Raises `Fenced`, and `InvalidRequest` for outputs
        of what is done already."""
        self._check(step)
        moved: dict[Hold, Progress] = {}
        for ack, hold in zip(step.acks, step.holds, strict=True):
            progress = moved[hold] = deepcopy(moved.get(hold) or before.get(hold) or hold.progress)
            check_new(ack, progress, step.outputs)
            progress.apply(Change(self._session.group, ack.channel, ack.upto, ack.ids))
        return moved

    def _check(self, step: Step) -> None:
        for ack, hold in zip(step.acks, step.holds, strict=True):
            if hold.over:
                raise lease_over(ack.channel, ack.lease)

    async def _stored(self, progress: Mapping[Hold, Progress]) -> None:
        for hold, at in progress.items():
            hold.progress = at
            if not hold.over:
                await forget(self._management, hold.channel, at.acked_to)

    def _answer(self, step: Step, result: list[bytes] | TidewalError) -> None:
        self._undecided.pop(step, None)
        for hold in step.holds:
            self._session.holdings.decided(hold)
        if step.answer.done():
            return
        if isinstance(result, TidewalError):
            step.answer.set_exception(result)
            step.answer.exception()  # whoever waited may have gone
        else:
            step.answer.set_result(result)


async def forget(management: Management, channel: Channel, position: bytes) -> None:
    """Of a queue what lies before its group's position goes at once. Where that fails the next step makes up for it."""
    if channel.policy.delivery is Delivery.QUEUE:
        try:
            await management.remove_before(channel, offset_behind(channel, position))
        except TidewalError as error:
            _log.warning("what is acknowledged of %s cannot be removed: %s", channel.name, error)


def _pieces(rows: Sequence[Row], sizes: Sequence[int], limit: int) -> Iterable[list[Row]]:
    """The rows in pieces of so many bytes, or of one row that is larger."""
    piece: list[Row] = []
    room = limit
    for row, size in zip(rows, sizes, strict=True):
        if piece and room < size + ROW_BYTES:
            yield piece
            piece, room = [], limit
        piece.append(row)
        room -= size + ROW_BYTES
    yield piece
