"""`connect` and `connect_sync`: a client of a node that runs in another process, or on another thread."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import tidewal
from tidewal.actors import connection
from tidewal.actors.client import Client
from tidewal.actors.sync_client import SyncClient
from tidewal.actors.transactions.sync_transaction import SyncTransaction
from tidewal.actors.transactions.transaction import Transaction
from tidewal.runtime.errors import (
    Closed,
    CollectionNotFound,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Unavailable,
)
from tidewal.runtime.log.loop_thread import LoopThread
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.rpc import client as rpc_client
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.memory import MemoryWal

CITIES = tidewal.CollectionSchema("cities", (tidewal.Field("id", "int64"), tidewal.Field("name", "varchar")), "id")
ROWS = [{"id": 1, "name": "Cádiz"}, {"id": 2, "name": "Porto"}]

# A program that never closes its client ends all the same.
SCRIPT = """
import sys, tidewal
client = tidewal.connect_sync(sys.argv[1])
client.insert("cities", [{"id": 3, "name": "Turku"}])
print(client.count("cities", consistency="strong"))
"""

# A child that a program forks has a client's data and not its thread: it is told, may connect itself, and ends.
FORKING = """
import os, signal, sys, tidewal
client = tidewal.connect_sync(sys.argv[1])
child = os.fork()
if not child:
    signal.alarm(50)  # nothing stays behind, whatever fails
    try:
        client.count("cities", deadline_s=3)
    except tidewal.errors.InvalidRequest as error:
        print(error, flush=True)
    if len(sys.argv) > 2:
        client.close()
    with tidewal.connect_sync(sys.argv[1]) as own:
        print(own.list_collections(), flush=True)
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.list_collections())
"""


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """The directory of a node that runs on another thread."""
    loop = LoopThread("node-of-the-test")
    with loop.entered(tidewal.standalone(tmp_path)):
        yield tmp_path
    loop.end()


def url_of_log(data: Path) -> str:
    return f"rocksmq://{data}/log"


@pytest.mark.parametrize("of", [str, Path, lambda data: data / "log", url_of_log], ids=["str", "home", "log", "url"])
async def test_connects_by_url_and_by_path(data: Path, of) -> None:
    async with tidewal.connect(of(data)) as client:
        await client.create_collection(CITIES)
        await client.insert("cities", ROWS)
        assert await client.count("cities", consistency="strong") == 2


async def test_connecting_that_is_awaited_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"write `async with tidewal\.connect"):
        await cast(Any, tidewal.connect(tmp_path))


def test_clients_are_shown_by_their_names(data: Path) -> None:
    client = tidewal.connect_sync(data)
    with client:
        assert re.fullmatch(r"<SyncClient of <Client 'client-\w+'>>", repr(client))
    assert repr(client).endswith(", closed>")


def test_the_synchronous_client_does_what_the_other_does(data: Path) -> None:
    with tidewal.connect_sync(data) as client:
        assert client.create_collection(CITIES) == client.describe_collection("cities")
        assert client.insert("cities", ROWS).rows == 2
        assert client.query("cities", 'name like "P%"', consistency="session").table.to_pylist() == ROWS[1:]
        assert client.get("cities", [1], columns=["name"], consistency="strong").table.to_pylist() == [
            {"name": "Cádiz"}
        ]
        pages = [page.table["id"].to_pylist() for page in client.query_iterator("cities", batch_size=1)]
        assert pages == [[row["id"]] for row in ROWS]
        with client.transaction() as t:
            t.insert("cities", [{"id": 3, "name": "Brno"}])
            t.delete("cities", [1])
        assert t.result is not None
        assert t.result.rows == 2
        assert client.count("cities", at=t.result.ts) == 2
        with contextlib.suppress(KeyError), client.transaction() as t:
            t.upsert("cities", ROWS)
            raise KeyError
        assert (client.count("cities", consistency="strong"), t.result) == (2, None)
        with pytest.raises(CollectionNotFound):
            client.flush("towns")


def test_every_public_call_is_there_with_the_same_parameters_and_results() -> None:
    def calls(of: type) -> dict[str, str]:
        names = [name for name, value in vars(of).items() if not name.startswith("_") and inspect.isfunction(value)]
        signatures = {name: str(inspect.signature(getattr(of, name))) for name in names}
        return {
            name: re.sub("Async(?=Iterator)|Sync(?=TopicMember|Transaction)", "", each)
            for name, each in signatures.items()
        }

    assert calls(SyncClient) == calls(Client) != {}
    assert all(getattr(SyncClient, name).__doc__ for name in calls(Client))
    awaited = {name: re.sub(r"Coroutine\[Any, Any, (\w+)\]", r"\1", each) for name, each in calls(Transaction).items()}
    assert calls(SyncTransaction) == awaited != {}


async def test_a_notebook_whose_loop_runs_may_use_it(data: Path) -> None:
    with tidewal.connect_sync(data) as client:
        assert client.list_collections() == []


def test_threads_share_it(data: Path) -> None:
    with tidewal.connect_sync(data) as client:
        client.create_collection(CITIES)

        def write(number: int) -> None:
            client.insert("cities", [{"id": number, "name": "x"}])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.count("cities", consistency="strong") == 8


def test_a_closed_client_says_so_and_leaves_no_thread(data: Path) -> None:
    client = tidewal.connect_sync(data)
    client.close()
    client.close()
    with pytest.raises(Closed, match="connect again"):
        client.list_collections()
    assert "tidewal-client" not in [thread.name for thread in threading.enumerate()]


def test_close_ends_a_call_of_another_thread(data: Path) -> None:
    client = tidewal.connect_sync(data)
    failed = list[BaseException]()

    def wait() -> None:
        try:
            client.ready(node="no such node")
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with pytest.raises(DeadlineExceeded):  # when this call has waited, the other one does
        client.ready(node="no such node", deadline_s=0.3)
    client.close()
    waiting.join()
    assert isinstance(failed[0], Closed)


def test_a_script_in_another_process_that_forgets_to_close_ends(data: Path) -> None:
    with tidewal.connect_sync(data) as client:
        client.create_collection(CITIES)
        client.insert("cities", ROWS)
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(data)], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("3\n", "", 0)


@pytest.mark.parametrize("closing", [[], ["closing"]], ids=["forgets", "closes"])
def test_a_fork_must_connect_itself(data: Path, closing: list[str]) -> None:
    program = [sys.executable, "-W", "ignore", "-c", FORKING, str(data), *closing]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    told, listed, parent = ended.stdout.splitlines()
    assert told.startswith("made in another process: connect again there")
    warned = [
        line for line in ended.stderr.splitlines() if "its reply channel is still there" not in line
    ]  # a busy node
    assert (listed, parent, warned) == ("[]", "0 []", [])


@pytest.mark.parametrize(
    ("where", "command"),
    [
        ("nothing", r"--data \S+/nothing\)"),
        ("nothing/log", r"--data \S+/nothing\)"),
        ("empty", r"--data \S+/empty\)"),
        ("a-log", r"--wal rocksmq://\S+/a-log\)"),
    ],
)
async def test_where_no_process_has_the_log_connecting_ends_in_time(tmp_path: Path, where: str, command: str) -> None:
    (tmp_path / "empty").mkdir()
    await (await tidewal.open_wal(f"rocksmq://{tmp_path}/a-log")).close()
    for named in (tmp_path / where, f"rocksmq://{tmp_path / where}") if where.endswith("log") else (tmp_path / where,):
        with pytest.raises(Unavailable, match=r"answered within 0\.2 s: start one \(tidewal run " + command):
            async with tidewal.connect(named, deadline_s=0.2):
                raise AssertionError
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("made", [None, "late", "late/log"])
async def test_a_node_that_makes_its_directory_later_is_found(tmp_path: Path, monkeypatch, made: str | None) -> None:
    if made:
        (tmp_path / made).mkdir(parents=True)
    tried, open_log = asyncio.Event(), connection.open_wal

    async def opened(*arguments: str, **named: object) -> Wal:
        tried.set()
        return await open_log(*arguments, **named)

    monkeypatch.setattr(connection, "open_wal", opened)

    async def count() -> list[str]:
        async with tidewal.connect(tmp_path / "late", deadline_s=60) as client:
            return await client.list_collections()

    counting = asyncio.create_task(count())
    await tried.wait()
    async with tidewal.standalone(tmp_path / "late"):
        assert await counting == []


async def test_a_log_that_opens_as_the_time_is_over_is_closed(tmp_path: Path, monkeypatch) -> None:
    opened = MemoryWal()

    async def open_in_spite_of_it(*_: object, **__: object) -> Wal:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return opened

    monkeypatch.setattr(connection, "open_wal", open_in_spite_of_it)
    with pytest.raises(Unavailable):
        async with tidewal.connect(tmp_path, deadline_s=0.01):
            raise AssertionError
    with pytest.raises(Closed):
        await opened.channels()


async def test_where_a_log_has_no_node_connecting_ends_in_time(tmp_path: Path) -> None:
    wal = await tidewal.open_wal(f"rocksmq://{tmp_path}")
    with pytest.raises(Unavailable, match="start one"):
        async with tidewal.connect(tmp_path, deadline_s=0.3):
            raise AssertionError
    await wal.close()


def test_what_fails_to_connect_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        tidewal.connect_sync(tmp_path, deadline_s=0.1)
    with pytest.raises(ConfigError):
        tidewal.connect_sync("nosuch://log")
    assert "tidewal-client" not in [thread.name for thread in threading.enumerate()]


async def test_a_client_outlives_its_node(tmp_path: Path) -> None:
    async with tidewal.standalone(tmp_path):
        connection = tidewal.connect(tmp_path)
        client = await connection.__aenter__()
        await client.create_collection(CITIES)
    async with tidewal.standalone(tmp_path):
        assert await client.list_collections() == ["cities"]
        await connection.__aexit__(None, None, None)


class SilentWal(MemoryWal):
    """A log whose owner is gone: nothing is dropped, and closing waits for appends in flight."""

    async def drop_channel(self, channel: str) -> None:
        await asyncio.get_running_loop().create_future()

    async def _close(self) -> None:
        await asyncio.get_running_loop().create_future()


def test_leaving_the_block_waits_a_second_at_most_and_its_error_counts(home_of_roles, caplog) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()  # virtual
        with contextlib.suppress(ZeroDivisionError):
            async with tidewal.connect("memory://"):
                began = loop.time()
                raise ZeroDivisionError
        assert loop.time() - began <= rpc_client.CLOSE_S + connection.CLOSE_WAL_S

    run_virtual(main())
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["WARNING"]


@pytest.fixture
def home_of_roles(monkeypatch) -> None:
    """`connect` finds a ready node over a `SilentWal`."""

    async def opened(*_: object, **__: object) -> SilentWal:
        return SilentWal()

    async def ready(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(connection, "open_wal", opened)
    monkeypatch.setattr(Client, "ready", ready)


async def test_a_client_whose_node_is_gone_closes_without_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rpc_client, "CLOSE_S", 0.01)

    async def fail_once_the_node_is_gone() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with tidewal.standalone(tmp_path):
                await stack.enter_async_context(tidewal.connect(tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_once_the_node_is_gone()


def test_a_synchronous_client_whose_node_is_gone_closes_without_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(rpc_client, "CLOSE_S", 0.01)
    loop = LoopThread("node-of-the-test")
    with loop.entered(tidewal.standalone(tmp_path)):
        client = tidewal.connect_sync(tmp_path)
    loop.end()
    client.close()


# A program whose node ends before it, and that never closes its client.
ORPHAN = """
import sys, tidewal
with tidewal.standalone_sync(sys.argv[1]):
    client = tidewal.connect_sync(sys.argv[1])
print("left")
"""


def test_a_script_whose_node_is_gone_ends_with_one_line(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.returncode) == ("left\n", 0)
    assert len(ended.stderr.splitlines()) == 1
    assert "its reply channel is still there" in ended.stderr
