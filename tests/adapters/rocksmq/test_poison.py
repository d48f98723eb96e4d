"""An entry that kills the process of its handler, again and again: it reaches the limit, and nothing else is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.testing.conformance.helpers import take

ATTEMPTS = 3


@pytest.mark.slow
@pytest.mark.parametrize("semantics", ["at_least_once", "exactly_once"])
async def test_an_entry_that_kills_its_process_becomes_a_dead_letter(tmp_path: Path, semantics: str) -> None:
    directory, payloads = str(tmp_path / "log"), [b"%d" % number for number in range(7)]
    wal = await RocksMQ.open(directory)
    for channel in ("in", "out"):
        await wal.create_channel(channel, ChannelPolicy())
    ids = await wal.append_many([Append("in", each) for each in [*payloads[:3], b"poison", *payloads[3:]]])
    await wal.close()

    killed = 0
    script = Path(__file__).with_name("poison_member.py")
    while True:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), f"rocksmq://{directory}", semantics, str(ATTEMPTS)
        )
        status = await process.wait()
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        assert killed <= ATTEMPTS + 1, "it does not reach the limit"

    wal = await RocksMQ.open(directory)
    (entry,) = await take(wal, GROUP_DEAD_LETTERS, From.EARLIEST, 1)
    letter = decode(entry.payload)
    assert (letter.key, bytes(letter.body)) == (ids[3], b"poison")
    assert (letter.tags["reason"], letter.tags["attempts"]) == ("crash", ATTEMPTS)
    assert await wal.latest_id(GROUP_DEAD_LETTERS) == entry.id
    outputs = [bytes(each.payload) for each in await take(wal, "out", From.EARLIEST, len(payloads))]
    assert outputs == payloads
    assert killed == ATTEMPTS + 1  # once in the batch of all, then alone
    await wal.close()
