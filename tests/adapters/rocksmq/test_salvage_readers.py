"""A salvaged log in use: what readers, groups, retention and holds find there."""

from __future__ import annotations

import asyncio
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.rocksmq.damage import flip
from tests.adapters.rocksmq.salvaging import SMALL, Frames, read_over_losses, replace, report
from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.adapters.rocksmq.journal.channels import JournalledChannel
from tidewal.adapters.rocksmq.journal.retention import STEP_LASTS_S
from tidewal.adapters.rocksmq.journal.segments import HEADER_BYTES
from tidewal.runtime.errors import PositionLost
from tidewal.runtime.log.wal import ChannelPolicy, Durability, From, FromId
from tidewal.runtime.metrics.metrics import Metrics

pytestmark = pytest.mark.slow


async def test_losses_last_until_they_are_accepted(open_rocksmq, log, written):
    frames = Frames(log)
    path, offset, _, _ = frames.places[40]
    flip(path, offset + 100)
    replace(log)
    for _ in range(2):  # the second time from a later snapshot
        store = await open_rocksmq(segment_bytes=SMALL)
        assert (await read_over_losses(store, "a"))[1]
        for _ in range(20):
            written["a"][await store.append("a", bytes(8000))] = bytes(8000)
        await store.close()
    replace(log, accept=True)
    store = await open_rocksmq(segment_bytes=SMALL)
    found, stopped = await read_over_losses(store, "a")
    assert not stopped
    assert len(found) == len(written["a"]) - 1


@pytest.mark.parametrize("reset_to", list(From))
@pytest.mark.parametrize("hit", [0, 40, -2])
async def test_a_group_passes_a_loss_once(open_rocksmq, log, written, helpers, hit, reset_to):
    """With `reset_to` a member goes on behind a loss, and what lies before it is not delivered again."""
    frames = Frames(log)
    path, offset, _, entries = [place for place in frames.places if any(number == 1 for number, _ in place[3])][hit]
    flip(path, offset + 100)
    replace(log)
    (lost,) = (id.to_bytes(8, "big") for number, id in entries if number == 1)
    before, behind = ([id for id in written["a"] if id < lost], [id for id in written["a"] if id > lost])
    metrics = Metrics()
    store = await open_rocksmq(segment_bytes=SMALL, metrics=metrics)
    member = await store.join("g", ["a"], reset_to=reset_to)
    found: list[bytes] = []
    async with asyncio.timeout(20):
        while len(found) < len(before):
            found += [entry.id for entry in (await anext(member)).entries]
        following = asyncio.ensure_future(anext(member))
        await helpers.until(lambda: metrics.value("wal_group_reset_total") == 1)
        new = await store.append("a", b"new")
        found += [entry.id for entry in (await following).entries]
        while found[-1] != new:
            found += [entry.id for entry in (await anext(member)).entries]
    assert found == [*before, *(behind if reset_to is From.EARLIEST else []), new]
    assert metrics.value("wal_group_reset_total") == 1


async def test_a_snapshot_that_was_made_up_lets_retention_take_nothing_too_soon(open_rocksmq, clock, tmp_path):
    """Retention goes by the time of the snapshot that follows a segment. Where the snapshot is lost, the entries before
    it must not seem older than they are."""
    log, day_s = tmp_path / "log", 24 * 3600
    store = await open_rocksmq(segment_bytes=SMALL, clock=clock)
    await store.create_channel("a", ChannelPolicy(retention_s=14 * day_s))
    for days in (10, 5):
        for _ in range(20):
            await store.append("a", bytes(4000))
        clock.advance(days * day_s)
    await store.close()
    segments = sorted((log / "journal").glob("*.segment"))
    flip(segments[2], HEADER_BYTES + 60)  # begun 5 days ago, as the second became full; the first did 15 days ago
    replace(log, wall_ms=clock.wall_ms())
    store = await open_rocksmq(segment_bytes=SMALL, clock=clock)
    store.retain_now()
    clock.advance(STEP_LASTS_S)  # the wall clock is ahead of the journal's time, and is believed once that has lasted
    store.retain_now()
    assert store._segments.first_epoch == 2


async def test_what_belongs_to_a_channel_is_carried_over(open_rocksmq, tmp_path):
    """Policies, positions of groups and single acknowledgements, holds, truncations: those after the damage, too."""
    log = tmp_path / "log"
    policy = ChannelPolicy(retention_s=77, retention_bytes=88, acks=Durability.ONE)
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("a", policy)
    await store.create_channel("b", ChannelPolicy())
    ids = [await store.append("a", bytes(3000), 5) for _ in range(50)]
    await store.hold("a", "h", ids[30])
    member = await store.join("g", ["a"])
    batch = await anext(member)
    await member.acknowledge(batch)
    await member.aclose()
    await store.truncate("a", ids[10])
    await store.append("b", b"last")
    await store.close()
    before = states(log)
    frames = Frames(log)
    flip(frames.places[5][0], frames.places[5][1] + 100)
    replace(log)
    after = states(log)
    assert after["a"].losses
    assert after == {name: replace_fields(state, losses=after[name].losses) for name, state in before.items()}
    assert before["a"].holds == {"h": int.from_bytes(ids[30], "big")}
    assert before["a"].groups["g"].acked_to
    store = await open_rocksmq(segment_bytes=SMALL)
    assert (await store.describe("a")).policy == policy
    assert store._registry.names["a"].groups == before["a"].groups
    with pytest.raises(PositionLost):
        await anext(store.read("a", FromId(ids[0], inclusive=True)))


async def test_a_repeated_append_is_recognised_in_the_copy(tmp_path):
    """The numbers of other processes' appends are carried over."""
    log = tmp_path / "log"
    store = await RocksMQ.open(str(log), segment_bytes=SMALL)
    await store.create_channel("a", ChannelPolicy())
    client = await open_wal(f"rocksmq://{log}", own=False)
    ids = [await client.append("a", bytes(2000)) for _ in range(60)]
    await client.close()
    await store.close()
    frames = Frames(log)
    flip(frames.places[5][0], frames.places[5][1] + 100)
    ((_, _, _, results),) = before = clients(log)
    assert {id for _, _, firsts in results for id in firsts} <= {int.from_bytes(id, "big") for id in ids}
    replace(log)
    assert clients(log) == before


def states(log: Path) -> dict[str, JournalledChannel]:
    return {state.name: state for state in report(log).table.by_number.values()}


def clients(log: Path) -> list[Any]:
    return report(log).table.clients.snapshot()
