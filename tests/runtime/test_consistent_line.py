"""Where a channel leaves a line, and up to which time a channel of a replica is complete."""

from __future__ import annotations

import pytest

from tests.runtime.test_catalog_topics import CHANNELS, altered, created, granted, said, topic
from tidewal.runtime.catalog.catalog import Catalog
from tidewal.runtime.catalog.stored_ids import without_later
from tidewal.runtime.cluster.decided_positions import DecidedPositions
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.log.heartbeats import Announcement
from tidewal.runtime.log.names import delay_channel_of
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import ChannelPolicy, Entry
from tidewal.runtime.migration.group_positions import GroupPosition
from tidewal.runtime.replication.channel_promise import ChannelPromise
from tidewal.runtime.replication.consistent_line import ConsistentLine, LineEnd, StoredState
from tidewal.runtime.replication.line_drawer import _Begun
from tidewal.runtime.replication.line_groups import LineGroups
from tidewal.runtime.streams.channel_reader import Granted

TICK, ROWS, FENCE, PREPARE = RecordType.TIME_TICK, RecordType.ROWS, RecordType.FENCE, RecordType.PREPARE


def entries(*records: tuple[RecordType, int, int, int]) -> list[Entry]:
    """Entries of records: their type, timestamp, term and number."""
    return [
        Entry(bytes([number]), ts, encode(Record(kind, ts, term, cseq)))
        for number, (kind, ts, term, cseq) in enumerate(records, 1)
    ]


def end(time: int, granted: Granted | None, found: list[Entry]) -> bytes | None:
    line = LineEnd(time, granted)
    for entry in found:
        if line.read(entry):
            break
    return line.first_above


def test_a_channel_leaves_a_line_at_the_first_record_above_it() -> None:
    found = entries((FENCE, 1, 1, 1), (ROWS, 5, 1, 2), (TICK, 7, 1, 3), (ROWS, 9, 1, 4), (ROWS, 10, 1, 5))
    granted = Granted(1, 100, {1: b"\1"})
    assert [end(time, granted, found) for time in (0, 4, 5, 7, 8, 9, 10)] == [
        *(b"\1", b"\2", b"\3", b"\4", b"\4", b"\5"),
        None,
    ]


def test_what_is_prepared_above_a_line_and_what_does_not_count_is_no_end_of_it() -> None:
    prepared = entries((ROWS, 5, 1, 1), (PREPARE, 20, 1, 2), (ROWS, 15, 1, 3), (PREPARE, 30, 1, 4), (ROWS, 30, 1, 5))
    assert end(17, Granted(1), prepared) == b"\4"  # just before the first above: what is prepared there is void
    fenced = entries((ROWS, 5, 1, 1), (FENCE, 6, 2, 1), (ROWS, 50, 1, 2), (ROWS, 8, 2, 2), (ROWS, 12, 2, 3))
    assert end(9, Granted(2, 100, {1: b"", 2: b"\2"}), fenced) == b"\5"
    ungranted = entries((ROWS, 5, 1, 1), (ROWS, 50, 9, 1), (TICK, 999, 1, 2), (ROWS, 8, 1, 3), (ROWS, 12, 1, 4))
    assert end(9, Granted(1, 100), ungranted) == b"\5"
    assert end(9, None, [Entry(b"\1", 50, b"no record"), *entries((ROWS, 5, 0, 0), (ROWS, 12, 0, 0))]) == b"\2"


def test_what_the_catalog_says_without_naming_its_entries_is_of_the_first_step() -> None:
    """An owner's snapshot, and what was released last of a delay channel, may lie above the line."""
    catalog = Catalog()
    created(catalog, topic())
    catalog.apply({"kind": "delay_topic", "id": 1})
    delays = {delay_channel_of(each) for each in CHANNELS}
    granted(catalog, *CHANNELS, *delays)
    for each in altered(catalog, 2, 2):
        granted(catalog, each, delay_channel_of(each))
        said(catalog, "partition_begun", each)
    for each in CHANNELS:
        said(catalog, "partition_ended", each, b"7", 70)
    first = _Begun(catalog, LineGroups([], DecidedPositions(), {}), 0)
    for each in delays:
        said(catalog, "delays_drained", each)
    catalog.apply({"kind": "lease", "node": "n-1", "limit": 9, "checkpoints": {CHANNELS[0]: b"9"}})
    second = _Begun(catalog, LineGroups([], DecidedPositions(), {}), 0)
    for begun, drained, checkpoint in ((first, set(), b""), (second, delays, b"9")):
        left = Catalog()
        left.restore(begun.settled(catalog.snapshot()))
        assert left.topics.ready("orders").drained == drained
        assert left.channels[CHANNELS[0]].checkpoint == checkpoint
        assert not begun.retired(catalog)
    catalog.apply({"kind": "retire_epoch", "id": 1, "epoch": 1})
    catalog.apply({"kind": "epoch_retired", "id": 1, "epoch": 1})
    assert first.retired(catalog) == delays
    assert not second.retired(catalog)


