"""Collections on channels that an administrator has made (`common.preCreatedTopic`)."""

from __future__ import annotations

import pytest

from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.errors import ConfigError
from tidewal.runtime.log.names import Names, pchannel_of
from tidewal.runtime.log.wal import ChannelPolicy, Delivery

NAMES = Names()
DURABLE = ChannelPolicy()
HEARTBEATS = ChannelPolicy(ephemeral=True)


def using(*names: str, timeticker: str = "") -> dict:
    return {"common": {"preCreatedTopic": {"enabled": True, "names": names, "timeticker": timeticker}}}


async def make(home, *names: str, policy: ChannelPolicy = DURABLE, entry: bytes = b"") -> None:
    """What an administrator does, with Tidewal."""
    wal = await home.wal()
    for name in names:
        await wal.create_channel(name, policy)
        if entry:
            await wal.append(name, entry)
    await wal.close()


async def channels(home) -> set[str]:
    wal = await home.wal()
    try:
        return set(await wal.channels())
    finally:
        await wal.close()


async def refused(home, settings: dict) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        async with home.node(settings=settings):
            pass
    return raised.value


@pytest.mark.slow
@pytest.mark.every_log
async def test_collections_lie_on_the_channels_that_are_there_and_none_is_made(home) -> None:
    await make(home, "orders-a", "orders-b")
    await make(home, "ticks", policy=HEARTBEATS)
    settings = using("orders-a", "orders-b", timeticker="ticks")
    for start in range(2):  # the second finds entries, its own
        async with home.client(settings=settings) as client:
            collection = await client.create_collection(home.PEOPLE, shards=3)
            assert [pchannel_of(name) for name in collection.vchannels] == ["orders-a", "orders-b", "orders-a"]
            assert len(set(collection.vchannels)) == 3
            await client.insert("people", home.people(*range(10 * start, 10 * start + 10)))
            await client.flush("people")
            assert await client.count("people", consistency="strong") == 10 * start + 10
    made = await channels(home)
    assert not [name for name in made if name.startswith(NAMES.pchannel(0)[:-1])]
    assert NAMES.heartbeats not in made


@pytest.mark.slow
async def test_a_channel_that_is_missing_or_not_empty_is_named_and_nothing_is_made(home) -> None:
    await make(home, "empty")
    await make(home, "used", entry=b"something else")
    error = await refused(home, using("empty", "gone", "used", "lost"))
    assert (error.key, error.channels) == ("common.preCreatedTopic.names", "gone, lost, used")
    assert "gone, lost (no channel of this log" in error.message
    assert "used (has entries that this cluster did not write" in error.message
    assert not {"gone", "lost"} & await channels(home)
    wal = await home.wal()
    assert await wal.latest_id(NAMES.catalog) is None, "a healthy node is not superseded by one that cannot start"
    assert await wal.latest_id("empty") is None
    await wal.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "channels"),
    [
        ((), None),
        (("a", "b", "a"), "a"),
        (("a", "ticks"), "ticks"),
        (("a", "b_1v0"), "b_1v0"),
        ((NAMES.cuts, "a"), NAMES.cuts),
        (("short", "queue", "a"), "short, queue"),
    ],
)
async def test_names_that_cannot_hold_data_are_refused(home, names, channels) -> None:
    await make(home, "a", "b", "b_1v0", NAMES.cuts)
    await make(home, "ticks", "short", policy=HEARTBEATS)
    await make(home, "queue", policy=ChannelPolicy(delivery=Delivery.QUEUE))
    error = await refused(home, using(*names, timeticker="ticks"))
    assert error.key == "common.preCreatedTopic.names"
    assert error.fields.get("channels") == channels


@pytest.mark.parametrize("timeticker", ["gone", "durable", "temporary"])
async def test_a_time_ticker_that_is_missing_or_of_another_kind_is_refused(home, timeticker) -> None:
    await make(home, "a", "durable")
    await make(home, "temporary", policy=ChannelPolicy(ephemeral=True, temporary=True))
    error = await refused(home, using("a", timeticker=timeticker))
    assert (error.key, error.channels) == ("common.preCreatedTopic.timeticker", timeticker)


async def test_a_channel_that_another_cluster_has_begun_to_use_is_refused_when_it_is_needed(home) -> None:
    await make(home, "a")
    other = using("a") | {"msgChannel": {"chanNamePrefix": {"cluster": "other"}}}
    async with home.node(settings=using("a")) as node, node.client() as client:
        await node.node.wal.append("a", b"of another cluster")
        assert isinstance(await home.error_of(client.create_collection(home.PEOPLE)), ConfigError)
        assert await client.list_collections() == []
    assert (await refused(home, other)).channels == "a"


@pytest.mark.slow
async def test_collections_made_before_stay_where_they_are(home) -> None:
    async with home.people_client() as client:
        before = await client.describe_collection("people")
        await client.insert("people", home.people(1))
    await make(home, "a")
    ours = pchannel_of(before.vchannels[0])
    async with home.client(settings=using("a", ours)) as client:
        assert await client.count("people", consistency="strong") == 1
        assert (await client.describe_collection("people")).vchannels == before.vchannels
        made = await client.create_collection(home.POINTS)
        assert {pchannel_of(name) for name in made.vchannels} == {"a", ours}
        await client.insert("points", [{"id": 1, "at": [0.0] * 4}])
        assert await client.count("points", consistency="strong") == 1


def test_names_are_a_list_or_comma_separated() -> None:
    key = "common.preCreatedTopic.names"
    for given in (["a", "b"], "a,b", " a , b,"):
        assert load_settings(environment={}, arguments={key: given}).common.pre_created_topic.names == ("a", "b")
    prefix = "TIDEWAL__COMMON__PRECREATEDTOPIC__"
    given = load_settings(environment={f"{prefix}NAMES": "a,b", f"{prefix}ENABLED": "true"}).common.pre_created_topic
    assert (given.enabled, given.names, given.timeticker) == (True, ("a", "b"), "")
    with pytest.raises(ConfigError):
        load_settings(environment={}, arguments={key: 7})
