"""Retries of `process` over the memory WAL on virtual time: what fails is tried again, in order, and ends somewhere."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import compose
from tidewal.runtime.errors import Fenced, InvalidRequest, Overloaded, TidewalError
from tidewal.runtime.groups.metadata_layers import Layer, unwrap, wrap
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retries import Attempts
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From, FromId
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

AT_LEAST, EXACTLY = Semantics.AT_LEAST_ONCE, Semantics.EXACTLY_ONCE
POLICY = RetryPolicy(attempts=3, seed=1)
WRITTEN_AT = compose(1_000_000)


class Killed(BaseException):
    """Ends the handler and all around it: its process is killed."""


class Hopeless(Exception):
    """No further attempt can help."""


class WithoutRepr(Exception):
    """An error that cannot be shown."""

    def __repr__(self) -> str:
        raise KeyError("message")


class NotUtf8(Exception):
    """An error that shows what is no text."""

    def __repr__(self) -> str:
        return "no file \udc80"


class Log:
    """A memory log with input channels, and what came of it."""

    def __init__(self, *channels: str) -> None:
        self.log = MemoryLog()
        self.wal = MemoryWal(self.log)
        self.channels = channels or ("in",)

    async def create(self) -> None:
        for channel in (*self.channels, "out"):
            await self.wal.create_channel(channel, ChannelPolicy())

    async def write(self, *payloads: bytes, channel: str = "in") -> list[bytes]:
        return await self.wal.append_many([Append(channel, payload, WRITTEN_AT) for payload in payloads])

    async def crash(self, member) -> None:
        """Let the process of a member end as by SIGKILL: nothing that it does from now on counts."""
        self.log.groups.coordinator.leave("g", member.id)
        await member.aclose()

    def outputs(self) -> list[bytes]:
        return [bytes(entry.payload) for entry in self.log.channels["out"].entries]

    def letters(self) -> list:
        entries = self.log.channels[GROUP_DEAD_LETTERS].entries
        return [decode(entry.payload) for entry in entries]

    def lettered(self) -> list[bytes]:
        return [bytes(letter.body) for letter in self.letters()]


def outputs_of(delivered):
    return [Append("out", bytes(entry.payload)) for entry in delivered.entries]


class Script:
    """A handler that fails as the payloads say: `good`, or `KIND:TIMES:…`."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.calls: Counter[bytes] = Counter()
        self.seen: defaultdict[str, list[bytes]] = defaultdict(list)
        self.member = None

    async def __call__(self, delivered):
        for entry in delivered.entries:
            payload = bytes(entry.payload)
            self.calls[payload] += 1
            kind, times, *_ = [*payload.split(b":"), b"0"]
            if self.calls[payload] <= int(times):
                match kind:
                    case b"fail":
                        raise ArithmeticError(payload.decode())
                    case b"hopeless":
                        raise Hopeless
                    case b"busy":
                        raise Overloaded("a while", limit="x")
                    case b"kill":
                        await self.log.crash(self.member)
                        raise Killed
                    case b"cancel":
                        raise asyncio.CancelledError
        self.seen[delivered.channel] += [entry.id for entry in delivered.entries]
        return outputs_of(delivered)


async def drain(log: Log, script: Script, semantics: Semantics, policy: RetryPolicy, **options) -> None:
    """Process until the group is at the end of all channels, with another member after every end."""
    while True:
        script.member = await log.wal.join("g", list(log.channels))
        working = asyncio.create_task(process(log.wal, script.member, script, semantics, retry=policy, **options))
        done = asyncio.create_task(at_end(log))
        await asyncio.wait({working, done}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            break
        done.cancel()
        with suppress(Killed, asyncio.CancelledError):
            await working
        await script.member.aclose()
    await script.member.aclose()
    await working


async def at_end(log: Log) -> None:
    ends = {channel: await log.wal.latest_id(channel) for channel in log.channels}
    while True:
        (info,) = await log.wal.groups()
        if all(end is None or info.positions.get(channel) == end for channel, end in ends.items()):
            return
        await elapse(0.05)


def run(main) -> None:
    async def within() -> None:
        async with asyncio.timeout(100_000):
            await main

    run_virtual(within())


KINDS = st.sampled_from([b"good", b"good", b"good", b"fail", b"busy", b"kill", b"hopeless", b"cancel"])
ENTRY = st.tuples(KINDS, st.sampled_from([1, 2, 3, 4, 1000]), st.sampled_from(["in-1", "in-2"]))


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [AT_LEAST, EXACTLY])
@settings(max_examples=100)
@given(st.lists(ENTRY, max_size=12), st.integers(1, 4))
def test_each_entry_ends_as_an_output_or_as_a_letter(semantics, entries, attempts):
    log = Log("in-1", "in-2")
    script = Script(log)
    policy = RetryPolicy(attempts=attempts, permanent=(Hopeless,), seed=3)
    written: dict[str, list[bytes]] = {}
    payloads: list[bytes] = []

    async def main():
        await log.create()
        for number, (kind, times, channel) in enumerate(entries):
            limited = min(times, 6) if kind in (b"busy", b"cancel") else times  # they never count: they have to end
            payloads.append(b"%b:%d:%d" % (kind, limited, number))
            written.setdefault(channel, []).extend(await log.write(payloads[-1], channel=channel))
        await drain(log, script, semantics, policy)

    run(main())
    outputs, letters = Counter(log.outputs()), Counter(log.lettered())
    for payload in payloads:
        kind, times, _ = payload.split(b":")
        lost = kind in (b"fail", b"kill", b"hopeless") and int(times) > attempts + 2
        kept = kind in (b"good", b"busy", b"cancel") or (kind in (b"fail", b"kill") and int(times) < attempts)
        assert (payload in outputs) != (payload in letters), payload
        assert not lost or payload in letters
        assert not kept or payload in outputs
        if semantics is EXACTLY:
            assert outputs[payload] + letters[payload] == 1
        if len(entries) == 1:
            assert script.calls[payload] <= attempts or kind in (b"busy", b"cancel")
    for channel, ids in written.items():
        firsts = list(dict.fromkeys(script.seen[channel]))
        assert firsts == [id for id in ids if id in set(firsts)], "an entry passed another"


