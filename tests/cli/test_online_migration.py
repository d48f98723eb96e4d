"""`tidewal migrate` while a node runs, in processes of their own: clients of other processes go on with the new log."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidewal
from tests.backends import log_url
from tidewal.runtime.errors import Fenced, Moved
from tidewal.runtime.log.opening import open_wal

pytestmark = [pytest.mark.long, pytest.mark.in_turn(1, 3)]

THINGS = tidewal.CollectionSchema("things", (tidewal.Field("id", "int64"),), "id")
ROUNDS = 5
LATER_S = 3.0
LAST = 10**9  # the number of the last message
ROWS = 200  # at the least, before and behind the migration


async def written(client: tidewal.Client, first: int, enough: asyncio.Event, ended: asyncio.Event) -> list[int]:
    """Insert rows, one after another, until `ended`. Returns their keys. `enough` is set once there are many."""
    keys: list[int] = []
    while not ended.is_set():
        key = first + len(keys)
        await client.insert("things", [{"id": key}])
        keys.append(key)
        if len(keys) == ROWS:
            enough.set()
    return keys


async def sent(client: tidewal.Client, ended: asyncio.Event) -> int:
    """Send numbers to a topic, of one key, until `ended`. Returns how many."""
    number = 0
    while not ended.is_set():
        await client.send("orders", f"{number}", key="k")
        number += 1
    return number


async def received(client: tidewal.Client, last: int) -> list[int]:
    """Get and acknowledge them, to `last`, in the order in which they are acknowledged."""
    done: list[int] = []
    unknown: list[int] = []
    async with await client.subscribe("orders", "billing") as member:
        async for pack in member:
            for part in pack.parts():
                numbers = [int(bytes(message.body)) for message in part.messages]
                if unknown and numbers[0] > unknown[-1]:  # these were acknowledged, for they do not come again
                    done += unknown
                unknown = []
                try:
                    await member.acknowledge(part)
                except Fenced as error:  # the log has moved: they come again
                    unknown = numbers if error.outcome_unknown else []
                    break
                done += numbers
            if done and done[-1] == last:
                break
    return done


async def found(client: tidewal.Client) -> list[int]:
    return sorted((await client.query("things", consistency="strong")).table["id"].to_pylist())


async def clients_go_on(data: Path | str, migrate: Callable[[], subprocess.Popen[str]]) -> list[int]:
    """Two clients write while the log of the node in `data` is migrated. Returns the keys that were acknowledged."""
    async with tidewal.connect(data, deadline_s=60) as one, tidewal.connect(data, deadline_s=60) as other:
        await one.create_collection(THINGS)
        await one.create_topic("orders", 2)
        enough, ended = [asyncio.Event(), asyncio.Event()], asyncio.Event()
        writing = [
            asyncio.create_task(written(client, 1_000_000 * number, enough[number], ended))
            for number, client in enumerate((one, other))
        ]
        receiving = asyncio.create_task(received(other, LAST))
        sending = asyncio.create_task(sent(one, ended))
        for each in enough:
            await each.wait()
        process = migrate()
        status = await asyncio.to_thread(process.wait, 120)
        assert status == 0, process.stdout and process.stdout.read()
        behind = asyncio.create_task(written(one, 5_000_000, reached := asyncio.Event(), ended))
        await reached.wait()
        ended.set()
        number = await sending
        await one.send("orders", f"{LAST}", key="k")
        assert await receiving == [*range(number), LAST]
        keys = sorted(key for keys in await asyncio.gather(*writing, behind) for key in keys)
        assert await found(other) == keys
        return keys


def test_a_node_and_its_clients_go_on_with_the_new_log(
    start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], tmp_path: Path
) -> None:
    data, old, new = tmp_path / "data", tmp_path / "data" / "log", tmp_path / "elsewhere"
    node = start("run", "--data", data)
    keys = asyncio.run(clients_go_on(data, lambda: start("migrate", f"rocksmq://{old}", "--to", f"rocksmq://{new}")))
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    with pytest.raises(Moved):
        asyncio.run(opened(old))
    assert asyncio.run(again(data, f"rocksmq://{new}")) == keys
    assert command("verify", "journal", f"rocksmq://{new}").status == 0


async def until_killed(
    data: Path, node: subprocess.Popen[str], migrate: Callable[[], subprocess.Popen[str]], after_s: float
) -> list[int]:
    """Write to a node that is killed so many seconds behind the beginning of its migration. Returns the keys that were
    acknowledged."""
    keys: list[int] = []
    async with tidewal.connect(data, deadline_s=60) as client:
        await client.create_collection(THINGS)

        async def write() -> None:
            while True:
                await client.insert("things", [{"id": len(keys)}])
                keys.append(len(keys))

        writing = asyncio.create_task(write())
        process = migrate()
        await asyncio.to_thread(process.stdout.readline if process.stdout else process.wait)  # it copies, or has failed
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, after_s)
        node.kill()
        node.wait()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        process.kill()
        process.wait()
    return keys


@pytest.mark.slow
def test_a_node_that_is_killed_in_its_migration_has_lost_nothing(
    start: Callable[..., subprocess.Popen[str]], command: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    for round in range(ROUNDS):
        data, new = tmp_path / f"data{round}", f"rocksmq://{tmp_path / f'new{round}'}"
        url = f"rocksmq://{data / 'log'}"
        node = start("run", "--data", data)
        migrate = ("migrate", url, "--to", new)
        keys = asyncio.run(until_killed(data, node, partial(start, *migrate), rng.uniform(0, LATER_S)))
        phase = command("migrate", url, "--status").out.partition(",")[0].strip()
        print(f"round {round}: killed as it was {phase}, with {len(keys)} rows")
        if phase not in ("open", "preparing"):
            ended = command(*migrate, "--tables", f"{data / 'tables'}")
            assert ended.status == 0, ended.err
            url = new
        found = asyncio.run(again(data, url))
        assert set(found) >= set(keys)
        assert len(found) == len(set(found))


@pytest.mark.broker
def test_a_node_goes_over_to_kafka_while_it_runs(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, kafka: str
) -> None:
    data, old, new = tmp_path / "data", tmp_path / "data" / "log", log_url("kafka", kafka)
    node = start("run", "--data", data)
    keys = asyncio.run(clients_go_on(data, lambda: start("migrate", f"rocksmq://{old}", "--to", new)))
    node.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert asyncio.run(again(data, new)) == keys


async def opened(log: Path) -> None:
    await (await open_wal(f"rocksmq://{log}")).close()


async def again(data: Path, url: str) -> list[int]:
    async with tidewal.standalone(data, wal=url) as node, node.client() as client:
        return await found(client)
