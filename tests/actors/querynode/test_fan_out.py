"""A question to several nodes: each vchannel is answered once, whoever refuses, dies or falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pytest

from tidewal.actors.querynode.fan_out import FanOut
from tidewal.runtime.errors import HandlerFailed, InvalidFilter, Lagging, MemoryLimitExceeded, TidewalError, Unavailable
from tidewal.runtime.testing.clock import VirtualClock, VirtualLoop


def loop() -> asyncio.AbstractEventLoop:
    return VirtualLoop(VirtualClock())


class World:
    """Nodes that have vchannels, refuse with an error, or never answer."""

    def __init__(self, has: Mapping[str, str], *, silent: str = "", late: str = "") -> None:
        self.has, self.silent, self.late = has, silent, late
        self.errors: dict[str, TidewalError] = {}
        self.asked: list[tuple[str, str]] = []

    async def ask(self, node: str, vchannels: Sequence[str]) -> Mapping[str, pa.Table]:
        self.asked.append((node, "".join(vchannels)))
        if node in self.silent:
            await asyncio.Event().wait()
        if node in self.late:
            await asyncio.sleep(1)
        if node in self.errors:
            raise self.errors[node]
        return {each: pa.table({"by": [node]}) for each in vchannels if each in self.has[node]}

    async def is_lost(self, node: str) -> bool:
        return node in self.silent

    async def answers(self, orders: Mapping[str, str]) -> list[str]:
        """Which node has answered for each vchannel, where these are the orders."""
        tables = await FanOut(list(orders), lambda vchannel: list(orders[vchannel]), self.ask, self.is_lost).run()
        return [table["by"][0].as_py() for table in tables]


async def run(world: World, orders: Mapping[str, str]) -> list[str]:
    async with asyncio.timeout(30):
        return await world.answers(orders)


def on_virtual_time(world: World, orders: Mapping[str, str]) -> list[str]:
    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(run(world, orders))


def test_each_vchannel_is_asked_of_the_first_node_that_has_it() -> None:
    world = World({"a": "vx", "b": "w", "c": ""})
    assert on_virtual_time(world, {"v": "abc", "w": "cba", "x": "abc"}) == ["a", "b", "a"]
    assert world.asked == [("a", "vx"), ("c", "w"), ("b", "w")]


def test_one_that_is_silent_is_followed_by_another_and_its_late_answer_counts_for_nothing() -> None:
    world = World({"a": "vw", "b": "vw"}, silent="a")
    assert on_virtual_time(world, {"v": "ab", "w": "ba"}) == ["b", "b"]
    world = World({"a": "vw", "b": "vw"}, late="a")
    assert on_virtual_time(world, {"v": "ab", "w": "ba"}) == ["a", "b"]
    assert len(world.asked) == 2, "a slow node that lives is waited for"


def test_a_question_that_two_nodes_do_not_survive_is_asked_of_no_third() -> None:
    world = World(dict.fromkeys("abc", "v"), silent="a")
    world.errors["b"] = HandlerFailed("it crashed")
    with pytest.raises(Unavailable, match="a and b did not survive"):
        on_virtual_time(world, {"v": "abc"})
    assert [node for node, _ in world.asked] == ["a", "b"]


def test_nodes_that_refuse_are_asked_again_and_cost_no_attempt() -> None:
    world = World({"a": "v", "b": "v", "c": ""})
    world.errors["a"] = world.errors["b"] = Lagging("not yet")

    async def recover() -> list[str]:
        asyncio.get_running_loop().call_later(1, world.errors.pop, "b")
        return await run(world, {"v": "abc"})

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(recover()) == ["b"]
    assert len(world.asked) > 6


@pytest.mark.parametrize("error", [InvalidFilter("no"), MemoryLimitExceeded("no room", limit="x")])
def test_what_repeating_does_not_mend_is_raised(error: TidewalError) -> None:
    world = World({"a": "v", "b": ""})
    world.errors["a"] = error
    with pytest.raises(type(error)):
        on_virtual_time(world, {"v": "ab"})
