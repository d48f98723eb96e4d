"""What a client does with topics, for one client: what it knows of them, and the order of what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from ...runtime.catalog.topics import Topic
from ...runtime.cluster.decided_positions import DecidedPosition
from ...runtime.errors import TidewalError, TopicEpochEnded, TopicExists, TopicNotFound
from ...runtime.log.following import moves_of
from ...runtime.log.migration_watch import LOOK_PREPARED_S
from ...runtime.log.names import Names
from ...runtime.log.wal import From, GroupMember, Wal
from ...runtime.rpc.client import RpcClient
from ...runtime.rpc.protocol import Params, Reply
from ..deadlines import in_s, left_s
from ..described import Described, WritePlace
from ..followed_log import has_left
from ..numbered_writes import NumberedWrites
from .delayed_sends import cancel_delayed, due_params, send_delayed
from .group_start import begin_in, start_of_group
from .member import JoinedTopics, TopicMember
from .messages import Message, Partitioner, PlacedMessage, SendResult, pack_messages
from .retry_topics import PARTITIONS_MAX, RetryTopics, retry_topic_name
from .sender import Sending, TopicSender

FENCE_DEADLINE_S = 10.0  # of one question about a position; the member asks again
GROWN_S = 3.0  # for a retry topic to get more partitions, as a member subscribes
COPY_DEADLINE_S = 10.0  # of a copy for a retry topic; it is sent again under its number then


class TopicCalls:
    """The calls of `Client` that are about topics; what they promise and raise is said there."""

    def __init__(self, wal: Wal, names: Names, rpc: RpcClient, writes: NumberedWrites) -> None:
        self._wal, self._names, self._rpc, self._writes = wal, names, rpc, writes
        self._described = Described(self.describe)
        self._sender = TopicSender(rpc.name)

    # ---- their records ----------------------------------------------------------------------------------------------

    async def create(
        self, name: str, partitions: int, retention_s: float | None, retention_bytes: int | None, deadline_s: float
    ) -> Topic:
        """`Client.create_topic`."""
        params = {
            "name": name,
            "partitions": partitions,
            "retention_s": None if retention_s is None else float(retention_s),
            "retention_bytes": retention_bytes,
        }
        return await self._changed("create_topic", params, deadline_s)

    async def alter(self, name: str, partitions: int, hashed: bool, deadline_s: float) -> Topic:
        """`Client.alter_topic`."""
        found = await self.describe(name, deadline_s)  # not a later topic of that name
        params = {"id": found.id, "epoch": found.epoch, "partitions": partitions, "hashed": hashed}
        return await self._changed("alter_topic", params, deadline_s)

    async def _changed(self, method: str, params: Params, deadline_s: float) -> Topic:
        reply = await self._rpc.call("mixcoord", method, params, deadline_s=deadline_s)
        return self._described.know(Topic.from_wire(reply.values["topic"]))

    async def drop(self, name: str, deadline_s: float) -> None:
        """`Client.drop_topic`."""
        found = await self.describe(name, deadline_s)  # not a later topic of that name
        await self._rpc.call("mixcoord", "drop_topic", {"id": found.id}, deadline_s=deadline_s)
        self._described.forget(found)
        self._sender.forget(found)

    async def describe(self, name: str, deadline_s: float) -> Topic:
        """`Client.describe_topic`."""
        return (await self._with_fences(name, deadline_s))[0]

    async def _with_fences(self, name: str, deadline_s: float) -> tuple[Topic, Mapping[str, Mapping[int, bytes]]]:
        values = (await self._rpc.call("mixcoord", "describe_topic", {"name": name}, deadline_s=deadline_s)).values
        fences = {channel: dict(each) for channel, each in values["fences"].items()}
        return self._described.know(Topic.from_wire(values["topic"])), fences

    async def list(self) -> list[Topic]:
        """`Client.list_topics`."""
        reply = await self._rpc.call("mixcoord", "list_topics")
        return [Topic.from_wire(wire) for wire in reply.values["topics"]]

    # ---- sends ------------------------------------------------------------------------------------------------------

    async def send(
        self,
        name: str,
        messages: Sequence[Message],
        partitioner: Partitioner | None,
        due: Params,
        deadline_s: float,
    ) -> SendResult:
        """`Client.send`; `due` are the parameters that say when the messages are."""
        until = in_s(deadline_s)
        sending = Sending(self._sender, messages, partitioner)
        place = self._described.place(name)
        known, over = place.at_once, None
        with sending.partly_written():
            while True:
                found = known or await place.in_turn(until, over)
                try:
                    return await self._send_in_turn(place, found, sending, due, until)
                except TopicEpochEnded as error:
                    sending.divide(error)
                    over = found
                except TopicNotFound as error:
                    if known is None or sending.partitions or error.fields.get("outcome_unknown"):
                        raise
                known = None

    async def _send_in_turn(
        self, place: WritePlace[Topic], topic: Topic, sending: Sending, due: Params, until: float
    ) -> SendResult:
        with place.under_way(topic):
            try:
                if due:
                    to = await self._with_delays(topic, until)
                    return await send_delayed(to, sending, partial(self._send_to, to, due, until))
                reply = await self._send_to(topic, due, until, sending.place(topic))
                return sending.result(reply.values["ts"])
            except (TopicNotFound, TopicEpochEnded):
                place.refused(topic)
                raise

    async def _send_to(self, topic: Topic, due: Params, until: float, placed: Sequence[PlacedMessage]) -> Reply:
        return await self._writes.send("send", {**_to(topic), **due}, pack_messages(placed), left_s(until))

    async def _with_delays(self, topic: Topic, until: float) -> Topic:
        """The topic, once it takes messages that are due later."""
        return topic if topic.delays else await self._changed("delay_topic", {"id": topic.id}, left_s(until))

    async def cancel(self, name: str, id: str, deadline_s: float) -> bool:
        """`Client.cancel`."""
        until = in_s(deadline_s)

        async def ask_to_cancel(topic: Topic, message: Params) -> bool:
            reply = await self._writes.send("cancel", {**_to(topic), **message}, b"", left_s(until))
            return bool(reply.values["cancelled"])

        describe = partial(self.describe, name, deadline_s)
        return await cancel_delayed(id, self._described.get(name), describe, ask_to_cancel)

    # ---- transactions -----------------------------------------------------------------------------------------------

    async def find(self, name: str, within_s: float) -> Topic:
        """The topic of that name. Raises as `describe` does."""
        return await self._described.find(name, within_s)

    def forget(self, topic: Topic) -> None:
        """It has refused a transaction: it is gone, or altered."""
        self._described.forget(topic)

    def place(self, topic: Topic, messages: Sequence[Message], partitioner: Partitioner | None) -> list[PlacedMessage]:
        """The messages with their partitions. Raises as `TopicSender.place` does."""
        return self._sender.place(topic, messages, partitioner)

    @asynccontextmanager
    async def in_turn(self, topics: Sequence[Topic], deadline_s: float) -> AsyncGenerator[None]:
        """The block writes to `topics` behind all that this client has sent to them before."""
        until = in_s(deadline_s)
        places = [(topic, self._described.place(topic.name)) for topic in topics]
        with ExitStack() as under_way:
            for topic, place in places:
                if place.at_once is None:
                    await place.in_turn(until)
                under_way.enter_context(place.under_way(topic))
            yield

    # ---- groups -----------------------------------------------------------------------------------------------------

    async def subscribe(
        self,
        named: Sequence[str],
        group: str,
        start: From,
        where: str | None,
        reset_to: From | None,
        session_timeout_s: float,
        ack_timeout_s: float | None,
        retry_topic: bool,
        deadline_s: float,
    ) -> TopicMember:
        """`Client.subscribe` to the topics of these names."""
        found = [await self.describe(name, deadline_s) for name in named]
        retries = await self._retry_topics(found, group, deadline_s) if retry_topic else None
        start = await start_of_group(self._wal, self._names, group, found, start, deadline_s)
        if retries is not None:
            if start is not From.EARLIEST:  # that is for its topics: of what is to be tried again none is passed
                await begin_in(self._wal, self._names, group, found, start, deadline_s)
                start = From.EARLIEST
            found += retries.topics
        join = partial(
            self._join,
            [topic.name for topic in found],
            deadline_s,
            group,
            [self._names.topic_pattern(topic.id) for topic in found],
            start=start,
            reset_to=reset_to,
            session_timeout_s=session_timeout_s,
            ack_timeout_s=ack_timeout_s,
        )
        describe = partial(self._with_fences, deadline_s=deadline_s)
        return TopicMember(self._wal, await join(), self._names, join, describe, self._fence_position, where, retries)

    async def _fence_position(self, group: str, channel: str) -> DecidedPosition:
        params = {"group": group, "channel": channel}
        values = (await self._rpc.call("proxy", "fence_position", params, deadline_s=FENCE_DEADLINE_S)).values
        return DecidedPosition(values["token"], "", values["decided"], values["upto"], values["metadata"])

    async def _join(
        self, names: Sequence[str], deadline_s: float, group: str, patterns: Sequence[str], **options: Any
    ) -> JoinedTopics:
        """Become a member of a group, with the `options` of `Wal.join`."""
        member, moves = await self._joined(group, patterns, **options)
        topics: list[Topic] = []
        fences: dict[str, Mapping[int, bytes]] = {}
        try:
            for name in names:  # read behind the start of the member: what a fence there hides is known then
                topic, known = await self._with_fences(name, deadline_s)
                topics.append(topic)
                fences.update(known)
        except BaseException:
            await member.aclose()
            raise
        return JoinedTopics(member, topics, fences, moves)

    async def _joined(self, group: str, patterns: Sequence[str], **options: Any) -> tuple[GroupMember, int]:
        """A member, and how often its log had moved before. The log may move while it joins, also because of that: it
        is not known then in which one it is, and it joins again."""
        while True:
            moves = moves_of(self._wal)
            member = await self._wal.join(group, patterns, **options)
            try:
                left = await has_left(self._wal)  # behind the join: either a migration sees that, or this sees it
                if not left and moves == moves_of(self._wal):
                    return member, moves
            except BaseException:
                await member.aclose()
                raise
            with suppress(TidewalError):
                await member.aclose()
            if left:
                await asyncio.sleep(LOOK_PREPARED_S)

    async def _retry_topics(self, topics: Sequence[Topic], group: str, deadline_s: float) -> RetryTopics:
        """The retry topics of a group, made where they are missing; none is made where one cannot be called so."""
        until = in_s(deadline_s)
        found: dict[str, Topic] = {}
        names = [retry_topic_name(topic.name, group) for topic in topics]
        for topic, name in zip(topics, names, strict=True):
            found[topic.name] = await self._with_delays(await self._retry_topic(topic, name, until), until)
        describe = partial(self.describe, deadline_s=COPY_DEADLINE_S)
        return RetryTopics(found, self._names, self._send_copies, describe)

    async def _retry_topic(self, topic: Topic, name: str, until: float) -> Topic:
        """The retry topic of that name for `topic`, with as many partitions as it should have by now, unless that takes
        long: then a later member sees to it."""
        partitions = min(PARTITIONS_MAX, len(topic.partitions))
        with suppress(TopicExists):  # of a time when the topic had other partitions
            await self.create(name, partitions, topic.retention_s, topic.retention_bytes, left_s(until))
        found = await self.describe(name, left_s(until))
        if len(found.partitions) < partitions:
            with suppress(TidewalError):
                return await self.alter(name, partitions, True, min(GROWN_S, left_s(until)))
        return found

    async def _send_copies(
        self, topic: Topic, epoch: int, messages: Sequence[PlacedMessage], delay_s: float, producer: str, number: int
    ) -> None:
        params, body = {**_to(topic), "epoch": epoch, **due_params(None, delay_s)}, pack_messages(messages)
        if producer:
            await self._writes.send_for(producer, number, "send", params, body, COPY_DEADLINE_S)
        else:
            await self._writes.send("send", params, body, COPY_DEADLINE_S)


def _to(topic: Topic) -> Params:
    """The parameters of what is written to a topic."""
    return {"topic": topic.name, "id": topic.id, "epoch": topic.epoch}
