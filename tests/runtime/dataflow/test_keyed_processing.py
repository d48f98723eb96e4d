"""`process_keyed` over the memory WAL on virtual time."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.keyed_model import chaos, check
from tidewal.runtime.clock import compose
from tidewal.runtime.dataflow import changelog as changelog_module
from tidewal.runtime.dataflow import commit_size, keyed_channel
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.dataflow.windowed import Windowed
from tidewal.runtime.dataflow.windows import tumbling
from tidewal.runtime.errors import Fenced, InvalidRequest, MessageTooLarge, PositionLost, Unavailable, Unsupported
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.log.wal import Append, ChannelPolicy, From
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

FAULTS = Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.3)


@pytest.mark.slow
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), sweeps=st.booleans())
def test_counts_and_outputs_equal_the_model_whatever_fails_and_is_cancelled(seed, sweeps):
    log = MemoryLog()

    async def main():
        wal = MemoryWal(log, FaultPlan(seed, FAULTS, channels="out"))
        async with asyncio.timeout(600):
            written = await chaos(wal, seed, elapse, steps=60)
            await check(wal, written)
        await wal.close()

    with pytest.MonkeyPatch.context() as patch:
        if sweeps:
            patch.setattr(changelog_module, "SWEEP_FROM_BYTES", 300)
            patch.setattr(changelog_module, "SWEEP_BYTES", 20)
            patch.setattr(changelog_module, "SWEPT_AT_ONCE", 2)
        run_virtual(main())


async def counting(delivered, state):
    table = state.table("counts")
    for entry in delivered.entries:
        word = bytes(entry.payload)
        table[word] = table.get(word, 0) + 1
    return []


async def until_counted(wal, member, number, name="counting", **options):
    """Process until a batch brings the count of all words to `number`; the state as it is then."""
    seen = {}

    async def handle(delivered, state):
        await counting(delivered, state)
        seen.update(state.table("counts"))
        if sum(state.table("counts").values()) >= number:
            reached.set()
        return []

    reached = asyncio.Event()
    running = asyncio.create_task(process_keyed(wal, member, handle, name, **options))
    done = asyncio.ensure_future(reached.wait())
    await asyncio.wait({running, done}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        await elapse(1.0)
        await member.aclose()
    done.cancel()
    await running
    return seen


def virtual(test):
    """Run a test on virtual time, with a memory WAL that has the channel `words`."""

    def run():
        async def main():
            wal = MemoryWal(MemoryLog())
            await wal.create_channel("words", ChannelPolicy())
            await test(wal)
            await wal.close()

        run_virtual(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@virtual
async def test_a_later_member_goes_on_with_the_state(wal):
    for words in ([b"a", b"b", b"a"], [b"a"], [b"c"]):
        before = sum(1 for _ in words)
        await wal.append_many([Append("words", word) for word in words])
        seen = await until_counted(wal, await wal.join("g", ["words"]), before)
    assert seen == {b"a": 3, b"b": 1, b"c": 1}


@virtual
async def test_a_handler_that_is_not_async_is_refused_by_its_name(wal):
    def count(delivered, state):
        return []

    await wal.append("words", b"a")
    member = await wal.join("g", ["words"])
    with pytest.raises(InvalidRequest, match=r"the handler .*count has returned a list.*async def"):
        await process_keyed(wal, member, count, "counts")
    assert len((await anext(member)).entries) == 1


@virtual
async def test_a_seek_begins_an_empty_state(wal):
    await wal.append_many([Append("words", b"a")] * 3)
    await until_counted(wal, await wal.join("g", ["words"]), 3)
    await wal.seek_group("g", "words", From.EARLIEST)
    assert await until_counted(wal, await wal.join("g", ["words"]), 3) == {b"a": 3}
    await wal.drop_group("g")
    assert await until_counted(wal, await wal.join("g", ["words"]), 3) == {b"a": 3}


@virtual
async def test_a_program_that_is_to_stop_commits_what_it_has_processed(wal):
    stop = asyncio.Event()
    member = await wal.join("g", ["words"])
    ids = await wal.append_many([Append("words", b"a")] * 3)

    async def handle(delivered, state):
        await counting(delivered, state)
        stop.set()
        await wal.append("words", b"a")  # comes too late for this program
        return []

    await process_keyed(wal, member, handle, "counting", commit_interval_s=60, stop=stop)
    (info,) = await wal.groups()
    assert info.positions == {"words": ids[-1]}
    assert await until_counted(wal, member, 4) == {b"a": 4}


@virtual
async def test_batches_are_committed_together_and_in_time(wal):
    commits = []
    member = await wal.join("g", ["words"])
    commit = member.commit

    async def noted(delivered, outputs, **options):
        commits.append([len(each.entries) for each in delivered])
        return await commit(delivered, outputs, **options)

    member.commit = noted
    running = asyncio.create_task(process_keyed(wal, member, counting, "counting", commit_interval_s=1.0))
    for _ in range(3):
        await wal.append("words", b"a")
        await elapse(0.2)
    assert commits == []
    await elapse(2.0)  # though nothing more comes
    assert commits == [[1, 1, 1]]
    await member.aclose()
    await running


def limited(member, limit):
    """Let the member's commits take `limit` bytes; the sizes of those that are done, in batches and in bytes."""
    done = []
    commit = member.commit

    async def checked(delivered, outputs, **options):
        size = sum(len(output.payload) for output in outputs)
        if size > limit:
            raise MessageTooLarge(f"one commit of {size} bytes", size=size, limit=limit)
        ids = await commit(delivered, outputs, **options)
        done.append((len(delivered), size))
        return ids

    member.commit = checked
    return done


