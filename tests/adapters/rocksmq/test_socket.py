"""Other processes read through the owner's socket, and cannot harm it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys

import pytest

from tidewal.adapters.rocksmq import RemoteRocksMQ, RocksMQ, open_wal
from tidewal.runtime.errors import (
    BadRecord,
    ChannelNotFound,
    Closed,
    InvalidRequest,
    NotYetSupported,
    Overloaded,
    PositionLost,
    Unavailable,
)
from tidewal.runtime.remote import LENGTH, BlockingClient, pack, result_of, socket_path, unpack
from tidewal.runtime.wal import Append, ChannelPolicy, From, FromId, FromTime

PLAIN = ChannelPolicy()

CHILD = """
import json, sys
from tidewal.runtime.remote import BlockingClient
heavy = [name for name in ("rocksdict", "pyarrow", "numpy", "tidewal.adapters") if name in sys.modules]
with BlockingClient(sys.argv[1]) as client:
    info = client.describe("a")
    everything = [(e.id.hex(), e.timestamp, len(e.payload)) for batch in client.read("a") for e in batch]
    after, upto = bytes.fromhex(everything[9][0]), bytes.fromhex(everything[19][0])
    some = [e.id.hex() for batch in client.read("a", after, upto) for e in batch]
    print(json.dumps({
        "heavy": heavy, "channels": client.channels(), "acks": info.policy.acks.value,
        "latest": client.latest_id("a").hex(), "at": client.id_at("a", 15).hex(),
        "everything": everything, "some": some,
    }))
