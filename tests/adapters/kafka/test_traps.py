"""What Python's Kafka clients and the protocol are known to trap their users with, where no other test shows that
Tidewal is not caught; `docs/backends.md` names the test for each.
"""

from __future__ import annotations

import asyncio

import pytest

from tidewal.adapters.kafka import sender as sender_module
from tidewal.adapters.kafka.requests import ProduceById
from tidewal.runtime.errors import ChannelNotFound
from tidewal.runtime.log.wal import ChannelPolicy, Durability, From

pytestmark = pytest.mark.broker

PLAIN = ChannelPolicy()
WITHIN_S = 30.0
ALL_COPIES, LEADER = -1, 1


async def test_appends_wait_for_all_copies_unless_the_channel_says_otherwise(kafka, opening, monkeypatch):
    asked = {}

    def recorded(required_acks, timeout_ms, topic, *rest):
        asked[topic] = required_acks
        return ProduceById(required_acks, timeout_ms, topic, *rest)

    monkeypatch.setattr(sender_module, "ProduceById", recorded)
    wal = await opening(kafka)
    wanted = {
        "default": (PLAIN, ALL_COPIES),
        "all": (ChannelPolicy(acks=Durability.ALL), ALL_COPIES),
        "one": (ChannelPolicy(acks=Durability.ONE), LEADER),
        "none": (ChannelPolicy(acks=Durability.NONE), LEADER),
        "ephemeral": (ChannelPolicy(ephemeral=True), LEADER),
    }
    for name, (policy, acks) in wanted.items():
        await wal.create_channel(name, policy)
        assert await wal.append(name, b"x")
        assert asked[wal._catalog.find(name).topic] == acks
    assert set(asked.values()) == {ALL_COPIES, LEADER}


async def test_a_dropped_topic_is_not_brought_back_by_who_still_uses_it(kafka, opening, helpers):
    one, other = await opening(kafka), await opening(kafka)
    await one.create_channel("a", PLAIN)
    await other.append("a", b"x")
    read = []
    reading = asyncio.create_task(helpers.drain(other.read("a", From.EARLIEST), read))
    await helpers.until(lambda: read)
    topic = other._catalog.find("a").topic
    assert topic in await topics(one)
    await one.drop_channel("a")
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(ChannelNotFound):
            await reading
        with pytest.raises(ChannelNotFound):
            await append_on(other)
        while topic in await topics(one):  # brokers forget it in their own time
            pass
    for call in (other.latest_id("a"), other.describe("a"), other.append("a", b"z")):
        with pytest.raises(ChannelNotFound):
            await call
    assert topic not in await topics(other)


async def append_on(wal) -> None:
    while True:
        await wal.append("a", b"y")


async def topics(wal) -> set[str]:
    """What the brokers have now."""
    await wal._call(lambda: wal._writes.refresh())
    return wal._writes._client.cluster.topics()
