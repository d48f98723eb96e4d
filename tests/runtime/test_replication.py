"""A log is mirrored into a replica, once and in order, also where each step fails, and the replica is promoted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tidewal.adapters.rocksmq.owner.store import RocksMQ
from tidewal.runtime.errors import (
    ChannelNotFound,
    CorruptLog,
    Fenced,
    InvalidRequest,
    MessageTooLarge,
    Moved,
    PositionLost,
    Promoted,
    ReplicaReadOnly,
    TidewalError,
    Unavailable,
    Unsupported,
)
from tidewal.runtime.groups.group_filter import until_assigned
from tidewal.runtime.groups.metadata_layers import Layer, unwrap, wrap
from tidewal.runtime.groups.retries import Attempts
from tidewal.runtime.log.dead_letters import times_moved
from tidewal.runtime.log.migration_state import (
    MigrationPhase,
    MigrationState,
    change_migration_state,
    check_in_use,
    come_into_use,
)
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.replication_state import (
    REPLICATION_CHANNEL,
    GroupPlace,
    ReplicatedChannel,
    ReplicationPhase,
    ReplicationState,
    ReplicationStates,
    replication_state,
)
from tidewal.runtime.log.wal import (
    Append,
    ChannelInfo,
    ChannelPolicy,
    Delivery,
    Entry,
    FromId,
    GroupInfo,
    OnAppended,
    Start,
    Wal,
)
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.migration.channel_copy import stored_entries
from tidewal.runtime.migration.migration import migrate
from tidewal.runtime.replication import replicated_node
from tidewal.runtime.replication import replicator as replicating
from tidewal.runtime.replication.promotion import forget_replica, forget_source, promote, promote_alone, release_source
from tidewal.runtime.replication.replicated_groups import group_places
from tidewal.runtime.replication.replication_lag import ReplicationLag
from tidewal.runtime.replication.replicator import ReplicationTimes, Replicator
from tidewal.runtime.replication.salvage import unreplicated_entries
from tidewal.runtime.testing import FaultPlan, MemoryLog, MemoryWal, Rates, VirtualClock, run_virtual
from tidewal.runtime.waiting import ended

SOURCE, TARGET = "memory://source", "memory://user:secret@target"
TIMES = ReplicationTimes(look_s=0.01, save_s=0.03, halted_s=0.05)
WITHIN_S = 60.0


async def contents(wal: Wal) -> dict[str, list[tuple[int, bytes]]]:
    """The entries of each channel that replication mirrors."""
    found: dict[str, list[tuple[int, bytes]]] = {}
    for name in await wal.channels():
        if not name.startswith("tidewal-"):
            info = await wal.describe(name)
            found[name] = [(e.timestamp, bytes(e.payload)) async for e in stored_entries(wal, info)]
    return found


async def remaining(wal: Wal) -> dict[tuple[str, str], int]:
    """How many entries each group has still to get."""
    found: dict[tuple[str, str], int] = {}
    for group in await wal.groups():
        for channel, id in group.positions.items():
            entries = [e async for e in stored_entries(wal, await wal.describe(channel))]
            found[group.name, channel] = sum(entry.id > (id or b"") for entry in entries)
    return found


async def until(condition: Callable[[], Awaitable[bool]], replicating: asyncio.Task[None] | None = None) -> None:
    """Return when the condition holds; raises what ended the replicator meanwhile."""
    async with asyncio.timeout(WITHIN_S):
        while not await condition():
            if replicating is not None and replicating.done():
                replicating.result()
            await asyncio.sleep(0.005)


async def until_same(source: Wal, target: Wal, running: asyncio.Task[None]) -> None:
    async def same() -> bool:
        # The replicator may drop a channel, and make it again, between two steps of this look at it.
        with suppress(ChannelNotFound, PositionLost):
            return await contents(source) == await contents(target)
        return False

    await until(same, running)


def started(source: Wal, target: Wal, *, times: ReplicationTimes = TIMES, **options: Any) -> asyncio.Task[None]:
    return asyncio.create_task(Replicator(source, target, SOURCE, times=times, **options).run())


async def stopped(running: asyncio.Task[None]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def fill(wal: Wal, channel: str, numbers: Sequence[int], **policy: Any) -> list[bytes]:
    await wal.create_channel(channel, ChannelPolicy(**policy))
    return [(await wal.append_many([Append(channel, b"%d" % n, (n + 1) << 18)]))[0] for n in numbers]


async def test_a_log_is_mirrored_while_it_is_written(backend: Any, source: Wal) -> None:
    """From any log: channels with their policies, what comes, and what is dropped; into another kind."""
    target: Wal = await backend.wal()
    await fill(source, "orders", range(50), retention_s=None)
    await fill(source, "unnumbered", [0, 0])
    await source.create_channel("signals", ChannelPolicy(ephemeral=True))
    running = started(source, target)
    await until_same(source, target, running)
    await fill(source, "orders", range(50, 60), retention_s=None)
    await fill(source, "late", range(5))
    await source.drop_channel("unnumbered")
    await until_same(source, target, running)
    assert (await target.describe("orders")).policy == ChannelPolicy(retention_s=None)
    assert (await target.describe("signals")).policy.ephemeral
    await stopped(running)
    await fill(source, "late", range(5, 9))
    await source.drop_channel("orders")
    await fill(source, "orders", range(100, 300))  # with ids that the replica knows of another one
    running = started(source, target)
    await until_same(source, target, running)
    await stopped(running)
    assert (await replication_state(target)).claim == ""


async def test_from_any_log(backend: Any, target: Wal) -> None:
    source: Wal = await backend.wal()
    await fill(source, "orders", range(20))
    await fill(source, "empty", [])
    running = started(source, target)
    await until_same(source, target, running)
    await fill(source, "orders", range(20, 30))
    await fill(source, "empty", range(3))
    await until_same(source, target, running)
    await stopped(running)
    state = await promote(source, target, SOURCE, TARGET)
    assert state.channels["orders"].source == await source.latest_id("orders")
    with pytest.raises(Moved, match="promoted"):
        await check_in_use(source, SOURCE)


async def test_groups_stand_where_they_do_in_the_source(source: Wal, target: Wal) -> None:
    """Forward entry by entry, back, ahead of the replica, before all, and dropped; a queue loses what is done."""
    ids = await fill(source, "orders", range(40))
    queued = await fill(source, "queue", range(10), delivery=Delivery.QUEUE)
    await source.seek_group("midst", "orders", FromId(ids[20]))
    await source.seek_group("beginning", "orders", FromId(ids[0], inclusive=True))
    await source.seek_group("workers", "queue", FromId(queued[3]))
    running = started(source, target)

    async def same() -> bool:
        return await remaining(target) == await remaining(source) and await contents(target) == await contents(source)

    await until(same, running)
    for at in (23, 24, 7, 39):
        await source.seek_group("midst", "orders", FromId(ids[at]))
        await source.seek_group("workers", "queue", FromId(queued[at % 10]))
        await until(same, running)
    await source.drop_group("beginning")
    await source.seek_group("workers", "queue", FromId(queued[-1]))
    await until(same, running)
    await stopped(running)
    assert (await remaining(target)) == {("midst", "orders"): 0, ("workers", "queue"): 0}


async def test_a_queue_goes_to_another_group(source: Wal, target: MemoryWal) -> None:
    """Also where a replicator was killed when it had stored a position, and the group is gone then."""
    ids = await fill(source, "queue", range(5), delivery=Delivery.QUEUE)
    await source.seek_group("killed", "queue", FromId(ids[0]))

    class Killed(MemoryWal):
        async def seek_group(self, group: str, channel: str, start: Start) -> None:
            await super().seek_group(group, channel, start)
            raise Unavailable("killed")

    with pytest.raises(Unavailable):
        await started(source, Killed(target.log))
    for group, left in (("first", 3), ("second", 2)):
        for each in await source.groups():
            await source.drop_group(each.name)
        await source.seek_group(group, "queue", FromId(ids[4 - left]))
        expected = {(group, "queue"): left}
        running = started(source, target)

        async def moved(expected: object = expected) -> bool:
            return await remaining(target) == expected

        await until(moved, running)
        await stopped(running)


async def test_a_group_is_not_ahead_where_the_replica_has_lost_entries(source: MemoryWal, target: MemoryWal) -> None:
    """It stood before all that is in the replica, whose retention has removed some: they are not counted."""
    ids = await fill(source, "orders", range(20))
    await source.truncate("orders", ids[5])
    await source.seek_group("midst", "orders", FromId(ids[4]))
    await stopped_when_same(source, target)
    there = [entry.id async for entry in stored_entries(target, await target.describe("orders"))]
    await target.truncate("orders", there[4])
    await source.seek_group("midst", "orders", FromId(ids[10]))
    running = started(source, target)

    async def same() -> bool:
        return await remaining(target) == {("midst", "orders"): 9}

    await until(same, running)
    await stopped(running)


async def test_a_group_s_place_is_found_in_bounded_memory(source: MemoryWal) -> None:
    """Counted from the end of a long channel: its ids are not kept."""

    class Counted(bytes):
        live = most = 0

        def __init__(self, _: bytes) -> None:
            Counted.live += 1
            Counted.most = max(Counted.most, Counted.live)

        def __del__(self) -> None:
            Counted.live -= 1

    class Long(MemoryWal):
        async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
            async for entries in super().read(channel, start):
                for entry in entries:
                    yield [entry._replace(id=Counted(entry.id))]

    count = 1000
    ids = await fill(source, "orders", range(count))
    await source.seek_group("midst", "orders", FromId(ids[1]))
    target = Long(MemoryLog())
    there = await fill(target, "orders", range(count))
    place = {"orders": ReplicatedChannel(ids[-1], there[-1])}
    found = await group_places(source, target, await source.groups(), place, {})
    assert found == {"midst": {"orders": GroupPlace(ids[1], there[1])}}
    assert 0 < Counted.most < 10


async def test_a_replica_is_read_only_until_it_is_promoted(source: Wal, target: Wal) -> None:
    await fill(source, "orders", range(5))
    await stopped_when_same(source, target)
    with pytest.raises(ReplicaReadOnly, match="replica of memory://source") as raised:
        await check_in_use(target, TARGET)
    assert raised.value.source == SOURCE
    with pytest.raises(InvalidRequest, match="no replica"):
        await promote_alone(source)
    await promote_alone(target)
    await check_in_use(target, TARGET)
    await target.append("orders", b"new")
    for begun in (started(source, target), started(source, target, is_last=True)):
        with pytest.raises(Promoted, match="in use by itself"):
            await begun


async def stopped_when_same(source: Wal, target: Wal) -> None:
    running = started(source, target)
    await until_same(source, target, running)
    await stopped(running)


async def test_promotion_brings_over_all_that_the_source_has(source: Wal, target: Wal) -> None:
    """Channels apart, a group with metadata, and a producer that writes until the source is fenced."""
    ids = await fill(source, "orders", range(30))
    await fill(source, "late", range(3))
    await stopped_when_same(source, target)
    await fill(source, "late", range(3, 9))
    await fill(source, "new", range(3))
    await source.seek_group("midst", "orders", FromId(ids[11]))
    member = await source.join("midst", ["orders"])
    await until_assigned(member, "orders")
    begun = Attempts(ids[13], 2, True, b"a copy").to_bytes()
    await member.annotate("orders", wrap(Layer.ATTEMPTS, begun, b"of midst"))
    with pytest.raises(Unavailable, match="group midst has members"):
        await promote(source, target, SOURCE, TARGET)
    await member.aclose()
    state = await promote(source, target, SOURCE, TARGET)
    assert state.phase is ReplicationPhase.PROMOTED
    assert await contents(source) == await contents(target)
    assert await remaining(source) == await remaining(target) == {("midst", "orders"): 18}
    [stored] = [group.metadata["orders"] for group in await target.groups()]
    attempts, own = unwrap(Layer.ATTEMPTS, stored)
    there = [entry.id async for entry in stored_entries(target, await target.describe("orders"))]
    assert (Attempts.from_bytes(attempts), own) == (Attempts(there[13], 2, True, b"a copy"), b"of midst")
    with pytest.raises(Moved) as raised:
        await check_in_use(source, SOURCE)
    assert raised.value.url == "memory://***@target"
    await check_in_use(target, TARGET)
    assert await promote(source, target, SOURCE, TARGET) == state


async def test_what_groups_have_stored_is_there_without_the_source(source: Wal, target: Wal) -> None:
    """As it was when it was saved, with the ids of the replica."""
    ids = await fill(source, "orders", range(30))
    member = await source.join("midst", ["orders"])
    await until_assigned(member, "orders")
    for number in (13, 14):
        begun = Attempts(ids[number], 2).to_bytes()
        await member.annotate("orders", wrap(Layer.ATTEMPTS, begun, b"of %d" % number))
        await fill(source, f"at-{number}", range(1))
        await stopped_when_same(source, target)
    await member.aclose()
    for _ in range(2):  # again
        await promote_alone(target)
        [stored] = [group.metadata["orders"] for group in await target.groups()]
        attempts, own = unwrap(Layer.ATTEMPTS, stored)
        there = [entry.id async for entry in stored_entries(target, await target.describe("orders"))]
        assert (Attempts.from_bytes(attempts), own) == (Attempts(there[14], 2), b"of 14")


async def test_what_the_replica_did_not_get_is_salvaged(source: Wal, target: Wal) -> None:
    """Schedule 15: the source is away, with channels apart; it comes back, is written, and is fenced then."""
    for name in ("ahead", "behind"):
        await fill(source, name, range(10))
    await stopped_when_same(source, target)
    await fill(source, "behind", range(10, 15))
    await fill(source, "new", range(2))
    state = await promote_alone(target)
    await fill(target, "ahead", range(100, 103))  # a producer that retries, at the promoted one
    await fill(source, "ahead", range(10, 12))  # the source returns and is written
    with pytest.raises(Promoted):
        await started(source, target)
    assert (await promote(source, target, SOURCE, TARGET)).channels == state.channels
    with pytest.raises(Moved):
        await check_in_use(source, SOURCE)
    found = [(name, bytes(entry.payload)) async for name, entry in unreplicated_entries(source, state)]
    expected = [("ahead", n) for n in (10, 11)] + [("behind", n) for n in range(10, 15)] + [("new", 0), ("new", 1)]
    assert found == [(name, b"%d" % n) for name, n in expected]


@pytest.mark.parametrize("saved", [True, False])
async def test_a_channel_that_was_created_again_is_salvaged_as_a_whole(
    source: Wal, target: MemoryWal, saved: bool
) -> None:
    """Whether its place was saved or the replicator was killed before: none of the old entries are counted in it."""
    await fill(source, "orders", range(3))
    if saved:
        await stopped_when_same(source, target)
    else:
        replica = Stepping(target.log)
        running = started(source, replica, times=replace(TIMES, save_s=1000))
        await until_same(source, target, running)
        replica.left = 0
        await fill(source, "more", [0])
        with pytest.raises(Unavailable):
            await running
    await source.drop_channel("orders")
    await fill(source, "orders", range(10, 15))
    await promote_alone(target)
    state = await promote(source, target, SOURCE, TARGET)
    found = [bytes(entry.payload) async for name, entry in unreplicated_entries(source, state) if name == "orders"]
    assert found == [b"%d" % n for n in range(10, 15)]


async def test_what_was_removed_at_the_source_does_not_end_a_salvage(source: MemoryWal, target: Wal) -> None:
    await fill(source, "orders", range(3))
    await fill(source, "other", range(3))
    await stopped_when_same(source, target)
    ids = await fill(source, "orders", range(3, 9))
    await fill(source, "other", range(3, 5))
    await promote_alone(target)
    state = await promote(source, target, SOURCE, TARGET)
    await release_source(source, state)
    await source.truncate("orders", ids[3])
    found = [(name, bytes(entry.payload)) async for name, entry in unreplicated_entries(source, state)]
    assert found == [("orders", b"6"), ("orders", b"7"), ("orders", b"8"), ("other", b"3"), ("other", b"4")]


async def test_a_replica_that_cannot_truncate_is_replaced_like_others(source: Wal, target: MemoryWal) -> None:
    """Its entries stay: that it is settled is told by the mark alone."""
    target.capabilities = replace(target.capabilities, truncate=False)
    third = MemoryWal(MemoryLog())
    await fill(source, "orders", range(3))
    await stopped_when_same(source, target)
    state = await promote(source, target, SOURCE, TARGET)
    assert await promote(source, target, SOURCE, TARGET) == state
    await stopped_when_same(target, third)
    await promote(target, third, TARGET, SOURCE)
    assert await contents(third) == await contents(source)


async def test_what_is_said_of_a_log_in_use_keeps_nothing_from_retention(source: Wal, target: Wal) -> None:
    """No entry stays in it: RocksMQ removes the front of its journal only."""
    await fill(source, "orders", range(3))
    await stopped_when_same(source, target)
    assert (await source.describe(REPLICATION_CHANNEL)).first_id is None
    await stopped_when_same(source, target)  # knows its source
    promoted = await promote(source, target, SOURCE, TARGET)
    assert (await target.describe(REPLICATION_CHANNEL)).first_id is None
    assert (await replication_state(target)).phase is ReplicationPhase.PROMOTED
    await source.append("orders", b"late")  # a program that was not stopped
    assert await promote(source, target, SOURCE, TARGET) == promoted
    assert [bytes(entry.payload) async for _, entry in unreplicated_entries(source, promoted)] == [b"late"]
    third = MemoryWal(MemoryLog())
    await stopped_when_same(target, third)
    await promote(target, third, TARGET, SOURCE)
    assert await contents(third) == await contents(target)


async def test_a_source_that_was_not_fenced_is_salvaged_or_given_up_first(source: Wal, target: Wal) -> None:
    third = MemoryWal(MemoryLog())
    await fill(source, "orders", range(3))
    await stopped_when_same(source, target)
    await promote_alone(target)
    await stopped_when_same(target, third)
    with pytest.raises(InvalidRequest, match="memory://source, which was not fenced"):
        await promote(target, third, TARGET, SOURCE)
    with pytest.raises(InvalidRequest, match="memory://source, which was not fenced"):
        await migrate(target, MemoryWal(MemoryLog()), TARGET, "memory://new")
    await forget_source(target)
    assert (await target.describe(REPLICATION_CHANNEL)).first_id is None
    with pytest.raises(InvalidRequest, match="--forget"):
        await promote(source, target, SOURCE, TARGET)
    await promote(target, third, TARGET, SOURCE)
    with pytest.raises(InvalidRequest, match="no replica that was promoted"):
        await forget_source(source)


async def test_two_that_begin_with_one_source_at_once_agree(source: Wal) -> None:
    """The second one finds the entry of the first settled already, behind its own."""
    late = ReplicationStates(source)
    assert (await late.read()).phase is ReplicationPhase.NONE
    first = ReplicationStates(source)
    await first.change(ReplicationState(ReplicationPhase.SOURCE, "1" * 32))
    await first.settle()
    await late.change(ReplicationState(ReplicationPhase.SOURCE, "2" * 32))
    await late.settle()
    assert late.state.log_id == (await replication_state(source)).log_id == "1" * 32


async def test_a_promotion_counts_what_was_not_saved(source: Wal) -> None:
    """The replicator is killed: what it had brought over behind the saved places is not salvaged again."""
    log = MemoryLog()
    target = Stepping(log)
    await fill(source, "orders", range(10))
    running = started(source, target, times=replace(TIMES, save_s=1000))
    await until_same(source, target, running)
    target.left = 0
    await fill(source, "orders", range(10, 12))
    with pytest.raises(Unavailable):
        await running
    state = await promote_alone(MemoryWal(log))
    assert (state.channels["orders"].source, state.channels["orders"].behind) == (b"", 10)
    found = [bytes(entry.payload) async for _, entry in unreplicated_entries(source, state)]
    assert found == [b"10", b"11"]


async def test_two_replicators_do_not_both_write(source: MemoryWal, target: MemoryWal, monkeypatch: Any) -> None:
    monkeypatch.setattr(replicating, "CLAIM_WAIT_S", 0.2)
    monkeypatch.setattr(replicating, "CLAIM_S", 0.02)
    target.capabilities = replace(target.capabilities, one_machine=False)
    await fill(source, "orders", range(10))
    first = started(source, target)

    async def is_saved() -> bool:  # what is saved just then would refuse the claim of the second one
        place = (await replication_state(target)).channels.get("orders")
        return place is not None and place.source == await source.latest_id("orders")

    await until(is_saved, first)
    second = started(source, target)
    with pytest.raises(Fenced, match="another replicator"):
        await first
    for at in range(10, 40):
        await fill(source, "orders", [at])
    await until_same(source, target, second)
    await stopped(second)


async def test_a_promotion_gives_way_to_a_replicator_that_claims_meanwhile(source: MemoryWal, monkeypatch: Any) -> None:
    """What it has counted is stale then: entries that the replica has would be salvaged."""
    monkeypatch.setattr(replicating, "CLAIM_WAIT_S", 0.0)

    class Counted(MemoryWal):
        """The replica, whose channels take long to count."""

        async def describe(self, channel: str) -> ChannelInfo:
            if channel == "orders":
                await fill(source, "orders", [3])
                await stopped_when_same(source, MemoryWal(self.log))
            return await super().describe(channel)

    target = Counted(MemoryLog())
    await fill(source, "orders", range(3))
    await stopped_when_same(source, MemoryWal(target.log))
    with pytest.raises(Fenced):
        await promote_alone(target)
    assert (await replication_state(target)).phase is ReplicationPhase.REPLICA


async def test_a_replicator_ends_when_another_log_has_taken_the_place_of_its_source(source: Wal, target: Wal) -> None:
    """A second replica would show no lag for ever, while programs go on with the first one."""
    await fill(source, "orders", range(5))
    await stopped_when_same(source, target)
    second = MemoryWal(MemoryLog())
    running = started(source, second)
    await until_same(source, second, running)
    await promote(source, target, SOURCE, TARGET)
    with pytest.raises(Promoted, match="target has taken its place"):
        await asyncio.wait_for(running, WITHIN_S)


async def test_a_replicator_ends_when_its_source_was_migrated(source: Wal, target: Wal) -> None:
    await fill(source, "orders", range(5))
    running = started(source, target)
    await until_same(source, target, running)
    await migrate(source, MemoryWal(MemoryLog()), SOURCE, "memory://elsewhere")
    with pytest.raises(Moved, match="elsewhere"):
        await asyncio.wait_for(running, WITHIN_S)


@pytest.mark.parametrize("runs", [True, False])
async def test_a_replica_outlives_a_source_that_lost_all(source: MemoryWal, target: Wal, runs: bool) -> None:
    """What the source says of itself is gone, too: so its channels were not dropped one by one."""
    await fill(source, "orders", range(5))
    running = started(source, target)
    await until_same(source, target, running)
    before = await contents(target)
    if not runs:
        await stopped(running)
    source.log.channels.clear()
    await fill(source, "others", range(3))
    if not runs:
        running = started(source, target)
    with pytest.raises(InvalidRequest, match=r"another log|not a replica of"):
        await asyncio.wait_for(running, WITHIN_S)
    assert await contents(target) == before
    await promote_alone(target)


async def test_what_a_promoted_replica_has_is_not_touched_by_a_replicator_that_stood_still(monkeypatch: Any) -> None:
    """It was waiting for the source, behind its look at the claim: groups and channels are the programs' by now."""
    monkeypatch.setattr(replicating, "CLAIM_S", 0.0)
    monkeypatch.setattr(replicating, "CLAIM_WAIT_S", 0.0)

    class Silent(MemoryWal):
        answers = asyncio.Event()

        async def groups(self) -> list[GroupInfo]:
            found = await super().groups()
            await self.answers.wait()
            return found

        async def describe(self, channel: str) -> ChannelInfo:
            if channel == "late":
                await self.answers.wait()
            return await super().describe(channel)

    for comes in ("group", "channel"):
        source, target = Silent(MemoryLog()), MemoryWal(MemoryLog())
        source.answers = asyncio.Event()
        source.answers.set()
        ids = await fill(source, "orders", range(5))
        running = started(source, target)
        await until_same(source, target, running)
        source.answers.clear()
        if comes == "group":
            await source.seek_group("midst", "orders", FromId(ids[2]))
        else:
            await fill(source, "late", range(2))
        await asyncio.sleep(5 * TIMES.save_s)
        await promote_alone(target)
        await fill(target, "late", range(7, 9), retention_s=None)
        ends = [entry.id async for entry in stored_entries(target, await target.describe("orders"))]
        await target.seek_group("midst", "orders", FromId(ends[3]))
        await target.seek_group("own", "orders", FromId(ends[1]))
        before = await contents(target), await remaining(target)
        source.answers.set()
        with pytest.raises(Promoted):
            await asyncio.wait_for(running, 20)
        assert (await contents(target), await remaining(target)) == before, comes
        assert not target.log.channels["orders"].holds


