"""Retries of `process_keyed` over the memory WAL on virtual time: a failed attempt leaves nothing in the state."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.dataflow import commit_size
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.errors import CorruptLog, MemoryLimitExceeded, Overloaded
from tidewal.runtime.groups.record_member import RecordMember
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

CHANNELS = ("in-1", "in-2")


class Killed(BaseException):
    """Ends the handler and all around it: its process is killed."""


class Hopeless(Exception):
    """No further attempt can help."""


class Program:
    """A program whose handler counts entries in the state, and fails as the payloads say: `KIND:TIMES:NUMBER`."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.wal = MemoryWal(self.log)
        self.calls: Counter[bytes] = Counter()
        self.member = None
        self.writing: asyncio.Task[None] | None = None

    async def create(self) -> None:
        for channel in (*CHANNELS, "out"):
            await self.wal.create_channel(channel, ChannelPolicy())

    async def write(self, *payloads: bytes, channel: str = "in-1") -> None:
        await self.wal.append_many([Append(channel, payload) for payload in payloads])

    async def handle(self, delivered, state):
        seen, last = state.table("seen"), state.table("last")
        outputs = []
        for entry in delivered.entries:
            payload = bytes(entry.payload)
            seen.setdefault("all", []).append(payload)  # in place, and before it fails
            last["payload"] = payload
            state.table("numbers")[payload] = len(seen["all"])
            outputs.append(Append("out", payload))
            self.calls[payload] += 1
            kind, times, _ = payload.split(b":")
            if self.calls[payload] <= int(times):
                await self.fail(kind, state, outputs)
        return outputs

    async def fail(self, kind: bytes, state, outputs) -> None:
        match kind:
            case b"fail":
                raise ArithmeticError
            case b"hopeless":
                raise Hopeless
            case b"busy":
                raise Overloaded("a while", limit="x")
            case b"unstorable":
                state.table("last")["set"] = {1}
            case b"unsendable":
                outputs.append(Append("out", b"x" * (9 * 1024 * 1024)))
            case b"kill":
                self.log.groups.coordinator.leave("g", self.member.id)
                await self.member.aclose()
                raise Killed
            case b"cancel":
                raise asyncio.CancelledError
            case _:
                pass

    async def run(self, policy: RetryPolicy | None, **options) -> None:
        """Process until the group is at the end of all channels, with another member after every end."""
        while True:
            self.member = await self.wal.join("g", list(CHANNELS))
            options.setdefault("commit_interval_s", 0.3)
            working = asyncio.create_task(
                process_keyed(self.wal, self.member, self.handle, "counting", retry=policy, **options)
            )
            done = asyncio.create_task(self.at_end())
            await asyncio.wait({working, done}, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                break
            done.cancel()
            with suppress(Killed, asyncio.CancelledError):
                await working
            await self.member.aclose()
        await self.member.aclose()
        await working

    async def at_end(self) -> None:
        if self.writing is not None:
            await asyncio.wait({self.writing})
        ends = {channel: await self.wal.latest_id(channel) for channel in CHANNELS}
        while True:
            (info,) = await self.wal.groups()
            if all(end is None or (info.positions.get(channel) or b"") >= end for channel, end in ends.items()):
                return
            await elapse(0.05)

    async def state_of(self, channel: str) -> tuple[list[bytes], dict[bytes, int]]:
        """The state that a new member finds."""
        found, stop = [], asyncio.Event()

        async def look(delivered, state):
            found.append((list(state.table("seen").get("all", [])), dict(state.table("numbers"))))
            stop.set()
            return []

        await self.wal.append(channel, b"good:0:end")
        member = await self.wal.join("g", [channel])
        await process_keyed(self.wal, member, look, "counting", stop=stop)
        await member.aclose()
        return found[0]

    def outputs(self) -> list[bytes]:
        return [bytes(entry.payload) for entry in self.log.channels["out"].entries]

    def letters(self) -> list[bytes]:
        return [bytes(decode(entry.payload).body) for entry in self.log.channels[GROUP_DEAD_LETTERS].entries]


def run(main) -> None:
    async def within() -> None:
        async with asyncio.timeout(100_000):
            await main

    run_virtual(within())


KINDS = st.sampled_from(
    [b"good", b"good", b"good", b"fail", b"busy", b"kill", b"hopeless", b"cancel", b"unstorable", b"unsendable"]
)
ENTRY = st.tuples(KINDS, st.sampled_from([1, 2, 3, 4, 1000]), st.sampled_from(CHANNELS), st.booleans())


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(ENTRY, max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_each_entry_is_in_the_state_and_the_outputs_once_or_is_a_letter(entries, attempts, careful):
    program = Program()
    written: dict[str, list[bytes]] = {channel: [] for channel in CHANNELS}

    async def main():
        await program.create()

        async def write() -> None:
            for number, (kind, times, channel, waits) in enumerate(entries):
                limited = min(times, 6) if kind in (b"busy", b"cancel") else times  # they never count
                payload = b"%b:%d:%d" % (kind, limited, number)
                written[channel].append(payload)
                await program.write(payload, channel=channel)
                if waits:
                    await elapse(0.1)

        policy = RetryPolicy(attempts=attempts, permanent=(Hopeless,), seed=3)
        program.writing = asyncio.create_task(write())
        await program.run(policy)
        letters, outputs = program.letters(), program.outputs()
        for channel, payloads in written.items():
            done = [payload for payload in payloads if payload not in letters]
            seen, numbers = await program.state_of(channel)
            assert seen == done, "the state has what was processed, in order, and nothing of a failed attempt"
            assert numbers == {payload: at for at, payload in enumerate(done, 1)}
            assert [payload for payload in outputs if payload in payloads] == done
        assert len(letters) == len(set(letters))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_size, "MAX_UNCOMMITTED", careful)
        run(main())
    letters = program.letters()
    for payload in [each for payloads in written.values() for each in payloads]:
        kind, times, _ = payload.split(b":")
        lost = kind not in (b"good", b"busy", b"cancel") and int(times) == 1000
        kept = kind in (b"good", b"busy", b"cancel") or (kind != b"hopeless" and int(times) < attempts)
        assert not lost or payload in letters
        assert not kept or payload not in letters


def test_what_ends_its_process_reaches_the_limit_wherever_it_stands():
    """Behind more batches, not committed, than are committed one by one at first."""
    program = Program()

    async def main():
        await program.create()

        async def write():
            for number in range(8):
                await program.write(b"good:0:%d" % number)
                await elapse(0.01)
            await program.write(b"kill:1000:8", b"good:0:9")

        program.writing = asyncio.create_task(write())
        await program.run(RetryPolicy(attempts=2, seed=1), commit_interval_s=60.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_size, "MAX_UNCOMMITTED", 20)
        run(main())
    assert program.letters() == [b"kill:1000:8"]
    assert program.outputs() == [*(b"good:0:%d" % number for number in range(8)), b"good:0:9"]
    assert program.calls[b"kill:1000:8"] <= 2 + 3


def test_a_channel_waits_behind_what_is_tried_again_and_the_others_go_on():
    program, metrics = Program(), Metrics("1")

    async def main():
        await program.create()
        await program.write(b"fail:2:1")
        await program.write(b"good:0:2", channel="in-2")
        await program.run(RetryPolicy(seed=1), metrics=metrics)

    run(main())
    assert program.outputs() == [b"good:0:2", b"fail:2:1"]
    assert metrics.value("wal_group_retry_total", group="g") == 2


def test_a_changelog_that_cannot_be_read_ends_the_program_and_makes_no_letter():
    program = Program()

    async def main():
        await program.create()
        await program.write(b"good:0:1")
        await program.run(RetryPolicy(seed=1))
        entry = program.log.channels["counting-changelog.in-1"].entries[0]
        damaged = decode(entry.payload)
        assert damaged.part is not None
        await program.write(b"good:0:2")
        await program.run(RetryPolicy(seed=1))
        del program.log.channels["counting-changelog.in-1"].entries[0]
        await program.write(b"good:0:3")
        for _ in range(7):
            with pytest.raises(CorruptLog):
                await program.run(RetryPolicy(attempts=2, seed=1))
            await program.member.aclose()

    run(main())
    assert program.letters() == []
    assert program.outputs() == [b"good:0:1", b"good:0:2"]


@pytest.mark.parametrize("retry", [None, RetryPolicy(attempts=1, seed=1)])
def test_a_state_over_its_limit_stops_the_program_and_loses_nothing(retry):
    program, metrics = Program(), Metrics("1")

    async def main():
        await program.create()
        for number in range(20):
            await program.write(b"good:0:%d-%b" % (number, b"x" * 1000))
        with pytest.raises(MemoryLimitExceeded) as caught:
            await program.run(retry, max_state_bytes=10_000, metrics=metrics)
        error = caught.value
        assert error.fields["group"] == "g"
        assert error.fields["channel"] == "in-1"
        assert error.fields["limit"] == "process_keyed.max_state_bytes"
        assert error.fields["size"] > 10_000
        assert "max_state_bytes" in error.message
        assert metrics.series("wal_keyed_state_bytes") == {}
        await program.member.aclose()
        await program.run(retry, max_state_bytes=200_000)
        assert len((await program.state_of("in-1"))[0]) == 20

    run(main())
    assert len(program.outputs()) == len(set(program.outputs())) == 20


def test_a_state_that_changes_without_growing_does_not_reach_the_limit():
    program = Program()

    async def main():
        await program.create()
        for number in range(300):
            await program.write(b"good:0:%d" % number)

        async def handle(delivered, state):
            for entry in delivered.entries:
                state.table("last")["payload"] = bytes(entry.payload) * 100
            return []

        program.handle = handle
        await program.run(None, max_state_bytes=5_000, commit_interval_s=0.0)

    run(main())


def test_records_are_tried_again_as_entries_are():
    program = Program()

    async def main():
        await program.create()
        clock = HybridClock()
        keys = [b"a", b"bad", b"b"]
        records = [encode(Record(RecordType.ROWS, key=key, ts=clock.now())) for key in keys]
        await program.wal.append_many([Append("in-1", record) for record in records])
        member = RecordMember(program.wal, await program.wal.join("g", ["in-1"]))
        stop = asyncio.Event()

        async def handle(pack, state):
            seen = state.table("seen").setdefault("all", [])
            for record in pack.records:
                seen.append(record.key)
                if record.key == b"bad":
                    raise ArithmeticError
            if seen == [b"a", b"b"]:
                stop.set()
            return []

        await process_keyed(program.wal, member, handle, "p", retry=RetryPolicy(attempts=2, seed=1), stop=stop)
        await member.aclose()
        assert len(program.letters()) == 1

    run(main())
