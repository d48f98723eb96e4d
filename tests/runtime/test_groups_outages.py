"""`process` and `process_keyed` over failures of the log: what passes is waited out, and what lasts is raised."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.errors import TidewalError, Unavailable
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.groups.work import OUTAGE_S
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

FAULTS = Rates(fail=0.2, unknown=0.2, lost=0.2, delay=0.2)
COUNT = 40


async def repeat(delivered, state=None):
    """Write each entry again, and with a state count it, too."""
    if state is not None:
        counts = state.table("counts")
        for entry in delivered.entries:
            key = bytes(entry.payload)
            counts[key] = counts.get(key, 0) + 1
            assert counts[key] == 1
    return [Append("out", entry.payload) for entry in delivered.entries]


def working(wal, member, semantics, retry):
    """One call that works through the group's channels; `None` for `semantics` is that with a keyed state."""
    if semantics is None:
        return asyncio.create_task(process_keyed(wal, member, repeat, "repeat", retry=retry))
    return asyncio.create_task(process(wal, member, repeat, semantics, retry=retry))


async def made(log):
    calm = MemoryWal(log)
    for channel in ("in-0", "in-1", "out"):
        await calm.create_channel(channel, ChannelPolicy())
    return calm


@pytest.mark.slow
@pytest.mark.parametrize("retry", [None, RetryPolicy(attempts=2)], ids=["once", "retried"])
@pytest.mark.parametrize("semantics", [None, Semantics.AT_LEAST_ONCE, Semantics.EXACTLY_ONCE])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_one_call_goes_on_whatever_fails_for_a_moment(semantics, retry, seed):
    log = MemoryLog()
    written = [b"%d" % number for number in range(COUNT)]

    async def main():
        calm = await made(log)
        shaky = MemoryWal(log, FaultPlan(seed, FAULTS))
        member = None
        while member is None:
            with suppress(Unavailable):
                member = await shaky.join("g", ["in-*"])
        if retry is not None:
            await calm.create_channel(GROUP_DEAD_LETTERS, ChannelPolicy())
        work = working(shaky, member, semantics, retry)
        for number, payload in enumerate(written):
            await calm.append(f"in-{number % 2}", payload)
            await elapse(0.1)
        await elapse(120)
        assert not work.done(), work.result()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await shaky.close()

    run_virtual(main())
    outputs = Counter(bytes(entry.payload) for entry in log.channels["out"].entries)
    if semantics is Semantics.AT_LEAST_ONCE:
        assert set(outputs) == set(written)
    else:
        assert outputs == Counter(written)
    assert retry is None or not log.channels[GROUP_DEAD_LETTERS].entries, "an outage is no entry's fault"


@pytest.mark.parametrize("semantics", [None, *Semantics])
def test_an_outage_that_lasts_is_raised(semantics):
    async def main():
        log = MemoryLog()
        calm = await made(log)
        member = await calm.join("g", ["in-0"])

        async def refused(*_, **__):
            raise Unavailable("the log is away")

        member.acknowledge = member.commit = refused
        work = working(calm, member, semantics, None)
        await calm.append("in-0", b"1")
        began = asyncio.get_running_loop().time()
        with pytest.raises(TidewalError, match="the log is away"):
            await work
        assert OUTAGE_S <= asyncio.get_running_loop().time() - began <= OUTAGE_S + 2
        del member.acknowledge, member.commit
        again = working(calm, member, semantics, None)  # with the same member, once the log is back
        await elapse(1)
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        outputs = [bytes(entry.payload) for entry in log.channels["out"].entries]
        assert outputs == [b"1"] or (semantics is Semantics.AT_LEAST_ONCE and set(outputs) == {b"1"})
        await calm.close()

    run_virtual(main())


@pytest.mark.parametrize("semantics", [None, Semantics.EXACTLY_ONCE])
def test_blips_of_an_idle_log_are_no_outage_however_many(semantics):
    class Blipping(MemoryWal):
        blips = 0

        async def read(self, channel, start):
            await elapse(40)
            if channel == "in-0" and self.blips < 5:
                self.blips += 1
                raise Unavailable("a moment")
            async for batch in super().read(channel, start):
                yield batch

    async def main():
        log = MemoryLog()
        calm = await made(log)
        wal = Blipping(log)
        work = working(wal, await wal.join("g", ["in-0"]), semantics, None)
        await elapse(400)
        assert wal.blips == 5
        await calm.append("in-0", b"1")
        await elapse(10)
        assert [bytes(entry.payload) for entry in log.channels["out"].entries] == [b"1"]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await wal.close()

    run_virtual(main())


@pytest.mark.parametrize("semantics", [None, Semantics.EXACTLY_ONCE])
def test_a_letter_whose_commit_meets_an_outage_still_says_what_the_handler_raised(semantics):
    async def main():
        log = MemoryLog()
        calm = await made(log)
        member = await calm.join("g", ["in-0"])
        await calm.append("in-0", b"1")
        commit, refusals = member.commit, 2

        async def failing(delivered, outputs, **named):
            nonlocal refusals
            if outputs and refusals:
                refusals -= 1
                raise Unavailable("a moment")
            return await commit(delivered, outputs, **named)

        async def handle(delivered, state=None):
            raise ValueError("of the handler")

        member.commit = failing
        policy = RetryPolicy(attempts=2, first_pause_s=0.1)
        if semantics is None:
            call = process_keyed(calm, member, handle, "p", retry=policy)
        else:
            call = process(calm, member, handle, semantics, retry=policy)
        work = asyncio.create_task(call)
        await elapse(60)
        [letter] = [decode(entry.payload) for entry in log.channels[GROUP_DEAD_LETTERS].entries]
        assert refusals == 0
        assert (letter.tags["reason"], letter.tags["message"]) == ("handler", "ValueError('of the handler')")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await calm.close()

    run_virtual(main())