async def test_a_program_s_channel_that_is_named_like_a_mark_goes_along(source: Wal, target: Wal) -> None:
    names = ["tidewal-replica-orders", "tidewal-replication-orders", "tidewal-replication-log"]
    for name in names:
        await fill(source, name, range(3))
    replicator = Replicator(source, target, SOURCE, times=TIMES)
    async with replicator.claimed():
        await replicator.catch_up()
    await promote(source, target, SOURCE, TARGET)
    for name in names:
        assert len([entry async for entry in stored_entries(target, await target.describe(name))]) == 3
    assert (await replication_state(target)).phase is ReplicationPhase.PROMOTED


async def test_loops_and_other_targets_are_refused(source: Wal, target: Wal) -> None:
    with pytest.raises(InvalidRequest, match="the same log"):
        await started(source, source)
    await fill(source, "orders", range(3))
    await stopped_when_same(source, target)
    with pytest.raises(InvalidRequest, match="not a replica"):
        await started(target, source)
    third = MemoryWal(MemoryLog())
    with pytest.raises(InvalidRequest, match="is a replica itself"):
        await started(target, third)
    with pytest.raises(InvalidRequest, match="but of memory://source"):
        await started(MemoryWal(MemoryLog()), target)
    await fill(third, "orders", range(3))
    with pytest.raises(InvalidRequest, match="not empty"):
        await started(source, third)
    await promote_alone(target)
    await stopped_when_same(target, MemoryWal(MemoryLog()))  # the way back


