"""`ack_timeout_s`, `extend_ack_timeout` and `Nack` of `process`, over the memory WAL on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.errors import AckTimeout, InvalidRequest
from tidewal.runtime.groups.ack_timer import ack_timer, check_ack_timeout, extend_ack_timeout
from tidewal.runtime.groups.nack import Nack
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retry_policy import RetryPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import elapse, run_virtual

from .test_groups_retries import AT_LEAST, EXACTLY, Killed, Log, drain, outputs_of, run

POLICY = RetryPolicy(attempts=3, first_pause_s=0.1, last_pause_s=0.1, ack_timeout_s=10.0, seed=1)


class TimedScript:
    """A handler that does at each entry as its payload says, `KIND:TIMES:…`, and goes on in good order after that.
    `begun` has the time of each call."""

    def __init__(self, log: Log) -> None:
        self.log, self.member = log, None
        self.calls: Counter[bytes] = Counter()
        self.begun: list[float] = []

    async def __call__(self, delivered):
        self.begun.append(asyncio.get_running_loop().time())
        for entry in delivered.entries:
            payload = bytes(entry.payload)
            self.calls[payload] += 1
            kind, times, *_ = [*payload.split(b":"), b"0"]
            if self.calls[payload] <= int(times):
                await self._misbehave(kind)
                if kind == b"stubborn":  # it was cancelled, and is not a second time
                    break
        return outputs_of(delivered)

    async def _misbehave(self, kind: bytes) -> None:
        match kind:
            case b"fail":
                raise ArithmeticError
            case b"hang":
                await elapse(1e6)
            case b"stubborn":  # ends in good order, too late
                with suppress(asyncio.CancelledError):
                    await elapse(1e6)
            case b"nack":
                raise Nack("later", delay_s=0.3)
            case b"extend":
                for _ in range(5):
                    extend_ack_timeout()
                    await elapse(0.4)
            case b"kill":
                await self.log.crash(self.member)
                raise Killed


KINDS = st.sampled_from([b"good", b"good", b"fail", b"hang", b"stubborn", b"nack", b"extend", b"kill"])
ENTRY = st.tuples(KINDS, st.sampled_from([1, 2, 3, 1000]), st.sampled_from(["in-1", "in-2"]))


@pytest.mark.slow
@pytest.mark.parametrize("semantics", [AT_LEAST, EXACTLY])
@settings(max_examples=40)
@given(st.lists(ENTRY, max_size=10), st.integers(1, 4))
def test_whatever_a_handler_does_each_entry_ends_as_an_output_or_as_a_letter(semantics, entries, attempts):
    log = Log("in-1", "in-2")
    script = TimedScript(log)
    policy = RetryPolicy(attempts=attempts, last_pause_s=0.2, ack_timeout_s=0.5, seed=3)
    payloads: list[bytes] = []

    async def main():
        await log.create()
        for number, (kind, times, channel) in enumerate(entries):
            payloads.append(b"%b:%d:%d" % (kind, times, number))
            await log.write(payloads[-1], channel=channel)
        await drain(log, script, semantics, policy)

    run(main())
    outputs, letters = Counter(log.outputs()), Counter(log.lettered())
    for payload in payloads:
        kind, times, _ = payload.split(b":")
        assert (payload in outputs) != (payload in letters), payload
        if kind in (b"good", b"extend"):
            assert payload in outputs
        elif int(times) > attempts + 2:
            assert payload in letters
        elif int(times) < attempts:
            assert payload in outputs
        if semantics is EXACTLY:
            assert outputs[payload] + letters[payload] == 1


@pytest.mark.parametrize("kind", [b"hang", b"stubborn"])
def test_a_handler_that_hangs_is_ended_and_its_entry_becomes_a_letter(kind):
    log, metrics = Log(), Metrics("1")
    script = TimedScript(log)

    async def main():
        await log.create()
        await log.write(b"%b:1000" % kind)
        await drain(log, script, EXACTLY, POLICY, metrics=metrics)
        await log.write(b"good:0:1")
        await drain(log, script, EXACTLY, POLICY, metrics=metrics)

    run(main())
    assert log.outputs() == [b"good:0:1"]
    (letter,) = log.letters()
    assert letter.tags["attempts"] == 3
    assert "ack_timeout_s" in str(letter.tags["message"])
    assert metrics.value("wal_group_ack_timeout_total", group="g") == 3
    waits = [after - before for before, after in pairwise(script.begun[:3])]
    assert all(10.0 <= wait < 10.2 for wait in waits), waits


def test_the_time_runs_from_when_the_handler_got_the_batch_and_not_from_its_delivery():
    log = Log(*(f"in-{number}" for number in range(20)))
    handled: list[bytes] = []

    async def main():
        await log.create()
        for channel in log.channels:
            await log.write(channel.encode(), channel=channel)

        async def handle(delivered):
            await elapse(6)  # 120 s for all, which wait for their turns meanwhile
            handled.append(bytes(delivered.entries[0].payload))

        member = await log.wal.join("g", list(log.channels))
        await process(log.wal, member, handle, AT_LEAST, retry=POLICY, count=20)
        await member.aclose()

    run(main())
    assert Counter(handled) == Counter(channel.encode() for channel in log.channels)


def test_a_time_that_is_extended_ends_later_and_one_that_is_over_cannot_be():
    async def extended() -> None:
        async with ack_timer(10.0):
            await elapse(9)
            extend_ack_timeout()
            await elapse(9)
            extend_ack_timeout(50.0)
            extend_ack_timeout(1.0)  # shortens nothing
            await elapse(1e6)

    async def main():
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(AckTimeout):
            await extended()
        assert loop.time() - began == pytest.approx(68.0, abs=1e-6)

        orphans: list[asyncio.Task[None]] = []

        async def late() -> None:
            await elapse(100)
            extend_ack_timeout()

        async with ack_timer(10.0):
            orphans.append(asyncio.create_task(late()))
        with pytest.raises(AckTimeout):
            await orphans[0]
        extend_ack_timeout()  # outside of handlers nothing happens

    run_virtual(main())


def test_time_for_which_the_process_stood_still_is_not_the_handlers():
    class Clock(asyncio.SelectorEventLoop):
        ahead_s = 0.0

        def time(self) -> float:
            return super().time() + self.ahead_s

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Clock)
        async with ack_timer(60.0):
            for _ in range(3):
                await asyncio.sleep(0)
                loop.ahead_s += 1000.0  # SIGSTOP, and SIGCONT 1000 s later
                for _ in range(5):
                    await asyncio.sleep(0)

            extend_ack_timeout(0.5)  # it has its 60 s still
            await asyncio.sleep(1)

    loop = Clock()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def test_a_thread_extends_the_time_of_its_handler_without_touching_the_loop():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_debug(True)  # a timer that is set from another thread raises
        async with ack_timer(60.0):
            await asyncio.to_thread(extend_ack_timeout, 120.0)
        with pytest.raises(AckTimeout):
            await late()

    async def late() -> None:
        async with ack_timer(0.01):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.to_thread(extend_ack_timeout)

    asyncio.run(main())


def test_a_handler_without_a_limit_has_not_that_of_one_around_it():
    async def main() -> None:
        async with ack_timer(10.0), ack_timer(None):
            with suppress(asyncio.CancelledError):
                await elapse(11)
            extend_ack_timeout()
            check_ack_timeout()

    with pytest.raises(AckTimeout):
        run_virtual(main())


@pytest.mark.parametrize("delay_s", [0.0, 30.0])
def test_what_is_given_back_comes_again_after_its_delay_and_counts(delay_s):
    log, metrics = Log(), Metrics("1")
    begun: list[float] = []

    async def main():
        await log.create()
        await log.write(b"one")

        async def handle(delivered):
            begun.append(asyncio.get_running_loop().time())
            raise Nack("not yet", delay_s=delay_s)

        member = await log.wal.join("g", ["in"])
        await process(log.wal, member, handle, EXACTLY, retry=POLICY, metrics=metrics, count=1)
        await member.aclose()

    run(main())
    assert [after - before for before, after in pairwise(begun)] == pytest.approx([delay_s] * 2)
    (letter,) = log.letters()
    assert (letter.tags["attempts"], letter.tags["message"]) == (3, "Nack('not yet')")
    assert metrics.value("wal_group_nack_total", group="g") == 3


def test_a_transient_nack_waits_for_its_delay_and_counts_nothing():
    log = Log()
    calls = 0

    async def main():
        await log.create()
        await log.write(b"one")

        async def handle(delivered):
            nonlocal calls
            calls += 1
            if calls <= 10:
                raise Nack(delay_s=60.0)
            return outputs_of(delivered)

        member = await log.wal.join("g", ["in"])
        policy = RetryPolicy(attempts=1, transient=(Nack,))
        await process(log.wal, member, handle, EXACTLY, retry=policy, count=1)
        await member.aclose()
        assert asyncio.get_running_loop().time() >= 600

    run(main())
    assert (log.outputs(), log.letters()) == ([b"one"], [])


@pytest.mark.parametrize("seed", range(20))
def test_of_the_timeout_and_the_commit_of_outputs_one_wins(seed):
    """Schedule 7: handlers return in the very moments in which their time ends, and commits take longer than that."""
    print("seed", seed)
    log, chance = Log(), random.Random(seed)
    calls: Counter[int] = Counter()
    commits: Counter[str] = Counter()
    metrics = Metrics("1")

    async def main():
        await log.create()
        await log.write(*(b"%d" % number for number in range(5)))
        member = await log.wal.join("g", ["in"])
        commit = member.commit

        async def slow_commit(*arguments, **options):
            commits["begun"] += 1
            await elapse(chance.choice([0, 5, 50]))
            ids = await commit(*arguments, **options)
            commits["ended"] += 1
            return ids

        member.commit = slow_commit

        async def handle(delivered):
            calls[len(calls)] += 1
            done = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(10.0 + chance.choice([-1e-6, 0, 0, 1e-6]), done.set_result, None)
            if chance.random() < 0.5:
                await done
            else:  # as a handler that shields what it waits for
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(done)
            return outputs_of(delivered)

        policy = RetryPolicy(attempts=1000, first_pause_s=0.1, ack_timeout_s=10.0, seed=seed)
        working = asyncio.create_task(
            process(log.wal, member, handle, Semantics.EXACTLY_ONCE, retry=policy, metrics=metrics)
        )
        while len(log.outputs()) < 5:
            await elapse(1)
        await elapse(200)
        await member.aclose()
        await working

    run(main())
    assert log.outputs() == [b"%d" % number for number in range(5)]
    assert log.letters() == []
    assert commits["begun"] == commits["ended"]  # the time does not run while a commit does
    assert len(calls) == commits["begun"] + metrics.value("wal_group_ack_timeout_total", group="g")


@pytest.mark.parametrize("ack_timeout_s", [0.0, -1.0, float("nan")])
def test_no_time_at_all_is_refused(ack_timeout_s):
    with pytest.raises(InvalidRequest, match="ack_timeout_s"):
        RetryPolicy(ack_timeout_s=ack_timeout_s)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        extend_ack_timeout(ack_timeout_s)


@pytest.mark.parametrize("delay_s", [-1.0, float("nan"), float("inf")])
def test_a_delay_without_an_end_is_refused(delay_s):
    with pytest.raises(InvalidRequest, match="delay_s"):
        Nack(delay_s=delay_s)