async def doubling(delivered, state):
    """Counts; and puts as many bytes into the state and the outputs as come in."""
    await counting(delivered, state)
    for entry in delivered.entries:
        state.table("last")[entry.id] = bytes(entry.payload)
    return [Append("out", entry.payload) for entry in delivered.entries]


async def written_one_by_one(wal, count):
    for number in range(count):
        await elapse(0.05)
        await wal.append("words", b"%d" % (number % 10) * 1000)


@virtual
async def test_what_is_not_committed_is_bounded_in_bytes(wal):
    await wal.create_channel("out", ChannelPolicy())
    member = await wal.join("g", ["words"])
    done = limited(member, 1 << 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_size, "MAX_UNCOMMITTED_BYTES", 5000)
        running = asyncio.create_task(process_keyed(wal, member, doubling, "counting", commit_interval_s=600.0))
        await written_one_by_one(wal, 30)
        await elapse(1.0)
    assert [batches for batches, _ in done] == [3] * 10
    await member.aclose()
    await running


@virtual
async def test_a_commit_that_is_too_large_is_made_in_parts(wal):
    """Of batches, and of entries where they come in one batch; with the next commits it is more again."""
    await wal.create_channel("out", ChannelPolicy())
    await wal.append_many([Append("words", b"%d" % number * 1000) for number in range(5)])
    member = await wal.join("g", ["words"])
    done = limited(member, 10_000)
    writing = asyncio.create_task(written_one_by_one(wal, 20))
    running = asyncio.create_task(process_keyed(wal, member, doubling, "counting", commit_interval_s=0.5))
    await writing
    await elapse(2.0)
    assert max(batches for batches, _ in done) == 3
    assert [bytes(entry.payload)[:1] for entry in wal.log.channels["out"].entries] == [
        b"%d" % (number % 10) for number in (*range(5), *range(20))
    ]
    await member.aclose()
    await running
    await wal.append("words", b"0" * 1000)
    seen = await until_counted(wal, await wal.join("g", ["words"]), 26)
    assert sorted(seen.values()) == [2] * 5 + [3] * 4 + [4]


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 80), faults=st.booleans())
def test_each_entry_is_processed_once_whatever_a_commit_takes_and_the_log_fails(seed, count, faults):
    """A limit that any entry alone fits into, with batches and commits of several channels above it."""
    log, source = MemoryLog(), random.Random(seed)
    names = {name: [source.randint(1, 1000) for _ in range(count)] for name in "ab"}

    async def write(wal, name):
        payloads = [b"%d:" % at + b"x" * size for at, size in enumerate(names[name])]
        while payloads:
            count = source.choice((1, 3, 20))
            await wal.append_many([Append(name, payload) for payload in payloads[:count]])
            del payloads[:count]
            await elapse(source.random())

    async def main():
        wal = MemoryWal(log, FaultPlan(seed, FAULTS if faults else Rates(), channels="out"))
        for name in (*names, "out"):
            await wal.create_channel(name, ChannelPolicy())
        member = await wal.join("g", list(names))
        limited(member, 7000)
        writing = asyncio.gather(*(write(wal, name) for name in names))
        running = asyncio.create_task(process_keyed(wal, member, numbering, "counting", commit_interval_s=0.5))
        await writing
        await elapse(300.0)
        await member.aclose()
        await running
        await wal.close()

    async def numbering(delivered, state):
        outputs = await doubling(delivered, state)
        counts = state.table("counts")
        assert len(counts) == int(bytes(delivered.entries[-1].payload).split(b":")[0]) + 1
        return [Append("out", delivered.channel.encode() + output.payload) for output in outputs]

    run_virtual(main())
    outputs = [bytes(entry.payload) for entry in log.channels["out"].entries]
    for name, mine in names.items():
        of_name = [output for output in outputs if output.startswith(name.encode())]
        assert [int(output[1:].split(b":")[0]) for output in of_name] == list(range(len(mine)))