def test_an_announced_time_counts_once_the_replica_has_its_record() -> None:
    promise = ChannelPromise()
    promise.judge(Granted(1, 100))
    promise.announce(Announcement("c", 1, 2, 10))
    promise.announce(Announcement("c", 1, 3, 20))
    promise.announce(Announcement("c", 1, 9, 90))
    assert promise.time == 0
    promise.note(entries((FENCE, 1, 1, 1), (ROWS, 5, 1, 2)))
    assert (promise.written, promise.time) == (5, 10)
    promise.note(entries((TICK, 30, 1, 3)))
    assert promise.time == 30, "a tick is in the channel itself"
    promise.note(entries((ROWS, 80, 1, 9)))
    assert promise.time == 90
    promise.announce(Announcement("c", 1, 9, 95))
    assert promise.time == 95, "at once, of an idle channel"
    promise.note([Entry(b"", 0, b"no record")])
    assert promise.time == 95


def test_what_no_owner_can_have_written_promises_nothing() -> None:
    promise = ChannelPromise(7)
    promise.note(entries((TICK, 30, 1, 3)))
    assert (promise.written, promise.time, promise.timestamp) == (0, 0, 30), "no grant is known yet"
    promise.ask()
    promise.note(entries((TICK, 40, 1, 4)))
    assert (promise.judge(Granted(1, 50)), promise.time) == (30, 30), "what came since may lie above the grants"
    promise.note(entries((TICK, 999, 1, 99), (ROWS, 1, 9, 1)))
    promise.announce(Announcement("c", 1, 99, 45))
    promise.ask()
    assert (promise.judge(Granted(1, 50)), promise.written, promise.timestamp) == (30, 50, 50), (
        "one of both was an owner's"
    )
    promise.note(entries((ROWS, 999, 1, 99)))
    promise.ask()
    promise.ask()  # the grants could not be read
    promise.note(entries((TICK, 60, 2, 1)))
    assert promise.judge(Granted(1, 50)) == 30
    promise.ask()
    assert (promise.judge(Granted(2, 70)), promise.written) == (60, 60)
    promise.announce(Announcement("c", 2, 1, 999))
    promise.ask()
    assert promise.judge(Granted(2, 70)) == 60


def test_a_line_goes_through_its_wire_form() -> None:
    line = ConsistentLine(
        7,
        "by-dev-",
        ends={"c": b"\1"},
        ends_in_source={"c": b"\2"},
        states={"s": StoredState(ChannelPolicy(retention_s=None), [(5, b"x")])},
        groups={"g": {"c": GroupPosition(b"", b"mark")}},
    )
    assert ConsistentLine.from_wire(line.to_wire()) == line
    assert ConsistentLine.from_wire({}) is None
    with pytest.raises(CorruptLog):
        ConsistentLine.from_wire({"time": "x"})


def test_what_a_catalog_says_of_later_entries_is_left_out() -> None:
    wire = {
        "channels": {"c": ("", 2, 9, 9, b"\7", {1: b"\1", 2: b"\7"}, "", 0, "")},
        "collections": [
            {"state": "ready", "beginning": (1, {"c": (1, 1, b"\1")})},
            {"state": "ready", "beginning": (1, {"c": (1, 1, b"\7")})},
            {"state": "dropping", "beginning": (1, {"c": (1, 1, b"\7")})},
        ],
        "topics": [{"ends": {"c": (b"\7", 3), "d": (b"\1", 3)}, "begun": ["d", "e"]}],
    }
    left = without_later(wire, lambda _, id: id > b"\5", {"e"})
    assert left["channels"]["c"][4:6] == (b"", {1: b"\1"})
    assert [(each["state"], each["beginning"] is None) for each in left["collections"]] == [
        ("ready", False),
        ("creating", True),
        ("dropping", False),
    ]
    assert left["topics"] == [{"ends": {"d": (b"\1", 3)}, "begun": ["d"]}]