def test_a_poison_entry_becomes_a_letter_and_its_neighbours_do_not():
    log, metrics = Log(), Metrics("1")
    script = Script(log)

    async def main():
        await log.create()
        ids = await log.write(b"good:0:1", b"fail:1000", b"good:0:2")
        await drain(log, script, EXACTLY, POLICY, metrics=metrics)
        assert log.outputs() == [b"good:0:1", b"good:0:2"]
        (letter,) = log.letters()
        assert (bytes(letter.body), letter.key) == (b"fail:1000", ids[1])
        assert letter.tags == {
            "channel": "in",
            "reason": "handler",
            "message": "ArithmeticError('fail:1000')",
            "size": 9,
            "group": "g",
            "attempts": 3,
            "timestamp": WRITTEN_AT,
        }
        assert script.calls == {b"good:0:1": 2, b"fail:1000": 4, b"good:0:2": 1}

    run(main())
    shown = metrics.render().decode()
    assert 'tidewal_wal_group_dead_letter_total{group="g",node_id="1",reason="handler"} 1.0' in shown
    assert 'tidewal_wal_group_retry_total{group="g",node_id="1"} 5.0' in shown


def test_what_ends_its_process_reaches_the_limit():
    log = Log()
    script = Script(log)

    async def main():
        await log.create()
        await log.write(b"good:0:1", b"kill:1000", b"good:0:2")
        await drain(log, script, EXACTLY, POLICY)

    run(main())
    assert log.outputs() == [b"good:0:1", b"good:0:2"]
    (letter,) = log.letters()
    assert (letter.tags["reason"], letter.tags["attempts"]) == ("crash", 3)
    assert script.calls[b"kill:1000"] == 4  # once with the others, then alone


@pytest.mark.parametrize("payload", [b"cancel:10", b"busy:10"])
def test_a_cancellation_and_an_outage_are_no_attempts(payload):
    log = Log()
    script = Script(log)

    async def main():
        await log.create()
        await log.write(payload, b"good")
        await drain(log, script, EXACTLY, POLICY)

    run(main())
    assert log.outputs() == [payload, b"good"]
    assert log.letters() == []
    assert script.calls[payload] == 11


def test_moves_of_idle_members_and_failures_of_the_log_count_nothing():
    log = Log()

    async def main():
        await log.create()
        await log.write(b"one")
        failing = True

        async def handle(delivered):
            return [Append("nowhere" if failing else "out", bytes(entry.payload)) for entry in delivered.entries]

        for _ in range(10):
            member = await log.wal.join("g", ["in"])
            with pytest.raises(TidewalError):
                await process(log.wal, member, handle, EXACTLY, retry=POLICY)
            await member.aclose()
        failing = False
        member = await log.wal.join("g", ["in"])
        await process(log.wal, member, handle, EXACTLY, retry=POLICY, count=1)
        await member.aclose()

    run(main())
    assert (log.outputs(), log.letters()) == ([b"one"], [])


