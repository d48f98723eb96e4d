"""Three brokers, and a group that copies with transactions while the brokers that coordinate it are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.protocol.coordination import FindCoordinatorRequest

from tests.turns import cases_in_turn
from tidewal.adapters.kafka.groups.coordinator_broker import CoordinatorType
from tidewal.runtime.errors import Fenced, Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PLAIN = ChannelPolicy()
WITHIN_S = 90.0
INPUTS = ("in-0", "in-1")
COPIES_PER_KILL = 40


async def copy(wal, copied: Callable[[int], None]) -> None:
    """One member that goes on whatever happens, as an application would."""
    while True:
        with suppress(Unavailable, Fenced):  # Fenced: of no answer in time the coordinator took it for dead
            member = await wal.join("copiers", ["in-*"], session_timeout_s=6)
            try:
                async for delivered in member:
                    target = delivered.channel.replace("in-", "out-")
                    with suppress(Fenced):  # another member has the channel, and gets the entries again
                        await member.commit([delivered], [Append(target, entry.payload) for entry in delivered.entries])
                        copied(len(delivered.entries))
            finally:
                await member.aclose()


class Copied:
    """How much was copied, with an event for tasks that wait for more."""

    def __init__(self) -> None:
        self._total, self._changed = 0, asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, number: int) -> None:
        self._total += number
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def more(self, number: int) -> None:
        goal = self._total + number
        async with asyncio.timeout(WITHIN_S), self._changed:
            await self._changed.wait_for(lambda: self._total >= goal)


async def coordinator_of(wal, kind: CoordinatorType, key: str) -> int:
    """The node that looks after a group, or after the transactions of one name."""
    cluster = wal._groups._cluster

    async def ask() -> int:
        found = await cluster.ask(None, FindCoordinatorRequest(key, kind))
        if found.error_code:
            raise kafka_errors.for_code(found.error_code)
        return found.coordinator_id

    return await wal._io.call(lambda: cluster.retrying("find a coordinator", ask))


async def payloads(wal, channel: str, number: int) -> list[bytes]:
    """So many entries of a channel at least, and all that are there."""
    last = await wal.latest_id(channel)
    found = []
    reader = wal.read(channel, From.EARLIEST)
    while len(found) < number or found[-1].id < last:
        async with asyncio.timeout(WITHIN_S):  # of each, for a busy machine copies slower than it fills the inputs
            found += await anext(reader)
    await reader.aclose()
    return [bytes(entry.payload) for entry in found]


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", cases_in_turn((CoordinatorType.GROUP, CoordinatorType.TRANSACTION)), ids=lambda kind: kind.name.lower()
)
async def test_a_pipeline_survives_the_death_of_its_coordinator(kafka3, opening, kind):
    wal = await opening(kafka3)
    for number in range(2):
        await wal.create_channel(f"in-{number}", PLAIN)
        await wal.create_channel(f"out-{number}", PLAIN)
    stopping, copied = asyncio.Event(), Copied()

    async def produce() -> None:
        for number in count():
            if stopping.is_set():
                return
            with suppress(Unavailable):  # what the log has is the model, acknowledged or not
                await wal.append(f"in-{number % 2}", b"%d" % number)

    async with asyncio.TaskGroup() as tasks:  # a member that fails ends the test, and says why
        members = [tasks.create_task(copy(await opening(kafka3), copied)) for _ in range(2)]
        producing = tasks.create_task(produce())
        await copied.more(COPIES_PER_KILL)
        group = wal._options.group_id("copiers")
        await wal.groups()
        key = group if kind is CoordinatorType.GROUP else f"{group}/{wal._catalog.find('in-0').topic}"
        dead = await coordinator_of(wal, kind, key)
        await asyncio.to_thread(kafka3.kill, dead)
        await copied.more(COPIES_PER_KILL)
        assert await coordinator_of(wal, kind, key) != dead
        await asyncio.to_thread(kafka3.restart, dead)
        await copied.more(COPIES_PER_KILL)
        stopping.set()
        await producing
        for number in range(2):
            inputs = await payloads(wal, f"in-{number}", 1)
            assert await payloads(wal, f"out-{number}", len(inputs)) == inputs
        for member in members:
            member.cancel()