@virtual
async def test_an_entry_that_is_too_large_for_one_commit_says_what_to_do_and_with_retries_is_a_letter(wal):
    await wal.create_channel("out", ChannelPolicy())
    sizes = (100, 100, 2000, 100)
    await wal.append_many([Append("words", b"x" * size) for size in sizes])
    member = await wal.join("g", ["words"])
    done = limited(member, 3000)
    for _ in range(2):
        with pytest.raises(MessageTooLarge, match=r"a single entry of words .*6\d\d\d bytes.*retry=RetryPolicy\(\)"):
            await process_keyed(wal, member, doubling, "counting")
    assert sum(batches for batches, _ in done) == 2
    stop = asyncio.Event()
    running = asyncio.create_task(
        process_keyed(wal, member, doubling, "counting", stop=stop, retry=RetryPolicy(attempts=2, seed=1))
    )
    await elapse(60.0)
    stop.set()
    await running
    assert [len(entry.payload) for entry in wal.log.channels["out"].entries] == [100, 100, 100]
    assert len(wal.log.channels[GROUP_DEAD_LETTERS].entries) == 1
    await member.aclose()


@virtual
async def test_what_a_sweep_has_made_superfluous_is_truncated(wal):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changelog_module, "SWEEP_FROM_BYTES", 500)
        patch.setattr(changelog_module, "SWEEP_BYTES", 20)
        patch.setattr(changelog_module, "SWEPT_AT_ONCE", 1)
        member = await wal.join("g", ["words"])
        running = asyncio.create_task(process_keyed(wal, member, counting, "counting", commit_interval_s=0.0))
        for number in range(300):
            await wal.append("words", b"%d" % (number % 7))
            await elapse(0.01)
        await elapse(1.0)
        await member.aclose()
        await running
    info = await wal.describe("counting-changelog.words")
    reader = wal.read("counting-changelog.words", From.EARLIEST)
    first = (await anext(reader))[0]
    await reader.aclose()
    assert first.id == info.first_id
    assert int.from_bytes(info.latest_id) - int.from_bytes(first.id) < 100
    await wal.append("words", b"0")
    seen = await until_counted(wal, await wal.join("g", ["words"]), 301)
    assert sum(seen.values()) == 301


