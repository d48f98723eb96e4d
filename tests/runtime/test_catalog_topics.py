"""Topics in the catalog: which of their events count."""

from __future__ import annotations

import random
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import msgpack
import pytest

from tidewal.runtime.catalog.catalog import TOPIC_KINDS, Catalog
from tidewal.runtime.catalog.topic_epochs import predecessors
from tidewal.runtime.catalog.topics import Topic
from tidewal.runtime.errors import BadRecord, PreconditionFailed, TopicNotFound
from tidewal.runtime.log.names import Names, delay_channel_of, pchannel_of
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.replicated.fold import Fold

NAMES = Names()
CHANNELS = [NAMES.topic_pchannel(1, number) for number in range(2)]


def topic(id: int = 1, name: str = "orders", partitions: int = 2) -> Topic:
    vchannels = (NAMES.vchannel(NAMES.topic_pchannel(id, number), id, number) for number in range(partitions))
    return Topic(id, name, (tuple(vchannels),), created_ts=id)


def created(catalog: Catalog, *topics: Topic, ready: bool = True) -> None:
    for each in topics:
        catalog.apply({"kind": "create_topic", "topic": each.to_wire()})
        if ready:
            catalog.apply({"kind": "topic_ready", "id": each.id})


def granted(catalog: Catalog, *channels: str, node: str = "n-1") -> None:
    terms = {name: (catalog.granted(name).term + 1, catalog.granted(name).term) for name in channels}
    catalog.apply({"kind": "grant", "node": node, "channels": terms, "limit": 5})


def test_the_channels_of_a_topic_are_to_be_owned_while_it_is_ready() -> None:
    catalog = Catalog()
    created(catalog, topic(), ready=False)
    assert catalog.pchannels == frozenset()
    with pytest.raises(TopicNotFound):
        catalog.topics.ready("orders")
    catalog.apply({"kind": "topic_ready", "id": 1})
    assert catalog.pchannels == set(CHANNELS)
    granted(catalog, *CHANNELS, "dml_0")
    assert catalog.collection_channels == ["dml_0"]
    assert catalog.topics.of_channel(CHANNELS[0]) == catalog.topics.ready("orders")
    catalog.apply({"kind": "drop_topic", "id": 1})
    assert catalog.pchannels == frozenset()
    with pytest.raises(TopicNotFound):
        catalog.topics.ready("orders")
    catalog.apply({"kind": "topic_dropped", "id": 1})
    assert list(catalog.channels) == ["dml_0"]
    assert catalog.topics.of_channel(CHANNELS[0]) is None
    created(catalog, topic(2))
    assert catalog.topics.ready("orders").id == 2


def test_names_and_ids_are_used_once() -> None:
    catalog = Catalog()
    created(catalog, topic())
    for other in (topic(2), topic(1, "other"), topic(0, "other")):
        with pytest.raises(PreconditionFailed):
            catalog.apply({"kind": "create_topic", "topic": other.to_wire()})
    for kind in ("topic_ready", "drop_topic", "topic_dropped"):
        with pytest.raises(PreconditionFailed):
            catalog.apply({"kind": kind, "id": 7})
    created(catalog, topic(2, "other"))
    assert catalog.next_id == 3


def test_what_a_node_says_of_a_channel_that_is_gone_is_refused() -> None:
    catalog = Catalog()
    created(catalog, topic())
    granted(catalog, CHANNELS[0])
    catalog.apply({"kind": "drop_topic", "id": 1})
    catalog.apply({"kind": "topic_dropped", "id": 1})
    for event in (
        {"kind": "fenced", "node": "n-1", "channels": {CHANNELS[0]: (1, b"f")}},
        {"kind": "released", "node": "n-1", "channels": {CHANNELS[0]: (1, 2, b"")}},
        {"kind": "renewed", "node": "n-1", "channels": {CHANNELS[0]: (1, 2, b"")}},
    ):
        with pytest.raises(PreconditionFailed):
            catalog.apply(event)
    assert catalog.channels == {}


