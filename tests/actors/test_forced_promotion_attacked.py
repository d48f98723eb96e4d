"""What attacks on the promotion of nodes' replicas without their source have found."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.actors.conftest import PEOPLE, people
from tests.actors.shared_logs import NEW as ELSEWHERE
from tests.actors.shared_logs import OLD, CommandOpener, SharedNodes
from tests.actors.test_forced_promotion import DRAWN_S, MEMORY_ONLY, NEW, forced, new_of, replicated
from tests.actors.test_node_migration import filled, keys, logs_of, received, tables_of
from tests.actors.test_node_replication import REPLICA, SOURCE, TIMES, replica_of, replicating
from tests.dying_wal import Killed
from tidewal.runtime.clock import compose
from tidewal.runtime.errors import InvalidRequest, Promoted, TidewalError, Unavailable
from tidewal.runtime.log.dead_letters import group_letter
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import RecordType, decode, stamp
from tidewal.runtime.log.replication_state import ReplicationStates, replication_state
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry
from tidewal.runtime.migration.channel_copy import stored_entries
from tidewal.runtime.replication import forced_promotion
from tidewal.runtime.replication import replicator as replicator_module
from tidewal.runtime.replication.forced_promotion import left_out, promote_at_line
from tidewal.runtime.replication.line_log import LineLog
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.replication.salvage import unreplicated_entries

pytestmark = MEMORY_ONLY


@pytest.fixture
async def nodes(home: Any, tmp_path: Path, rng: random.Random) -> AsyncIterator[SharedNodes]:
    nodes = SharedNodes(tmp_path, rng)
    yield nodes
    await nodes.stop()


async def test_nodes_of_a_source_that_is_back_have_left_before_it_is_salvaged(nodes: SharedNodes) -> None:
    """What one of them acknowledges is in the salvage, or it was told that the log has moved."""
    opener = CommandOpener(nodes)
    await nodes.start("a")
    async with nodes.client() as client:
        await client.create_collection(PEOPLE)
        await client.insert("people", people(1))
        old, replica = await opener.open_alone(OLD), await opener.open_alone("memory://replica")
        mirroring = asyncio.create_task(Replicator(old, replica, OLD, times=TIMES, clock=nodes.loop.clock).run())
        await asyncio.sleep(DRAWN_S)
        mirroring.cancel()
        await asyncio.wait([mirroring])
        new = await opener.open_alone(ELSEWHERE)
        await promote_at_line(replica, new, "memory://replica", ELSEWHERE, tables=nodes.tables_of_nodes(), settle_s=0)
        fencing = asyncio.create_task(promote(old, replica, OLD, "memory://replica"))
        number = 2
        while not fencing.done():
            try:
                await client.insert("people", people(number), deadline_s=1)
                number += 1
            except TidewalError:
                break
            await asyncio.sleep(0.1)
        with pytest.raises(Unavailable, match="nodes belong to the cluster"):
            await fencing
        await nodes.end("a")
    await promote(old, replica, OLD, "memory://replica")
    salvaged = [entry async for _, entry in unreplicated_entries(old, await replication_state(old))]
    assert sum(decode(entry.payload).type is RecordType.ROWS for entry in salvaged) == number - 2


async def test_a_group_that_retention_has_cut_off_stops_no_promotion(home: Any) -> None:
    """Nobody can seek it any more: the source is gone, and a replica is read-only."""
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    for name, channel in other.log.channels.items():
        if "-topic_" in name and channel.entries:
            channel.holds.clear()
            channel.remove_before(channel.entries[-1].id)
    await forced(home, other)


async def late_line(replica: Any, before: Mapping[str, Any]) -> None:
    """Let the line of the replica have the time of that `before`: its states were read so long behind the promises."""
    states = ReplicationStates(replica)
    state = await states.read()
    await states.change(replace(state, line={**state.line, "time": before["time"], "groups": before["groups"]}))


async def test_a_collection_that_came_behind_the_line_and_was_flushed_goes_back_to_nothing(home: Any) -> None:
    """The catalog is read behind the promises: it may have a collection whose beginning lies above the line, and whose
    table was filled since."""
    other = replica_of(home)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
    await replicated(home, other)
    async with home.client() as client:
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0, 0.0, 0.0, 1.0]}])
        await client.flush("points")
        await client.insert("people", home.people(2))
        await client.flush("people")
    async with logs_of(home, other) as (old, new):
        before = (await replication_state(new)).line
        async with replicating(old, new):
            await asyncio.sleep(DRAWN_S)
        await late_line(new, before)
    with pytest.raises(InvalidRequest, match=r"table of points, which was created after .* move it away"):
        await forced(home, other)
    (home.tables / "points").rename(home.directory / "away")
    promoted, _ = await forced(home, other)
    async with promoted.client() as client:
        assert await keys(client) == [1]
        assert len((await client.query("points", consistency="strong")).table) == 0
        await client.insert("points", [{"id": 2, "at": [0.0, 0.0, 0.0, 1.0]}])
        await client.flush("points")
        assert (await client.query("points", consistency="strong")).table["id"].to_pylist() == [2]
    async with promoted.client() as client:
        assert (await client.query("points", consistency="strong")).table["id"].to_pylist() == [2]


async def test_what_came_late_with_an_earlier_time_than_the_line_is_salvaged(home: Any) -> None:
    """To a channel that had no owner, by one whose clock is behind those of others."""
    other = replica_of(home)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
    await replicated(home, other)
    async with home.client() as client:
        written = (await client.insert("people", home.people(2))).ts
    async with logs_of(home, other) as (old, new):
        line = (await replication_state(new)).line
        async with replicating(old, new):  # the replica has it, too
            await asyncio.sleep(DRAWN_S)
        states = ReplicationStates(new)
        await states.change(replace(await states.read(), line={**line, "time": written + 1}))
        promoted, state = await forced(home, other)
        here = [entry async for _, entry in left_out(new, state)]
        await promote(old, new, SOURCE, REPLICA)
        there = [entry async for _, entry in unreplicated_entries(old, await replication_state(old))]
    for salvaged in (here, there):
        assert [each.timestamp for each in salvaged if decode(each.payload).type is RecordType.ROWS] == [written]
    async with promoted.client() as client:
        assert await keys(client) == [1]


async def test_dead_letters_are_of_the_line_whosever_clock_is_ahead(home: Any) -> None:
    """What they tell of is acknowledged, and does not come again."""
    other, letters = replica_of(home), Names().group_dead_letters
    async with home.people_client() as client:
        ts = (await client.insert("people", home.people(1))).ts
    async with logs_of(home, other) as (old, _):
        await old.create_channel(letters, ChannelPolicy())
        entry = Entry(b"", ts, b"")
        times = [ts, ts + compose(3_600_000), ts]
        written = [group_letter("topic", entry, "group", "handler", "", 1, each, 100) for each in times]
        await old.append_many([Append(letters, each, time) for each, time in zip(written, times, strict=True)])
    await replicated(home, other)
    promoted, _ = await forced(home, other)
    async with logs_of(promoted, other) as (log, _):
        assert len([each async for each in stored_entries(log, await log.describe(letters))]) == len(times)


async def test_a_collection_that_was_dropped_behind_the_line_and_created_again_is_told(home: Any) -> None:
    other = replica_of(home)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await client.create_collection(home.POINTS)
        await client.flush("points")
    await replicated(home, other)
    async with home.client() as client:
        await client.drop_collection("points")
        await asyncio.sleep(30)
        await client.create_collection(home.POINTS)
        await client.insert("points", [{"id": 1, "at": [0.0, 0.0, 0.0, 1.0]}])
        await client.flush("points")
    with pytest.raises(InvalidRequest, match="created again, move its table away, and give --dropped points"):
        await forced(home, other)
    (home.tables / "points").rename(home.directory / "away")
    promoted, _ = await forced(home, other, frozenset({"points"}))
    async with promoted.client() as client:
        assert await keys(client) == [1]
        await client.create_collection(home.POINTS)
        assert len((await client.query("points", consistency="strong")).table) == 0


async def test_a_flush_that_a_clock_behind_has_told_below_the_line_stops_no_promotion(home: Any) -> None:
    """Of rows above it: the table goes back, and has less than nodes have stored."""
    other = replica_of(home)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
    await replicated(home, other)
    async with home.client() as client:
        await client.insert("people", home.people(2))
        await client.flush("people")
    async with logs_of(home, other) as (old, new):
        before = (await replication_state(new)).line
        told = home.log.channels["by-dev-insert_events"]
        last = told.entries[-1]
        record = decode(last.payload)
        early = stamp(record, before["time"] - 1, record.term, record.cseq)
        told.entries[-1] = last._replace(timestamp=before["time"] - 1, payload=early)
        async with replicating(old, new):
            await asyncio.sleep(DRAWN_S)
        await late_line(new, before)
    promoted, _ = await forced(home, other)
    async with promoted.client() as client:
        assert await keys(client) == [1]


async def test_a_replicator_that_starts_late_draws_no_line_behind_a_promotion(
    home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between its line and that which was promoted would be in no log that is in use, nor be salvaged."""
    await filled(home)
    other, new = replica_of(home), new_of(home)
    await replicated(home, other)
    claim, open_line, going_on = replicator_module.claim_replica, LineLog.open, asyncio.Event()

    async def paused(*args: Any) -> LineLog:
        await going_on.wait()
        return await open_line(*args)

    async def dies(*_: Any) -> Any:
        raise Killed

    monkeypatch.setattr(LineLog, "open", paused)
    monkeypatch.setattr(forced_promotion, "mark_promoted", dies)
    async with logs_of(home, other) as (old, replica), logs_of(other, new) as (_, log):
        line = (await replication_state(replica)).line
        promoting = asyncio.create_task(promote_at_line(replica, log, REPLICA, NEW, tables=tables_of(home), settle_s=0))
        await asyncio.sleep(1)

        async def late(*args: Any) -> None:
            going_on.set()
            with pytest.raises(Killed):
                await promoting
            await claim(*args)

        monkeypatch.setattr(replicator_module, "claim_replica", late)
        with pytest.raises(Promoted, match="goes on"):
            await Replicator(old, replica, SOURCE, times=TIMES).run()
        assert (await replication_state(replica)).line == line


