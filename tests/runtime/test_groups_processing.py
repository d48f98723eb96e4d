"""`process` over the memory WAL on virtual time: a batch whose step failed, was cancelled or not seen."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.group_model import chaos, check, passes
from tidewal.runtime.errors import InvalidRequest
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

FAULTS = Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("semantics", list(Semantics))
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), seeks=st.booleans())
def test_outputs_equal_the_model_whatever_fails_and_is_cancelled(semantics, seed, seeks):
    log = MemoryLog()
    written: dict[str, list[bytes]] = {}

    async def main():
        wal = MemoryWal(log, FaultPlan(seed, FAULTS, channels="out"))
        async with asyncio.timeout(300):
            written.update(await chaos(wal, seed, semantics, elapse, steps=60, seeks=seeks))
        await wal.close()

    with passes(lambda: written) as passed:
        run_virtual(main())
    outputs = [bytes(entry.payload) for entry in log.channels["out"].entries]
    check(semantics, written, outputs, passed)


@pytest.mark.parametrize("semantics", list(Semantics))
@pytest.mark.parametrize("retry", [None, RetryPolicy(attempts=1)], ids=["once", "retried"])
def test_a_handler_that_writes_nothing_need_not_return_anything(semantics, retry):
    seen: list[bytes] = []

    async def note(delivered):
        seen.extend(bytes(entry.payload) for entry in delivered.entries)

    async def main():
        wal = MemoryWal()
        await wal.create_channel("in", ChannelPolicy())
        id = await wal.append("in", b"1")
        member = await wal.join("g", ["in"])
        await process(wal, member, note, semantics, retry=retry, count=1)
        (group,) = await wal.groups()
        assert (seen, group.positions) == ([b"1"], {"in": id})
        assert retry is None or not wal.log.channels[GROUP_DEAD_LETTERS].entries
        await wal.close()

    if semantics is not Semantics.AT_MOST_ONCE or retry is None:
        run_virtual(main())


@pytest.mark.parametrize("retry", [None, RetryPolicy(attempts=1)], ids=["once", "retried"])
def test_a_handler_that_is_not_async_is_refused_by_its_name_and_costs_no_entry(retry):
    def double(delivered):
        return []

    async def main():
        wal = MemoryWal()
        await wal.create_channel("in", ChannelPolicy())
        id = await wal.append("in", b"1")
        member = await wal.join("g", ["in"])
        with pytest.raises(InvalidRequest, match=r"the handler .*double has returned a list.*async def"):
            await process(wal, member, double, Semantics.EXACTLY_ONCE, retry=retry)
        assert [entry.id for entry in (await anext(member)).entries] == [id]
        assert retry is None or not wal.log.channels[GROUP_DEAD_LETTERS].entries
        await wal.close()

    run_virtual(main())