def test_a_snapshot_has_the_topics_and_one_without_any_is_as_before_there_were_topics() -> None:
    catalog, restored = Catalog(), Catalog()
    assert "topics" not in catalog.snapshot()
    created(catalog, topic(), replace(topic(2, "kept"), retention_s=None, retention_bytes=9))
    catalog.apply({"kind": "drop_topic", "id": 1})
    restored.restore(msgpack.unpackb(msgpack.packb(catalog.snapshot()), strict_map_key=False))
    assert list(restored.topics) == list(catalog.topics)
    assert restored.pchannels == catalog.pchannels == {NAMES.topic_pchannel(2, n) for n in range(2)}
    assert restored.snapshot() == catalog.snapshot()


@pytest.mark.parametrize(
    "change",
    [
        {"state": "odd"},
        {"epochs": []},
        {"epochs": [[]]},
        {"epochs": [[5]]},
        {"id": "1"},
        {"retention_s": 1},
        {"name": 5},
    ],
)
def test_a_malformed_topic_is_a_bad_record_and_changes_nothing(change: dict[str, Any]) -> None:
    catalog = Catalog()
    before = catalog.snapshot()
    with pytest.raises(BadRecord):
        catalog.apply({"kind": "create_topic", "topic": {**topic().to_wire(), **change}})
    assert catalog.snapshot() == before


def test_events_of_topics_are_of_the_second_feature_level() -> None:
    fold = Fold(Catalog, RecordType.CATALOG, led=True)
    assert fold.level == 1
    for kind in TOPIC_KINDS:
        assert Catalog.kind_levels[kind] == 2


def test_the_channel_of_a_partition_is_no_virtual_one() -> None:
    vchannel = topic().partitions[1]
    assert pchannel_of(vchannel) == CHANNELS[1] == pchannel_of(CHANNELS[1])


# ---- epochs ----------------------------------------------------------------------------------------------------------


def altered(catalog: Catalog, epoch: int, partitions: int, *, ready: bool = True, hashed: bool = True) -> list[str]:
    """Give topic 1 its next epoch; returns its pchannels."""
    channels = [NAMES.topic_pchannel(1, number, epoch) for number in range(partitions)]
    vchannels = [NAMES.vchannel(channel, 1, number) for number, channel in enumerate(channels)]
    catalog.apply({"kind": "alter_topic", "id": 1, "epoch": epoch, "partitions": vchannels, "hashed": hashed})
    if ready:
        catalog.apply({"kind": "epoch_ready", "id": 1, "epoch": epoch})
    return channels


def said(catalog: Catalog, kind: str, channel: str, *values: object, node: str = "n-1") -> None:
    term = catalog.granted(channel).term
    catalog.apply({"kind": kind, "node": node, "channels": {channel: (term, *values)}})


