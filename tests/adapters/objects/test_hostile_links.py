"""Processes that know the secret and send nonsense, or too much, over a link: only they are harmed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.adapters.objects.linked_processes import LinkedProcesses
from tests.adapters.objects.processes import entries_of
from tidewal.adapters.objects.link.link_server import ASKS
from tidewal.adapters.objects.link.messages import pack
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.testing.clock import elapse, run_virtual

HOSTILE: dict[str, object] = {
    "timestamp below 0": [["a"], [[0, -1, b"x"]], []],
    "timestamp with a fraction": [["a"], [[0, 1.5, b"x"]], []],
    "number of zeros": [["a"], [[0, 0, 5]], []],
    "payload of text": [["a"], [[0, 0, "x"]], []],
    "name of none": [[["a"]], [[0, 0, b"x"]], []],
    "names in a map": [{"a": 0}, [[0, 0, b"x"]], []],
    "number of no name": [["a"], [[7, 0, b"x"]], []],
    "id that is none": [[], [], [pack(["truncate", 1, 5])]],
    "hold at a number": [[], [], [pack(["hold", 1, "h", 5])]],
    "channel without a name": [[], [], [pack(["create", "", {}])]],
    "position of a group": [[], [], [pack(["group", 1, "g", b"\xff" * 16, [], False, None])]],
    "all of a group": [[], [], [pack(["forget", "g"])]],
    "run": [[], [], [pack(["compact", 1, 0, [b"", b""]])]],
    "channel without a policy": [[], [], [pack(["create", "b", []])]],
    "none as a policy": [[], [], [pack(["create", "b", None])]],
    "none as a limit of messages": [[], [], [pack(["create", "b", {"max_message_bytes": None}])]],
    "none as a limit of memory": [[], [], [pack(["create", "b", {"ephemeral": True, "ephemeral_bytes": None}])]],
    "text as a limit of time": [[], [], [pack(["create", "b", {"retention_s": "x"}])]],
    "none as the kind of channel": [[], [], [pack(["create", "b", {"ephemeral": None}])]],
    "unknown control": [[], [], [pack(["unknown"])]],
}


@pytest.mark.parametrize("submit", [pytest.param(submit, id=name) for name, submit in HOSTILE.items()])
def test_a_submit_that_is_none_ends_its_link_and_harms_no_other(submit: object) -> None:
    async def main() -> None:
        processes = LinkedProcesses()
        owner = await processes.owner("a")
        await owner.wal.append("a", b"before")
        hostile = await processes.raw_link(owner)
        hostile.write(["submit", 1], pack(submit))
        await elapse(0.001)
        async with asyncio.timeout(20):
            await owner.wal.append("a", b"after")
        assert hostile.ended is not None
        reader = await processes.open()
        assert await entries_of(reader.wal, "a", 2) == [b"before", b"after"]
        assert await reader.wal.channels() == ["a"]
        await processes.close()

    run_virtual(main())


@pytest.mark.parametrize("outputs", [[["a", b"x", -1]], [["a", 5, 0]], [[5, b"x", 0]], [["a"]], [{}], [5]])
def test_outputs_that_are_none_are_refused(outputs: list[Any]) -> None:
    async def main() -> None:
        processes = LinkedProcesses()
        owner = await processes.owner("a")
        hostile = await processes.raw_link(owner)
        with pytest.raises(InvalidRequest):
            await hostile.ask("group.commit", "g", "m", [], outputs)
        await processes.close()

    run_virtual(main())


def test_more_readers_than_questions_may_wait_harm_no_append() -> None:
    async def main() -> None:
        processes = LinkedProcesses()
        owner = await processes.owner("a")
        await owner.wal.create_channel("e", ChannelPolicy(ephemeral=True))
        other = await processes.open()
        readers = [other.wal.read("e", From.EARLIEST) for _ in range(ASKS + 10)]
        reading = [asyncio.ensure_future(anext(reader)) for reader in readers]
        await elapse(5)
        last = await other.wal.append("a", b"x")
        assert await other.wal.latest_id("a") == last
        await owner.wal.append("e", b"y")
        for found in await asyncio.gather(*reading):
            assert [bytes(entry.payload) for entry in found] == [b"y"]
        await processes.close()

    run_virtual(main())
