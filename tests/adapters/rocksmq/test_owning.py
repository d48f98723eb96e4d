"""One process owns a directory; what prevents it is reported by type. Kill -9 loses nothing acknowledged."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys

import pytest
import uvloop

from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.adapters.rocksmq.index import index
from tidewal.adapters.rocksmq.log_directory import named_directory
from tidewal.runtime.errors import ConfigError, DirectoryInUse, DirectoryUnwritable, FormatTooNew
from tidewal.runtime.log.wal import ChannelPolicy, Durability, From

PLAIN = ChannelPolicy()


async def test_the_error_for_a_second_owner_names_the_first(open_rocksmq, tmp_path):
    store = await open_rocksmq()
    with pytest.raises(DirectoryInUse) as caught:
        await open_wal(f"rocksmq://{tmp_path}/log", own=True, failover_s=0)
    assert caught.value.pid == os.getpid()
    await store.close()
    await open_rocksmq()


async def test_a_newer_format_is_refused_untouched(open_rocksmq, tmp_path):
    await (await open_rocksmq()).close()
    (tmp_path / "log" / "FORMAT").write_text("tidewal rocksmq 2\n")
    with pytest.raises(FormatTooNew) as caught:
        await open_rocksmq()
    assert (caught.value.found, caught.value.supported) == (2, 1)
    assert (tmp_path / "log" / "FORMAT").read_text() == "tidewal rocksmq 2\n"


async def test_a_newer_segment_is_refused(open_rocksmq, tmp_path, monkeypatch):
    monkeypatch.setattr("tidewal.adapters.rocksmq.journal.segments.VERSION", 2)
    await (await open_rocksmq()).close()
    monkeypatch.undo()
    with pytest.raises(FormatTooNew):
        await open_rocksmq()


async def test_a_path_below_a_file_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DirectoryUnwritable) as caught:
        await RocksMQ.open(str(tmp_path / "file" / "log"))
    assert caught.value.path == str(tmp_path / "file" / "log")


async def test_another_programs_directory_is_left_alone(tmp_path):
    (tmp_path / "FORMAT").write_text("something else\n")
    with pytest.raises(DirectoryUnwritable):
        await RocksMQ.open(str(tmp_path))


@pytest.mark.slow
async def test_a_fresh_directory_is_small_and_no_file_stays_open(tmp_path, helpers):
    uvloop.new_event_loop().close()  # a process's first one opens a pipe for good
    gc.collect()  # what other tests have left is not closed meanwhile
    before = len(os.listdir("/dev/fd"))
    store = await RocksMQ.open(str(tmp_path / "log"))
    await store.create_channel("a", PLAIN)
    await store.append("a", b"x")
    await helpers.until(lambda: store._segments.ready)
    size = sum(
        os.stat(os.path.join(root, name)).st_blocks * 512 for root, _, names in os.walk(tmp_path) for name in names
    )
    await store.close()
    assert size <= 128 * 1024 * 1024
    assert len(os.listdir("/dev/fd")) <= before
    assert not (tmp_path / "log" / "socket").exists()


def test_urls():
    assert named_directory("rocksmq:///var/lib/x%20y") == "/var/lib/x y"
    assert named_directory("rocksmq://./rel/path") == os.path.abspath("rel/path")
    for url in ("rocksmq://host/path", "rocksmq:///", "kafka:///x"):
        with pytest.raises(ConfigError):
            named_directory(url)


@pytest.mark.parametrize("policy", [ChannelPolicy(ephemeral=True), ChannelPolicy(acks=Durability.NONE)])
async def test_ids_of_forgetful_channels_grow_over_incarnations(open_rocksmq, policy):
    last = b""
    for _ in range(3):
        store = await open_rocksmq()
        await store.create_channel("e", policy)
        for _ in range(3):
            id = await store.append("e", b"x")
            assert id > last
            last = id
        await store.close()


CHILD = """
import asyncio, sys
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.wal import ChannelPolicy

async def produce(wal, worker):
    number = 0
    while True:
        payload = f"{worker}:{number} ".encode() * 40
        id = await wal.append("a", payload)
        sys.stdout.write(f"{id.hex()} {worker}:{number}\\n")
        sys.stdout.flush()
        number += 1

async def main():
    wal = await RocksMQ.open(sys.argv[1], segment_bytes=256 * 1024, serve=False)
    await wal.create_channel("a", ChannelPolicy())
    await asyncio.gather(*(produce(wal, sys.argv[2] + "." + str(worker)) for worker in range(4)))

asyncio.run(main())
"""


@pytest.mark.slow
async def test_kill_9_loses_nothing_acknowledged_and_ids_only_grow(open_rocksmq, tmp_path, helpers, rng: random.Random):
    acknowledged: dict[bytes, bytes] = {}
    for incarnation in range(4):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(tmp_path / "log"), str(incarnation), stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        highest = max(acknowledged, default=b"")
        for _ in range(rng.randrange(1, 600)):
            line = (await child.stdout.readline()).decode()
            id, text = line.split()
            assert bytes.fromhex(id) > highest
            acknowledged[bytes.fromhex(id)] = (text + " ").encode() * 40
        child.send_signal(signal.SIGKILL)
        rest = (await child.stdout.read()).decode().splitlines()
        await child.wait()
        for line in rest:
            if len(words := line.split()) == 2 and words[1].count(":") == 1 and line != rest[-1]:
                acknowledged[bytes.fromhex(words[0])] = (words[1] + " ").encode() * 40
    store = await open_rocksmq()
    latest = await store.latest_id("a")
    reader, read = store.read("a", From.EARLIEST), {}
    while latest not in read:
        read.update((entry.id, bytes(entry.payload)) for entry in await anext(reader))
    assert acknowledged.items() <= read.items()
    assert len(set(read.values())) == len(read)


async def test_a_log_whose_index_cannot_be_made_opens_and_frees_the_directory(open_rocksmq, monkeypatch):
    def refuse(*_):
        raise Exception("IO error: No space left on device: While appending to file")  # as rocksdict puts it

    with monkeypatch.context() as patch:
        patch.setattr(index.rocksdict, "Rdict", refuse)
        store = await open_rocksmq()
        await store.create_channel("a", ChannelPolicy())
        id = await store.append("a", b"x")
        await store.close()
    store = await open_rocksmq()
    assert await store.latest_id("a") == id
