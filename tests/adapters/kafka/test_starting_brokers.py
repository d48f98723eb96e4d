"""Brokers that have not all registered yet, as right behind a restart of the cluster: the controller refuses to make a
topic until as many are there as it is to have copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.protocol.admin import CreateTopicsRequest

from tidewal.adapters.kafka.catalog import ChannelCatalog, KafkaChannel
from tidewal.adapters.kafka.cluster import Cluster
from tidewal.adapters.kafka.management import Management
from tidewal.adapters.kafka.options import KafkaOptions, parse
from tidewal.adapters.kafka.requests import DescribeTopic
from tidewal.runtime.errors import ConfigError, Unavailable
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import run_virtual

PATIENCE_S = 5.0
TOO_FEW = kafka_errors.InvalidReplicationFactorError.errno
UNKNOWN_TOPIC = kafka_errors.UnknownTopicOrPartitionError.errno
REASON = "The target replication factor of 3 cannot be reached because only 1 broker(s) are registered."
TOPIC_ID = bytes(range(16))


class Starting(Cluster):
    """Brokers with a controller; it refuses as often as `refusals` says to make a topic, or to say that it could."""

    def __init__(self, refusals: float):
        super().__init__(
            KafkaOptions("nowhere", replication_factor=3, delivery_timeout_s=PATIENCE_S), StallWatch(Metrics())
        )
        self.refusals = refusals
        self.made: set[str] = set()

    async def ask(self, node, request, connection=0):
        if isinstance(request, DescribeTopic):
            name = request._topic
            return SimpleNamespace(topics=[(0 if name in self.made else UNKNOWN_TOPIC, name, TOPIC_ID)])
        assert isinstance(request, CreateTopicsRequest)
        ((name, _, copies, *_),) = request.create_topic_requests
        assert copies == 3, "the same is asked for that would be made"
        if self.refusals > 0:
            self.refusals -= 1
            return SimpleNamespace(topic_errors=[(name, TOO_FEW, REASON)])
        if not request.validate_only:
            self.made.add(name)
        return SimpleNamespace(topic_errors=[(name, 0, None)])

    def leader(self, topic, partition=0):
        return 1 if topic in self.made else None

    def topics(self):
        return set(self.made)

    async def refresh(self):
        pass


class Written(ChannelCatalog):
    """Its own topic is left out: what is written is known."""

    async def sync(self):
        pass

    async def write_channel(self, name, policy):
        found = self._channels[name] = KafkaChannel(name, 0, policy, f"tidewal.{name}.0", b"")
        return found

    async def write_topic_id(self, channel, topic_id):
        channel.topic_id = topic_id


async def open_catalog(cluster):
    await ChannelCatalog(cluster, (1, 2), lambda: None).open()
    return {"tidewal.catalog"}


async def create_channel(cluster):
    await managing(cluster).create("a", ChannelPolicy())
    return {"tidewal.a.0"}


def managing(cluster):
    return Management(cluster, Written(cluster, (1, 2), lambda: None), lambda channel: -1)


making = pytest.mark.parametrize("make", [open_catalog, create_channel])


@making
@pytest.mark.parametrize("refusals", [1, 2, 20])
def test_brokers_that_have_not_all_registered_are_waited_for(make, refusals):
    async def run():
        cluster = Starting(refusals)
        assert await make(cluster) == cluster.made

    run_virtual(run())


@making
def test_more_copies_than_brokers_are_told_at_the_deadline_with_what_to_do(make, clock):
    async def run():
        began_s = clock.monotonic()
        with pytest.raises(Unavailable, match=r"only 1 broker\(s\) are registered.*`replication_factor`") as caught:
            await make(Starting(float("inf")))
        assert caught.value.retryable
        assert PATIENCE_S <= clock.monotonic() - began_s < PATIENCE_S + 1

    run_virtual(run(), clock)


def test_a_channel_that_waits_for_brokers_is_called_neither_made_nor_refused():
    async def run():
        cluster = Starting(float("inf"))
        management = managing(cluster)
        with pytest.raises(Unavailable) as caught:
            await management.create("a", ChannelPolicy())
        assert caught.value.outcome_unknown
        cluster.refusals = 0
        await management.ensure(await management.find("a"))
        assert cluster.made == {"tidewal.a.0"}

    run_virtual(run())


@pytest.mark.parametrize("copies", [0, -2])
def test_a_number_of_copies_that_no_cluster_grants_is_refused_at_once(copies):
    with pytest.raises(ConfigError, match="replication_factor"):
        parse(f"kafka://nowhere?replication_factor={copies}")
