"""Sources: what only rises is in its channel once, however its records are divided into batches, under any owner."""

from __future__ import annotations

import pytest

from tidewal.runtime.errors import PreconditionFailed, Unavailable
from tidewal.runtime.log.record import RecordType
from tidewal.runtime.ownership.producers import ProducerTable


def numbered(world, *numbers: int):
    return [(b"%03d" % number, world.rows(b"%d" % number)) for number in numbers]


def found(world) -> list[bytes]:
    return [bytes(record.body) for record in world.records("a") if record.type is RecordType.ROWS]


async def test_what_the_channel_has_is_cut_and_what_is_missing_is_refused(world):
    await world.channels("a")
    owner = world.owner()
    await owner.own("a")
    append = owner.channel_owner.append_from
    assert not (await append("s", "a", numbered(world, 1, 3, 4), after=b"")).repeated
    assert owner.channel_owner.source_offset("s", "a") == b"004"
    assert (await append("s", "a", numbered(world, 1, 3), after=b"")).repeated
    await append("s", "a", numbered(world, 3, 4, 7, 9), after=b"001")
    with pytest.raises(PreconditionFailed) as raised:
        append("s", "a", numbered(world, 12), after=b"010")
    assert raised.value.fields["offset"] == b"009"
    await append("other", "a", numbered(world, 2), after=b"")
    assert found(world) == [b"1", b"3", b"4", b"7", b"9", b"2"]


async def test_one_batch_of_a_source_is_in_flight_to_a_channel(world, holding_wal):
    await world.channels("a")
    wal = holding_wal(world.log)
    owner = world.owner(wal)
    await owner.own("a")
    wal.holding = True
    append = owner.channel_owner.append_from
    first = append("s", "a", numbered(world, 1), after=b"")
    with pytest.raises(Unavailable, match="in flight"):
        append("s", "a", numbered(world, 2), after=b"001" if owner.channel_owner.source_offset("s", "a") else b"")
    wal.let_go()
    await first
    await append("s", "a", numbered(world, 1, 2), after=b"")
    assert found(world) == [b"1", b"2"]


async def test_the_next_owner_knows_it_by_the_records(world):
    await world.channels("a")
    owner = world.owner()
    await owner.own("a")
    await owner.channel_owner.append_from("s", "a", numbered(world, 1, 2), after=b"")
    successor = world.owner()
    await successor.own("a", term=2, previous_limit=owner.limit)
    await successor.channel_owner.append_from("s", "a", numbered(world, 1, 2, 3), after=b"")
    assert found(world) == [b"1", b"2", b"3"]


def test_offsets_are_in_the_pages_of_a_table_and_merged_by_the_highest():
    table, other = ProducerTable(), ProducerTable()
    table.reach("s", b"5")
    table.reach("t", b"2")
    other.reach("s", b"7")
    for page in table.pages():
        other.merge(ProducerTable.from_bytes(page))
    assert (other.source_offset("s"), other.source_offset("t"), other.source_offset("u")) == (b"7", b"2", b"")
    assert ProducerTable().pages() == [b"\x92\x02\x90"], "without sources it is what an older Tidewal reads"