def test_the_channel_waits_behind_what_is_held_back_and_the_others_go_on():
    log = Log("in-1", "in-2")
    order: list[bytes] = []

    async def main():
        await log.create()
        await log.write(b"a1", channel="in-1")

        async def handle(delivered):
            order.extend(bytes(entry.payload) for entry in delivered.entries)
            if order[-1] == b"a1" and order.count(b"a1") < 3:
                if order.count(b"a1") == 1:
                    await log.write(b"a2", channel="in-1")
                    await log.write(b"b1", channel="in-2")
                raise ArithmeticError
            return outputs_of(delivered)

        member = await log.wal.join("g", ["in-*"])
        await process(log.wal, member, handle, AT_LEAST, retry=POLICY, count=3)

    run(main())
    assert order == [b"a1", b"b1", b"a1", b"a1", b"a2"]
    assert log.outputs() == [b"b1", b"a1", b"a2"]


def test_pauses_grow_to_the_limit_with_jitter_and_one_seed_gives_one_run():
    policy = RetryPolicy(attempts=100, first_pause_s=0.5, last_pause_s=20.0)
    chance = random.Random(7)
    pauses = [policy.pause_s(attempt, chance) for attempt in range(1, 2000)]
    for attempt, pause_s in enumerate(pauses, 1):
        longest_s = min(20.0, 0.5 * 2.0 ** min(attempt - 1, 30))
        assert longest_s / 2 <= pause_s <= longest_s
    assert len(set(pauses)) > 1900
    again = random.Random(7)
    assert [policy.pause_s(attempt, again) for attempt in range(1, 2000)] == pauses


def test_a_handler_that_is_fenced_ends_processing_and_counts_nothing():
    log = Log()

    async def main():
        await log.create()
        await log.write(b"one")

        async def handle(delivered):
            raise Fenced("of something else")

        member = await log.wal.join("g", ["in"])
        for _ in range(10):
            with pytest.raises(Fenced, match="something else"):
                await process(log.wal, member, handle, AT_LEAST, retry=POLICY)
        script = Script(log)
        await process(log.wal, member, script, AT_LEAST, retry=POLICY, count=1)

    run(main())
    assert (log.outputs(), log.letters()) == ([b"one"], [])


def test_what_is_held_back_when_the_channel_is_lost_is_left_to_the_next_member():
    log = Log()

    async def main():
        await log.create()
        await log.write(b"fail:3:1")
        script = Script(log)
        member = await log.wal.join("g", ["in"])
        working = asyncio.create_task(process(log.wal, member, script, EXACTLY, retry=RetryPolicy(first_pause_s=5)))
        await elapse(1)
        await member.seek("in", FromId((await log.wal.describe("in")).first_id, inclusive=True))
        await elapse(100)
        await member.aclose()
        await working
        assert log.outputs() == [b"fail:3:1"]
        assert log.letters() == []

    run(main())


@pytest.mark.parametrize("how", ["a seek", "another session"])
@pytest.mark.parametrize("semantics", [AT_LEAST, EXACTLY])
def test_a_handler_that_fails_when_its_channel_was_assigned_anew_holds_nothing_up(semantics, how):
    log = Log()
    calls: list[int] = []

    async def main():
        await log.create()
        await log.write(b"1", b"2")
        member = await log.wal.join("g", ["in"])

        async def handle(delivered):
            calls.append(len(delivered.entries))
            if len(calls) == 1:
                if how == "a seek":
                    await member.seek("in", From.EARLIEST)
                else:
                    log.log.groups.coordinator.leave("g", member.id)
                    await elapse(5)  # it joins again by itself
                raise ArithmeticError
            return outputs_of(delivered)

        await process(log.wal, member, handle, semantics, retry=POLICY, timeout_s=100)
        await member.aclose()

    run(main())
    assert (log.outputs(), log.letters()) == ([b"1", b"2"], [])


def test_other_channels_have_their_turn_between_the_entries_of_a_batch_that_is_held_back():
    log = Log("in-1", "in-2")
    times: dict[bytes, float] = {}

    async def main():
        await log.create()
        await log.write(*(b"a%d" % number for number in range(20)), channel="in-1")
        now = asyncio.get_running_loop().time
        begun = now()

        async def handle(delivered):
            await elapse(1)
            if len(delivered.entries) > 1:
                await log.write(b"b", channel="in-2")
                raise ArithmeticError
            times[bytes(delivered.entries[0].payload)] = now() - begun
            return []

        member = await log.wal.join("g", ["in-*"])
        await process(log.wal, member, handle, EXACTLY, retry=POLICY, timeout_s=10)
        assert now() - begun < 12
        await member.aclose()

    run(main())
    assert times[b"b"] < 6
    assert b"a19" not in times


