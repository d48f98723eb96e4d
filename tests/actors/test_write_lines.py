"""Writes at a door: in the order of their clients, also over owners that end; none lost, none written twice, and no
channel in the way of another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from tests.actors.nodes import role_of
from tidewal.actors.local_owner import LocalOwner
from tidewal.actors.proxy.write_lines import OVERHEAD_BYTES, ROOM_S, WriteLines
from tidewal.actors.write_requests import SendAgain
from tidewal.runtime.errors import DeadlineExceeded, DiskFull, Overloaded, TidewalError, Unavailable
from tidewal.runtime.ownership import Appended
from tidewal.runtime.testing.clock import elapse
from tidewal.runtime.testing.faults import FaultPlan, Rates

MEMORY = pytest.mark.asyncio(loop_factories=["memory"])
LIMIT_BYTES = 100 * OVERHEAD_BYTES
CHANNELS = ("a", "b", "c")
OPEN = dict.fromkeys(CHANNELS, 1000)


@dataclass
class Door:
    """Sends numbered writes, as the Proxy does, to an owner that notes what it gets, and answers at once unless it is
    `slow`."""

    refusal: TidewalError | None = None  # of the owner
    slow: bool = False
    limit_bytes: int = LIMIT_BYTES
    sent: list[int] = field(default_factory=list)
    appends: dict[int, asyncio.Future[Appended]] = field(default_factory=dict)  # the last one of each write
    answers: dict[int, Appended | TidewalError] = field(default_factory=dict)
    set_aside: int = 0

    def __post_init__(self) -> None:
        self.owner = LocalOwner()
        self.owner.join(self)
        self.lines = WriteLines(self.owner, self.limit_bytes, while_waiting=self.waiting)
        self.running = asyncio.ensure_future(self.lines.run())
        self.tasks: dict[int, asyncio.Task[None]] = {}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.set_aside += 1
        try:
            yield
        finally:
            self.set_aside -= 1

    def open(self, *channels: str) -> None:
        self.owner.open({channel: OPEN[channel] for channel in channels})

    def write(self, number: int, channels: str, producer: str = "p", size: int = 1, deadline_s: float = 30.0) -> None:
        self.tasks[number] = asyncio.ensure_future(self._write(number, set(channels), producer, size, deadline_s))

    async def _write(self, number: int, channels: set[str], producer: str, size: int, deadline_s: float) -> None:
        def send() -> asyncio.Future[Appended]:
            assert self.owner.is_open(channels)
            return self.send(number, producer, channels)

        try:
            answer: Appended | TidewalError = await self.lines.write(
                producer, channels, size, send, deadline_s=deadline_s
            )
        except TidewalError as error:
            answer = error
        assert number not in self.answers
        self.answers[number] = answer

    def send(self, number: int, producer: str, channels: set[str]) -> asyncio.Future[Appended]:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append(number)
        append = self.appends[number] = asyncio.get_running_loop().create_future()
        if not self.slow:
            self.answer(number)
        return append

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.appends[number].set_result(Appended(number, 1, repeated=False))

    def give_back(self, *numbers: int, unknown: bool = True) -> None:
        for number in numbers:
            self.appends[number].set_exception(SendAgain("the owner has ended", outcome_unknown=unknown))

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(*self.tasks.values())
        with suppress(asyncio.CancelledError):
            await self.running
        assert not self.lines._waiting
        assert not self.lines._lines
        assert not any(self.lines._bytes.values())
        assert not self.set_aside


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
    door.lines._limit_bytes = 3 * (OVERHEAD_BYTES + 1)
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
@pytest.mark.parametrize("refusal", [DiskFull("no space"), Overloaded("too many rows", limit="memory", mark=9)])
async def test_a_held_write_that_the_owner_refuses_is_answered_with_that_and_the_next_goes_on(door, refusal) -> None:
    door.write(1, "a")
    await elapse(1)
    door.refusal = refusal
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
    door.tasks.pop(1).cancel()
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
    door.lines._limit_bytes = 10_000 * (OVERHEAD_BYTES + 1)
    for number in range(5000):
        door.write(number, "a")
    await elapse(1)
    door.open("a")
    await elapse(1)
    assert door.sent == list(range(5000))
    await door.end()


# ---- owners that end ------------------------------------------------------------------------------------------------


@MEMORY
async def test_several_writes_of_a_producer_are_under_way_at_once(door) -> None:
    door.slow = True
    door.open("a", "b")
    for number, channels in enumerate(["a", "ab", "b", "a"]):
        door.write(number, channels)
    await elapse(1)
    assert door.sent == [0, 1, 2, 3]
    assert not door.set_aside, "what is with its owner is being worked on"
    door.answer(3, 1, 0, 2)
    await door.end()


@MEMORY
@pytest.mark.parametrize("unknown", [False, True])
async def test_a_write_that_the_log_refuses_for_certain_is_not_sent_again_behind_a_later_one(door, unknown) -> None:
    door.slow = True
    door.open("a")
    door.write(1, "a")
    door.write(2, "a")
    await elapse(1)
    door.appends[1].set_exception(Unavailable("the log has refused it", outcome_unknown=unknown))
    await elapse(1)
    assert door.sent == ([1, 2, 1] if unknown else [1, 2])
    assert isinstance(door.answers.get(1), Unavailable) is not unknown
    door.answer(*({1, 2} if unknown else {2}))
    await door.end()


@MEMORY
async def test_a_write_that_is_lost_with_its_owner_is_sent_again_before_those_behind_it(door) -> None:
    door.slow = True
    door.open("a")
    for number in (1, 2, 3):
        door.write(number, "a")
    await elapse(1)
    door.owner.leave(door)
    door.write(4, "a")
    door.write(5, "a", producer="another")
    door.owner.join(door)
    door.open("a")
    await elapse(1)
    assert door.sent == [1, 2, 3, 5], "1 to 3 may be lost, and would come behind 4"
    assert door.set_aside == 1
    door.give_back(3)
    door.give_back(1)
    await elapse(1)
    assert door.sent == [1, 2, 3, 5, 1], "2 may be lost, too"
    door.give_back(2)
    await elapse(1)
    assert door.sent == [1, 2, 3, 5, 1, 2, 3, 4]
    door.answer(1, 2, 3, 4, 5)
    await door.end()
    assert all(isinstance(answer, Appended) for answer in door.answers.values())


@MEMORY
async def test_a_write_whose_last_owner_answers_late_lets_the_next_go_then(door) -> None:
    door.slow = True
    door.open("a", "b")
    door.write(1, "ab")
    await elapse(1)
    door.owner.close(["a"])
    door.open("a")
    door.write(2, "a")
    door.write(3, "b")
    await elapse(1)
    assert door.sent == [1, 3], "b has its owner still"
    door.answer(1)
    await elapse(1)
    assert door.sent == [1, 3, 2]
    door.answer(2, 3)
    await door.end()


@MEMORY
async def test_a_write_that_is_given_back_again_and_again_is_sent_again_in_a_while(door) -> None:
    door.slow = True
    door.open("a")
    door.write(0, "a")
    await elapse(1)
    door.give_back(0, unknown=False)
    await elapse(0.001)
    assert door.sent == [0, 0], "at once, the first time"
    for number in range(1, 5):
        before = list(door.sent)
        door.give_back(0, unknown=False)
        await elapse(ROOM_S / 2)
        door.write(number, "a")
        await elapse(0.001)
        assert door.sent == before
        await elapse(ROOM_S)
        assert door.sent == [*before, 0, number]
    door.answer(*range(5))
    await door.end()


@MEMORY
async def test_what_the_present_owner_gives_back_goes_to_it_in_the_order_of_arrival(door) -> None:
    door.slow = True
    door.open("a")
    for number in (1, 2, 3):
        door.write(number, "a")
    await elapse(1)
    for _ in range(2):
        for number in (2, 3, 1):
            door.give_back(number)
        await elapse(2 * ROOM_S)
    assert door.sent[-3:] == [1, 2, 3]
    door.answer(1, 2, 3)
    await door.end()


@MEMORY
async def test_a_write_that_is_given_back_past_its_deadline_is_not_sent_again(door) -> None:
    door.slow = True
    door.open("a")
    door.write(1, "a", deadline_s=2)
    await elapse(3)
    door.give_back(1)
    await elapse(1)
    assert door.sent == [1]
    assert isinstance(door.answers[1], DeadlineExceeded)
    await door.end()


@pytest.mark.parametrize("unknown", [False, True], ids=["not taken", "unknown"])
@MEMORY
async def test_what_a_late_write_says_of_its_outcome_is_what_its_owners_said(door, unknown) -> None:
    door.slow = True
    door.open("a")
    door.write(1, "a", deadline_s=2)
    door.write(2, "a", deadline_s=2)
    door.write(3, "a", deadline_s=2)
    await elapse(1)
    door.owner.close(["a"])
    door.give_back(1, unknown=unknown)
    await elapse(0.1)
    assert not door.answers
    await elapse(2)
    assert door.answers.keys() == {1}, "the others are with an owner, whose answer may come"
    door.give_back(2, unknown=unknown)
    await elapse(0.1)
    for number in (1, 2):
        error = door.answers[number]
        assert isinstance(error, DeadlineExceeded)
        assert error.outcome_unknown is unknown
        assert ("certainly not written" in error.message) is not unknown
    door.answer(3)
    await door.end()
    assert isinstance(door.answers[3], Appended)


@MEMORY
async def test_an_error_behind_a_sending_that_may_have_been_taken_leaves_the_outcome_unknown(door) -> None:
    door.slow = True
    door.open("a")
    for number in (1, 2, 3):
        door.write(number, "a")
    await elapse(1)
    door.owner.close(["a"])
    door.give_back(1, 2)
    door.give_back(3, unknown=False)
    await elapse(1)
    door.refusal = DiskFull("no space")
    door.open("a")
    await elapse(1)
    assert [type(door.answers[number]) for number in (1, 2, 3)] == [DiskFull] * 3
    assert [door.answers[number].outcome_unknown for number in (1, 2, 3)] == [True, True, None]
    await door.end()


@MEMORY
async def test_a_write_that_may_be_written_keeps_its_place_where_its_next_owner_refuses_it(door) -> None:
    """Its client repeats it: behind the later ones it would be applied after them."""
    door.slow = True
    door.open("a")
    door.write(1, "a")
    await elapse(1)
    door.give_back(1)
    await elapse(1)
    door.appends[1].set_exception(Overloaded("too many rows", limit="memory", mark=9))
    door.write(2, "a")
    await elapse(1)
    assert door.sent == [1, 1, 1, 2]
    door.answer(1, 2)
    await elapse(1)
    assert isinstance(door.answers[1], Appended)
    await door.end()


@MEMORY
async def test_a_write_that_is_given_back_is_not_refused_for_room(door) -> None:
    door.lines._limit_bytes = 2 * (OVERHEAD_BYTES + 1)
    door.slow = True
    door.open("a")
    for number in range(5):
        door.write(number, "a")
    await elapse(1)
    door.owner.close(["a"])
    door.give_back(*range(5))
    await elapse(1)
    door.write(5, "a")
    await elapse(1)
    assert door.answers.keys() == {5}
    assert isinstance(door.answers[5], Overloaded)
    door.slow = False
    door.open("a")
    await elapse(1)
    assert door.sent == [0, 1, 2, 3, 4] * 2
    await door.end()


@MEMORY
async def test_a_write_whose_caller_is_gone_ends_with_its_owner_too_and_lets_the_next_go(door) -> None:
    door.slow = True
    door.open("a")
    door.write(1, "a")
    await elapse(1)
    door.owner.close(["a"])
    door.open("a")
    door.write(2, "a")
    await elapse(1)
    assert door.sent == [1]
    door.tasks.pop(1).cancel()
    await elapse(1)
    assert door.appends[1].cancelled()
    assert door.sent == [1, 2]
    door.answer(2)
    await door.end()


@pytest.mark.slow
@MEMORY
async def test_thousands_of_writes_that_an_owner_gives_back_go_in_order_to_the_next(door) -> None:
    door.slow = True
    door.open("a")
    for number in range(5000):
        door.write(number, "a")
    await elapse(1)
    assert door.sent == list(range(5000))
    door.owner.close(["a"])
    door.give_back(*reversed(range(5000)))
    await elapse(1)
    door.slow = False
    door.open("a")
    await elapse(1)
    assert door.sent[5000:] == list(range(5000))
    await door.end()


@MEMORY
async def test_a_write_that_is_lost_with_the_streamingnode_is_not_passed_by_the_next_of_its_client(home) -> None:
    """Trap 23: the first one is in flight as its owner crashes, the second one waits at the door."""
    home.faults = plan = FaultPlan(1, channels="dml")
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        await client.upsert("people", home.people(1, name="before"))
        plan.rates = Rates(lost=1.0)
        first = asyncio.create_task(client.upsert("people", home.people(1, name="first")))
        await home.until(lambda: role_of(node, "streamingnode")._owner.inflight_bytes)
        await home.until(lambda: role_of(node, "streamingnode")._owner.stalled)
        second = asyncio.create_task(client.upsert("people", home.people(1, name="second")))
        await home.elapse(0.1)
        role_of(node, "streamingnode").crash(RuntimeError("a bug"))
        await home.elapse(0.01)
        plan.rates = Rates()
        assert [written.rows for written in await asyncio.gather(first, second)] == [1, 1]
        assert first.result().ts < second.result().ts
        [row] = (await client.get("people", [1], consistency="strong")).table.to_pylist()
        assert row["name"] == "second"
        assert dict((await client.stats("people", consistency="strong")).versions)["upsert"] == 3