"""


@pytest.fixture
async def store(open_rocksmq) -> RocksMQ:
    return await open_rocksmq(serve=True, tail_bytes=1, segment_bytes=8 * 1024 * 1024)


@pytest.fixture
def directory(tmp_path) -> str:
    return str(tmp_path / "log")


async def test_a_second_process_reads_what_the_first_wrote(store, directory):
    await store.create_channel("a", PLAIN)
    ids = await store.append_many([Append("a", bytes(i * 5_000), i) for i in range(40)])
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, directory, stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate()
    answer = json.loads(output)
    hexes = [id.hex() for id in ids]
    assert answer == {
        "heavy": [],
        "channels": ["a"],
        "acks": "all",
        "latest": hexes[-1],
        "at": hexes[15],
        "everything": [[id, i, i * 5_000] for i, id in enumerate(hexes)],
        "some": hexes[10:20],
    }


async def test_the_blocking_client_names_its_errors(store, directory):
    await store.create_channel("a", PLAIN)
    ids = await store.append_many([Append("a", b"x")] * 3)

    def ask() -> None:
        client = BlockingClient(directory)
        with pytest.raises(ChannelNotFound):
            client.describe("no")
        with pytest.raises(PositionLost):
            list(client.read("a", ids[0], b"\x7f" * 8))
        with pytest.raises(PositionLost):
            list(client.read("a", b"\x7f" * 8))
        assert [e.id for batch in client.read("a", ids[0]) for e in batch] == ids[1:]
        client.close()
        with pytest.raises(Closed):
            client.channels()
        with pytest.raises(Unavailable), BlockingClient(directory + "-not") as other:
            other.channels()

    await asyncio.to_thread(ask)


async def test_a_client_finds_the_owner_again_after_its_restart(open_rocksmq, directory):
    client = BlockingClient(directory)
    store = await open_rocksmq(serve=True)
    await store.create_channel("a", PLAIN)
    assert await asyncio.to_thread(client.channels) == ["a"]
    await store.close()
    with pytest.raises(Unavailable):
        await asyncio.to_thread(client.channels)
    await open_rocksmq(serve=True)
    assert await asyncio.to_thread(client.channels) == ["a"]
    client.close()


async def test_the_remote_wal_reads_and_follows_and_refuses_to_write(store, directory, helpers):
    await store.create_channel("a", PLAIN)
    ids = await store.append_many([Append("a", bytes([i]), i * 10) for i in range(50)])
    remote = await open_wal(f"rocksmq://{directory}")
    assert isinstance(remote, RemoteRocksMQ)
    assert await remote.channels() == ["a"]
    assert await remote.describe("a") == await store.describe("a")
    assert (await remote.latest_id("a"), await remote.id_at("a", 70)) == (ids[-1], ids[7])
    for start in (From.EARLIEST, FromId(ids[9]), FromId(ids[9], inclusive=True), FromTime(110)):
        assert await helpers.take(remote, "a", start, 10) == await helpers.take(store, "a", start, 10)
    reader = remote.read("a", FromId(ids[-1]))
    waiting = asyncio.ensure_future(anext(reader))
    more = await store.append("a", b"more")
    assert [entry.id for entry in await waiting] == [more]
    for refused in (
        remote.append("a", b""),
        remote.create_channel("b", PLAIN),
        remote.drop_channel("a"),
        remote.truncate("a", more),
        remote.hold("a", "me", more),
    ):
        with pytest.raises(NotYetSupported):
            await refused
    with pytest.raises(ChannelNotFound):
        await anext(remote.read("no", From.EARLIEST))
    waiting = asyncio.ensure_future(anext(reader, None))
    await asyncio.sleep(0)
    await remote.close()
    assert await asyncio.wait_for(waiting, 5) is None
    with pytest.raises(Closed):
        await remote.channels()


async def test_a_remote_reader_is_told_when_the_owner_goes(open_rocksmq, directory, helpers):
    store = await open_rocksmq(serve=True)
    await store.create_channel("a", PLAIN)
    remote = await open_wal(f"rocksmq://{directory}")
    reader = remote.read("a", From.EARLIEST)
    waiting = asyncio.ensure_future(anext(reader))
    await helpers.until(lambda: store.find("a").waiters)
    await store.close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, 5)
    await remote.close()


async def test_the_socket_is_its_owners_alone(store, directory):
    assert stat.S_IMODE(os.stat(os.path.join(directory, "socket")).st_mode) == 0o600


async def test_a_path_too_long_for_an_address_works(tmp_path):
    directory = str(tmp_path / ("x" * 120))
    store = await RocksMQ.open(directory, segment_bytes=64 * 1024)
    await store.create_channel("a", PLAIN)
    remote = await open_wal(f"rocksmq://{directory}")
    assert await remote.channels() == ["a"]
    client = BlockingClient(directory)
    assert await asyncio.to_thread(client.channels) == ["a"]
    client.close()
    await remote.close()
    await store.close()


async def connection(directory: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    with socket_path(directory) as path:
        return await asyncio.open_unix_connection(path)


async def answer_of(reader: asyncio.StreamReader) -> object:
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return result_of(unpack(await reader.readexactly(size)))


@pytest.mark.parametrize(
    ("request_bytes", "error"),
    [
        (LENGTH.pack(3) + b"\xc1\xc1\xc1", BadRecord),
        (LENGTH.pack(2**32 - 1), BadRecord),
        (pack(["read", "a"]), InvalidRequest),
        (pack(["read", "a", ["next", b"short"], None, 0.0]), InvalidRequest),
        (pack(["read", "a", 7, None, 0.0]), InvalidRequest),
        (pack({"channels": 1}), InvalidRequest),
        (pack([["channels"]]), InvalidRequest),
        (pack(["append", "a", b"x"]), InvalidRequest),
        (LENGTH.pack(60_000) + b"\x91" * 60_000, BadRecord),
    ],
    ids=["no msgpack", "huge", "too few", "short id", "no start", "a map", "a list", "append", "deep"],
)
async def test_nonsense_is_answered_by_type_and_the_owner_goes_on(store, directory, request_bytes, error):
    await store.create_channel("a", PLAIN)
    reader, writer = await connection(directory)
    writer.write(request_bytes)
    with pytest.raises(error):
        await asyncio.wait_for(answer_of(reader), 5)
    writer.close()
    await writer.wait_closed()
    client = BlockingClient(directory)
    assert await asyncio.to_thread(client.channels) == ["a"]
    client.close()


async def test_clients_that_stall_neither_block_others_nor_fill_memory(store, directory):
    await store.create_channel("a", PLAIN)
    for _ in range(20):
        await store.append("a", bytes(1024 * 1024))
    half = [await connection(directory) for _ in range(5)]
    for _, writer in half:
        writer.write(b"\0\0")  # half a length, and then nothing
    deaf = []
    for _ in range(5):  # asks for megabytes and reads none of them
        peer = socket.socket(socket.AF_UNIX)
        with socket_path(directory) as path:
            peer.connect(path)
        peer.sendall(pack(["read", "a", ["earliest"], None, 0.0]) * 20)
        deaf.append(peer)
    client = BlockingClient(directory, timeout_s=10)
    sizes = await asyncio.to_thread(lambda: [len(e.payload) for batch in client.read("a") for e in batch])
    assert sizes == [1024 * 1024] * 20
    client.close()
    for _, writer in half:
        writer.close()
        await writer.wait_closed()
    for peer in deaf:
        peer.close()


async def test_too_many_connections_are_turned_away(store, directory, monkeypatch):
    monkeypatch.setattr("tidewal.adapters.rocksmq.server.MAX_CONNECTIONS", 3)
    kept = [await connection(directory) for _ in range(3)]
    for reader, writer in kept:
        writer.write(pack(["channels"]))
        assert await answer_of(reader) == []
    reader, writer = await connection(directory)
    with pytest.raises(Overloaded):
        await asyncio.wait_for(answer_of(reader), 5)
    for _, each in [*kept, (reader, writer)]:
        each.close()
        await each.wait_closed()


async def test_a_long_poll_ends_with_nothing_when_nothing_comes(store, directory):
    await store.create_channel("a", PLAIN)
    reader, writer = await connection(directory)
    writer.write(pack(["read", "a", ["latest"], None, 0.001]))
    assert await asyncio.wait_for(answer_of(reader), 5) == [[], (1).to_bytes(8, "big"), None]
    writer.close()
    await writer.wait_closed()
