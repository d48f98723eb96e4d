"""Random work of a node, replicators that die at any write, and a source that is gone: what was promoted is what the
source had up to one time, whole."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

import tidewal
from tests.actors.test_forced_promotion import forced
from tests.actors.test_node_migration import FarWal
from tests.actors.test_node_replication import SOURCE, TIMES, replica_of
from tests.actors.test_node_replication_model import FarLockedWal, LockedWal, taken
from tests.actors.test_online_migration_transactions import PreparedWal
from tests.dying_wal import Killed
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.log.record import TIMELESS_TYPES, Record, RecordType, decode, record_type
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.migration.node_records import node_entry
from tidewal.runtime.replication.forced_promotion import line_of
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.testing.clock import VirtualLoop
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

STEPS = 40
LATER_S = 30.0
QUIET_S = 3.0


class ApartWal(PreparedWal):
    """A log whose transactions prepare, and which stores no positions with appends."""

    capabilities = replace(PreparedWal.capabilities, atomic_acks=False)


class FarApartWal(FarWal):
    """Another one, with higher ids."""

    capabilities = ApartWal.capabilities


class Work:
    """What a node has acknowledged, and at which times: rows, messages, those that are due later, and those that
    transactions have sent on."""

    def __init__(self, home: Any, rng: random.Random) -> None:
        self._home, self._rng = home, rng
        self.rows: list[tuple[int, int]] = []
        self.gone: list[tuple[int, int]] = []
        self.sent: list[tuple[int, str]] = []
        self.later: list[tuple[int, str]] = []
        self.inputs: list[tuple[int, str]] = []
        self.done: list[str] = []  # by a group, before the time that it had when it was acknowledged
        self._next = 0
        self._partitions = 2

    async def run(self, steps: int = STEPS) -> None:
        async with self._home.client() as client:
            if not self._next:
                await client.create_collection(self._home.PEOPLE, shards=2)
                for topic, partitions in (("orders", 2), ("later", 1), ("in", 1), ("out", 1)):
                    await client.create_topic(topic, partitions)
            work = (
                *(self._insert, self._delete, self._send, self._delay),
                *(self._take, self._input, self._pipe, self._two),
                *(self._grow, self._come_and_go),
            )
            for _ in range(steps):
                await self._rng.choice(work)(client)
                await asyncio.sleep(self._rng.random() / 4)
                if self._rng.random() < 0.1:
                    await client.flush("people")

    def _keys(self) -> range:
        keys = range(self._next, self._next + self._rng.randrange(1, 9))
        self._next = keys.stop
        return keys

    async def _insert(self, client: tidewal.Client) -> None:
        keys = self._keys()
        result = await client.insert("people", self._home.people(*keys))
        self.rows += [(result.ts, key) for key in keys]

    async def _delete(self, client: tidewal.Client) -> None:
        there = {key for _, key in self.rows} - {key for _, key in self.gone}
        if gone := self._rng.sample(sorted(there), min(2, len(there))):
            result = await client.delete("people", gone)
            self.gone += [(result.ts, key) for key in gone]

    async def _send(self, client: tidewal.Client) -> None:
        texts = [f"{len(self.sent) + number}" for number in range(self._rng.randrange(1, 6))]
        result = await client.send("orders", [tidewal.Message(text, key=text) for text in texts])
        self.sent += [(result.ts, text) for text in texts]

    async def _delay(self, client: tidewal.Client) -> None:
        text = f"{len(self.later)}"
        result = await client.send("later", text, key="k", deliver_after_s=self._rng.choice((1.0, LATER_S)))
        self.later.append((result.ts, text))

    async def _take(self, client: tidewal.Client) -> None:
        self.done += await taken(client, "orders", 1)

    async def _input(self, client: tidewal.Client) -> None:
        text = f"{len(self.inputs)}"
        self.inputs.append(((await client.send("in", text, key="k")).ts, text))

    async def _pipe(self, client: tidewal.Client) -> None:
        """Send on what came in, and write it as rows, in the transaction that acknowledges it."""
        async with await client.subscribe("in", "pipe") as member:
            with suppress(TimeoutError):
                pack = await asyncio.wait_for(anext(member), QUIET_S)
                async with client.transaction() as t:
                    await t.send("out", [bytes(each.body) for each in pack.messages])
                    await t.acknowledge(member, pack)

    async def _grow(self, client: tidewal.Client) -> None:
        """The next epoch of a topic: a line may lie between its beginning and the end of the one before."""
        if self._partitions < 5:
            self._partitions += 1
            await client.alter_topic("orders", self._partitions)

    async def _come_and_go(self, client: tidewal.Client) -> None:
        name = f"short{self._next}"
        self._next += 1
        await client.create_topic(name, 1)
        await client.send(name, "0")
        await client.create_collection(replace(self._home.POINTS, name=name))
        await asyncio.sleep(self._rng.random())
        await client.drop_topic(name)
        if self._rng.random() < 0.5:
            await client.drop_collection(name)

    async def _two(self, client: tidewal.Client) -> None:
        """Rows in both shards and messages, together."""
        keys = range(self._next, self._next + 8)
        self._next = keys.stop
        text = f"{len(self.sent)}"
        async with client.transaction() as t:
            await t.insert("people", self._home.people(*keys))
            await t.send("orders", [tidewal.Message(text, key=text)])
        assert t.result is not None
        self.rows += [(t.result.ts, key) for key in keys]
        self.sent.append((t.result.ts, text))


async def replicators(home: Any, other: Any, rng: random.Random, kills: int) -> None:
    """One after another, each of which dies at a write; the last one in the midst of the work."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    for number in range(kills + 1):
        left, behind = [rng.randrange(200, 900) if number == kills else rng.randrange(1, 200)], rng.random() < 0.5
        old, new = LockedWal(home.log, left, behind=behind), FarLockedWal(other.log, left, behind=behind)
        with suppress(Killed):
            await Replicator(old, new, SOURCE, times=TIMES, clock=loop.clock).run()