@virtual
async def test_a_changelog_is_truncated_however_short_the_lives_of_its_members_are(wal):
    """The sweep that one member has begun is gone on with, and ended, by later ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changelog_module, "SWEEP_FROM_BYTES", 500)
        patch.setattr(changelog_module, "SWEEP_BYTES", 20)
        patch.setattr(changelog_module, "SWEPT_AT_ONCE", 1)
        for number in range(150):
            await wal.append("words", b"%d" % (number % 30))
            await until_counted(wal, await wal.join("g", ["words"]), number + 1)
    info = await wal.describe("counting-changelog.words")
    assert int.from_bytes(info.latest_id) - int.from_bytes(info.first_id) < 150
    await wal.append("words", b"0")
    seen = await until_counted(wal, await wal.join("g", ["words"]), 151)
    assert sum(seen.values()) == 151


@virtual
async def test_a_channel_that_comes_back_comes_with_what_another_member_made_of_its_state(wal):
    await wal.create_channel("more", ChannelPolicy())
    states = {}

    async def handle(delivered, state):
        await counting(delivered, state)
        states[delivered.channel] = dict(state.table("counts"))
        return []

    async def write():
        for channel in ("words", "more"):
            await wal.append(channel, b"a")
        await elapse(1.0)

    first = await wal.join("g", ["words", "more"])
    one = asyncio.create_task(process_keyed(wal, first, handle, "counting"))
    await write()
    second = await wal.join("g", ["words", "more"])
    two = asyncio.create_task(process_keyed(wal, second, handle, "counting"))
    await write()
    assert len(first.channels) == len(second.channels) == 1
    await second.aclose()
    await two
    await write()
    assert first.channels == {"words", "more"}
    assert states == {"words": {b"a": 3}, "more": {b"a": 3}}
    await first.aclose()
    await one


@virtual
async def test_a_changelog_that_was_removed_is_told(wal):
    await wal.append("words", b"a")
    await until_counted(wal, await wal.join("g", ["words"]), 1)
    await wal.drop_channel("counting-changelog.words")
    await wal.append("words", b"a")
    with pytest.raises(Unavailable, match=r"counting-changelog\.words"):
        await until_counted(wal, await wal.join("g", ["words"]), 2)


@virtual
async def test_a_program_does_not_read_its_own_changelog(wal):
    await wal.append("words", b"a")
    with pytest.raises(InvalidRequest, match="changelog of this very program"):
        await until_counted(wal, await wal.join("g", ["*"]), 99)


@virtual
async def test_metadata_of_another_program_is_refused(wal):
    member = await wal.join("g", ["words"])
    await member.annotate("words", b"something else")
    await wal.append("words", b"a")
    with pytest.raises(InvalidRequest, match="another program"):
        await until_counted(wal, member, 1)


@virtual
async def test_what_failed_is_counted_once_when_processing_starts_again(wal):
    member = await wal.join("g", ["words"])
    await wal.append_many([Append("words", b"a")] * 2)

    async def fails(delivered, state):
        await counting(delivered, state)
        raise ValueError("after the state has changed")

    with pytest.raises(ValueError, match="after the state"):
        await process_keyed(wal, member, fails, "counting")
    assert await until_counted(wal, member, 2) == {b"a": 2}


@virtual
async def test_a_value_that_cannot_be_stored_stops_the_program_and_nothing_is_lost(wal):
    member = await wal.join("g", ["words"])
    await wal.append("words", b"a")

    async def stores_a_set(delivered, state):
        state.table("counts")["set"] = {1}
        return []

    with pytest.raises(InvalidRequest, match="counts"):
        await process_keyed(wal, member, stores_a_set, "counting")
    assert await until_counted(wal, member, 1) == {b"a": 1}


@virtual
async def test_a_codec_of_ones_own_is_used(wal):
    class Repr:
        def encode(self, values):
            return repr(values).encode()

        def decode(self, data):
            return eval(data)

    codec = Repr()
    await wal.append("words", b"a")
    await until_counted(wal, await wal.join("g", ["words"]), 1, codec=codec)
    await wal.append("words", b"a")
    assert await until_counted(wal, await wal.join("g", ["words"]), 2, codec=codec) == {b"a": 2}


@virtual
async def test_of_several_channels_those_that_are_left_are_committed(wal):
    """A channel goes to another member between processing and commit: the other channel's batch is committed."""
    await wal.create_channel("more", ChannelPolicy())
    member = await wal.join("g", ["words", "more"])
    commit, calls = member.commit, []

    async def loses_one(delivered, outputs, **options):
        calls.append([each.channel for each in delivered])
        if len(calls) == 1:
            raise Fenced("another member has it", channel="more")
        return await commit(delivered, outputs, **options)

    member.commit = loses_one
    running = asyncio.create_task(process_keyed(wal, member, counting, "counting", commit_interval_s=0.5))
    await wal.append("words", b"a")
    await wal.append("more", b"a")
    await elapse(2.0)
    assert sorted(calls[0]) == ["more", "words"]
    assert calls[1:] == [["words"]]
    await member.aclose()
    await running


async def test_what_cannot_work_is_refused_before_anything_is_read():
    wal = MemoryWal(MemoryLog())
    await wal.create_channel("words", ChannelPolicy())
    member = await wal.join("g", ["words"])
    with pytest.raises(InvalidRequest, match="name"):
        await process_keyed(wal, member, counting, "")
    wal.capabilities = type("C", (), {"atomic_commits": False})()
    with pytest.raises(Unsupported) as caught:
        await process_keyed(wal, member, counting, "counting")
    assert caught.value.capability == "atomic_commits"
    await member.aclose()
    await wal.close()