async def test_a_log_in_replication_is_not_migrated_and_one_that_is_migrated_not_promoted(
    source: Wal, target: Wal
) -> None:
    new = MemoryWal(MemoryLog())
    await fill(source, "orders", range(3))
    await stopped_when_same(source, target)
    with pytest.raises(ReplicaReadOnly):
        await migrate(target, new, TARGET, "memory://new")
    await change_migration_state(target, MigrationState(MigrationPhase.MIGRATING, "m", "memory://new"))
    for promoting in (promote(source, target, SOURCE, TARGET), promote_alone(target)):
        with pytest.raises(Unavailable, match="migration of this log has not ended"):
            await promoting
    await come_into_use(target)
    await promote(source, target, SOURCE, TARGET)
    with pytest.raises(Moved):
        await migrate(source, new, SOURCE, "memory://new")
    await migrate(target, new, TARGET, "memory://new")


async def test_a_channel_that_cannot_be_mirrored_stops_no_other(source: Wal, target: Wal) -> None:
    await fill(source, "orders", range(3))
    await fill(source, "letters", range(2))
    await source.append("letters", encode(Record(RecordType.STATE)))
    metrics = Metrics()
    lag = ReplicationLag(metrics)
    running, reporting = started(source, target, lag=lag), asyncio.create_task(lag.run(source, TIMES.look_s))

    async def halted() -> bool:
        saved = (await replication_state(target)).channels.get("letters")
        is_told = metrics.value("replication_halted", channel_name="letters") == 1
        return is_told and saved is not None and "STATE" in saved.halted

    await until(halted, running)
    await fill(source, "orders", range(3, 6))

    async def others() -> bool:
        return (await contents(target))["orders"] == (await contents(source))["orders"]

    await until(others, running)
    assert metrics.value("replication_lag_entries", channel_name="letters") == 1
    assert metrics.value("replication_halted", channel_name="orders") == 0
    await ended(reporting)
    await stopped(running)
    assert (await contents(target))["letters"] == [((n + 1) << 18, b"%d" % n) for n in range(2)]


