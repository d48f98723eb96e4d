"""Writes that wait at a door: in the order of their clients, none lost, none sent twice, and no channel in the way of
another."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.actors.local_owner import LocalOwner
from tidewal.actors.proxy.held_writes import OVERHEAD_BYTES, ROOM_S, HeldWrites
from tidewal.runtime.errors import DeadlineExceeded, DiskFull, Overloaded, TidewalError
from tidewal.runtime.ownership import Appended
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual

MEMORY = pytest.mark.asyncio(loop_factories=["memory"])
LIMIT_BYTES = 100 * OVERHEAD_BYTES
CHANNELS = ("a", "b", "c")
OPEN = dict.fromkeys(CHANNELS, 1000)


@dataclass
class Door:
    """Sends numbered writes, as the Proxy does, to an owner that notes what it gets."""

    refusal: TidewalError | None = None  # of the owner
    sent: list[int] = field(default_factory=list)
    answers: dict[int, Appended | TidewalError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owner = LocalOwner()
        self.owner.join(self)
        self.held = HeldWrites(self.owner, LIMIT_BYTES)
        self.running = asyncio.ensure_future(self.held.run())
        self.tasks: list[asyncio.Task[None]] = []

    def open(self, *channels: str) -> None:
        self.owner.open({channel: OPEN[channel] for channel in channels})

    def write(self, number: int, channels: str, producer: str = "p", size: int = 1, deadline_s: float = 30.0) -> None:
        self.tasks.append(asyncio.ensure_future(self._write(number, set(channels), producer, size, deadline_s)))

    async def _write(self, number: int, channels: set[str], producer: str, size: int, deadline_s: float) -> None:
        def send() -> asyncio.Future[Appended]:
            assert self.owner.is_open(channels)
            if self.refusal is not None:
                raise self.refusal
            self.sent.append(number)
            future = asyncio.get_running_loop().create_future()
            future.set_result(Appended(number, 1, repeated=False))
            return future

        try:
            if self.held.must_wait(producer, channels):
                appended = await self.held.hold(producer, channels, size, send, deadline_s=deadline_s)
            else:
                appended = send()
            answer: Appended | TidewalError = await appended
        except TidewalError as error:
            answer = error
        assert number not in self.answers
        self.answers[number] = answer

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(*self.tasks)
        with suppress(asyncio.CancelledError):
            await self.running
        assert not self.held._writes
        assert not self.held._lines
        assert not any(self.held._bytes.values())


@pytest.fixture
async def door(home) -> Door:
    return Door()


@MEMORY
async def test_writes_of_one_producer_keep_their_order_on_each_channel(door) -> None:
    door.open("b")
    door.write(1, "a")
    door.write(2, "ab")
    door.write(3, "b")  # would pass 2
    door.write(4, "b", producer="another")
    door.write(5, "c")
    await elapse(1)
    assert door.sent == [4]
    door.open("c")
    await elapse(1)
    assert door.sent == [4, 5]
    door.open("a")
    await elapse(1)
    assert door.sent == [4, 5, 1, 2, 3]
    await door.end()


@MEMORY
async def test_a_write_waits_whichever_of_its_channels_has_an_earlier_one(door) -> None:
    door.open("b", "c")
    door.write(1, "ab", producer="p")
    door.write(2, "bc", producer="p")
    door.write(3, "ac", producer="q")
    door.write(4, "bc", producer="q")
    door.open("b")  # a change
    await elapse(1)
    assert door.sent == []
    door.open("a")
    await elapse(1)
    assert door.sent == [1, 2, 3, 4]
    await door.end()


@MEMORY
async def test_a_write_that_comes_as_the_channels_are_opened_overtakes_none_that_waited(door) -> None:
    for number in range(3):
        door.write(number, "a")
    await elapse(1)
    asyncio.get_running_loop().call_soon(door.open, "a")
    for number in range(3, 6):
        door.write(number, "a")
    await elapse(1)
    assert door.sent == list(range(6))
    await door.end()


@MEMORY
async def test_a_dead_channel_does_not_fill_the_bounds_of_healthy_ones(door) -> None:
    door.held._limit_bytes = 3 * (OVERHEAD_BYTES + 1)
    door.open("b")
    for number in range(3):
        door.write(number, "ab", deadline_s=5)
    for number in range(3, 6):
        door.write(number, "b", deadline_s=5)  # behind them, on account of a
    await elapse(1)
    for number, error in door.answers.items():
        assert isinstance(error, Overloaded), number
        assert (error.limit, error.fields["channel"]) == ("streamingNode.maxInflightBytes", "a")
    assert door.answers.keys() == {3, 4, 5}
    door.owner.close(["b"])
    for number in range(6, 9):
        door.write(number, "b", producer="another", deadline_s=5)
    await elapse(1)
    assert door.answers.keys() == {3, 4, 5}, "b has its whole bound"
    door.open("b")
    await elapse(1)
    assert door.sent == [6, 7, 8]
    await elapse(5)
    assert all(isinstance(door.answers[number], DeadlineExceeded) for number in range(3))
    await door.end()


@MEMORY
async def test_a_write_whose_deadline_passes_is_not_sent_and_lets_the_next_go(door) -> None:
    door.open("b")
    door.write(1, "ab", deadline_s=2)
    for number in (2, 3, 4):
        door.write(number, "b")
    await elapse(3)
    error = door.answers[1]
    assert isinstance(error, DeadlineExceeded)
    assert "certainly not written" in error.message
    assert error.fields["outcome_unknown"] is False
    assert door.sent == [2, 3, 4]
    door.open("a")
    await elapse(1)
    assert door.sent == [2, 3, 4]
    await door.end()


@MEMORY
async def test_a_held_write_for_which_the_owner_has_no_room_keeps_its_turn(door) -> None:
    door.write(1, "a", size=1000)
    door.write(2, "a")
    door.write(3, "a", producer="another", deadline_s=2)
    await elapse(1)
    door.refusal = Overloaded("no room", limit="x")
    door.open("a")
    await elapse(2)
    assert door.sent == []
    assert isinstance(door.answers[3], DeadlineExceeded)
    assert "no room" in door.answers[3].message
    door.refusal = None
    door.write(4, "a")
    await elapse(2 * ROOM_S)
    assert door.sent == [1, 2, 4]
    await door.end()


@MEMORY
async def test_a_held_write_that_the_owner_refuses_is_answered_with_that_and_the_next_goes_on(door) -> None:
    door.write(1, "a")
    await elapse(1)
    door.refusal = DiskFull("no space")
    door.open("a")
    await elapse(1)
    assert door.answers[1] is door.refusal
    door.refusal = None
    door.write(2, "a")
    await elapse(1)
    assert door.sent == [2]
    await door.end()


@MEMORY
async def test_a_write_that_is_cancelled_is_not_sent_and_lets_the_next_go(door) -> None:
    door.write(1, "a")
    door.write(2, "a")
    await elapse(1)
    door.tasks.pop(0).cancel()
    door.open("a")
    await elapse(1)
    assert door.sent == [2]
    await door.end()


@MEMORY
async def test_what_the_end_of_an_owner_closes_waits_for_the_next(door) -> None:
    door.open("a")
    door.owner.leave(door)
    door.write(1, "a")
    door.owner.leave(object())  # a late one, that is not this one's business
    await elapse(1)
    door.owner.join(door)
    await elapse(1)
    assert door.sent == []
    door.open("a")
    await elapse(1)
    assert door.sent == [1]
    await door.end()


@pytest.mark.slow
@MEMORY
async def test_thousands_of_held_writes_go_in_order_without_a_depth_of_calls(door) -> None:
    door.held._limit_bytes = 10_000 * (OVERHEAD_BYTES + 1)
    for number in range(5000):
        door.write(number, "a")
    await elapse(1)
    door.open("a")
    await elapse(1)
    assert door.sent == list(range(5000))
    await door.end()


WRITES = st.tuples(
    st.just("write"),
    st.sampled_from(["p", "q"]),
    st.sampled_from(["a", "b", "c", "ab", "bc", "ca", "abc"]),
    st.sampled_from([30.0, 0.5]),
)
CHANGES = st.tuples(st.sampled_from(["open", "close"]), st.sampled_from(CHANNELS))
OTHERS = st.sampled_from([("turn",), ("wait", 0.01), ("wait", 0.6), ("full",), ("room",), ("end",)])
STEPS = st.lists(st.one_of(WRITES, CHANGES, WRITES, CHANGES, OTHERS), min_size=12, max_size=40)


@given(STEPS)
@settings(deadline=None, max_examples=300)
def test_over_any_openings_and_closings_order_is_kept_and_each_write_is_answered_once(steps) -> None:
    run_virtual(_play(steps), VirtualClock())


async def _play(steps) -> None:
    door, lines, refused = Door(), defaultdict(list), Overloaded("no room", limit="x")
    for number, step in enumerate(steps):
        match step:
            case ("write", producer, channels, deadline_s):
                door.write(number, channels, producer, deadline_s=deadline_s)
                for channel in channels:
                    lines[producer, channel].append(number)
                await asyncio.sleep(0)  # so that they arrive in this order
            case ("open", channel):
                door.open(channel)
            case ("close", channel):
                door.owner.close([channel])
            case ("wait", seconds):
                await elapse(seconds)
            case ("full",):
                door.refusal = refused
            case ("room",):
                door.refusal = None
            case ("turn",):
                await asyncio.sleep(0)
            case ("end",):
                door.owner.leave(door)
                door.owner.join(door)
    door.refusal = None
    door.open(*CHANNELS)
    await elapse(1)
    await door.end()
    written = {number for number, answer in door.answers.items() if isinstance(answer, Appended)}
    assert len(door.answers) == len([step for step in steps if step[0] == "write"])
    assert sorted(door.sent) == sorted(written), "what is answered as written was sent, once, and nothing else"
    for answer in door.answers.values():
        assert isinstance(answer, (Appended, DeadlineExceeded)) or answer is refused
    for numbers in lines.values():
        assert [number for number in door.sent if number in numbers] == [n for n in numbers if n in written]
