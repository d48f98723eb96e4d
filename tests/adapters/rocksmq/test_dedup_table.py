"""An append that another process sends again is written once: while it is on its way, durable, after crashes, for ever
and a day less one hour."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.rocksmq.journal import dedup_table
from tidewal.adapters.rocksmq.journal.channels import ChannelTable
from tidewal.adapters.rocksmq.journal.dedup_table import (
    CLIENT_EXPIRY_S,
    CLIENTS,
    CLIENTS_KEPT,
    AppendResult,
    DedupTable,
)
from tidewal.adapters.rocksmq.owner import dedup
from tidewal.runtime.disk import Disk
from tidewal.runtime.errors import (
    ChannelNotFound,
    InvalidRequest,
    JournalFailed,
    OutcomeUnknown,
    Overloaded,
    TidewalError,
)
from tidewal.runtime.log.wal import Append, ChannelPolicy, Durability, From
from tidewal.runtime.testing.disk import FaultyDisk

SMALL = 64 * 1024
PLAIN = ChannelPolicy()
EPHEMERAL = ChannelPolicy(ephemeral=True)
ME, OTHER = b"m" * 16, b"o" * 16


class SlowDisk(Disk):
    """Syncs while `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()

    def sync(self, file: int) -> None:
        self.go_on.wait(20)
        super().sync(file)


def send(store, number, entries, *, client=ME, settled=0):
    """A future of what `submit_from` answers; errors are results."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    store.submit_from(
        client, number, settled, entries, lambda result: loop.call_soon_threadsafe(future.set_result, result)
    )
    return future


async def read_all(store, channel="a"):
    latest = await store.latest_id(channel)
    entries = []
    reader = store.read(channel, From.EARLIEST)
    while latest is not None and (not entries or entries[-1].id < latest):
        entries += await anext(reader)
    return [bytes(entry.payload) for entry in entries]


async def test_a_repeated_number_gets_the_first_ids_and_appends_nothing(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    first = await send(store, 1, [Append("a", b"1")])
    assert await send(store, 1, [Append("a", b"1")]) == first
    assert await send(store, 1, [Append("a", b"other's 1")], client=OTHER) != first
    assert await read_all(store) == [b"1", b"other's 1"]


async def test_a_number_that_is_on_its_way_is_waited_for(open_rocksmq):
    disk = SlowDisk()
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    disk.go_on.clear()
    sent = [send(store, 1, [Append("a", b"1")]) for _ in range(3)]
    assert not any(future.done() for future in sent)
    disk.go_on.set()
    answers = await asyncio.gather(*sent)
    assert answers[0] == answers[1] == answers[2]
    assert await read_all(store) == [b"1"]


@pytest.mark.slow
@pytest.mark.parametrize("roll", [False, True], ids=["same segment", "from a snapshot"])
async def test_the_next_incarnation_knows_what_was_appended(open_rocksmq, helpers, roll):
    store = await open_rocksmq()
    for name in "abc":
        await store.create_channel(name, PLAIN)
    mixed = [Append(name, name.encode()) for name in "abacabbca"]
    first = await send(store, 7, mixed)
    if roll:
        await helpers.fill_segment(store)
    await store.close()
    store = await open_rocksmq()
    assert await send(store, 7, mixed) == first
    assert await read_all(store, "a") == [b"a"] * 4
    await send(store, 8, [Append("a", b"8")], settled=7)
    assert isinstance(await send(store, 7, mixed), OutcomeUnknown)


async def test_a_number_cannot_stand_for_two_appends(open_rocksmq):
    store = await open_rocksmq()
    for name in "ab":
        await store.create_channel(name, PLAIN)
    await send(store, 1, [Append("a", b"1"), Append("a", b"2")])
    for entries in ([Append("a", b"1")], [Append("a", b"1"), Append("b", b"2")]):
        assert isinstance(await send(store, 1, entries), InvalidRequest)
    assert isinstance(await send(store, 1, [Append("a", b"1")], client=b"short"), InvalidRequest)


async def test_a_refusal_is_the_answer_to_its_number_and_harms_no_other(open_rocksmq):
    store = await open_rocksmq()
    assert isinstance(await send(store, 1, [Append("a", b"1")]), ChannelNotFound)
    await store.create_channel("a", PLAIN)
    assert isinstance(await send(store, 1, [Append("a", b"1")]), ChannelNotFound)
    assert isinstance(await send(store, 2, [Append("a", b"2")]), list)
    assert isinstance(await send(store, 1, [Append("a", b"1")], settled=1), OutcomeUnknown)
    assert await read_all(store) == [b"2"]


async def test_an_unknown_outcome_stays_unknown(open_rocksmq, seed, helpers):
    disk = FaultyDisk(seed)
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    await helpers.until(lambda: store._segments.ready)
    disk.fail("sync")
    for _ in range(2):
        answer = await send(store, 1, [Append("a", b"1")])
        assert isinstance(answer, JournalFailed)
        assert answer.outcome_unknown is True
    assert "outcome_unknown" not in (await send(store, 2, [Append("a", b"2")])).fields


async def test_ephemeral_appends_are_known_for_one_incarnation_and_leave_no_record(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("e", EPHEMERAL)
    first = await send(store, 1, [Append("e", b"1")])
    assert await send(store, 1, [Append("e", b"1")]) == first
    await store.close()
    store = await open_rocksmq()
    assert await send(store, 1, [Append("e", b"1")]) > first


async def test_an_append_to_both_kinds_of_channels_is_known_in_the_next_incarnation(open_rocksmq):
    store = await open_rocksmq()
    await store.create_channel("e", EPHEMERAL)
    await store.create_channel("a", PLAIN)
    entries = [Append("e", b"e"), Append("a", b"a")]
    first = await send(store, 1, entries)
    await store.close()
    store = await open_rocksmq()
    assert await send(store, 1, entries) == first
    assert await read_all(store) == [b"a"]


@pytest.mark.parametrize("acks", [Durability.ONE, Durability.NONE])
async def test_numbered_appends_are_durable_when_answered_whatever_the_channel_asks(open_rocksmq, seed, acks):
    disk = FaultyDisk(seed, keep_chance=0.0)
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", ChannelPolicy(acks=acks))
    first = await send(store, 1, [Append("a", b"1")])
    disk.cut_power()
    await store.close()
    disk.restore_power()
    store = await open_rocksmq(disk=disk)
    assert await send(store, 1, [Append("a", b"1")]) == first


@pytest.mark.slow
async def test_nothing_acknowledged_is_lost_or_doubled_over_losses_of_power(open_rocksmq, rng, seed):
    """Three clients send again, after each loss of power, what was not answered."""
    disk = FaultyDisk(seed)
    under_way: dict[bytes, dict[int, list[Append]]] = {bytes([65 + i]) * 16: {} for i in range(3)}
    numbers = dict.fromkeys(under_way, 0)
    counts: dict[tuple[bytes, str], int] = {}
    acknowledged: dict[tuple[str, bytes], bytes] = {}

    def next_entry(client: bytes) -> Append:
        channel = rng.choice("ab")
        count = counts[client, channel] = counts.get((client, channel), 0) + 1
        return Append(channel, f"{client[:1].decode()} {count} ".encode() * rng.randrange(1, 400))

    for _incarnation in range(10):
        store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
        for name in "ab":
            await store.create_channel(name, PLAIN)
        sent = []
        for client, appends in under_way.items():
            for _ in range(rng.randrange(12)):
                numbers[client] += 1
                appends[numbers[client]] = [next_entry(client) for _ in range(rng.randrange(1, 4))]
            for number, entries in appends.items():
                answer = send(store, number, entries, client=client, settled=min(appends) - 1)
                sent.append((appends, number, entries, answer))
        if sent:
            await asyncio.wait([rng.choice(sent)[3]])
        disk.cut_power()
        for appends, number, entries, answer in sent:
            ids = await answer
            if not isinstance(ids, TidewalError):
                acknowledged.update({(e.channel, id): bytes(e.payload) for e, id in zip(entries, ids, strict=True)})
                del appends[number]
        await store.close()
        disk.restore_power()

    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    for client, appends in under_way.items():
        for number, entries in list(appends.items()):
            assert isinstance(await send(store, number, entries, client=client, settled=min(appends) - 1), list)
            del appends[number]
    for channel in "ab":
        texts = [payload.split() for payload in await read_all(store, channel)]
        for client in under_way:
            mine = [int(words[1]) for words in texts if words[0] == client[:1]]
            assert mine == list(range(1, counts.get((client, channel), 0) + 1))
    assert acknowledged


# ---- several at once -------------------------------------------------------------------------------------------------


def send_each(store, number, entries, *, client=ME, settled=0):
    """A future of what `submit_each_from` answers; False where it cannot."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    if not store.submit_each_from(
        client, number, settled, entries, lambda result: loop.call_soon_threadsafe(future.set_result, result)
    ):
        future.set_result(False)
    store.wake()
    return future


def small(*numbers):
    return [Append("a", b"%d" % number) for number in numbers]


@pytest.mark.parametrize("roll", [False, True], ids=["same segment", "from a snapshot"])
async def test_each_of_several_is_known_by_its_number_now_and_in_the_next_incarnation(open_rocksmq, helpers, roll):
    store = await open_rocksmq()
    for name in "ab":
        await store.create_channel(name, PLAIN)
    entries = [Append("ab"[place % 3 == 1], b"%d" % place) for place in range(1, 8)]
    ids = await send_each(store, 1, entries)
    assert len(ids) == 7
    for _incarnation in range(2):
        for number, (entry, id) in enumerate(zip(entries, ids, strict=True), 1):
            assert await send(store, number, [entry]) == [id]
        assert await send_each(store, 1, entries) is False
        assert await send_each(store, 7, [*entries[6:], Append("a", b"8")]) is False
        assert isinstance(await send(store, 3, small(1, 2)), InvalidRequest)
        if roll:
            await helpers.fill_segment(store)
            roll = False
        await store.close()
        store = await open_rocksmq()
    assert len(await send_each(store, 8, small(8), settled=5)) == 1
    assert isinstance(await send(store, 5, entries[4:5]), OutcomeUnknown)
    assert await send(store, 6, entries[5:6]) == ids[5:6]
    assert await read_all(store, "b") == [b"1", b"4", b"7"]
    assert await read_all(store, "a") == [b"2", b"3", b"5", b"6", b"8"]


async def test_one_of_several_that_are_on_their_way_is_waited_for(open_rocksmq):
    disk = SlowDisk()
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    disk.go_on.clear()
    several = send_each(store, 1, small(1, 2, 3))
    second = send(store, 2, small(2))
    disk.go_on.set()
    ids = await several
    assert await second == ids[1:2]
    assert await read_all(store) == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    "odd",
    [Append("nowhere", b""), Append("e", b""), Append("one", b""), Append("a", bytes(101)), Append("a", bytes(100))],
    ids=["no channel", "ephemeral", "not synced", "too large", "too many"],
)
async def test_several_are_taken_together_only_where_all_are_alike(open_rocksmq, monkeypatch, odd):
    store = await open_rocksmq()
    await store.create_channel("a", ChannelPolicy(max_message_bytes=100))
    await store.create_channel("e", EPHEMERAL)
    await store.create_channel("one", ChannelPolicy(acks=Durability.ONE))
    if len(odd.payload) == 100:
        monkeypatch.setattr(dedup, "CLIENT_NUMBERS", 2)
    assert await send_each(store, 1, [*small(1, 2), odd]) is False
    assert store._dedup.count == 0
    assert await send_each(store, 1, small(1, 2), settled=2) is False  # it says itself that they were answered
    assert isinstance(await send(store, 1, small(1)), OutcomeUnknown)
    assert len(await send_each(store, 3, small(3, 4))) == 2
    assert await read_all(store) == [b"3", b"4"]


async def test_no_client_is_forgotten_whose_appends_are_not_in_the_table_yet(open_rocksmq, monkeypatch):
    monkeypatch.setattr(dedup, "RESULTS", 4)
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    ids = await send_each(store, 1, small(1, 2, 3), client=OTHER)
    assert store._journal.table.clients.find(OTHER) is None
    await send_each(store, 1, small(4, 5, 6))
    assert await send(store, 2, small(2), client=OTHER) == ids[1:2]
    await store.create_channel("b", PLAIN)  # what is asked of channels brings the table up to date
    assert list(store._journal.table.clients.find(OTHER).wrote) == [1, 2, 3]
    assert store._dedup.count == 0
    assert await send(store, 2, small(2), client=OTHER) == ids[1:2]
    assert len(await read_all(store)) == 6


async def test_several_fail_together_and_their_outcome_stays_unknown(open_rocksmq, seed, helpers):
    disk = FaultyDisk(seed)
    store = await open_rocksmq(disk=disk)
    await store.create_channel("a", PLAIN)
    await helpers.until(lambda: store._segments.ready)
    disk.fail("sync")
    answers = [await send_each(store, 1, small(1, 2)), await send(store, 2, small(2))]
    assert [type(answer) for answer in answers] == [JournalFailed] * 2
    assert all(answer.outcome_unknown for answer in answers)


@pytest.mark.slow
async def test_several_at_once_are_neither_lost_nor_doubled_over_losses_of_power(open_rocksmq, rng, seed):
    """After each loss of power what was not answered is sent again, together with other appends."""
    disk = FaultyDisk(seed)
    under_way: list[int] = []
    count, acknowledged = 0, {}
    for _incarnation in range(12):
        store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
        await store.create_channel("a", PLAIN)
        fresh = rng.randrange(1, 40)
        under_way += range(count + 1, count + 1 + fresh)
        count += fresh
        settled, at, sent = under_way[0] - 1, 0, []
        while at < len(under_way):
            run = under_way[at : at + rng.randrange(1, 9)]
            at += len(run)
            entries = [Append("a", b"%d " % number * 99) for number in run]
            answer = send_each(store, run[0], entries, settled=settled) if run[-1] - run[0] < len(run) else None
            if answer is None or (answer.done() and answer.result() is False):
                singles = zip(run, entries, strict=True)
                sent += [([number], send(store, number, [entry], settled=settled)) for number, entry in singles]
            else:
                sent.append((run, answer))
        await asyncio.wait([rng.choice(sent)[1]])
        disk.cut_power()
        for run, answer in sent:
            ids = await answer
            if not isinstance(ids, TidewalError):
                acknowledged.update(zip(run, ids, strict=True))
                under_way = [number for number in under_way if number not in run]
        under_way = under_way or [count + 1]
        count = max(count, under_way[-1])
        await store.close()
        disk.restore_power()
    store = await open_rocksmq(disk=disk, segment_bytes=SMALL)
    for number in under_way:
        ids = await send(store, number, [Append("a", b"%d " % number * 99)], settled=under_way[0] - 1)
        acknowledged[number] = ids[0]
    found = [int(payload.split()[0]) for payload in await read_all(store)]
    assert found == list(range(1, count + 1))
    assert [acknowledged[number] for number in found] == sorted(acknowledged.values())


# ---- the table -------------------------------------------------------------------------------------------------------


def client_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_clients_are_forgotten_an_hour_after_their_last_append_but_never_the_newest():
    table = DedupTable()
    for number in range(CLIENTS_KEPT):
        table.apply(client_id(number), 1, 0, 0, 1, (number,))
    late_ms = int(CLIENT_EXPIRY_S * 1000) * 100
    table.apply(client_id(0), 2, 1, late_ms, 1, (1,))
    assert len(table) == CLIENTS_KEPT
    table.apply(client_id(CLIENTS_KEPT), 1, 0, late_ms, 1, (1,))
    assert len(table) == CLIENTS_KEPT
    assert table.find(client_id(1)) is None  # wrote longest ago
    assert table.find(client_id(0)) is not None
    for number in range(1, 10):
        table.apply(client_id(1000 + number), 1, 0, late_ms, 1, (1,))
    assert len(table) == CLIENTS_KEPT


def test_the_number_of_clients_is_bounded():
    table = DedupTable()
    for number in range(CLIENTS + 10):
        table.apply(client_id(number), 1, 0, 0, 1, (number,))
    assert len(table) == CLIENTS
    assert table.find(client_id(9)) is None


def test_what_all_clients_leave_unsettled_is_bounded(monkeypatch):
    monkeypatch.setattr(dedup_table, "RESULTS", 100)
    table = DedupTable()
    for number in range(1, 31):
        table.apply(client_id(1), number, 0, 0, 1, (number,))
    table.apply(client_id(2), 1, 0, 0, 2, (7, 8))
    for number in range(1, 20):
        table.apply(client_id(3), number, 0, 0, 1, (number,))
    assert table.find(client_id(1)) is None
    assert list(table.find(client_id(2)).wrote) == [1]
    for number in range(20, 1000):
        table.apply(client_id(3), number, number - 1, 0, 1, (number,))
    assert table.find(client_id(2)) is not None
    restored = DedupTable()
    restored.restore(table.snapshot())
    assert restored._size == table._size == 3 + 2


async def test_a_client_that_settles_nothing_is_refused(open_rocksmq, monkeypatch):
    monkeypatch.setattr(dedup, "CLIENT_NUMBERS", 5)
    store = await open_rocksmq()
    await store.create_channel("a", PLAIN)
    await store.create_channel("e", EPHEMERAL)
    for number in range(1, 6):
        assert isinstance(await send(store, number, [Append("ae"[number % 2], b"x")]), list)
    refused = await send(store, 6, [Append("a", b"x")])
    assert isinstance(refused, Overloaded)
    assert refused.limit == "client_numbers"
    assert isinstance(await send(store, 6, [Append("a", b"x")], client=OTHER, settled=1), list)
    assert isinstance(await send(store, 7, [Append("a", b"x")], settled=2), list)


async def test_what_this_incarnation_keeps_of_all_clients_is_bounded(open_rocksmq, monkeypatch):
    monkeypatch.setattr(dedup, "RESULTS", 10)
    store = await open_rocksmq()
    await store.create_channel("e", EPHEMERAL)
    for index in range(5):
        for number in range(1, 5):
            await send(store, number, [Append("e", b"x")], client=client_id(index))
    assert store._dedup.count <= 10
    kept = await send(store, 1, [Append("e", b"x")], client=client_id(4))
    assert kept < await send(store, 1, [Append("e", b"x")], client=client_id(0))


STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60)


@pytest.mark.slow
@given(STEPS)
def test_a_table_is_what_its_records_say_also_through_a_snapshot(steps):
    table, restored = ChannelTable(), ChannelTable()
    numbers = dict.fromkeys(range(4), 0)
    settled = dict.fromkeys(range(4), 0)
    for place, (index, lag) in enumerate(steps):
        numbers[index] += 1
        settled[index] = max(settled[index], numbers[index] - 1 - lag)
        several = 1 + (place + index) % 3
        if lag == 2:
            ids = [place * 10 + each * (1 + index % 2) for each in range(several)]
            record = dedup_table.each(client_id(index), numbers[index], settled[index], place, ids)
            numbers[index] += several - 1
        else:
            record = dedup_table.wrote(
                client_id(index), numbers[index], settled[index], place, AppendResult(1, (place,))
            )
        assert dedup_table.is_result(record)
        table.apply(record)
        restored.apply(record)
        if lag == 3:
            snapshot = restored.snapshot(place)
            restored = ChannelTable()
            restored.apply(snapshot)
    for index, number in numbers.items():
        for each in (table, restored):
            found = each.clients.find(client_id(index))
            if number == 0:
                assert found is None
            else:
                assert found.settled == settled[index]
                assert list(found.wrote) == list(range(settled[index] + 1, number + 1))
    assert restored.clients.snapshot() == [
        [id, settled, wall_ms, [[number, total, list(firsts)] for number, total, firsts in results]]
        for id, settled, wall_ms, results in table.clients.snapshot()
    ]