async def test_dead_letters_go_along_and_are_known_again(source: Wal, target: Wal) -> None:
    """They say that the id is of another log. Each replicator compares the last one with that of the source."""
    await source.create_channel("letters", ChannelPolicy())
    letter = encode(Record(RecordType.DEAD_LETTER, key=b"1"))
    for number in range(3):
        await source.append("letters", letter, number + 1)
        replicator = Replicator(source, target, SOURCE)
        async with replicator.claimed():
            await replicator.catch_up()
    there = [entry async for entry in stored_entries(target, await target.describe("letters"))]
    assert [times_moved(decode(entry.payload)) for entry in there] == [1, 1, 1]


async def test_a_message_that_is_too_large_halts_behind_what_is_before_it(source: Wal) -> None:
    """And the channel is not halted any more when the replica takes it."""

    class Small(MemoryWal):
        largest = 100

        async def describe(self, channel: str) -> ChannelInfo:
            return replace(await super().describe(channel), backend_message_bytes=self.largest)

        def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
            for entry in entries:
                if entry.channel == "orders" and len(entry.payload) > self.largest:
                    done(MessageTooLarge("too large"))
                    return
            super().submit(entries, done)

    target = Small(MemoryLog())
    await fill(source, "orders", range(3))
    await source.append("orders", b"x" * 200)
    await fill(source, "orders", range(3, 5))

    def halting(halted: bool) -> Callable[[], Awaitable[bool]]:
        async def is_so() -> bool:
            place = (await replication_state(target)).channels.get("orders", ReplicatedChannel())
            return bool(place.source) and bool(place.halted) is halted

        return is_so

    running = started(source, target)
    await until(halting(True), running)
    assert len((await contents(target))["orders"]) == 3
    target.largest = 1000
    await until_same(source, target, running)
    await until(halting(False), running)
    await stopped(running)


