"""Topics in the catalog: which of their events count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from tidewal.runtime.catalog.catalog import Catalog
from tidewal.runtime.catalog.topics import Topic
from tidewal.runtime.errors import BadRecord, PreconditionFailed, TopicNotFound
from tidewal.runtime.log.names import Names, pchannel_of
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
    for kind in ("create_topic", "topic_ready", "drop_topic", "topic_dropped"):
        assert Catalog.kind_levels[kind] == 2


def test_the_channel_of_a_partition_is_no_virtual_one() -> None:
    vchannel = topic().partitions[1]
    assert pchannel_of(vchannel) == CHANNELS[1] == pchannel_of(CHANNELS[1])