def test_an_epoch_begins_when_the_one_before_has_ended_and_goes_at_last() -> None:
    catalog = Catalog()
    created(catalog, topic())
    new = altered(catalog, 2, 4, ready=False)
    assert catalog.pchannels == set(CHANNELS)
    assert catalog.topics.ready("orders").epoch == 1
    assert catalog.topics.of_channel(new[0]) is not None, "it is a topic's while it is made"
    catalog.apply({"kind": "epoch_ready", "id": 1, "epoch": 2})
    assert catalog.pchannels == {*CHANNELS, *new}
    found = catalog.topics.ready("orders")
    assert (found.epoch, len(found.partitions), found.settled) == (2, 4, False)
    assert [found.predecessors(each) for each in new] == [[CHANNELS[n % 2]] for n in range(4)]
    assert (found.unended, found.unbegun) == (CHANNELS, new)
    assert not catalog.topics.has_begun(new[0])
    assert catalog.topics.has_begun(CHANNELS[0])
    granted(catalog, *CHANNELS, *new)
    said(catalog, "partition_ended", CHANNELS[0], b"7", 70)
    said(catalog, "partition_ended", CHANNELS[0], b"9", 90)
    assert catalog.topics.ready("orders").ends == {CHANNELS[0]: (b"7", 70)}, "the first counts"
    assert catalog.topics.ready("orders").unended == CHANNELS[1:]
    for each in new:
        said(catalog, "partition_begun", each)
    assert catalog.topics.ready("orders").settled
    with pytest.raises(PreconditionFailed):
        catalog.apply({"kind": "retire_epoch", "id": 1, "epoch": 2})
    catalog.apply({"kind": "retire_epoch", "id": 1, "epoch": 1})
    assert catalog.pchannels == set(new)
    found = catalog.topics.ready("orders")
    assert [found.is_to_go(each) for each in (CHANNELS[0], new[0])] == [True, False]
    catalog.apply({"kind": "epoch_retired", "id": 1, "epoch": 1})
    found = catalog.topics.ready("orders")
    assert (found.first_epoch, found.epoch, found.ends, found.predecessors(new[0])) == (2, 2, {}, [])
    assert set(catalog.channels) == set(new)
    assert catalog.topics.of_channel(CHANNELS[0]) is None
    assert (found.partitions_of(1), found.partitions_of(2), found.partitions_of(3)) == ((), found.partitions, ())


def test_one_epoch_comes_at_a_time_and_a_dropped_topic_gets_none() -> None:
    catalog = Catalog()
    created(catalog, topic())
    for event in (
        {"kind": "epoch_ready", "id": 1, "epoch": 2},
        {"kind": "alter_topic", "id": 1, "epoch": 3, "partitions": ["x"], "hashed": True},
        {"kind": "alter_topic", "id": 1, "epoch": 2, "partitions": [], "hashed": True},
        {"kind": "alter_topic", "id": 7, "epoch": 2, "partitions": ["x"], "hashed": True},
        {"kind": "retire_epoch", "id": 1, "epoch": 1},
        {"kind": "epoch_retired", "id": 1, "epoch": 1},
    ):
        with pytest.raises(PreconditionFailed):
            catalog.apply(event)
    altered(catalog, 2, 3, ready=False)
    with pytest.raises(PreconditionFailed):
        altered(catalog, 2, 3)
    catalog.apply({"kind": "drop_topic", "id": 1})
    with pytest.raises(PreconditionFailed):
        catalog.apply({"kind": "epoch_ready", "id": 1, "epoch": 2})


def test_delays_are_of_the_last_epoch_which_has_begun_and_of_all_that_come() -> None:
    catalog = Catalog()
    created(catalog, topic())
    new = altered(catalog, 2, 3, ready=False)
    granted(catalog, *CHANNELS)
    with pytest.raises(PreconditionFailed):
        catalog.apply({"kind": "delay_topic", "id": 1})
    catalog.apply({"kind": "epoch_ready", "id": 1, "epoch": 2})
    granted(catalog, *new)
    with pytest.raises(PreconditionFailed):
        catalog.apply({"kind": "delay_topic", "id": 1})
    for each in CHANNELS:
        said(catalog, "partition_ended", each, b"7", 70)
    for each in new:
        said(catalog, "partition_begun", each)
    catalog.apply({"kind": "delay_topic", "id": 1})
    delays = {delay_channel_of(each): each for each in new}
    assert catalog.topics.partition_of == delays
    assert catalog.pchannels == {*CHANNELS, *new, *delays}
    found = catalog.topics.ready("orders")
    assert Topic.from_wire(found.to_wire()) == found
    assert not fnmatch(next(iter(delays)), NAMES.topic_pattern(1)), "groups do not read it"
    catalog.apply({"kind": "retire_epoch", "id": 1, "epoch": 1})
    catalog.apply({"kind": "epoch_retired", "id": 1, "epoch": 1})
    assert catalog.pchannels == {*new, *delays}
    assert {catalog.topics.of_channel(each) for each in delays} == {catalog.topics.ready("orders")}
    last = altered(catalog, 3, 2)
    later = {delay_channel_of(each): each for each in last}
    assert catalog.topics.partition_of == delays | later
    assert catalog.pchannels == {*new, *delays, *last, *later}
    granted(catalog, *delays, *last, *later)
    with pytest.raises(PreconditionFailed):
        said(catalog, "delays_drained", next(iter(delays)), node="n-2")
    for each in delays:
        said(catalog, "delays_drained", each)
    assert catalog.topics.ready("orders").drained == set(delays)
    assert Topic.from_wire(catalog.topics.ready("orders").to_wire()) == catalog.topics.ready("orders")
    catalog.apply({"kind": "retire_epoch", "id": 1, "epoch": 2})
    assert catalog.pchannels == {*last, *later}
    assert all(catalog.topics.ready("orders").is_to_go(each) for each in (*new, *delays))
    catalog.apply({"kind": "epoch_retired", "id": 1, "epoch": 2})
    assert catalog.channels.keys() == {*last, *later}
    assert {catalog.topics.of_channel(each) for each in (*new, *delays)} == {None}
    assert catalog.topics.ready("orders").drained == frozenset()
    catalog.apply({"kind": "drop_topic", "id": 1})
    catalog.apply({"kind": "topic_dropped", "id": 1})
    assert not catalog.channels