async def test_a_channel_that_the_replica_does_not_take_stops_no_other(source: Wal) -> None:
    """Brokers can refuse a policy. It is created when they do not any more; a promotion says what they refuse."""

    class Refusing(MemoryWal):
        refuses = True

        async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
            if channel == "odd" and self.refuses:
                raise InvalidRequest("the brokers refuse this policy")
            await super().create_channel(channel, policy)

    target = Refusing(MemoryLog())
    await fill(source, "odd", range(3))
    await fill(source, "orders", range(3))
    await source.seek_group("workers", "odd", FromId((await source.latest_id("odd")) or b""))
    running = started(source, target)

    async def is_halted() -> bool:
        state = await replication_state(target)
        return "odd" in state.channels and "refuse" in state.channels["odd"].halted and "workers" in state.groups

    await until(is_halted, running)
    assert len((await contents(target))["orders"]) == 3
    await stopped(running)
    with pytest.raises(InvalidRequest, match="refuse this policy"):
        await promote(source, target, SOURCE, TARGET)
    await check_in_use(source, SOURCE)
    running = started(source, target)
    await until(is_halted, running)
    target.refuses = False
    await until_same(source, target, running)
    await stopped(running)
    await promote(source, target, SOURCE, TARGET)
    assert await remaining(target) == {("workers", "odd"): 0}


