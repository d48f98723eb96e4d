"""A log is migrated to another one: from any log to any log, also where each step fails, once or for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from tests.dying_wal import DyingWal, Killed
from tidewal.runtime.errors import (
    CorruptLog,
    InvalidRequest,
    Moved,
    PositionLost,
    PositionMismatch,
    PreconditionFailed,
    Unavailable,
    Unsupported,
)
from tidewal.runtime.groups.group_filter import until_assigned
from tidewal.runtime.groups.metadata_layers import Layer, unwrap, wrap
from tidewal.runtime.groups.retries import Attempts
from tidewal.runtime.groups.subscriptions import Subscription
from tidewal.runtime.log import long_entries
from tidewal.runtime.log import migration_state as migration_module
from tidewal.runtime.log.migration_state import (
    MIGRATION_CHANNEL,
    MigrationPhase,
    MigrationState,
    change_migration_state,
    check_in_use,
    is_migration_channel,
    mark_of,
    migration_state,
)
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.redaction import shown_url
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, Entry, FromId, OnAppended, Wal
from tidewal.runtime.loop_bridge import promise
from tidewal.runtime.migration import channel_copy, group_positions
from tidewal.runtime.migration.channel_copy import HOLDER, stored_entries
from tidewal.runtime.migration.migration import MigrationProof, cancel_migration, migrate
from tidewal.runtime.migration.translation import translate_position
from tidewal.runtime.streams.messages import Position
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

OLD, NEW = "memory://old", "memory://user:secret@new"
ENTRIES = 20


async def filled(wal: Wal) -> list[bytes]:
    """Two channels and a queue with entries, records among them, and groups at the beginning, midst and end."""
    for name, policy in (
        ("orders", ChannelPolicy(retention_s=None)),
        ("empty", ChannelPolicy(retention_bytes=10)),
        ("queue", ChannelPolicy(delivery=Delivery.QUEUE)),
        ("signals", ChannelPolicy(ephemeral=True)),
    ):
        await wal.create_channel(name, policy)
    record = encode(Record(RecordType.ROWS, ts=7, term=1, cseq=1, body=b"rows", tags={"tag": "a"}))
    payloads = [record, b"", b"TW", *(b"%d" % number for number in range(ENTRIES - 3))]
    ids: list[bytes] = []
    for number, payload in enumerate(payloads):
        ids += await wal.append_many([Append("orders", payload, number << 18 | 3)])
        await wal.append("queue", payload, number + 1)
    await wal.seek_group("midst", "orders", FromId(ids[6]))
    await wal.seek_group("end", "orders", FromId(ids[-1]))
    await wal.seek_group("beginning", "orders", FromId(ids[0], inclusive=True))
    queued = [entry.id for entry in await content(wal, "queue")]
    await wal.seek_group("workers", "queue", FromId(queued[4]))
    for group, channel in (("midst", "orders"), ("workers", "queue")):
        member = await wal.join(group, [channel])
        await until_assigned(member, channel)
        begun = Attempts(ids[7] if channel == "orders" else b"an id", 1).to_bytes()
        await member.annotate(channel, wrap(Layer.ATTEMPTS, begun, f"of {group}".encode()))
        await member.aclose()
    return ids


async def content(wal: Wal, channel: str) -> list[Entry]:
    info = await wal.describe(channel)
    return [Entry(e.id, e.timestamp, bytes(e.payload)) async for e in stored_entries(wal, info)]


async def plain(wal: Wal, channel: str) -> list[tuple[int, bytes]]:
    return [(entry.timestamp, bytes(entry.payload)) for entry in await content(wal, channel)]


async def places(wal: Wal) -> dict[tuple[str, str], tuple[int, int, bytes]]:
    """How many entries each group has still to get of each channel, how many lie behind the one at which it has begun
    attempts, all for none, and what it has stored with its position."""
    found: dict[tuple[str, str], tuple[int, int, bytes]] = {}
    for group in await wal.groups():
        for channel, id in group.positions.items():
            attempts, stored = unwrap(Layer.ATTEMPTS, group.metadata.get(channel, b""))
            begun = Attempts.from_bytes(attempts).id
            ids = [entry.id for entry in await content(wal, channel)]
            counts = [sum(each > at for each in ids) for at in (id or b"", begun if begun in ids else b"")]
            found[group.name, channel] = counts[0], counts[1], stored
    return found


async def assert_same(old: Wal, new: Wal) -> None:
    channels = [name for name in await old.channels() if not is_migration_channel(name)]
    assert channels == [name for name in await new.channels() if not is_migration_channel(name)]
    for name in channels:
        assert (await old.describe(name)).policy == (await new.describe(name)).policy
        if name != "signals":
            assert await plain(old, name) == await plain(new, name)
    found = await places(new)
    assert await places(old) == found
    assert found["midst", "orders"][1:] == (len(await plain(new, "orders")) - 8, b"of midst")


@pytest.fixture
def old() -> MemoryWal:
    return MemoryWal(MemoryLog())


@pytest.fixture
def new() -> MemoryWal:
    return MemoryWal(MemoryLog())


async def test_from_and_to_each_log_and_back(backend: Any, old: Wal, new: Wal) -> None:
    """Schedule 14: there and back with equal contents, and the first position is still valid."""
    ids = await filled(old)
    between: Wal = await backend.wal()
    await migrate(old, between, OLD, "other://between")
    await assert_same(old, between)
    await migrate(between, new, "other://between", NEW)
    await assert_same(between, new)
    assert (await migration_state(new)).phase is MigrationPhase.OPEN
    await new.append("orders", b"next")
    for at in (0, 6, ENTRIES - 1):
        there = await translate_position(old, between, Position("orders", ids[at], 1, 2, 3, old.name, "g"))
        assert (there.wal, there.term, there.cseq, there.timestamp, there.group) == (between.name, 1, 2, 3, "g")
        back = await translate_position(between, new, there)
        follows = [entry.payload for entry in await content(new, "orders") if entry.id > back.message_id]
        assert follows == [*(entry.payload for entry in await content(old, "orders") if entry.id > ids[at]), b"next"]


async def test_the_old_log_names_the_new_one_without_credentials(old: Wal, new: Wal) -> None:
    await filled(old)
    proof = await migrate(old, new, OLD, NEW)
    assert proof.channels["orders"].entries == ENTRIES
    with pytest.raises(Moved, match=r"memory://\*\*\*@new") as raised:
        await check_in_use(old, OLD)
    assert raised.value.url == "memory://***@new"
    await check_in_use(new, NEW)
    assert await migrate(old, new, OLD, NEW) == proof
    with pytest.raises(InvalidRequest, match="migrates to"):
        await migrate(old, MemoryWal(MemoryLog()), OLD, "memory://third")
    with pytest.raises(InvalidRequest, match="migrated already"):
        await cancel_migration(old, new, NEW)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
async def test_a_migration_killed_at_each_write_goes_on_or_is_taken_back(behind: bool) -> None:
    steps = 0
    ended = False
    while not ended:
        steps += 1
        for goes_on in (True, False):
            old_log, new_log = MemoryLog(), MemoryLog()
            old, new = MemoryWal(old_log), MemoryWal(new_log)
            await filled(old)
            left = [steps]
            try:
                await migrate(DyingWal(old_log, left, behind=behind), DyingWal(new_log, left, behind=behind), OLD, NEW)
                ended = True
            except Killed:
                phase = (await migration_state(old)).phase
                if phase is not MigrationPhase.OPEN:  # one of the two can be opened at most
                    with pytest.raises((Moved, Unavailable)):
                        await check_in_use(old, OLD)
                if phase is not MigrationPhase.MIGRATED and (await migration_state(new)).id:
                    with pytest.raises(Unavailable, match="migrate memory://old --to"):
                        await check_in_use(new, NEW)
                finished = any(map(is_migration_channel, set(await new.channels()) - {MIGRATION_CHANNEL}))
                if goes_on or phase is MigrationPhase.OPEN or finished:
                    await migrate(old, new, OLD, NEW)
                else:
                    await taken_back(old_log, new_log, random.Random(steps))
                    continue
            await assert_same(old, new)
            await check_in_use(new, NEW)
            assert MIGRATION_CHANNEL not in new_log.channels  # its entries would keep those behind from retention
            assert not any(channel.holds for channel in new_log.channels.values())
    assert steps > 15, steps


async def taken_back(old_log: MemoryLog, new_log: MemoryLog, rng: random.Random) -> None:
    """Cancel, killed on the way, too."""
    old, new = MemoryWal(old_log), MemoryWal(new_log)
    left = [rng.randint(1, 5)]
    try:
        await cancel_migration(DyingWal(old_log, left, behind=True), DyingWal(new_log, left, behind=True), NEW)
    except Killed:
        state = await migration_state(old)
        if state.phase is MigrationPhase.CANCELLING:
            with pytest.raises(PreconditionFailed):  # a record of the killed process that lands late
                await change_migration_state(old, replace(state, phase=MigrationPhase.MIGRATED))
            with pytest.raises(Unavailable, match="taken back"):
                await migrate(old, new, OLD, NEW)
        if state.phase is not MigrationPhase.OPEN:
            await cancel_migration(old, new, NEW)
    assert set(await new.channels()) <= {MIGRATION_CHANNEL}  # empty, where nothing was written to it
    await check_in_use(old, OLD)
    assert MIGRATION_CHANNEL not in old_log.channels
    assert not any(channel.holds for channel in old_log.channels.values())
    await old.append("orders", b"goes on")
    await migrate(old, new, OLD, NEW)
    await assert_same(old, new)


async def test_entries_that_come_meanwhile_are_copied_or_the_migration_does_not_end(old: MemoryWal) -> None:
    class Busy(MemoryWal):
        """Another program writes to the old log when the migration has copied the first channel."""

        times = 1

        async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
            await super().hold(channel, holder, id)
            if channel == "queue" and self.times:
                self.times -= 1
                await old.append("orders", b"late")

    await filled(old)
    new = Busy(MemoryLog())
    proof = await migrate(old, new, OLD, NEW)
    assert proof.channels["orders"].entries == ENTRIES + 1
    await assert_same(old, new)

    again = MemoryWal(MemoryLog())
    await filled(again)
    busy = Busy(MemoryLog())
    busy.times = 100
    old = again
    with pytest.raises(Unavailable, match="is written to"):
        await migrate(again, busy, OLD, NEW)
    busy.times = 0
    await migrate(again, busy, OLD, NEW)
    await assert_same(again, busy)


@pytest.mark.parametrize("ephemeral", [False, True])
async def test_a_temporary_channel_does_not_go_along(ephemeral: bool, old: Wal, new: Wal) -> None:
    await filled(old)
    await old.create_channel("replies", ChannelPolicy(temporary=True, ephemeral=ephemeral))
    proof = await migrate(old, new, OLD, NEW)
    assert "orders" in proof.channels
    assert "replies" not in await new.channels()


async def test_a_channel_of_a_program_that_is_named_like_a_mark_goes_along(old: Wal, new: Wal) -> None:
    await old.create_channel("tidewal-migrated-orders", ChannelPolicy())
    await old.append("tidewal-migrated-orders", b"1")
    await migrate(old, new, OLD, NEW)
    assert [payload for _, payload in await plain(new, "tidewal-migrated-orders")] == [b"1"]


async def test_a_channel_of_a_program_that_is_named_like_a_nodes_goes_along(old: Wal, new: Wal) -> None:
    record = encode(Record(RecordType.ROWS, body=b"of a program"))
    named = {"web-cluster": b"1", "db-cluster": b"", "my-cluster": record, "my-collection_schema": record}
    for name, payload in named.items():
        await old.create_channel(name, ChannelPolicy())
        if payload:
            await old.append(name, payload)
    await migrate(old, new, OLD, NEW)
    assert {name: b"".join([each for _, each in await plain(new, name)]) for name in named} == named

    node = MemoryWal(MemoryLog())
    await node.create_channel("by-dev-cluster", ChannelPolicy())
    await node.append("by-dev-cluster", encode(Record(RecordType.CLUSTER)))
    with pytest.raises(Unsupported, match="by-dev-cluster is named like the state of nodes"):
        await migrate(node, MemoryWal(MemoryLog()), OLD, NEW)


async def test_an_entry_without_a_time_stays_so(old: Wal, new: Wal) -> None:
    await old.create_channel("orders", ChannelPolicy(retention_s=None))
    appended, done = promise()
    old.submit([Append("orders", b"first"), Append("orders", b"second")], done)
    await appended
    await migrate(old, new, OLD, NEW)
    assert await plain(new, "orders") == [(0, b"first"), (0, b"second")]


async def test_what_differs_is_found_before_anything_rests_on_it(old: Wal, new: MemoryWal) -> None:
    class Forging(MemoryWal):
        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            forged = [each._replace(timestamp=each.timestamp + 1) if each.payload == b"5" else each for each in entries]
            super().submit(forged, done)

    await filled(old)
    with pytest.raises(CorruptLog, match=r"orders.*--cancel"):
        await migrate(old, Forging(new.log), OLD, NEW)
    assert (await migration_state(old)).phase is MigrationPhase.MIGRATING
    await cancel_migration(old, new, NEW)
    assert await new.channels() == []


@pytest.mark.parametrize("differs", ["changed", "doubled", "missing"])
@pytest.mark.parametrize("channel", ["empty", "orders", "queue"])
async def test_one_entry_that_differs_is_named_in_each_channel(channel: str, differs: str) -> None:
    class Differing(MemoryWal):
        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            written: list[Append] = []
            for each in entries:
                if each.channel != channel or each.payload != b"odd":
                    written.append(each)
                elif differs != "missing":
                    written += [each] * 2 if differs == "doubled" else [each._replace(payload=b"even")]
            super().submit(written, done)

    old, new = MemoryWal(MemoryLog()), MemoryWal(MemoryLog())
    await filled(old)
    for name in ("empty", "orders", "queue"):
        await old.append(name, b"odd", 1 << 40)
    with pytest.raises(CorruptLog, match=rf"entry \d+ of {channel} is not the same in both logs.*--cancel"):
        await migrate(old, Differing(new.log), OLD, NEW)


async def test_a_channel_that_the_new_log_alone_has_is_found(old: MemoryWal, new: MemoryWal) -> None:
    class Crowded(MemoryWal):
        async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
            await super().create_channel(channel, policy)
            if channel == "queue":
                await super().create_channel("other", policy)

    await filled(old)
    with pytest.raises(CorruptLog, match="other is in the new log only"):
        await migrate(old, Crowded(new.log), OLD, NEW)
    await cancel_migration(old, new, NEW)
    await migrate(old, new, OLD, NEW)


async def test_a_long_proof_is_in_parts_and_counts_with_the_last(
    old: MemoryWal, new: MemoryWal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_entries, "PART_BYTES", 100)
    monkeypatch.setattr(migration_module, "SHORT_BYTES", 100)
    await filled(old)
    proof = await migrate(old, new, OLD, NEW)
    state = await migration_state(old)
    assert MigrationProof.from_wire(state.proof) == proof
    parts = state.entries()
    assert len(parts) > 5
    log = MemoryWal(MemoryLog())
    migrating = replace(state, phase=MigrationPhase.MIGRATING, proof={})
    other = replace(state, proof={"other": "y" * 1000})
    await change_migration_state(log, migrating)
    for part in parts[:-1]:  # of a run that was killed there
        await log.append(MIGRATION_CHANNEL, part)
        assert await migration_state(log) == migrating
    for part in other.entries()[:-1]:
        await log.append(MIGRATION_CHANNEL, part)
    await log.append(MIGRATION_CHANNEL, parts[-1])
    assert await migration_state(log) == state
    await log.append(MIGRATION_CHANNEL, b"{")
    with pytest.raises(CorruptLog, match="cannot be read"):
        await migration_state(log)


async def test_what_cannot_be_migrated_is_refused(old: Wal, new: Wal) -> None:
    with pytest.raises(InvalidRequest, match="no channels"):  # on brokers, where the name of the old log is misspelt
        await migrate(old, new, OLD, NEW)
    assert await old.channels() == await new.channels() == []

    used = MemoryWal(MemoryLog())
    await used.create_channel("mine", ChannelPolicy())
    await old.create_channel("ours", ChannelPolicy())
    with pytest.raises(InvalidRequest, match="not empty"):
        await migrate(old, used, OLD, NEW)
    assert await old.channels() == ["ours"]

    node = MemoryWal(MemoryLog())
    await node.create_channel("by-dev-collection_schema", ChannelPolicy())
    await node.append("by-dev-collection_schema", encode(Record(RecordType.CATALOG, body=b"none")))
    with pytest.raises(Unsupported, match="by-dev-collection_schema is named like the state of nodes"):
        await migrate(node, new, OLD, NEW)

    with_ids = MemoryWal(MemoryLog())
    await with_ids.create_channel("ids", ChannelPolicy())
    await with_ids.create_channel("others", ChannelPolicy())
    await with_ids.append("ids", encode(Record(RecordType.GROUP, key=b"id")))
    with pytest.raises(Unsupported, match=r"GROUP.*holds ids"):
        await migrate(with_ids, new, OLD, NEW)
    await cancel_migration(with_ids, new, NEW)
    await with_ids.drop_channel("ids")
    await migrate(with_ids, new, OLD, NEW)

    lagging = MemoryWal(MemoryLog())
    ids = await filled(lagging)
    await lagging.truncate("orders", ids[10])
    with pytest.raises(PositionLost, match=r"groups seek"):
        await migrate(lagging, MemoryWal(MemoryLog()), OLD, NEW)
    await check_in_use(lagging, OLD)  # so that the group can be moved


async def test_of_two_migrations_into_one_log_the_first_counts(old: Wal, new: Wal) -> None:
    first = MigrationState(MigrationPhase.RESERVED, "first", OLD)
    await change_migration_state(new, first)
    with pytest.raises(PreconditionFailed, match="came first"):
        await change_migration_state(new, MigrationState(MigrationPhase.RESERVED, "second", OLD))
    assert await migration_state(new) == first
    await filled(old)
    with pytest.raises(InvalidRequest, match="not empty"):
        await migrate(old, new, OLD, NEW)


async def test_a_position_that_one_log_has_no_more_is_lost(old: Wal, new: Wal) -> None:
    ids = await filled(old)
    await migrate(old, new, OLD, NEW)

    def at(number: int) -> Position:
        return Position("orders", ids[number], 0, 0, 0, old.name)

    there = (await translate_position(old, new, at(8))).message_id
    await new.truncate("orders", there)
    assert (await translate_position(old, new, at(8))).message_id == there
    with pytest.raises(PositionLost, match="new log"):
        await translate_position(old, new, at(7))
    await old.hold("orders", HOLDER, None)
    await old.truncate("orders", ids[12])
    assert (await translate_position(old, new, at(12))).message_id > there
    with pytest.raises(PositionLost, match="old log"):
        await translate_position(old, new, at(8))
    with pytest.raises(InvalidRequest, match="was not in the log"):
        await translate_position(old, new, Position("orders", b"\xff" * 8, 0, 0, 0, old.name))
    with pytest.raises(PositionMismatch, match="of kafka"):  # its bytes may be an id here
        await translate_position(old, new, replace(at(12), wal="kafka"))


async def test_a_position_before_all_that_was_migrated_is_lost(old: Wal, new: Wal) -> None:
    await old.create_channel("orders", ChannelPolicy(retention_s=None))
    ids = await old.append_many([Append("orders", b"%d" % number) for number in range(ENTRIES)])
    await old.truncate("orders", ids[10])
    await migrate(old, new, OLD, NEW)
    for id, there in ((b"", b""), (ids[9], b""), (ids[10], (await content(new, "orders"))[0].id)):
        assert (await translate_position(old, new, Position("orders", id, 0, 0, 0, old.name))).message_id == there
    with pytest.raises(PositionLost, match="old log"):
        await translate_position(old, new, Position("orders", ids[3], 0, 0, 0, old.name))


class DyingAtTheEnd(MemoryWal):
    """A new log whose process dies when it has everything, before it comes into use."""

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        if is_migration_channel(channel) and channel != MIGRATION_CHANNEL:
            raise Killed
        await super().create_channel(channel, policy)


async def test_another_log_in_place_of_the_new_one_is_not_said_to_be_equal(old: Wal, new: MemoryWal) -> None:
    await filled(old)
    with pytest.raises(Killed):
        await migrate(old, DyingAtTheEnd(new.log), OLD, NEW)
    emptied = MemoryWal(MemoryLog())
    with pytest.raises(CorruptLog, match="emptied, removed or replaced"):
        await migrate(old, emptied, OLD, NEW)
    assert await emptied.channels() == []
    await migrate(old, new, OLD, NEW)
    with pytest.raises(CorruptLog, match="emptied, removed or replaced"):
        await migrate(old, emptied, OLD, NEW)
    with pytest.raises(InvalidRequest, match="migrated already"):
        await cancel_migration(old, emptied, NEW)


@pytest.mark.parametrize("removed", [False, True], ids=["written", "removed"])
async def test_a_new_log_that_changed_behind_the_proof_does_not_come_into_use(
    removed: bool, old: Wal, new: MemoryWal
) -> None:
    await filled(old)
    with pytest.raises(Killed):
        await migrate(old, DyingAtTheEnd(new.log), OLD, NEW)
    await new.drop_channel("empty") if removed else await new.append("orders", b"by another program")
    with pytest.raises(CorruptLog, match=r"changed in the new log.*--cancel"):
        await migrate(old, new, OLD, NEW)
    await cancel_migration(old, new, NEW)
    await check_in_use(old, OLD)
    await migrate(old, new, OLD, NEW)
    await assert_same(old, new)


async def test_what_comes_late_and_cannot_be_moved_is_no_dead_end(old: MemoryWal, new: MemoryWal) -> None:
    class Busy(MemoryWal):
        """A program that was not stopped writes a record with ids just before the old log is migrated."""

        async def append(self, channel: str, payload: Any, *args: Any, **options: Any) -> Any:
            if channel == MIGRATION_CHANNEL and b'"migrated"' in payload:
                await super().append("empty", encode(Record(RecordType.GROUP, key=b"id")))
            return await super().append(channel, payload, *args, **options)

    await filled(old)
    with pytest.raises(Unsupported, match="GROUP"):
        await migrate(Busy(old.log), new, OLD, NEW)
    assert (await migration_state(old)).phase is MigrationPhase.MIGRATED
    await cancel_migration(old, new, NEW)
    await check_in_use(old, OLD)
    assert await new.channels() == []


async def test_a_join_that_fails_for_a_moment_is_done_again_and_one_that_lasts_ends_it(
    old: MemoryWal, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(MemoryWal):
        """A log whose coordinator is not there yet."""

        failures = 2

        async def join(self, *args: Any, **options: Any) -> Any:
            self.failures -= 1
            if self.failures >= 0:
                raise Unavailable("no coordinator yet")
            return await super().join(*args, **options)

    await filled(old)
    lasting = Busy(MemoryLog())
    lasting.failures = 1_000_000
    monkeypatch.setattr(group_positions, "JOIN_S", 0.1)
    with pytest.raises(Unavailable, match="no coordinator"):
        await migrate(old, lasting, OLD, NEW)
    lasting.failures = 2
    monkeypatch.undo()
    await migrate(old, lasting, OLD, NEW)
    await assert_same(old, lasting)


async def test_where_a_migration_was_taken_back_at_any_step_the_next_one_goes_elsewhere(old: MemoryWal) -> None:
    """OLD to NEW is taken back, OLD goes to NEWER, and NEW, which others use since, to a log of its own."""
    newer_url, other_url = "memory://newer", "memory://other"
    for steps in range(2, 40, 3):
        old, new, newer, other = (MemoryWal(MemoryLog()) for _ in range(4))
        await filled(old)
        left = [steps]
        with suppress(Killed):
            await migrate(DyingWal(old.log, left, behind=True), DyingWal(new.log, left, behind=True), OLD, NEW)
        state = await migration_state(old)
        if mark_of(state.id) in await new.channels():
            assert steps > 20
            break
        if state.phase is not MigrationPhase.OPEN:
            with pytest.raises(InvalidRequest, match="go on with that one, or take it back"):
                await migrate(old, newer, OLD, newer_url)
            await cancel_migration(old, new, NEW)
        await migrate(old, newer, OLD, newer_url)
        await assert_same(old, newer)
        await filled(new)
        with pytest.raises(InvalidRequest, match="not empty"):
            await migrate(new, newer, NEW, newer_url)
        with pytest.raises(InvalidRequest, match="no migration of this log is under way"):
            await cancel_migration(new, newer, newer_url)
        await check_in_use(newer, newer_url)
        await migrate(new, other, NEW, other_url)
        await assert_same(new, other)
        with pytest.raises(Moved, match="newer"):
            await check_in_use(old, OLD)
    else:
        pytest.fail("no migration came to its mark")


async def test_only_what_the_old_log_names_is_taken_back(old: Wal, new: MemoryWal) -> None:
    await filled(old)
    with pytest.raises(Killed):
        await migrate(old, DyingAtTheEnd(new.log), OLD, NEW)
    with pytest.raises(InvalidRequest, match="migrates to"):
        await cancel_migration(old, MemoryWal(MemoryLog()), "memory://wrong")
    await cancel_migration(old, new, NEW)
    assert await new.channels() == []


def test_a_pattern_takes_no_channel_of_a_migration() -> None:
    for name in (MIGRATION_CHANNEL, mark_of(uuid4().hex)):
        assert not Subscription(["*", "tidewal-*"]).takes(name)
        assert Subscription([name]).takes(name)
    assert Subscription(["*"]).takes("tidewal-migrations")


async def test_each_new_channel_is_held_before_its_second_entry(old: Wal) -> None:
    class Watched(MemoryWal):
        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            for channel in {each.channel for each in entries} - {MIGRATION_CHANNEL}:
                there = self.log.channels[channel]
                assert there.holds or (not there.entries and len(entries) == 1)
                sizes.append(len(entries))
            super().submit(entries, done)

    sizes: list[int] = []
    await filled(old)
    new = Watched(MemoryLog())
    await migrate(old, new, OLD, NEW)
    assert sizes == [1, ENTRIES - 1, 1, ENTRIES - 6]  # five of the queue are done
    await assert_same(old, new)


async def test_an_append_is_bounded_in_bytes_and_in_entries(
    old: Wal, new: MemoryWal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []

    class Watched(MemoryWal):
        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            if entries[0].channel == "orders":
                sizes.append((len(entries), sum(len(each.payload) for each in entries)))
            super().submit(entries, done)

    monkeypatch.setattr(channel_copy, "APPEND_ENTRIES", 5)
    monkeypatch.setattr(channel_copy, "APPEND_BYTES", 100)
    await old.create_channel("orders", ChannelPolicy(retention_s=None))
    await old.append_many([Append("orders", bytes(size)) for size in [0] * 20 + [30] * 20])
    await migrate(old, Watched(new.log), OLD, NEW)
    assert max(entries for entries, _ in sizes) == 5
    assert max(size for _, size in sizes) == 90


@pytest.mark.parametrize(("at", "error"), [("copied", None), ("stored", "is written to"), ("joins", "has members")])
async def test_a_group_that_moves_meanwhile_is_brought_to_where_it_is_then(
    at: str, error: str | None, old: MemoryWal
) -> None:
    class Busy(MemoryWal):
        """Another program uses groups of the old log once, when that was copied, or a first position is stored."""

        async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
            await super().hold(channel, holder, id)
            if channel == "queue" and at == "copied" and not used:
                await use()

        async def seek_group(self, group: str, channel: str, start: Any) -> None:
            await super().seek_group(group, channel, start)
            if at != "copied" and not used:
                await use()

    used: list[Any] = []

    async def use() -> None:
        used.append(await old.join("workers", ["queue"]) if at == "joins" else None)
        await old.seek_group("beginning", "orders", FromId(ids[9]))
        await old.seek_group("made", "orders", FromId(ids[2]))

    ids = await filled(old)
    new = Busy(MemoryLog())
    if error is not None:
        with pytest.raises(Unavailable, match=error):
            await migrate(old, new, OLD, NEW)
        with pytest.raises(Unavailable, match="migrate memory://old"):
            await check_in_use(new, NEW)
    if at == "joins":
        await used[0].aclose()
    await migrate(old, new, OLD, NEW)
    await assert_same(old, new)
    found = await places(new)
    assert (found["beginning", "orders"][0], found["made", "orders"][0]) == (ENTRIES - 10, ENTRIES - 3)


NO_PART = b'{"v": 1, "whole": "a", "of": 0, "number": 0, "text": ""}'


@pytest.mark.parametrize(
    "torn", [b"1", b"null", b"[]", b"[" * 100_000, b'{"v": 1}', NO_PART], ids=["1", "null", "[]", "deep", "{}", "part"]
)
async def test_a_torn_state_is_said_to_be_corrupt(torn: bytes, old: Wal) -> None:
    await old.create_channel(MIGRATION_CHANNEL, ChannelPolicy())
    await old.append(MIGRATION_CHANNEL, torn)
    with pytest.raises(CorruptLog, match="cannot be read"):
        await check_in_use(old, OLD)


@pytest.mark.parametrize(
    "torn", [3, {}, {"channels": 1}, {"channels": {}}, {"channels": {}, "groups": {"g": {"c": ["zz", "00"]}}}]
)
async def test_a_torn_proof_is_said_to_be_corrupt(torn: Any, old: Wal, new: Wal) -> None:
    state = MigrationState(MigrationPhase.MIGRATING, "id", shown_url(NEW))
    await change_migration_state(old, state)
    await change_migration_state(old, replace(state, phase=MigrationPhase.MIGRATED, proof=torn))
    await new.create_channel(mark_of(state.id), ChannelPolicy())
    with pytest.raises(CorruptLog, match="proof of a migration"):
        await migrate(old, new, OLD, NEW)
