"""A stream developer: topics, a group of workers, results exactly once, and no broker to run. The core alone."""

from __future__ import annotations

import json
import signal

import pytest

from tests.first_hour.stranger import Stranger, example

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.in_turn(2, 3)]

WORDS = 3000
CORE_BYTES = 80 * 10**6  # the environment less what `venv` itself puts there
OF_VENV = ("pip", "setuptools", "_distutils_hack", "distutils-precedence")

WORKER = """
import asyncio
import sys
import tidewal


async def main():
    log = await tidewal.open_wal("rocksmq://./stream")
    member = await log.join("measuring", ["words-*"], start=tidewal.From.EARLIEST)
    print("joined", flush=True)

    async def measure(delivered):
        await asyncio.sleep(0.02)  # as real work would
        print(len(delivered.entries), flush=True)
        return [tidewal.Append("lengths", bytes(entry.payload).rpartition(b" ")[2]) for entry in delivered.entries]

    await tidewal.process(log, member, measure, tidewal.Semantics.EXACTLY_ONCE)


asyncio.run(main())
"""

MAKE = f"""
import asyncio
import tidewal


async def main():
    async with await tidewal.open_wal("rocksmq://./stream") as log:
        for name in ("words-0", "words-1", "lengths"):
            await log.create_channel(name, tidewal.ChannelPolicy())
        for number in range(0, {WORDS}, 50):
            batch = [tidewal.Append(f"words-{{each % 2}}", b"word %d" % each) for each in range(number, number + 50)]
            await log.append_many(batch)


asyncio.run(main())
"""

READ = f"""
import asyncio
import json
import tidewal


async def main():
    async with await tidewal.open_wal("rocksmq://./stream", own=False) as log:
        found = []
        reader = log.read("lengths", tidewal.From.EARLIEST)
        async for entries in reader:
            found += [int(bytes(entry.payload)) for entry in entries]
            if len(found) >= {WORDS}:
                break
        await reader.aclose()
        await asyncio.sleep(1)  # what comes twice would come now
        last = await log.latest_id("lengths")
        print(json.dumps([len(found), len(set(found)), entries[-1].id == last]))


asyncio.run(main())
"""


def installed_bytes(stranger: Stranger) -> int:
    (packages,) = (stranger.folder / "env" / "lib").glob("python3*/site-packages")
    added = [each for each in packages.iterdir() if not each.name.startswith(OF_VENV)]
    return sum(file.stat().st_size for each in added for file in (each, *each.rglob("*")) if file.is_file())


def test_a_worker_is_killed_and_each_word_is_measured_once(stranger: Stranger) -> None:
    stranger.reads("README.md", "Tidewal")
    stranger.installs("tidewal")
    assert stranger.types("python -c 'import tidewal, sys; print(len(sys.modules) < 500)'") == "True\n"
    assert "pyarrow" not in stranger.types("pip list")
    assert installed_bytes(stranger) <= CORE_BYTES

    page = stranger.reads("docs/streams.md", "A log and its channels", "Plain streams")
    stranger.writes("plain.py", example(page, "as_consumer"), typed=False)
    assert stranger.types("python plain.py") == "[(b'door', b'opened')]\n"
    page = stranger.reads("docs/groups.md", "What is promised", "Exactly once")
    stranger.writes("lengths.py", example(page, "commit("), typed=False)
    assert stranger.types("python lengths.py") == "[4, 3, 3]\n"

    stranger.writes("make.py", MAKE)
    stranger.types("python make.py")
    stranger.writes("worker.py", WORKER)
    first = stranger.starts("python -u worker.py")
    first.until("joined")
    second = stranger.starts("python -u worker.py")
    second.until("joined")
    first.until("\n")  # it owns the log and works
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    stranger.writes("read.py", READ)
    assert json.loads(stranger.types("python read.py")) == [WORDS, WORDS, True]
    assert "measuring" in stranger.types("tidewal groups list stream")
    second.end()