async def test_a_promotion_that_cannot_end_fences_nothing(source: Wal, target: Wal) -> None:
    """A halted channel: the source is in use still, so that the channel can be dropped there."""
    await fill(source, "orders", range(3))
    await fill(source, "letters", [])
    await stopped_when_same(source, target)
    await source.append("letters", encode(Record(RecordType.STATE)))
    with pytest.raises(Unsupported, match="STATE"):
        await promote(source, target, SOURCE, TARGET)
    await check_in_use(source, SOURCE)
    await source.drop_channel("letters")
    state = await promote(source, target, SOURCE, TARGET)
    assert state.channels.keys() == {"orders"}


async def test_a_promotion_does_not_hide_that_a_group_was_cut_off(source: MemoryWal, target: Wal) -> None:
    ids = await fill(source, "orders", range(10))
    await source.seek_group("slow", "orders", FromId(ids[2]))
    await source.truncate("orders", ids[6])
    await stopped_when_same(source, target)
    with pytest.raises(PositionLost, match="groups seek"):
        await promote(source, target, SOURCE, TARGET)
    await check_in_use(source, SOURCE)
    await source.seek_group("slow", "orders", FromId(ids[7]))
    await promote(source, target, SOURCE, TARGET)
    assert await remaining(target) == {("slow", "orders"): 2}


