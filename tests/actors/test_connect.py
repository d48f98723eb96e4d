"""`connect` and `connect_sync`: a client of a node that runs in another process, or on another thread."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidewal
from tidewal.actors.client import Client
from tidewal.actors.sync_client import SyncClient
from tidewal.runtime.errors import Closed, CollectionNotFound, ConfigError, DeadlineExceeded, Unavailable
from tidewal.runtime.log.loop_thread import LoopThread

CITIES = tidewal.CollectionSchema("cities", (tidewal.Field("id", "int64"), tidewal.Field("name", "varchar")), "id")
ROWS = [{"id": 1, "name": "Cádiz"}, {"id": 2, "name": "Porto"}]

# A program that never closes its client ends all the same.
SCRIPT = """
import sys, tidewal
client = tidewal.connect_sync(sys.argv[1])
client.insert("cities", [{"id": 3, "name": "Turku"}])
print(client.count("cities", consistency="strong"))
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


def test_the_synchronous_client_does_what_the_other_does(data: Path) -> None:
    with tidewal.connect_sync(data) as client:
        assert client.create_collection(CITIES) == client.describe_collection("cities")
        assert client.insert("cities", ROWS).rows == 2
        assert client.query("cities", 'name like "P%"', consistency="session").table.to_pylist() == ROWS[1:]
        assert client.get("cities", [1], columns=["name"], consistency="strong").table.to_pylist() == [
            {"name": "Cádiz"}
        ]
        with pytest.raises(CollectionNotFound):
            client.flush("towns")


def test_every_public_call_is_there_with_the_same_parameters_and_results() -> None:
    def calls(of: type) -> dict[str, inspect.Signature]:
        names = [name for name, value in vars(of).items() if not name.startswith("_") and inspect.isfunction(value)]
        return {name: inspect.signature(getattr(of, name)) for name in names}

    assert calls(SyncClient) == calls(Client) != {}
    assert all(getattr(SyncClient, name).__doc__ for name in calls(Client))


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


async def test_where_no_process_has_the_log_connecting_ends_in_time(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"answered within 0\.2 s: start one \(tidewal run --wal rocksmq://"):
        async with tidewal.connect(tmp_path / "nothing", deadline_s=0.2):
            raise AssertionError
    assert not (tmp_path / "nothing").exists()


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