async def test_a_promotion_that_is_typed_again_behind_the_fence_says_what_has_happened(home: Any) -> None:
    await filled(home)
    other = replica_of(home)
    await replicated(home, other)
    promoted, _ = await forced(home, other)
    async with logs_of(home, other) as (old, replica), logs_of(other, promoted) as (_, log):
        await promote(old, replica, SOURCE, REPLICA)
        state = await promote_at_line(replica, log, REPLICA, NEW)
        with pytest.raises(InvalidRequest, match="fenced, or given up"):
            _ = [each async for each in left_out(replica, state)]
        with pytest.raises(InvalidRequest, match=NEW):
            await promote_at_line(replica, log, REPLICA, "memory://other")


@pytest.mark.parametrize("is_gone", [True, False], ids=["the source is gone", "promoted in the end"])
async def test_a_promotion_that_does_not_end_takes_nothing_from_the_line(home: Any, is_gone: bool) -> None:
    """The source may be lost before it is fenced."""
    other = replica_of(home)
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
        await client.create_topic("short", 1)
        await client.send("short", "0")
    await replicated(home, other)
    async with home.client() as client:
        await client.drop_topic("short")
        await asyncio.sleep(1)
    async with logs_of(home, other) as (old, new):
        [channel] = [name for name in await new.channels() if "-topic_" in name]
        assert channel not in await old.channels()
        with pytest.raises(InvalidRequest, match="--tables"):
            await promote(old, new, SOURCE, REPLICA)
        if not is_gone:
            await promote(old, new, SOURCE, REPLICA, tables=tables_of(home))
            assert channel not in await new.channels()
            return
    promoted, _ = await forced(home, other)
    async with promoted.client() as client, await client.subscribe("short", "readers") as reader:
        assert await received(reader, 1) == ["0"]
