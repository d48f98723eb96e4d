"""Writes at a door over any fate of the owners: in order, each answered once, and none waits without a reason."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.test_write_lines import CHANNELS, Door
from tidewal.actors.proxy.write_lines import OVERHEAD_BYTES, ROOM_S
from tidewal.actors.write_requests import SendAgain
from tidewal.runtime.errors import DeadlineExceeded, Overloaded
from tidewal.runtime.ownership import Appended
from tidewal.runtime.testing.clock import VirtualClock, elapse, run_virtual


class Owned(Door):
    """A door to owners of three channels, each with an owner of its own: what it gets lies in its inbox until it takes
    it into its channel, in order, and refuses it, or crashes. A batch is done once it is in all its channels."""

    def __post_init__(self) -> None:
        self.limit_bytes = 5 * OVERHEAD_BYTES
        super().__post_init__()
        self.slow = True
        self.full = Overloaded("no room", limit="x")
        self.batches: dict[int, tuple[str, set[str]]] = {}  # producer and channels
        self.deadlines: dict[int, float] = {}
        self.inboxes: dict[str, list[int]] = {channel: [] for channel in CHANNELS}
        self.log: dict[str, list[int]] = {channel: [] for channel in CHANNELS}
        self.at_owner: dict[int, dict[str, object]] = {}  # the channels' terms, under which it was sent
        self.silent: dict[int, bool] = {}  # of ended owners that the door has not heard of: whether it may be written

    def write(self, number: int, channels: str, producer: str = "p", size: int = 1, deadline_s: float = 30.0) -> None:
        self.batches[number] = producer, set(channels)
        self.deadlines[number] = asyncio.get_running_loop().time() + deadline_s
        super().write(number, channels, producer, size, deadline_s)

    def gone(self, number: int) -> bool:
        """Whether its caller was cancelled."""
        return bool(self.tasks[number].cancelling())

    def known(self, number: int) -> bool:
        """Whether the door knows its outcome, or has dropped it."""
        if number in self.at_owner:
            ended = self.appends[number].done()
        else:
            ended = asyncio.get_running_loop().time() > self.deadlines[number] - 1e-6  # timers have a resolution
        return ended or number in self.answers or self.gone(number)

    def pending_before(self, number: int) -> Iterator[tuple[int, str]]:
        """The earlier writes without an outcome, each with a channel of a line that it shares with this one."""
        producer, channels = self.batches[number]
        for earlier, (other, theirs) in self.batches.items():
            if earlier < number and other == producer and not self.known(earlier):
                yield from ((earlier, channel) for channel in channels & theirs)

    def lets_pass(self, number: int, channel: str) -> bool:
        terms = self.at_owner.get(number, {}).get(channel)
        return terms is not None and terms == self.owner.terms((channel,))

    def send(self, number: int, producer: str, channels: set[str]) -> asyncio.Future[Appended]:
        assert all(self.lets_pass(*each) for each in self.pending_before(number)), f"{number} passes an earlier one"
        assert number not in self.at_owner, f"{number} is sent while it is with its owner"
        append = super().send(number, producer, channels)
        self.at_owner[number] = {channel: self.owner.terms((channel,)) for channel in channels}
        for channel in channels:
            self.inboxes[channel].append(number)
        return append

    def take(self, channel: str, count: int) -> None:
        """The owner of `channel` takes the first `count` of its inbox into its log."""
        inbox = self.inboxes[channel]
        for number in inbox[:count]:
            if number not in self.log[channel]:  # it recognises a repetition
                self.log[channel].append(number)
            if not self.appends[number].done() and all(number in self.log[each] for each in self.batches[number][1]):
                self.answer(number)
        del inbox[:count]

    def crash(self, channel: str, count: int, *, heard: bool) -> None:
        """The owner of `channel` ends: the first `count` are in its log, and it tells nobody."""
        inbox, self.inboxes[channel] = self.inboxes[channel], []
        for number in inbox[:count]:
            if number not in self.log[channel]:
                self.log[channel].append(number)
        self.owner.close([channel])
        self.lose(inbox, heard=heard)

    def refuse(self, channel: str, count: int) -> None:
        """The owner of `channel` takes `count` of its inbox, and no others."""
        self.take(channel, count)
        inbox, self.inboxes[channel] = self.inboxes[channel], []
        if self.owner.is_open(channel):
            self.open(channel)  # other terms
        self.lose(inbox, heard=True, unknown=False)

    def lose(self, numbers: list[int], *, heard: bool, unknown: bool = True) -> None:
        for number in numbers:
            may_be = unknown or len(self.batches[number][1]) > 1  # by the owner of another of its channels
            self.silent[number] = may_be or self.silent.get(number, False)
        if heard:
            self.hear(numbers)

    def hear(self, numbers: list[int]) -> None:
        for number in numbers:
            if not self.appends[number].done():
                self.at_owner.pop(number)
                self.give_back(number, unknown=self.silent.pop(number))

    def check(self) -> None:
        """All is still: what waits has a reason, and is counted."""
        for number, (_, channels) in self.batches.items():
            if number in self.answers or number in self.at_owner or self.gone(number):
                continue
            closed = not self.owner.is_open(channels)
            behind = not all(self.lets_pass(*each) for each in self.pending_before(number))
            assert closed or behind or self.refusal, f"{number} could go"
        counted = Counter[str]()
        for write in self.lines._waiting:
            counted.update(dict.fromkeys(write.waits_for, write.size))
        assert counted == +self.lines._bytes
        arrived = Counter[str]()
        for write in self.lines._waiting:
            if not isinstance(write.refusal, SendAgain):
                arrived.update(dict.fromkeys(write.waits_for, write.size))
        for channel, size in arrived.items():
            assert size <= max(self.limit_bytes, OVERHEAD_BYTES + 1), channel


WRITES = st.tuples(
    st.just("write"),
    st.sampled_from(["p", "p", "q"]),
    st.sampled_from(["a", "b", "c", "ab", "bc", "ca", "abc"]),
    st.sampled_from([30.0, 30.0, 0.5]),
)
COUNTS = st.integers(0, 3)
CHANGES = st.tuples(st.sampled_from(["open", "open", "close"]), st.sampled_from(CHANNELS))
OWNERS = st.one_of(
    st.tuples(st.sampled_from(["take", "refuse"]), st.sampled_from(CHANNELS), COUNTS),
    st.tuples(st.just("crash"), st.sampled_from(CHANNELS), COUNTS, st.booleans()),
    st.just(("hear",)),
)
OTHERS = st.one_of(
    st.sampled_from([("turn",), ("wait", 0.01), ("wait", 0.6), ("full",), ("room",), ("leave",)]),
    st.tuples(st.just("cancel"), st.integers(0, 40)),
)
STEPS = st.lists(st.one_of(WRITES, WRITES, CHANGES, OWNERS, OWNERS, OTHERS), min_size=12, max_size=40)


@given(STEPS)
@settings(deadline=None, max_examples=400)
def test_over_any_fate_of_the_owners_order_is_kept_and_each_write_is_answered_once(steps) -> None:
    run_virtual(_play(steps), VirtualClock())


async def _play(steps) -> None:
    door = Owned()
    door.open(*CHANNELS)
    for number, step in enumerate(steps):
        await _do(door, number, step)
    door.refusal = None
    door.hear(list(door.silent))
    door.open(*CHANNELS)
    for _ in range(3):  # what is taken lets those behind it go
        await elapse(2 * ROOM_S)
        for channel in CHANNELS:
            door.take(channel, len(steps))
    await elapse(2 * ROOM_S)
    _judge(door, steps)
    await door.end()


async def _do(door: Owned, number: int, step) -> None:
    match step:
        case ("write", producer, channels, deadline_s):
            door.write(number, channels, producer, deadline_s=deadline_s)
            await asyncio.sleep(0)  # so that they arrive in this order
        case ("open", channel):
            if not door.owner.is_open(channel):
                door.open(channel)
        case ("close", channel):  # for a moment: its owner takes what it has
            door.owner.close([channel])
        case ("take", channel, count):
            door.take(channel, count)
        case ("refuse", channel, count):
            door.refuse(channel, count)
        case ("crash", channel, count, heard):
            door.crash(channel, count, heard=heard)
        case ("hear",):
            door.hear(list(door.silent))
        case ("leave",):
            door.owner.leave(door)
            door.owner.join(door)
        case ("wait", seconds):
            await elapse(seconds)
            if seconds > 2 * ROOM_S:
                door.check()
        case ("full",):
            door.refusal = door.full
        case ("room",):
            door.refusal = None
        case ("turn",):
            await asyncio.sleep(0)
        case ("cancel", which):
            if which in door.tasks:
                door.tasks[which].cancel()


def _judge(door: Owned, steps) -> None:
    lines: dict[tuple[str, str], list[int]] = defaultdict(list)
    for channel, numbers in door.log.items():
        assert len(set(numbers)) == len(numbers)
        for number in numbers:
            lines[door.batches[number][0], channel].append(number)
    for line, numbers in lines.items():
        assert numbers == sorted(numbers), line
    for number, (_, channels) in door.batches.items():
        answer = door.answers.get(number)
        in_log = [number in door.log[channel] for channel in channels]
        if answer is None:
            assert door.tasks.pop(number).cancelled(), f"{number} hangs"
        elif isinstance(answer, Appended):
            assert all(in_log), f"{number} is acknowledged"
        elif not answer.outcome_unknown:
            assert not any(in_log), f"{number} is not written"
            assert isinstance(answer, DeadlineExceeded | Overloaded)
        else:
            assert isinstance(answer, DeadlineExceeded)
            assert steps[number][3] < 30, f"{number} had time"