async def test_both_logs_hold_only_what_a_next_replicator_needs(source: MemoryWal, target: MemoryWal) -> None:
    ids = await fill(source, "orders", range(10))
    await stopped_when_same(source, target)
    running = started(source, target)

    async def let_go() -> bool:
        await source.truncate("orders", ids[-1])
        return (await source.describe("orders")).first_id == ids[-1]

    await until(let_go, running)
    await stopped(running)
    await fill(source, "orders", range(10, 20))
    info = await source.describe("orders")
    assert info.latest_id is not None
    await source.truncate("orders", info.latest_id)
    await target.truncate("orders", (await target.latest_id("orders")) or b"")
    running = started(source, target)

    async def all_there() -> bool:
        return [payload for _, payload in (await contents(target))["orders"]][-10:] == [
            b"%d" % n for n in range(10, 20)
        ]

    await until(all_there, running)
    await stopped(running)


async def test_an_ephemeral_channel_that_is_created_again_as_a_durable_one_is_mirrored(
    source: Wal, target: Wal
) -> None:
    await fill(source, "orders", [], ephemeral=True)
    running = started(source, target)

    async def is_there() -> bool:
        return "orders" in await target.channels()

    await until(is_there, running)
    await source.drop_channel("orders")  # between two looks
    await fill(source, "orders", range(3))
    await until_same(source, target, running)
    await stopped(running)
    assert not (await target.describe("orders")).policy.ephemeral


async def test_a_channel_that_was_created_again_with_higher_ids_is_brought_over_anew(
    target: Wal, tmp_path: Any
) -> None:
    """RocksMQ goes on with the ids of the dropped channel, while no replicator runs."""
    source = await RocksMQ.open(str(tmp_path / "source"))
    try:
        await fill(source, "orders", range(3))
        await stopped_when_same(source, target)
        await source.drop_channel("orders")
        await fill(source, "orders", range(10, 14))
        await stopped_when_same(source, target)
    finally:
        await source.close()


async def test_the_lag_rises_while_the_replica_does_not_answer(source: Wal) -> None:
    """Over attempts that all fail; a channel that is replicated no more has no lag."""
    target, metrics = Stepping(MemoryLog()), Metrics()
    lag = ReplicationLag(metrics)
    reporting = asyncio.create_task(lag.run(source, TIMES.look_s))
    await fill(source, "orders", range(3))
    running = started(source, target, lag=lag)
    await until_same(source, target, running)
    target.left = 0
    await fill(source, "orders", range(3, 53))
    for attempt in (running, started(source, target, lag=lag)):
        with pytest.raises(Unavailable):
            await attempt

    async def lags() -> bool:
        return (metrics.value("replication_lag_entries", channel_name="orders") or 0) >= 50

    await until(lags)
    lag.note({})
    assert not metrics.value("replication_lag_entries", channel_name="orders")
    await ended(reporting)


async def test_a_replicator_whose_replica_does_not_answer_is_stopped(source: Wal) -> None:
    target = Stepping(MemoryLog())
    await fill(source, "orders", range(3))
    running = started(source, target, times=replace(TIMES, save_s=1000))
    await until_same(source, target, running)
    target.left = 0
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_replica_that_is_lost_is_forgotten(source: MemoryWal, target: Wal) -> None:
    await fill(source, "orders", range(3))
    await stopped_when_same(source, target)
    await stopped_when_same(source, MemoryWal(MemoryLog()))
    assert len(source.log.channels["orders"].holds) == 2
    kept = (await replication_state(target)).log_id
    with pytest.raises(InvalidRequest, match=kept) as raised:
        await forget_replica(source, "unknown")
    (lost,) = {id.strip() for id in str(raised.value).rpartition(":")[2].split(",")} - {kept}
    await forget_replica(source, lost)
    assert source.log.channels["orders"].holds.keys() == {f"{replicating.HOLDER}-{kept}"}
    await promote(source, target, SOURCE, TARGET)
    with pytest.raises(InvalidRequest, match="but for: none"):
        await forget_replica(source, kept)


async def test_a_replicator_whose_replica_is_forgotten_ends_and_holds_nothing(source: MemoryWal, target: Wal) -> None:
    """The wrong one, or one that was taken for lost: what it held behind that could not be let go of any more."""
    await fill(source, "orders", range(3))
    running = started(source, target, times=replace(TIMES, look_s=0.05))
    await until_same(source, target, running)
    await forget_replica(source, (await replication_state(target)).log_id)
    await fill(source, "orders", range(3, 6))
    with pytest.raises(InvalidRequest, match="--forget"):
        await asyncio.wait_for(running, WITHIN_S)
    assert not source.log.channels["orders"].holds
    await stopped_when_same(source, target)
    await promote(source, target, SOURCE, TARGET)


async def test_what_comes_to_an_empty_channel_is_held(source: Wal, target: Wal) -> None:
    """By retention, and where the consumer of a queue is faster than the replicator."""
    await fill(source, "orders", [])
    await fill(source, "queue", [], delivery=Delivery.QUEUE)
    await stopped_when_same(source, target)
    ids = await fill(source, "orders", range(10))
    await source.truncate("orders", ids[7])
    ids = await fill(source, "queue", range(10), delivery=Delivery.QUEUE)
    await source.seek_group("workers", "queue", FromId(ids[7]))
    running = started(source, target, times=replace(TIMES, save_s=1000))

    async def all_there() -> bool:
        return {len(entries) for entries in (await contents(target)).values()} == {10}

    await until(all_there, running)
    await stopped(running)