def test_only_the_owner_says_that_a_partition_has_ended_or_begun() -> None:
    catalog = Catalog()
    created(catalog, topic())
    (new,) = altered(catalog, 2, 1)
    granted(catalog, *CHANNELS, new)
    for kind, channel, values in (("partition_ended", CHANNELS[0], (b"7", 70)), ("partition_begun", new, ())):
        with pytest.raises(PreconditionFailed):
            said(catalog, kind, channel, *values, node="n-2")
        with pytest.raises(PreconditionFailed):
            catalog.apply({"kind": kind, "node": "n-1", "channels": {channel: (9, *values)}})
        with pytest.raises(BadRecord):
            said(catalog, kind, channel, *values, "more")
    assert catalog.topics.ready("orders").ends == {}
    assert catalog.topics.ready("orders").begun == frozenset()


def test_a_snapshot_has_the_epochs() -> None:
    catalog, restored = Catalog(), Catalog()
    created(catalog, topic())
    (new,) = altered(catalog, 2, 1, hashed=False)
    granted(catalog, *CHANNELS, new)
    said(catalog, "partition_ended", CHANNELS[1], b"7", 70)
    said(catalog, "partition_ended", CHANNELS[0], b"8", 71)
    said(catalog, "partition_begun", new)
    altered(catalog, 3, 2, ready=False)
    restored.restore(msgpack.unpackb(msgpack.packb(catalog.snapshot()), strict_map_key=False))
    assert list(restored.topics) == list(catalog.topics)
    assert restored.snapshot() == catalog.snapshot()
    assert restored.topics.ready("orders").predecessors(new) == CHANNELS
    assert restored.topics.has_begun(new)
    assert restored.topics.of_channel(NAMES.topic_pchannel(1, 1, 3)) is not None


def test_each_partition_follows_those_that_may_have_had_its_keys(rng: random.Random) -> None:
    for _ in range(200):
        before, after = rng.randint(1, 24), rng.randint(1, 24)
        names = [f"{number}" for number in range(before)]
        hashes = [rng.getrandbits(31) for _ in range(200)]
        for partition in range(after):
            follows = predecessors(names, after, partition, hashed=True)
            had = {names[each % before] for each in hashes if each % after == partition}
            assert had <= set(follows)
            assert predecessors(names, after, partition, hashed=False) == names
    assert predecessors(list("abcdefgh"), 12, 5, hashed=True) == ["b", "f"]
    assert len(predecessors(list("abcdefgh"), 9, 5, hashed=True)) == 8
