"""The part of a migration for which the old log is in use: it is copied while it is written to, and taken back."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.dying_wal import DyingWal, Killed
from tests.runtime.test_migration import NEW, OLD, assert_same, content, filled, plain
from tidewal.runtime.errors import CorruptLog, Moved, Unavailable
from tidewal.runtime.log.migration_state import (
    MIGRATION_CHANNEL,
    MigrationPhase,
    check_in_use,
    check_not_migrating,
    migration_state,
)
from tidewal.runtime.log.wal import Append, ChannelInfo, ChannelPolicy, Entry, From, FromId, Start
from tidewal.runtime.migration import compared_channel, preparation
from tidewal.runtime.migration.compared_channel import ComparedChannel
from tidewal.runtime.migration.migration import cancel_migration, migrate
from tidewal.runtime.migration.preparation import begin_switch, end_switch, prepare
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal


class CountingWal(MemoryWal):
    """Counts the entries that are read."""

    counted = 0

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        async for entries in super().read(channel, start):
            self.counted += len(entries)
            yield entries


class WrittenWal(MemoryWal):
    """A log to which a program writes while it is copied: `after` each look at a channel."""

    async def describe(self, channel: str) -> Any:
        info = await super().describe(channel)
        if channel == "orders":
            await self.append("orders", b"meanwhile")
        return info


async def phase_of(log: MemoryLog) -> MigrationPhase:
    return (await migration_state(MemoryWal(log))).phase


async def test_a_log_is_in_use_while_it_is_prepared_and_the_rest_is_little() -> None:
    log, new = MemoryLog(), CountingWal(MemoryLog())
    old = CountingWal(log)
    await filled(old)
    for number in range(5_000):
        await old.append("orders", b"%d" % number)
    member = await old.join("workers", ["queue"])  # members are no hindrance
    compared = await prepare(old, new, OLD, NEW)
    await check_in_use(MemoryWal(log), OLD)
    with pytest.raises(Unavailable, match="--cancel"):
        await check_not_migrating(MemoryWal(log), OLD)
    with pytest.raises(Unavailable, match="has not ended"):
        await check_in_use(new, NEW)
    await member.aclose()
    await old.append("orders", b"behind")
    await old.create_channel("late", ChannelPolicy())
    await old.append("late", b"1")
    await begin_switch(old, new)
    with pytest.raises(Unavailable):
        await check_in_use(MemoryWal(log), OLD)
    await old.seek_group("far", "orders", FromId((await content(old, "orders"))[2_500].id))
    old.counted = new.counted = 0
    await migrate(old, new, OLD, NEW, compared=compared)
    assert old.counted < 2_000, (
        old.counted
    )  # of 5,000: a position, and attempts, are looked up between two that are kept
    assert new.counted < 1_500, new.counted
    await assert_same(old, new)
    assert (await migration_state(old)).phase is MigrationPhase.MIGRATED


async def test_a_switch_that_fails_leaves_the_old_log_in_use_and_may_be_tried_again() -> None:
    old, new = MemoryWal(MemoryLog()), MemoryWal(MemoryLog())
    await filled(old)
    compared = await prepare(old, new, OLD, NEW)
    await begin_switch(old, new)
    assert await end_switch(old, new)
    await check_in_use(old, OLD)
    await old.append("orders", b"more")
    compared = await prepare(old, new, OLD, NEW)
    await begin_switch(old, new)
    await migrate(old, new, OLD, NEW, compared=compared)
    assert not await end_switch(old, new)
    await assert_same(old, new)


class NewIdsWal(MemoryWal):
    """A log whose ids never come again, also in a channel that is made anew."""

    _ids = itertools.count(1_000, 1_000)

    def submit(self, entries: Sequence[Append], done: Any) -> None:
        for entry in entries:
            channel = self.log.channels.get(entry.channel)
            if channel is not None and not channel.entries:
                channel.first = next(self._ids)
        super().submit(entries, done)


async def test_what_was_compared_before_another_run_took_it_back_is_copied_again() -> None:
    """The first run stands still between both parts, while another one takes back what it has copied."""
    old, new = MemoryWal(MemoryLog()), NewIdsWal(MemoryLog())
    await filled(old)
    compared = await prepare(old, new, OLD, NEW)
    await cancel_migration(old, new, NEW)
    await old.append("orders", b"meanwhile")
    await migrate(old, new, OLD, NEW, compared=compared)
    await assert_same(old, new)


async def test_what_is_made_anew_or_dropped_meanwhile_is_so_in_the_new_log() -> None:
    old, new = MemoryWal(MemoryLog()), MemoryWal(MemoryLog())
    await filled(old)
    await old.create_channel("gone", ChannelPolicy())
    await old.create_channel("again", ChannelPolicy())
    for number in range(3):
        await old.append_many([numbered("gone", number), numbered("again", number)])
    compared = await prepare(old, new, OLD, NEW)
    await old.drop_channel("gone")
    await old.drop_channel("again")
    await old.create_channel("again", ChannelPolicy())
    for number in range(3):  # of the same ids
        await old.append_many([numbered("again", number + 7)])
    await begin_switch(old, new)
    await migrate(old, new, OLD, NEW, compared=compared)
    assert "gone" not in await new.channels()
    assert await plain(old, "again") == await plain(new, "again")


@pytest.mark.parametrize("switched", [False, True], ids=["preparing", "migrating"])
async def test_what_was_dropped_before_a_run_that_was_killed_in_the_switch_is_no_hindrance(switched: bool) -> None:
    log, new = MemoryLog(), MemoryWal(MemoryLog())
    old = MemoryWal(log)
    await filled(old)
    await old.create_channel("gone", ChannelPolicy())
    await old.append_many([numbered("gone", number) for number in range(3)])
    await prepare(old, new, OLD, NEW)
    await old.drop_channel("gone")
    if switched:
        await begin_switch(old, new)
    else:  # this run is killed once no process can open the log any more
        dying = DyingWal(log, [4], behind=True)
        with pytest.raises(Killed):
            await migrate(dying, new, OLD, NEW)
    assert await phase_of(log) is MigrationPhase.MIGRATING
    await migrate(old, new, OLD, NEW)
    await assert_same(old, new)


class VanishingWal(MemoryWal):
    """A log of which `channel` is dropped just before, or just behind, the `left`th look at it."""

    left, channel = 0, "gone"

    async def describe(self, channel: str) -> ChannelInfo:
        if channel != self.channel:
            return await super().describe(channel)
        self.left -= 1
        if self.left == 0:
            await self.drop_channel(channel)
        info = await super().describe(channel)
        if self.left == 1:
            await self.drop_channel(channel)
        return info


@pytest.mark.parametrize("group", [False, True], ids=["", "with a group"])
async def test_a_channel_that_is_dropped_while_it_is_copied_is_in_neither_log(group: bool) -> None:
    """As the reply channel of a client that leaves, or a topic."""
    looks = 0
    while True:
        looks += 1
        old, new = VanishingWal(MemoryLog()), MemoryWal(MemoryLog())
        await filled(old)
        await old.create_channel("gone", ChannelPolicy())
        await old.append_many([numbered("gone", number) for number in range(3)])
        if group:
            await old.seek_group("readers", "gone", From.LATEST)
        old.left = looks
        compared = await prepare(old, new, OLD, NEW)
        await begin_switch(old, new)
        left, old.left = old.left, 0
        await migrate(old, new, OLD, NEW, compared=compared)
        if left > 1:
            break
        assert "gone" not in await new.channels()
        await assert_same(old, new)
    assert looks > 2, looks


async def test_a_log_of_many_channels_to_which_little_comes_is_prepared() -> None:
    """However long a look at all of them takes."""
    old, new = WrittenWal(MemoryLog()), MemoryWal(MemoryLog())
    await filled(old)
    said: list[str] = []
    compared = await prepare(old, new, OLD, NEW, on_progress=said.append, round_s=-1)
    assert sum("all that was there is equal" in line for line in said) == 2
    await begin_switch(old, new)
    await migrate(MemoryWal(old.log), new, OLD, NEW, compared=compared)


async def test_a_log_that_is_written_to_faster_than_it_is_copied_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "ROUND_ENTRIES", 0)
    log, new = MemoryLog(), MemoryWal(MemoryLog())
    await filled(MemoryWal(log))
    with pytest.raises(Unavailable, match="written to faster than it is copied"):
        await prepare(WrittenWal(log), new, OLD, NEW, round_s=-1)
    await check_in_use(MemoryWal(log), OLD)
    compared = await prepare(WrittenWal(log), new, OLD, NEW)
    await migrate(MemoryWal(log), new, OLD, NEW, compared=compared)
    assert await plain(MemoryWal(log), "orders") == await plain(new, "orders")


def numbered(channel: str, number: int) -> Append:
    return Append(channel, b"%d" % number, 1)


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
def test_a_preparation_that_is_killed_at_each_write_goes_on_or_is_taken_back(behind: bool) -> None:
    step = 0
    while run_virtual(killed(step := step + 1, behind=behind)):
        pass
    assert step > 20, step


async def killed(step: int, *, behind: bool) -> bool:
    """Whether the process died at that step. The log is written to between, a channel is made anew, and one dropped."""
    log, new_log = MemoryLog(), MemoryLog()
    wal = MemoryWal(log)
    await filled(wal)
    await wal.create_channel("gone", ChannelPolicy())
    await wal.append("gone", b"1")
    left = [step]
    old, new = DyingWal(log, left, behind=behind), DyingWal(new_log, left, behind=behind)
    died = False
    try:
        compared = await prepare(old, new, OLD, NEW)
        await begin_switch(old, new)
        await migrate(old, new, OLD, NEW, compared=compared)
    except Killed:
        died = True
    phase = await phase_of(log)
    if phase in (MigrationPhase.OPEN, MigrationPhase.PREPARING):
        await check_in_use(MemoryWal(log), OLD)
        await wal.append("orders", b"after the kill")
        await wal.drop_channel("gone")
        await wal.drop_channel("empty")
        await wal.create_channel("empty", ChannelPolicy(retention_bytes=10))
        await wal.append("empty", b"anew")
    if step % 3 == 0 and phase in (MigrationPhase.PREPARING, MigrationPhase.MIGRATING):
        await cancel_migration(MemoryWal(log), MemoryWal(new_log), NEW)
        assert set(new_log.channels) <= {MIGRATION_CHANNEL}
        await check_in_use(MemoryWal(log), OLD)
        return died
    goes_on = phase is MigrationPhase.PREPARING and step % 2
    compared = await prepare(wal, MemoryWal(new_log), OLD, NEW) if goes_on else None
    await migrate(wal, MemoryWal(new_log), OLD, NEW, compared=compared)
    await assert_same(MemoryWal(log), MemoryWal(new_log))
    with pytest.raises(Moved):
        await check_in_use(MemoryWal(log), OLD)
    await check_in_use(MemoryWal(new_log), NEW)
    return died


async def test_each_place_is_found_however_it_was_compared(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(compared_channel, "INDEX_ENTRIES", 7)
    rng = random.Random(seed)
    old, new = MemoryWal(MemoryLog()), MemoryWal(MemoryLog())
    for wal in (old, new):
        await wal.create_channel("c", ChannelPolicy())
    await new.append("c", b"so that ids differ")
    new.log.channels["c"].remove_before(b"\xff")
    found = ComparedChannel("c")
    entries: list[Entry] = []
    while len(entries) < 60:
        for number in range(rng.randrange(10)):
            await old.append("c", b"%d" % number, 5)
            await new.append("c", b"%d" % number, 5)
        entries = await content(old, "c")
        theirs = await content(new, "c")
        known = {e.id: t.id for e, t in zip(entries, theirs, strict=True)}
        ids = rng.sample(sorted(known), len(known) // 2)
        gone = [id + b"of no entry" for id in rng.sample(sorted(known), len(known) // 4)]
        behind = {id + b"behind it": id for id in rng.sample(sorted(known), len(known) // 4)}
        places = await found.compare(old, new, await old.describe("c"), positions=behind, ids=[b"", *ids, *gone])
        assert {id: places[id] for id in ids} == {id: known[id] for id in ids}
        assert {id: places[id] for id in behind} == {id: known[entry] for id, entry in behind.items()}
        assert {places[id] for id in [b"", *gone]} == {b""}
    whole = ComparedChannel("c")
    await whole.compare(old, new, await old.describe("c"))
    assert whole.proof(await old.describe("c")) == found.proof(await old.describe("c"))
    await new.append("c", b"another")
    with pytest.raises(CorruptLog, match=rf"entry {len(entries) + 1:,} of c"):
        await found.compare(old, new, await old.describe("c"))