class Stepping(MemoryWal):
    """A log whose calls that write fail from one of them on: the process was killed there."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.left: int = 1 << 60

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Unavailable("killed")

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._step()
        super().submit(entries, done)

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._step()
        await super().create_channel(channel, policy)

    async def drop_channel(self, channel: str) -> None:
        self._step()
        await super().drop_channel(channel)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self._step()
        await super().hold(channel, holder, id)


async def test_killed_at_each_step_nothing_is_lost_or_doubled() -> None:
    """Also while a channel is dropped and created again, and in the promotion."""
    steps = 0
    for steps in range(200):
        source, log = MemoryWal(MemoryLog()), MemoryLog()
        ids = await fill(source, "orders", range(10))
        await fill(source, "other", range(5))
        await source.seek_group("midst", "orders", FromId(ids[6]))
        target = Stepping(log)
        target.left = steps
        with suppress(Unavailable):
            await stopped_when_same(source, target)
            await source.drop_channel("orders")
            ids = await fill(source, "orders", range(20, 60))
            await stopped_when_same(source, target)
            await promote(source, target, SOURCE, TARGET)
            break
        if (await replication_state(source)).phase is not ReplicationPhase.REPLACED:
            await fill(source, "orders", range(60, 62))
        with suppress(InvalidRequest):  # killed before it was a replica
            await promote(source, MemoryWal(log), SOURCE, TARGET)
            assert (await replication_state(source)).phase is ReplicationPhase.REPLACED
        if (await replication_state(MemoryWal(log))).phase is not ReplicationPhase.PROMOTED:
            await stopped_when_same(source, MemoryWal(log))
            await promote(source, MemoryWal(log), SOURCE, TARGET)
        assert await contents(source) == await contents(MemoryWal(log)), steps
        assert await remaining(source) == await remaining(MemoryWal(log)), steps
    assert 20 < steps < 199


def test_appends_that_fail_or_are_not_known_of_double_nothing() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    source_log, target_log = MemoryLog(), MemoryLog()
    faults = FaultPlan(seed, Rates(fail=0.05, unknown=0.05, lost=0.05, delay=0.3))

    async def main() -> None:
        source, target = MemoryWal(source_log), MemoryWal(target_log, faults)
        clock, rng = VirtualClock(), random.Random(seed)
        for at in range(300):
            await fill(source, rng.choice("ab"), [at])
            if at % 10 == 0:
                task = asyncio.create_task(Replicator(source, target, SOURCE, times=TIMES, clock=clock).run())
                await asyncio.sleep(rng.random())
                task.cancel()
                with suppress(asyncio.CancelledError, TidewalError):
                    await task
        while True:
            with suppress(Unavailable):
                await promote(source, target, SOURCE, TARGET)
                break
        assert await contents(source) == await contents(target)

    run_virtual(main(), VirtualClock())


@pytest.mark.parametrize(
    "entry",
    [
        b'{"v":1,"phase":"source","number":"1","channels":{},"groups":{}}',
        b'{"v":1,"phase":"source","number":null,"channels":{},"groups":{}}',
        b'{"v":1,"phase":"replica","number":1,"claim":[],"channels":{},"groups":{}}',
        b'{"v":1,"phase":"replica","number":1,"channels":{"a":["","","x","",0,"",""]},"groups":{}}',
        b"[" * 100_000,
    ],
    ids=["text", "null", "list", "place", "deep"],
)
async def test_a_damaged_state_is_a_corrupt_log(target: Wal, entry: bytes) -> None:
    await target.create_channel(REPLICATION_CHANNEL, ChannelPolicy())
    await target.append(REPLICATION_CHANNEL, entry)
    with pytest.raises(CorruptLog, match=REPLICATION_CHANNEL):
        await replication_state(target)


async def test_a_state_that_is_over_an_entry_s_limit_is_in_parts(target: Wal) -> None:
    """Of very many channels and groups. A part alone says nothing, and only what counts is kept."""
    rng = random.Random(7)
    places = {f"tenant-{n}": ReplicatedChannel(rng.randbytes(8), rng.randbytes(8)) for n in range(40_000)}
    states, other = ReplicationStates(target), ReplicationStates(target)
    await states.change(ReplicationState(ReplicationPhase.REPLICA, "1" * 32, channels=places))
    info = await target.describe(REPLICATION_CHANNEL)
    sizes = [len(entry.payload) async for entry in stored_entries(target, info)]
    assert len(sizes) > 2
    assert max(sizes) < 1024 * 1024  # as brokers take by default
    assert (await other.read()).channels == places
    late = replace(states.state, number=2, claim="late", channels={**places, "more": ReplicatedChannel()})
    for part in late.entries()[:-1]:  # of a process that was killed there
        await target.append(REPLICATION_CHANNEL, part)
    assert (await replication_state(target)) == states.state == await other.read()
    await states.change(replace(states.state, claim="next"))
    assert (await replication_state(target)).claim == (await other.read()).claim == "next"
    assert len([entry async for entry in stored_entries(target, await target.describe(REPLICATION_CHANNEL))]) == len(
        sizes
    )


async def test_what_a_fenced_replicator_writes_does_not_count(target: Wal) -> None:
    one, other = ReplicationStates(target), ReplicationStates(target)
    await one.change(ReplicationState(ReplicationPhase.REPLICA, "log", "source", claim="one"))
    await other.read()
    await other.change(replace(other.state, claim="other"))
    with pytest.raises(TidewalError, match="changed meanwhile"):
        await one.change(replace(one.state, claim="one"))
    assert (await replication_state(target)).claim == "other"
    assert [e.id async for e in stored_entries(target, await target.describe(REPLICATION_CHANNEL))]


async def test_an_entry_of_a_node_is_found_behind_a_younger_one() -> None:
    """A tick may have a time just before that of the record in front of it."""
    source, target = MemoryWal(MemoryLog()), MemoryWal(MemoryLog())
    ids: list[bytes] = []
    for wal in (source, target):
        await wal.create_channel("c", ChannelPolicy())
        ids = [await wal.append("c", body, ts) for ts, body in ((10, b"create"), (9, b"tick"), (11, b"row"))]
    assert [await replicated_node.replicated_place(source, target, "c", id) for id in ids] == ids