@virtual
async def test_a_recovery_that_truncation_overtakes_begins_anew(wal):
    await wal.append("words", b"a")
    await until_counted(wal, await wal.join("g", ["words"]), 1)
    await wal.append("words", b"a")
    read, overtaken = wal.read, []

    def read_once_too_late(channel, start):
        if channel == "counting-changelog.words" and not overtaken:
            overtaken.append(channel)
            return lost()
        return read(channel, start)

    async def lost():
        raise PositionLost("truncated meanwhile", channel="counting-changelog.words")
        yield

    wal.read = read_once_too_late
    assert await until_counted(wal, await wal.join("g", ["words"]), 2) == {b"a": 2}
    assert overtaken


def test_recovery_waits_for_a_commit_that_is_published_later(monkeypatch):
    """A backend may show the position before the outputs of its commit: the state waits for them."""

    async def main():
        log = MemoryLog()
        wal = MemoryWal(log)
        await wal.create_channel("words", ChannelPolicy())
        await wal.append("words", b"a")
        await until_counted(wal, await wal.join("g", ["words"]), 1)
        entries = log.channels["counting-changelog.words"].entries
        hidden = entries.pop()
        await wal.append("words", b"a")
        again = asyncio.create_task(until_counted(wal, await wal.join("g", ["words"]), 2))
        await elapse(keyed_channel.RECOVERY_STALLED_S / 2)
        assert not again.done()
        await wal.append("counting-changelog.words", hidden.payload)
        assert await again == {b"a": 2}
        await wal.close()

    run_virtual(main())


@virtual
async def test_the_states_are_shown_by_group_and_channel_for_as_long_as_they_are_here(wal):
    metrics = Metrics("1")
    labels = {"group": "g", "channel_name": "words"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changelog_module, "SWEEP_FROM_BYTES", 500)
        patch.setattr(changelog_module, "SWEEP_BYTES", 20)
        member = await wal.join("g", ["words"])
        running = asyncio.create_task(
            process_keyed(wal, member, counting, "counting", commit_interval_s=0.0, metrics=metrics)
        )
        for number in range(300):
            await wal.append("words", b"%d" % (number % 7), compose(1000 + number * 1000))
            await elapse(0.01)
        assert metrics.value("wal_keyed_state_keys", **labels) == 7
        assert 7 * 200 < metrics.value("wal_keyed_state_bytes", **labels) < 7 * 200 + 3000
        assert 7 < metrics.value("wal_keyed_changelog_bytes", **labels) < 3000
        assert 200 < metrics.value("wal_keyed_snapshot_unix_seconds", **labels) < 300
        await member.aclose()
        await running
    assert metrics.series("wal_keyed_state_keys") == {}
    member = await wal.join("g", ["words"])
    await wal.append("words", b"0", compose(301_000))
    running = asyncio.create_task(process_keyed(wal, member, counting, "counting", metrics=metrics))
    await elapse(1.0)
    assert metrics.value("wal_keyed_state_keys", **labels) == 7
    assert 200 < metrics.value("wal_keyed_snapshot_unix_seconds", **labels) < 300
    await member.aclose()
    await running


@virtual
async def test_an_entry_that_tells_the_time_ends_the_windows_of_a_silent_channel(wal):
    metrics, found = Metrics("1"), []
    seen = Windowed("seen", tumbling(timedelta(seconds=10)), new=lambda: 0, add=lambda kept, _: kept + 1)

    async def handle(delivered, state):
        for entry in delivered.entries:
            rows = [("all", entry.timestamp >> 18, 1)] if entry.payload == b"row" else []
            results, late = seen.update(state, rows, None if rows else entry.timestamp)
            found.extend((each.window.start, each.value) for each in results)
            assert not late
        return []

    labels = {"group": "g", "channel_name": "words", "window": "seen"}
    for _ in range(2):  # the second member begins with what is stored
        member = await wal.join("g", ["words"])
        running = asyncio.create_task(process_keyed(wal, member, handle, "seen", metrics=metrics))
        await wal.append("words", b"row", compose(3_000 if not found else 13_000))
        await elapse(100.0)
        assert len(found) == metrics.value("wal_keyed_watermark_unix_seconds", **labels) // 10
        await wal.append("words", b"time", compose(10_000 if not found else 20_500))
        await elapse(1.0)
        await member.aclose()
        await running
    assert found == [(0, 1), (10_000, 1)]
