"""A channel whose topic the brokers refuse is taken back, but not one that another process was granted meanwhile. The
catalogs of two processes follow one list of records, as they follow its topic."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.protocol.admin import CreateTopicsRequest

from tidewal.adapters.kafka.catalog import TOPIC, ChannelCatalog
from tidewal.adapters.kafka.cluster import Cluster
from tidewal.adapters.kafka.management import Management
from tidewal.adapters.kafka.options import KafkaOptions
from tidewal.adapters.kafka.requests import DescribeTopic
from tidewal.runtime.errors import ChannelNotFound, InvalidRequest
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import run_virtual

REFUSED = kafka_errors.PolicyViolationError.errno
UNKNOWN_TOPIC = kafka_errors.UnknownTopicOrPartitionError.errno
POLICY = ChannelPolicy()


async def nothing():
    pass


class Brokers(Cluster):
    """What one process sees of the topics in `made`. It is `refused` to make one."""

    def __init__(self, made, *, refused):
        super().__init__(KafkaOptions("nowhere"), StallWatch(Metrics()))
        self.made, self.refused = made, refused
        self.at_refusal = nothing

    async def ask(self, node, request, connection=0):
        if isinstance(request, DescribeTopic):
            id = self.made.get(request._topic)
            return SimpleNamespace(topics=[(UNKNOWN_TOPIC if id is None else 0, request._topic, id)])
        assert isinstance(request, CreateTopicsRequest)
        ((name, *_),) = request.create_topic_requests
        if self.refused and not request.validate_only:
            await self.at_refusal()
            return SimpleNamespace(topic_errors=[(name, REFUSED, "not you")])
        if not request.validate_only:
            self.made[name] = bytes([1 + len(self.made)] * 16)
        return SimpleNamespace(topic_errors=[(name, 0, None)])

    async def delete_topic(self, topic):
        self.made.pop(topic, None)

    def leader(self, topic, partition=0):
        return 1 if topic in self.made else None

    async def refresh(self):
        pass


class Followed(ChannelCatalog):
    """Knows at once what any of `peers` writes."""

    def __init__(self, cluster, peers):
        super().__init__(cluster, (1, 2), lambda: None)
        self.peers = peers
        peers.append(self)
        self.before_write = lambda key: nothing()

    async def sync(self):
        pass

    async def _write(self, changes):
        for key, value in changes:
            await self.before_write(key)
            for peer in self.peers:
                row = key.encode(), None if value is None else json.dumps(value).encode()
                peer._apply(self.peers[0].applied_to, *row)
            self.peers[0].applied_to += 1


class Process:
    def __init__(self, made, peers, *, refused=False):
        self.cluster = Brokers(made, refused=refused)
        self.catalog = Followed(self.cluster, peers)
        self.management = Management(self.cluster, self.catalog, lambda channel: -1)


def two():
    made, peers = {}, []
    return made, Process(made, peers, refused=True), Process(made, peers)


def test_a_refused_channel_frees_its_name():
    async def run():
        made, refused, other = two()
        with pytest.raises(InvalidRequest, match="not you"):
            await refused.management.create("a", POLICY)
        assert await refused.management.names() == await other.management.names() == []
        await other.management.create("a", ChannelPolicy(retention_s=1))
        assert len(made) == 1

    run_virtual(run())


@pytest.mark.parametrize("when", ["at the refusal", "as it is taken back"])
def test_a_channel_that_another_process_was_granted_meanwhile_is_not_taken_back(when):
    async def run():
        made, refused, other = two()

        async def create():
            refused.catalog.before_write = lambda key: nothing()
            await other.management.create("a", POLICY)

        if when == "at the refusal":
            refused.cluster.at_refusal = create
        else:
            refused.catalog.before_write = lambda key: create() if key.startswith(TOPIC) else nothing()
        with pytest.raises(InvalidRequest, match="not you"):
            await refused.management.create("a", POLICY)
        for process in (refused, other):
            channel = await process.management.find("a")
            await process.management.ensure(channel)
            assert channel.topic_id == made[channel.topic]

    run_virtual(run())


def test_of_a_channel_that_is_taken_back_as_another_process_makes_it_nothing_is_left():
    """The other one has its topic and has not noted it yet, so it cannot have appended anything."""

    async def run():
        made, refused, other = two()
        asked, going = asyncio.Event(), asyncio.Event()

        async def wait():
            asked.set()
            await going.wait()

        refused.cluster.at_refusal = wait
        refusal = asyncio.create_task(refused.management.create("a", POLICY))
        await asked.wait()

        async def refuse():
            other.catalog.before_write = lambda key: nothing()
            going.set()
            await asyncio.gather(refusal, return_exceptions=True)

        other.catalog.before_write = lambda key: refuse() if key.startswith(TOPIC) else nothing()
        with pytest.raises(ChannelNotFound, match="dropped"):
            await other.management.create("a", POLICY)
        assert isinstance(refusal.exception(), InvalidRequest)
        assert await other.management.names() == []
        assert made == {}

    run_virtual(run())
