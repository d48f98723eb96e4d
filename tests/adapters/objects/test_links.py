"""Processes that write through the owner of the log: in virtual time, over a network that breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.adapters.objects.linked_processes import LinkedProcesses
from tests.adapters.objects.processes import LEASE_S, Processes, appended, entries_of, until_owned
from tests.adapters.objects.simulated_store import StoreRates
from tests.turns import cases_in_turn
from tidewal.runtime.errors import ChannelNotFound, Fenced, Overloaded, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.testing.clock import elapse, run_virtual


def linked(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test as a function that runs it in virtual time, and closes its processes."""

    def run() -> None:
        async def main() -> None:
            processes = LinkedProcesses()
            await test(processes)
            await processes.close()

        run_virtual(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@linked
async def test_a_process_writes_through_the_owner_in_order(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    other = await processes.open()
    ids = await asyncio.gather(*(other.wal.append("a", b"%d" % at) for at in range(100)))
    assert list(ids) == sorted(ids)
    assert other.linked
    assert await entries_of(owner.wal, "a", 100) == [b"%d" % at for at in range(100)]
    await other.wal.create_channel("b", ChannelPolicy())
    assert await other.wal.append_many([Append("a", b"x"), Append("b", b"y")])
    assert await owner.wal.channels() == await other.wal.channels() == ["a", "b"]
    await other.wal.truncate("a", ids[50])
    assert (await owner.wal.describe("a")).first_id == ids[50]
    with pytest.raises(ChannelNotFound):
        await other.wal.append("none", b"x")
    assert [key for key in processes.objects.bodies if key.startswith("claim/")] == [f"claim/{1:016x}"]


@linked
async def test_the_owner_is_killed_and_another_one_goes_on(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(3)]
    for at, other in enumerate(others):
        await other.wal.append("a", b"%d" % at)
    processes.kill(owner)
    began = asyncio.get_running_loop().time()
    results = await asyncio.gather(*(appended(other.wal, "a", [b"x", b"y"]) for other in others))
    assert all(isinstance(result, bytes) for results_ in results for result in results_)
    assert asyncio.get_running_loop().time() - began < 1.5 * LEASE_S
    assert sum(other.linked for other in others) == 2
    found = await entries_of(others[0].wal, "a", 9)
    assert found[:3] == [b"0", b"1", b"2"]
    assert sorted(found[3:]) == [b"x"] * 3 + [b"y"] * 3
    assert len([key for key in processes.objects.bodies if key.startswith("claim/")]) == 2


@linked
async def test_what_a_link_had_when_it_broke_is_unknown_and_never_sent_twice(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    other = await processes.open()
    await other.wal.append("a", b"before")
    owner.store.down = True
    sent = [asyncio.ensure_future(other.wal.append("a", b"sent%d" % at)) for at in range(3)]
    await elapse(0.1)
    processes.network.break_all()
    results = await asyncio.gather(*sent, return_exceptions=True)
    assert [getattr(result, "outcome_unknown", None) for result in results] == [True] * 3
    owner.store.down = False
    await other.wal.append("a", b"after")
    assert await entries_of(owner.wal, "a", 5) == [b"before", b"sent0", b"sent1", b"sent2", b"after"]


@linked
async def test_what_waits_when_nothing_answers_was_not_written(processes: LinkedProcesses) -> None:
    """A process that must not own the log waits for an owner, for as long as an append may wait."""
    owner = await processes.owner("a")
    other = await processes.open(may_own=False)
    await other.wal.append("a", b"before")
    processes.kill(owner)
    (result,) = await appended(other.wal, "a", [b"lost"])
    assert isinstance(result, Unavailable)
    assert not result.outcome_unknown
    waiting = asyncio.ensure_future(other.wal.append("a", b"after"))
    await elapse(1)
    successor = await processes.open()
    await until_owned(successor, "a")
    await waiting
    assert await entries_of(other.wal, "a", 3) == [b"before", b"successor", b"after"]


@linked
async def test_an_owner_that_slept_acknowledges_nothing_to_others(processes: LinkedProcesses) -> None:
    zombie = await processes.owner("a")
    other = await processes.open()
    await other.wal.append("a", b"before")
    zombie.store.stop()
    asleep = asyncio.ensure_future(appended(other.wal, "a", [b"asleep"] * 10))
    await elapse(1)
    successor = await processes.open()
    await successor.wal._ownership.acquire()  # it cannot reach the one that sleeps
    await successor.wal.append("a", b"successor")
    zombie.store.go_on()
    results = await asleep
    assert not any(isinstance(result, bytes) for result in results)
    assert await entries_of(successor.wal, "a", 2) == [b"before", b"successor"]
    await other.wal.append("a", b"after")
    assert await entries_of(zombie.wal, "a", 3) == [b"before", b"successor", b"after"]
    assert (await zombie.wal.append("a", b"through the successor")) == await successor.wal.latest_id("a")


@linked
async def test_a_clean_stop_of_the_owner_costs_no_append(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(2)]
    appends = []
    for at in range(50):
        appends += [asyncio.ensure_future(each.wal.append("a", b"%d" % at)) for each in others]
        await elapse(0.02)
        if at == 25:
            closing = asyncio.ensure_future(owner.wal.close())
    results = await asyncio.gather(*appends, return_exceptions=True)
    await closing
    refused = [result for result in results if not isinstance(result, bytes)]
    assert all(isinstance(result, Unavailable) for result in refused)
    assert not any(result.outcome_unknown for result in refused if isinstance(result, Unavailable))
    assert len(refused) < 20
    assert len(await entries_of(others[0].wal, "a", 100 - len(refused))) == 100 - len(refused)
    processes.opened.remove(owner)


@linked
async def test_acknowledged_blocks_are_sent_and_the_store_is_not_asked(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    other = await processes.open()
    reading = asyncio.ensure_future(entries_of(other.wal, "a", 100))
    await elapse(5)
    assert other.linked
    before = processes.objects.requests["get"]
    for at in range(100):
        await owner.wal.append("a", b"%d" % at)
    assert await reading == [b"%d" % at for at in range(100)]
    assert processes.objects.requests["get"] == before


@linked
async def test_a_follower_that_takes_nothing_reads_from_the_store(processes: LinkedProcesses) -> None:
    """Blocks that are not sent because too much waits are read, also the last one."""
    owner = await processes.owner("a")
    other = await processes.open()
    reading = asyncio.ensure_future(entries_of(other.wal, "a", 12))
    await elapse(5)
    (served,) = owner.wal._links._server._links
    other.simulated.pause()
    for _ in range(12):
        await owner.wal.append("a", bytes(1024 * 1024))
        assert served.unsent_bytes < 9 * 1024 * 1024
    other.simulated.resume()
    assert await reading == [bytes(1024 * 1024)] * 12


@linked
async def test_only_what_is_acknowledged_is_sent(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    other = await processes.open()
    reading = asyncio.ensure_future(entries_of(other.wal, "a", 1))
    await elapse(1)
    owner.store.down = True
    writing = asyncio.ensure_future(owner.wal.append("a", b"x"))
    await elapse(5)
    assert not reading.done()
    owner.store.down = False
    await writing
    assert await reading == [b"x"]


@linked
async def test_a_strong_read_of_a_follower_is_answered_by_the_owner(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    other = await processes.open()
    await other.wal.append("a", b"x")
    for _ in range(10):
        last = await owner.wal.append("a", b"y")
        before = processes.objects.requests["get"]
        assert await other.wal.latest_id("a") == last
        assert processes.objects.requests["get"] - before == 1  # whether the log was claimed meanwhile


@linked
async def test_a_strong_read_through_an_idle_owner_that_is_none_any_more(processes: LinkedProcesses) -> None:
    idle = await processes.owner("a")
    other = await processes.open()
    await other.wal.append("a", b"before")
    idle.store.stop()
    await elapse(1)
    successor = await processes.open()
    await successor.wal._ownership.acquire()
    last = await successor.wal.append("a", b"successor")
    asking = asyncio.ensure_future(other.wal.latest_id("a"))
    await elapse(0.1)
    idle.store.go_on()
    assert await asking == last


@linked
async def test_what_is_on_its_way_over_a_link_is_bounded(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    other = await processes.open()
    await other.wal.append("a", b"x")
    owner.store.down = True
    payload = bytes(1024 * 1024)
    appends = [asyncio.ensure_future(other.wal.append("a", payload)) for _ in range(64)]
    await elapse(5)
    assert sum(append.done() for append in appends) == 0
    assert len(other.wal._links.route.link._submits) == 32
    with pytest.raises(Overloaded):
        await other.wal.append("a", payload)
    owner.store.down = False
    ids = await asyncio.gather(*appends)
    assert list(ids) == sorted(ids)


@linked
async def test_a_process_that_cannot_reach_the_owner_does_not_take_the_log(processes: LinkedProcesses) -> None:
    """Without an address of the owner, and with another secret, which both are refused, and say why."""
    owner = await processes.open(listens=False)
    await owner.wal.create_channel("a", ChannelPolicy())
    other = await processes.open()
    for _ in range(3):
        (result,) = await appended(other.wal, "a", [b"x"])
        assert isinstance(result, Unavailable)
        assert "objects.advertise" in result.message
        await elapse(60)
    await owner.wal.close()
    processes.opened.remove(owner)
    await other.wal.append("a", b"x")
    stranger = await processes.open(key=b"s" * 32)
    (result,) = await appended(stranger.wal, "a", [b"x"])
    assert isinstance(result, Unavailable)
    assert "cannot be reached" in result.message
    assert len([key for key in processes.objects.bodies if key.startswith("claim/")]) == 2


@linked
async def test_a_process_without_a_secret_is_told_what_it_lacks(processes: LinkedProcesses) -> None:
    await processes.owner("a")
    alone = Processes()
    alone.objects = processes.objects
    unlinked = await alone.open()
    (result,) = await appended(unlinked.wal, "a", [b"x"])
    assert isinstance(result, Unavailable)
    assert "cluster.secret" in result.message
    await alone.close()


@pytest.mark.parametrize("seed", [0, *cases_in_turn(range(1, 19), pytest.mark.long, of=3)])
def test_whatever_breaks_every_append_is_there_as_it_was_answered(seed: int) -> None:
    """Four processes append over links that break while owners are killed and the store fails: what is acknowledged is
    there once, and of each process in order; what was refused for certain is not there."""
    rates = StoreRates(refused=0.03, cut=0.03, late=0.03, conflict=0.03, doubled=0.03)
    processes = LinkedProcesses(rates)
    draw = random.Random(seed)

    async def main() -> None:
        writers = [await processes.open(seed * 10 + at) for at in range(4)]
        await writers[0].wal.create_channel("a", ChannelPolicy())
        processes.network.breaks = lambda: draw.random() < 0.01
        tasks: dict[bytes, asyncio.Task[bytes]] = {}
        for step in range(150):
            for at, writer in enumerate(writers):
                name = b"%d.%d.%d" % (at, id(writer), step)
                tasks[name] = asyncio.ensure_future(writer.wal.append("a", name))
            await elapse(0.05)
            if step % 60 == 59:
                at = next((at for at, writer in enumerate(writers) if writer.wal._committer.owns), 0)
                processes.kill(writers[at])
                writers[at] = await processes.open(seed * 10 + step)
                await elapse(20)
        processes.network.breaks = lambda: False
        await elapse(60)
        reader = await processes.open(99)
        reader.store.rates = StoreRates()
        last = await reader.wal.latest_id("a")
        found: list[bytes] = []
        async for entries in reader.wal.read("a", From.EARLIEST):
            found += [bytes(entry.payload) for entry in entries]
            if last is None or entries[-1].id >= last:
                break
        assert len(set(found)) == len(found)
        places = {name: place for place, name in enumerate(found)}
        acknowledged: dict[bytes, list[bytes]] = {}
        for name, task in tasks.items():
            if not task.done():
                task.cancel()
            elif task.exception() is None:
                acknowledged.setdefault(name.rpartition(b".")[0], []).append(name)
            elif not getattr(task.exception(), "outcome_unknown", False):
                assert name not in places
        assert sum(map(len, acknowledged.values())) > 150
        for names in acknowledged.values():
            assert [places[name] for name in names] == sorted(places[name] for name in names)
        await processes.close()

    run_virtual(main())


EPHEMERAL = ChannelPolicy(ephemeral=True)


@linked
async def test_ephemeral_channels_are_those_of_all_processes(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(2)]
    await others[0].wal.create_channel("e", EPHEMERAL)
    await owner.wal.create_channel("e", EPHEMERAL)
    readers = [asyncio.ensure_future(entries_of(each.wal, "e", 20)) for each in (owner, *others)]
    before = processes.objects.requests["create"]
    ids: list[bytes] = []
    for at in range(10):
        ids.append(await others[at % 2].wal.append("e", b"%d" % at))
        ids.append(await owner.wal.append("e", b"owner %d" % at))
    assert ids == sorted(ids)
    found = await asyncio.gather(*readers)
    assert found[0] == found[1] == found[2]
    assert processes.objects.requests["create"] - before <= 1  # the mark of an idle owner
    for each in (owner, *others):
        assert await each.wal.latest_id("e") == ids[-1]
        assert (await each.wal.describe("e")).first_id == ids[0]
    durable, fleeting = await others[1].wal.append_many([Append("a", b"x"), Append("e", b"y")])
    assert await owner.wal.latest_id("a") == durable
    assert await owner.wal.latest_id("e") == fleeting
    await others[1].wal.truncate("e", fleeting)
    assert (await owner.wal.describe("e")).first_id == fleeting
    waiting = asyncio.ensure_future(entries_of(others[0].wal, "e", 2))
    await elapse(1)
    await owner.wal.drop_channel("e")
    with pytest.raises(ChannelNotFound):
        await waiting


@linked
async def test_entries_of_ephemeral_channels_are_lost_with_the_owner_and_readers_go_on(
    processes: LinkedProcesses,
) -> None:
    owner = await processes.owner("a")
    others = [await processes.open(seed) for seed in range(2)]
    await others[0].wal.create_channel("e", EPHEMERAL)
    old = await others[1].wal.append("e", b"old")
    reader = others[0].wal.read("e", From.EARLIEST)
    assert [entry.id for entry in await anext(reader)] == [old]
    processes.kill(owner)
    following = asyncio.ensure_future(anext(reader))
    await elapse(1)
    new = await others[1].wal.append("e", b"new")
    assert new > old
    assert [entry.id for entry in await following] == [new]
    assert await entries_of(others[1].wal, "e", 1) == [b"new"]


@linked
async def test_ephemeral_channels_without_an_owner_are_empty_and_say_so(processes: LinkedProcesses) -> None:
    owner = await processes.owner("a")
    await owner.wal.create_channel("e", EPHEMERAL)
    await owner.wal.append("e", b"x")
    other = await processes.open(may_own=False)
    processes.kill(owner)
    info = await other.wal.describe("e")
    assert (info.policy, info.first_id, info.latest_id) == (EPHEMERAL, None, None)
    with pytest.raises(Unavailable, match="memory of the log's owner"):
        await other.wal.id_at("e", 1)


@linked
async def test_members_in_other_processes_outlive_the_owner(processes: LinkedProcesses) -> None:
    """Each entry is processed, and none that is acknowledged comes again."""
    owner = await processes.owner("a", "b")
    others = [await processes.open(seed) for seed in range(2)]
    members = [await each.wal.join("g", ["a", "b"]) for each in others]
    processed: list[bytes] = []

    async def work(member: Any) -> None:
        async for delivered in member:
            try:
                await member.acknowledge(delivered)
            except (Fenced, Unavailable):
                continue
            processed.extend(bytes(entry.payload) for entry in delivered.entries)

    working = [asyncio.ensure_future(work(member)) for member in members]
    for at in range(20):
        await others[0].wal.append("ab"[at % 2], b"%d" % at)
    await elapse(5)
    assert {len(member.channels) for member in members} == {1}
    (group,) = await owner.wal.groups()
    assert sorted(map(sorted, group.members.values())) == [["a"], ["b"]]
    processes.kill(owner)
    await elapse(1)
    for at in range(20, 40):
        await others[1].wal.append("ab"[at % 2], b"%d" % at)
    await elapse(60)
    assert sorted(processed) == sorted(b"%d" % at for at in range(40))
    assert await others[0].wal.groups() == await others[1].wal.groups()
    for member in members:
        await member.aclose()
    await asyncio.gather(*working)


@linked
async def test_an_ephemeral_entry_waits_behind_one_that_is_appended_with_durable_ones(
    processes: LinkedProcesses,
) -> None:
    owner = await processes.owner("a")
    for channel in ("e", "f"):
        await owner.wal.create_channel(channel, ChannelPolicy(ephemeral=True))
    other = await processes.open()
    await other.wal.append("a", b"linked")
    for process in (owner, other):
        mixed = asyncio.ensure_future(process.wal.append_many([Append("a", b"1"), Append("e", b"1")]))
        await asyncio.sleep(0)
        alone = asyncio.ensure_future(process.wal.append("e", b"2"))
        await process.wal.append("f", b"elsewhere")
        assert not mixed.done()
        assert (await mixed)[1] < await alone < await process.wal.append("e", b"3")
