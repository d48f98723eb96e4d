"""Topics: the leader creates them, and drops them once no node owns their channels."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.catalog.topics import CREATING, DROPPING, READY, TOPICS_LEVEL, Topic, Topics, check_topic_name
from ...runtime.errors import DeadlineExceeded, Fenced, InvalidRequest, TidewalError, TopicExists
from ...runtime.log.names import delay_channel_of
from ...runtime.waiting import first_of
from ..node import Node
from ..requests import Answer, Method, Nothing
from .requests import AlterTopicParams, CreateTopicParams, OfTopic, TopicIdParams
from .topic_epochs import TopicEpochs

if TYPE_CHECKING:
    from ...runtime.rpc.server import Request

GIVEN_UP_S = 20.0  # for owners to give the channels of a dropped topic up: longer than a lease
LEVEL_S = 10.0  # for the feature level to rise, once all members know it: a leader waits for a lease
LOOK_S = 0.2  # leases end without a record
FINISH_AGAIN_S = 5.0

_log = logging.getLogger("tidewal.mixcoord")


class TopicDdl:
    """The methods of the leader for topics. `adding` is held while an id is given to a topic or a collection,
    `deciding` while the leader decides who is to own what; `is_over` says whether nothing can rest on the lease of a
    process."""

    def __init__(
        self,
        node: Node,
        catalog: CatalogLog,
        adding: asyncio.Lock,
        deciding: asyncio.Lock,
        is_over: Callable[[str], bool],
    ) -> None:
        self._node, self._catalog = node, catalog
        self._adding, self._deciding, self._is_over = adding, deciding, is_over
        self._ddl: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by name, while one is held
        self._epochs = TopicEpochs(node, catalog, deciding, self._until_given_up)

    def handlers(self) -> dict[str, Method]:
        """The methods, by name."""
        return {
            "create_topic": Method(self._create, CreateTopicParams),
            "alter_topic": Method(self._alter, AlterTopicParams),
            "delay_topic": Method(self._delay, TopicIdParams),
            "drop_topic": Method(self._drop, TopicIdParams),
            "describe_topic": Method(self._describe, OfTopic),
            "list_topics": Method(self._list, Nothing),
        }

    @property
    def _topics(self) -> Topics:
        return self._catalog.catalog.topics

    # ---- what clients ask -------------------------------------------------------------------------------------------

    async def _create(self, request: Request) -> Answer:
        params = request.params
        name: str = params["name"]
        check_topic_name(name)
        self._check_partitions(params["partitions"])
        await self._until_level()
        async with self._ddl_of(name):
            found = self._topics.find(name)
            if found is not None and found.state == DROPPING:
                await self._finish_drop(found)
                found = None
            wanted = params["partitions"], params["retention_s"], params["retention_bytes"]
            if found is not None and (other := _difference(found, *wanted)):
                raise TopicExists(f"topic {name} exists: {other}", topic=name)
            created = found is None or found.state != READY
            if found is None:
                async with self._adding:
                    found = await self._add(name, *wanted)
            if created:
                await self._finish_create(found)
            return {"topic": self._topics.ready(name).to_wire(), "created": created}

    async def _alter(self, request: Request) -> Answer:
        params = request.params
        id, epoch, partitions = params["id"], params["epoch"], params["partitions"]
        self._check_partitions(partitions)
        topic = await self._epochs.settled(id)  # an epoch that is begun is finished first
        async with self._ddl_of(topic.name):
            topic = self._epochs.present(id)
            if len(topic.partitions) != partitions:
                _check_alterable(topic, epoch)
                await self._epochs.announce(topic, partitions, hashed=params["hashed"])
                await self._epochs.finish(self._epochs.present(id))
        return {"topic": (await self._epochs.settled(id)).to_wire()}

    async def _delay(self, request: Request) -> Answer:
        """Let a topic take messages that are due later: the partitions that take messages get delay channels, and so do
        all that come."""
        id = request.params["id"]
        topic = await self._epochs.settled(id)  # what is due is written to partitions that have begun
        async with self._ddl_of(topic.name):
            topic = self._epochs.present(id)
            if topic.settled:
                if not topic.delays:
                    await self._epochs.make_delay_channels(topic, topic.delay_channels)
                    await self._catalog.append({"kind": "delay_topic", "id": id})
                return {"topic": self._epochs.present(id).to_wire()}
        return await self._delay(request)  # it was altered meanwhile

    def _check_partitions(self, partitions: int) -> None:
        limit = self._node.settings.root_coord.max_topic_partition_num
        if not 1 <= partitions <= limit:
            raise InvalidRequest(
                f"a topic has 1 to {limit} partitions (rootCoord.maxTopicPartitionNum), not {partitions}",
                argument="partitions",
            )

    async def _drop(self, request: Request) -> Answer:
        named = self._topics.by_id(request.params["id"])
        if named is None:
            return None  # a repeated request: it is gone already
        async with self._ddl_of(named.name):
            topic = self._topics.by_id(named.id)
            if topic is None:
                return None
            if topic.state != DROPPING:
                async with self._deciding:  # no grant of its channels comes behind this
                    await self._catalog.append({"kind": "drop_topic", "id": topic.id})
            await self._finish_drop(topic)
        return None

    async def _describe(self, request: Request) -> Answer:
        """The topic, and by pchannel the known fences, for readers that begin in the middle."""
        topic = self._topics.ready(request.params["name"])
        fences = self._catalog.catalog.fences(list(topic.pchannels))
        return {"topic": topic.to_wire(), "fences": {name: list(each.items()) for name, each in fences.items()}}

    async def _list(self, _: Request) -> Answer:
        return {"topics": [each.to_wire() for each in sorted(self._topics, key=_name) if each.state == READY]}

    # ---- how it is done ---------------------------------------------------------------------------------------------

    def _ddl_of(self, name: str) -> asyncio.Lock:
        lock = self._ddl.get(name)
        if lock is None:
            lock = self._ddl[name] = asyncio.Lock()
        return lock

    async def _until_level(self) -> None:
        """Wait until the catalog may have topics, where all members know them. Raises `InvalidRequest` where the
        feature level does not rise now."""
        try:
            async with asyncio.timeout(LEVEL_S):
                while self._catalog.fold.level < TOPICS_LEVEL:
                    cluster = self._node.cluster.state
                    if cluster.level_held or cluster.known_level < TOPICS_LEVEL:
                        raise TimeoutError
                    await first_of(self._catalog.changed(), asyncio.sleep(LOOK_S))
        except TimeoutError:
            raise InvalidRequest(
                f"topics need feature level {TOPICS_LEVEL}, and the cluster has level {self._catalog.fold.level}: "
                "`tidewal level` says what it waits for"
            ) from None

    async def _add(self, name: str, partitions: int, retention_s: float | None, retention_bytes: int | None) -> Topic:
        limit = self._node.settings.root_coord.max_topic_num
        if len(self._topics) >= limit:
            raise InvalidRequest(
                f"there are {len(self._topics)} topics, the limit is {limit} (rootCoord.maxTopicNum): drop one, or "
                "raise it"
            )
        names, id = self._node.names, self._catalog.catalog.next_id
        epoch = tuple(names.vchannel(names.topic_pchannel(id, n), id, n) for n in range(partitions))
        created_ts = self._node.clock.now()
        topic = Topic(id, name, (epoch,), created_ts, retention_s=retention_s, retention_bytes=retention_bytes)
        await self._catalog.append({"kind": "create_topic", "topic": topic.to_wire()})
        return topic

    async def _finish_create(self, topic: Topic) -> None:
        wal = self._node.wal
        await asyncio.gather(*(wal.create_channel(channel, topic.policy) for channel in topic.pchannels))
        await self._catalog.append({"kind": "topic_ready", "id": topic.id})

    async def _finish_drop(self, topic: Topic) -> None:
        await self._until_given_up(f"topic {topic.name} takes no more messages, and", topic.owned_channels)
        channels = (*topic.pchannels, *map(delay_channel_of, topic.pchannels))  # a leader may have died making these
        await asyncio.gather(*(self._node.wal.drop_channel(channel) for channel in channels))
        await self._catalog.append({"kind": "topic_dropped", "id": topic.id})

    async def _until_given_up(self, what: str, channels: Sequence[str]) -> None:
        """Wait until no process can write to `channels`, which their owners are to give up, for `what` is removed."""
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                while self._owned(channels):
                    await first_of(self._catalog.changed(), asyncio.sleep(LOOK_S))
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what} is removed once its owners have given it up: {', '.join(self._owned(channels))} are owned",
                outcome_unknown=True,
            ) from None

    def _owned(self, channels: Sequence[str]) -> list[str]:
        """Those that a process may still write to."""
        states = self._catalog.catalog.channels
        owners = {name: states[name].owner for name in channels if name in states}
        return [name for name, owner in owners.items() if owner and not self._is_over(owner)]

    async def finish(self) -> None:
        """Finish what an earlier leader began, and what could not be finished when it was asked for; remove epochs of
        which nothing is kept any more."""
        while True:
            await asyncio.gather(*map(self._finish_one, self._topics))
            await asyncio.sleep(FINISH_AGAIN_S)

    async def _finish_one(self, topic: Topic) -> None:
        async with self._ddl_of(topic.name):
            current = self._topics.by_id(topic.id)
            try:
                if current is not None and current.state == CREATING:
                    await self._finish_create(current)
                elif current is not None and current.state == DROPPING:
                    await self._finish_drop(current)
                elif current is not None:
                    await self._epochs.finish(current)
                    await self._epochs.retire(self._epochs.present(current.id))
            except Fenced:
                raise
            except TidewalError as error:  # the next turn, or the next request for the name, continues
                _log.warning("topic %s stays %s for now: %s", topic.name, topic.state, error)


def _name(topic: Topic) -> str:
    return topic.name


def _check_alterable(topic: Topic, epoch: int) -> None:
    """Raise `InvalidRequest` where a topic whose last epoch is to be of that number gets no other."""
    if topic.epoch != epoch or not topic.settled:
        raise InvalidRequest(
            f"topic {topic.name} was altered meanwhile, and has {len(topic.partitions)} partitions",
            argument="partitions",
        )


def _difference(topic: Topic, partitions: int, retention_s: float | None, retention_bytes: int | None) -> str:
    """In what a topic differs from the wanted one; "" where it does not."""
    found: list[str] = []
    if len(topic.partitions) != partitions:
        found.append(f"it has {len(topic.partitions)} partitions, not {partitions}")
    if topic.retention_s != retention_s:
        found.append(f"it keeps messages for {_shown(topic.retention_s)} s, not {_shown(retention_s)}")
    if topic.retention_bytes != retention_bytes:
        found.append(f"it keeps {_shown(topic.retention_bytes)} bytes of a partition, not {_shown(retention_bytes)}")
    return "; ".join(found)


def _shown(value: float | None) -> str:
    return "any number of" if value is None else f"{value:g}"