@pytest.mark.asyncio(loop_factories=["memory"])
@pytest.mark.parametrize("run", range(4))
async def test_what_is_promoted_is_what_the_source_had_at_one_time(home: Any, seed: int, run: int) -> None:
    rng = random.Random(f"{seed} {run}")
    home.memory, other = ApartWal, replica_of(home)
    other.memory = FarApartWal
    work = Work(home, rng)
    mirroring = asyncio.create_task(replicators(home, other, random.Random(rng.random()), run))
    await work.run()
    if rng.random() < 0.5:  # the channels end at different times, for it is killed in between
        mirroring.cancel()
        with suppress(asyncio.CancelledError):
            await mirroring
    await work.run(rng.randrange(10))
    mirroring.cancel()
    with suppress(asyncio.CancelledError):
        await mirroring
    line = line_of(await replication_state(MemoryWal(other.log)))
    promoted = await _forced(home, other)
    promoted.memory = ApartWal
    check_channels(home.log, promoted.log, line.time)
    print(f"{run}: {len(work.rows)} rows, {sum(ts > line.time for ts, _ in work.rows)} above the line")
    async with promoted.client() as client:
        found = (await client.query("people", consistency="strong")).table["id"].to_pylist()
        assert sorted(found) == sorted(_upto(line.time, work.rows) - _upto(line.time, work.gone))
        sent, got = _upto(line.time, work.sent), await taken(client, "orders")
        assert sent - {*work.done} <= {*got} <= sent, "each that was not done comes, and none from above the line"
        assert len(got) == len({*got})
        inputs, left = _upto(line.time, work.inputs), await taken(client, "in", None)
        async with await client.subscribe("in", "pipe") as member:
            left = await _rest(member)
        out = await taken(client, "out")
        assert sorted([*out, *left]) == sorted(inputs), "each input counts once"
        await asyncio.sleep(LATER_S)
        assert sorted(await taken(client, "later")) == sorted(_upto(line.time, work.later))
        await client.insert("people", home.people(10_000))
        await client.flush("people")


async def _forced(home: Any, other: Any) -> Any:
    """Promote, as an operator does who is told of tables that came or went behind the line."""
    dropped = frozenset[str]()
    for _ in range(STEPS):
        try:
            return (await forced(home, other, dropped))[0]
        except InvalidRequest as error:
            name = error.fields["table"]
            if "move it away" in error.message:
                shutil.rmtree(home.tables / name)
            else:
                dropped |= {name}
    raise AssertionError("the tables are told one by one")


def _upto(time: int, acknowledged: list[tuple[int, Any]]) -> set[Any]:
    return {each for ts, each in acknowledged if ts <= time}


async def _rest(member: Any) -> list[str]:
    got: list[str] = []
    with suppress(TimeoutError):
        while True:
            pack = await asyncio.wait_for(anext(member), QUIET_S)
            got += [bytes(each.body).decode() for each in pack.messages]
            await member.acknowledge(pack)
    return got


def check_channels(source: MemoryLog, promoted: MemoryLog, time: float = math.inf) -> None:
    """Each channel of the owners ends where the source's has its first record above the time, with the same entries
    before. What landed late, of an owner whose term was over, is no part of either."""
    for name, channel in promoted.channels.items():
        is_owned = "-dml_" in name or "-topic_" in name or "-delays_" in name
        if not is_owned or name not in source.channels:  # dropped since
            continue
        before, end = list[tuple[int, bytes]](), None
        for entry, record in _in_term(source.channels[name].entries):
            is_timeless = record.type in TIMELESS_TYPES
            if record.ts > time:
                end = len(before) if end is None else end  # what is prepared there is not of the line ...
                if not is_timeless:
                    break
            elif not is_timeless:
                end = None  # ... unless a record of the line follows
            before.append((entry.timestamp, bytes(node_entry(name, entry).payload)))
        before = before[:end]
        there = [(entry.timestamp, bytes(entry.payload)) for entry, _ in _in_term(channel.entries)]
        assert there or not before or record.type is RecordType.TIME_TICK, name
        before, there = _without_last_ticks(before), _without_last_ticks(there)
        common = min(len(before), len(there))
        assert there[len(there) - common :] == before[len(before) - common :], name


def _without_last_ticks(entries: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """An owner announces a time while a tick of before is on its way: without it nothing is missing."""
    ticks = takewhile(lambda each: record_type(each[1]) is RecordType.TIME_TICK, reversed(entries))
    return entries[: len(entries) - sum(1 for _ in ticks)]


def _in_term(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Record]]:
    highest = 0
    for entry in entries:
        record = decode(entry.payload)
        if record.term >= highest:
            highest = record.term
            yield entry, record