@pytest.mark.parametrize("output", [bytes(2000), "text"])
@pytest.mark.parametrize("semantics", [AT_LEAST, EXACTLY])
def test_an_entry_whose_output_no_log_takes_becomes_a_letter(semantics, output):
    log = Log()

    async def main():
        await log.create()
        await log.wal.create_channel("small", ChannelPolicy(max_message_bytes=1000))
        await log.write(b"1", b"much", b"2")

        async def handle(delivered):
            return [Append("small", output if e.payload == b"much" else b"ok") for e in delivered.entries]

        member = await log.wal.join("g", ["in"])
        await process(log.wal, member, handle, semantics, retry=POLICY, count=1)
        await member.aclose()
        assert [bytes(entry.payload) for entry in log.log.channels["small"].entries] == [b"ok", b"ok"]

    run(main())
    assert log.lettered() == [b"much"]


def test_a_letter_that_cannot_be_processed_stays_where_it_is():
    log = Log(GROUP_DEAD_LETTERS)

    async def main():
        await log.create()
        await log.write(b"fail:1000", channel=GROUP_DEAD_LETTERS)
        await drain(log, Script(log), EXACTLY, POLICY)
        assert len(log.log.channels[GROUP_DEAD_LETTERS].entries) == 1

    run(main())


@pytest.mark.parametrize("semantics", list(Semantics))
def test_it_ends_after_so_many_batches_or_seconds(semantics):
    log = Log()

    async def main():
        await log.create()
        member = await log.wal.join("g", ["in"])
        await process(log.wal, member, Script(log), semantics, count=0)
        for number in range(3):
            await log.write(b"%d" % number)
            await process(log.wal, member, Script(log), semantics, count=1)
        begun = asyncio.get_running_loop().time()
        await process(log.wal, member, Script(log), semantics, timeout_s=7.0)
        assert asyncio.get_running_loop().time() - begun == pytest.approx(7.0)
        await log.write(b"3")
        await process(log.wal, member, Script(log), semantics, timeout_s=1.0, count=5)
        await member.aclose()

    run(main())
    assert log.outputs() == [b"0", b"1", b"2", b"3"]


def test_a_timeout_of_the_handler_is_an_error_of_its_own():
    log = Log()

    async def main():
        await log.create()
        await log.write(b"one")

        async def handle(delivered):
            raise TimeoutError

        member = await log.wal.join("g", ["in"])
        with pytest.raises(TimeoutError):
            await process(log.wal, member, handle, AT_LEAST, timeout_s=9.0)
        with pytest.raises(InvalidRequest, match="at most once"):
            await process(log.wal, member, handle, Semantics.AT_MOST_ONCE, retry=POLICY)
        await member.aclose()
        await process(log.wal, member, handle, AT_LEAST, retry=POLICY)
        await log.wal.close()
        await process(log.wal, member, handle, AT_LEAST, retry=POLICY)

    run(main())


def layered(draw: st.DrawFn) -> bytes:
    """Bytes of a caller, also such as begin like a layer."""
    head = draw(st.sampled_from([b"", *(bytes((0xF7, layer)) for layer in Layer)]))
    size = draw(st.sampled_from([b"", b"\x00", b"\x00\x00", b"\x00\x03", b"\xff\xff"]))
    return head + size + draw(st.binary(max_size=40))


@given(st.sampled_from(list(Layer)), st.binary(max_size=40), st.composite(layered)())
def test_layers_of_metadata_come_off_as_they_were_put_on(layer, part, inside):
    whole = wrap(layer, part, inside)
    assert unwrap(layer, whole) == (part, inside)
    other = next(each for each in Layer if each is not layer)
    if part:
        assert unwrap(other, whole) == (b"", whole)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"text", b"\x93\x01\x02\x03", b"\x92\xa1x\x01", b"\x80"])
def test_what_is_no_count_of_attempts_counts_none(data):
    assert Attempts.from_bytes(data) == Attempts()


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"first_pause_s": 0}, {"first_pause_s": 2.0, "last_pause_s": 1.0}, {"last_pause_s": 0}]
)
def test_a_policy_without_sense_is_refused(options):
    with pytest.raises(InvalidRequest):
        RetryPolicy(**options)


@pytest.mark.parametrize(
    ("error", "said"),
    [(WithoutRepr, "WithoutRepr, whose repr raises KeyError"), (NotUtf8, "no file \\udc80")],
    ids=["no repr", "no UTF-8"],
)
def test_an_error_that_cannot_be_shown_stops_no_member(error, said) -> None:
    async def main() -> None:
        log = Log()
        await log.create()
        await log.write(b"bad", b"good")

        async def handle(delivered):
            if any(bytes(entry.payload) == b"bad" for entry in delivered.entries):
                raise error
            return outputs_of(delivered)

        member = await log.wal.join("g", list(log.channels))
        await process(log.wal, member, handle, AT_LEAST, retry=POLICY, timeout_s=30)
        await member.aclose()
        assert log.outputs() == [b"good"]
        assert [(letter.tags["attempts"], letter.tags["message"]) for letter in log.letters()] == [(3, said)]

    run(main())
