"""Topics are written exactly once: Spark's protocol, played by a model that kills, repeats and doubles whatever it can.

Tasks and drivers here call what Spark's processes call; only Spark is missing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import xxhash

from tests.torture.faults import garbage
from tidewal.runtime.errors import (
    CorruptLog,
    DeadlineExceeded,
    FormatTooNew,
    InvalidRequest,
    OutcomeUnknown,
    Unavailable,
)
from tidewal.runtime.log.ledger_body import ledger_channel
from tidewal.runtime.log.names import DEFAULT_PREFIX
from tidewal.runtime.log.record import Record, RecordType, decode, encode
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal
from tidewal.runtime.testing.clock import VirtualLoop, elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.spark_bridge.sink.ledger import (
    NOTHING,
    POLICY,
    Decision,
    Ledger,
    LedgerState,
    MicroBatch,
    StagedRows,
    upto,
)
from tidewal.spark_bridge.sink.messages import OutgoingMessage
from tidewal.spark_bridge.sink.topic import Publisher, Stager, producer_of, staged_name

WRITER = "q"
LEDGER = ledger_channel(DEFAULT_PREFIX, WRITER)
STAGED_CHANNEL = staged_name(LEDGER)
TOPICS = ("a", "b", "c")
DEADLINE_S = 60.0

Rows = list[tuple[str, bytes]]  # (topic, value)


class Killed(BaseException):
    """The process was killed."""


class Mortal:
    """A log as a process sees it that is killed at its `life`-th call, before or after the call happens."""

    def __init__(self, wal: Wal, rng: random.Random, life: int) -> None:
        self._wal, self._rng, self._life = wal, rng, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wal, name)
        if name not in ("append", "append_many", "latest_id", "truncate", "create_channel", "describe"):
            return found

        async def call(*arguments: Any) -> Any:
            self._life -= 1
            if self._life == 0 and self._rng.random() < 0.5:
                raise Killed
            result = await found(*arguments)
            if self._life == 0:
                raise Killed
            return result

        return call


async def create(wal: Wal) -> None:
    for topic in TOPICS:
        await wal.create_channel(topic, ChannelPolicy())


async def stage(wal: Wal, batch: int, partition: int, rows: Rows, limit: int = 2000) -> StagedRows | None:
    """One task."""
    await wal.create_channel(STAGED_CHANNEL, POLICY)
    stager = Stager(wal, STAGED_CHANNEL, partition, limit, DEADLINE_S)
    producer = producer_of(WRITER, batch, partition)
    records = (
        OutgoingMessage(
            topic,
            number + 1,
            encode(Record(RecordType.ROWS, producer=producer, pseq=number, body=value)),
            xxhash.xxh3_64_intdigest(value, ord(topic)),
        )
        for number, (topic, value) in enumerate(rows)
    )
    await stager.add(records)
    return await stager.finish()


async def commit(
    wal: Wal, batch: int, attempts: Sequence[StagedRows | None], run: str = "", *, allow_old: bool = False
) -> None:
    """The driver, a fresh process."""
    ledger = Ledger(wal, LEDGER)
    await ledger.create()
    publisher = Publisher(wal, ledger, STAGED_CHANNEL, WRITER, DEADLINE_S, allow_old=allow_old)
    await publisher.commit(batch, [each for each in attempts if each is not None], TOPICS, run)


async def payloads(wal: Wal, channel: str) -> list[bytes]:
    last = await wal.latest_id(channel)
    if last is None:
        return []
    async with aclosing(upto(wal, channel, From.EARLIEST, last)) as entry_lists:
        return [bytes(entry.payload) async for entries in entry_lists for entry in entries]


async def content(wal: Wal, topic: str) -> list[Record]:
    return [decode(payload) for payload in await payloads(wal, topic)]


async def values(wal: Wal) -> Counter[tuple[str, bytes]]:
    return Counter([(topic, bytes(record.body)) for topic in TOPICS for record in await content(wal, topic)])


async def survived(work: Awaitable[Any]) -> bool:
    try:
        await work
    except Killed:
        return False
    return True


class Spark:
    """Runs batches as Spark does: tasks until each has succeeded once, then the driver's commit; after a driver's death
    the whole batch again. Rows come in another order each time, as behind a shuffle."""

    def __init__(self, wal: Wal, rng: random.Random, *, deaths: float = 0.5) -> None:
        self.wal, self.rng, self.deaths = wal, rng, deaths

    def _process(self) -> Any:
        """A process's view of the log, which may be its last."""
        if self.rng.random() < self.deaths:
            return Mortal(self.wal, self.rng, self.rng.randrange(1, 12))
        return self.wal

    async def batch(self, number: int, partitions: Sequence[Rows]) -> None:
        while True:
            attempts = [await self._task(number, place, rows) for place, rows in enumerate(partitions)]
            zombies = [
                asyncio.ensure_future(survived(stage(self._process(), number, place, self._shuffled(rows))))
                for place, rows in enumerate(partitions)
                if self.rng.random() < 0.3
            ]
            committed = await survived(commit(self._process(), number, attempts))
            await asyncio.gather(*zombies)
            if committed and self.rng.random() < 0.8:  # else it dies before Spark's own commit
                return
            if isinstance(asyncio.get_running_loop(), VirtualLoop):
                await elapse(1)  # a driver takes longer to start than an append to land

    async def _task(self, number: int, place: int, rows: Rows) -> StagedRows | None:
        while True:
            try:
                return await stage(self._process(), number, place, self._shuffled(rows))
            except Killed:
                continue

    def _shuffled(self, rows: Rows) -> Rows:
        return self.rng.sample(rows, len(rows))


def random_rows(rng: random.Random, count: int) -> Rows:
    return [(rng.choice(TOPICS), rng.randbytes(rng.randrange(1, 60))) for _ in range(count)]


async def play(wal: Wal, rng: random.Random, *, batches: int, rows: int = 60) -> None:
    """Whatever dies, the topics hold each row once, and what others wrote."""
    await create(wal)
    spark = Spark(wal, rng)
    expected: Counter[tuple[str, bytes]] = Counter()
    for number in range(batches):
        partitions = [random_rows(rng, rng.randrange(rows)) for _ in range(rng.randrange(1, 4))]
        await wal.append("a", encode(Record(RecordType.ROWS, producer="another", body=b"other")))
        expected["a", b"other"] += 1
        await spark.batch(number, partitions)
        expected.update(row for part in partitions for row in part)
        assert await values(wal) == expected
    state = await Ledger(wal, LEDGER).state()
    assert state.decision is None


@pytest.mark.slow
@pytest.mark.parametrize("round", range(20))
def test_each_row_is_there_once_whoever_dies_and_whatever_is_repeated(seed: int, round: int) -> None:
    rng = random.Random(seed + round)

    async def main() -> None:
        faults = FaultPlan(rng.randrange(2**32), Rates(fail=0.1, unknown=0.1, lost=0.1, delay=0.1), channels="spark")
        log = MemoryLog()
        await play(MemoryWal(log, faults), rng, batches=6)

    run_virtual(main())


@pytest.mark.slow
async def test_on_every_log(backend: Any, rng: random.Random) -> None:
    await play(await backend.wal(), rng, batches=3, rows=20)


def test_an_append_of_unknown_outcome_is_looked_for_and_not_repeated(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        clean = MemoryWal()
        await create(clean)
        expected: Counter[tuple[str, bytes]] = Counter()
        for number in range(30):
            rows = random_rows(rng, 30)
            attempt = await stage(clean, number, 0, rows)
            for topic in TOPICS:  # each copy may fail or land with its answer lost
                faults = FaultPlan(rng.randrange(2**32), Rates(fail=0.2, unknown=0.3, lost=0.2), channels=topic)
            await commit(MemoryWal(clean.log, faults), number, [attempt])
            expected.update(rows)
        assert await values(clean) == expected

    run_virtual(main())


def test_what_was_decided_counts_though_the_batch_is_computed_anew() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        first = [await stage(wal, 0, 0, [("a", b"first"), ("b", b"first")])]
        for life in range(1, 20):  # dies at every step, at last it survives
            if await survived(commit(Mortal(wal, random.Random(life), life), 0, first, allow_old=True)):
                break
            first = [await stage(wal, 0, 0, [("a", b"second")])] if life > 6 else first
        else:
            raise AssertionError("it never ends")
        found = await values(wal)
        assert found in (Counter({("a", b"first"): 1, ("b", b"first"): 1}), Counter({("a", b"second"): 1}))
        third = [await stage(wal, 0, 0, [("c", b"third")])]
        with pytest.raises(InvalidRequest, match="batch 0 is not written: this batch is done, and had other rows"):
            await commit(wal, 0, third)
        await commit(wal, 0, third, allow_old=True)
        assert await values(wal) == found

    run_virtual(main())


def test_a_number_that_is_done_does_not_make_other_rows_count_as_written() -> None:
    """A checkpoint is restored from a copy, or made anew under the same application."""

    async def main() -> None:
        wal = MemoryWal()
        await create(wal)

        async def write(number: int, value: bytes, run: str, **options: bool) -> None:
            await commit(wal, number, [await stage(wal, number, 0, [("a", value)])], run, **options)

        for number in range(4):
            await write(number, b"old %d" % number, "first")
        await write(3, b"old 3", "first")  # Spark died before its own commit
        with pytest.raises(InvalidRequest, match="batch 2 is not written: batch 3 is done, and this one is older"):
            await write(2, b"new", "first")
        with pytest.raises(InvalidRequest, match="batch 3 is not written: this batch is done, and had other rows"):
            await write(3, b"new", "first")
        for number in (0, 3):
            with pytest.raises(InvalidRequest, match="was written under another checkpoint"):
                await write(number, b"old %d" % number, "second")
        for number in range(4):
            await write(number, b"passed over", "second", allow_old=True)
        await write(4, b"new", "second")
        assert await values(wal) == Counter([("a", b"old %d" % number) for number in range(4)] + [("a", b"new")])

    run_virtual(main())


def test_a_batch_that_another_checkpoint_has_begun_is_not_taken_for_ones_own() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        await die_while_copying(wal, 0)
        with pytest.raises(CorruptLog, match="batch 0 was begun and is not done, and this is batch 0 of another check"):
            await commit(wal, 0, [await stage(wal, 0, 0, [("a", b"new")])], "second")

    run_virtual(main())


def test_rows_of_a_partition_keep_their_order(rng: random.Random) -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        rows = [("a", b"%d" % number) for number in range(500)]
        attempts = await asyncio.gather(*(stage(wal, 0, place, rows[place::3]) for place in range(3)))
        await commit(wal, 0, attempts)
        found = [bytes(record.body) for record in await content(wal, "a")]
        for place in range(3):
            assert [value for value in found if int(value) % 3 == place] == [value for _, value in rows[place::3]]

    run_virtual(main())


def test_nothing_is_left_of_what_is_done() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        for number in range(50):
            await commit(wal, number, [await stage(wal, number, 0, [("a", bytes(500))] * 10)])
        assert len(wal.log.channels[LEDGER].entries) == 1
        assert len(wal.log.channels[STAGED_CHANNEL].entries) == 1

    run_virtual(main())


def test_a_batch_of_nothing_writes_nothing() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        await commit(wal, 0, [await stage(wal, 0, 0, [])])
        assert await wal.latest_id(LEDGER) is None

    run_virtual(main())


def test_of_two_decisions_on_one_batch_the_first_counts() -> None:
    async def main() -> None:
        ledger = Ledger(MemoryWal(), LEDGER)
        await ledger.create()
        first, second = (Decision(3, [StagedRows(0, token, 1, b"1", b"1")], {"a": None}) for token in ("x", "y"))
        await ledger.decide(first)
        await ledger.decide(second)
        assert await ledger.state() == (NOTHING, first)
        await ledger.finish(MicroBatch(3, "run", 7))
        assert await ledger.state() == (MicroBatch(3, "run", 7), None)

    run_virtual(main())


async def die_while_copying(wal: MemoryWal, batch: int) -> StagedRows | None:
    """Leave a batch that is decided and copied, and not done."""
    attempt = await stage(wal, batch, 0, [("a", b"x"), ("a", b"y")])

    class Deaf(Mortal):
        async def append_many(self, entries: Any) -> None:
            await self._wal.append_many(entries)
            raise Killed

    assert not await survived(commit(Deaf(wal, random.Random(), 0), batch, [attempt]))
    assert (await Ledger(wal, LEDGER).state()).decision is not None
    return attempt


def test_another_checkpoint_is_noticed() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        await die_while_copying(wal, 5)
        with pytest.raises(CorruptLog, match=r"batch 5 was begun and is not done, .* run that one first"):
            await commit(wal, 0, [await stage(wal, 0, 0, [("a", b"y")])])

    run_virtual(main())


def test_what_retention_took_is_told_instead_of_doubled() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        await wal.append("a", encode(Record(RecordType.ROWS)))
        attempt = await die_while_copying(wal, 0)
        for _ in range(3):
            last = await wal.append("a", encode(Record(RecordType.ROWS)))
        await wal.truncate("a", last)
        with pytest.raises(OutcomeUnknown, match="retention has removed from a what shows"):
            await commit(wal, 0, [attempt])

    run_virtual(main())


def test_nothing_waits_for_what_retention_took() -> None:
    """Of a topic that was empty before the batch, and of the ledger, all that was there."""

    async def emptied(wal: Wal, channel: str) -> None:
        latest = await wal.latest_id(channel)
        assert latest is not None
        await wal.truncate(channel, (int.from_bytes(latest) + 1).to_bytes(len(latest)))

    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        attempt = await die_while_copying(wal, 0)
        await emptied(wal, "a")
        with pytest.raises(OutcomeUnknown, match="retention has removed from a what shows"):
            await commit(wal, 0, [attempt])
        await emptied(wal, LEDGER)
        assert await Ledger(wal, LEDGER).state() == LedgerState(NOTHING, None)

    run_virtual(main())


def test_what_no_tidewal_wrote_into_the_channels_of_a_query_is_passed_by(rng: random.Random) -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        for channel in (LEDGER, STAGED_CHANNEL):
            await wal.create_channel(channel, POLICY)

        async def pollute() -> None:
            for channel in (LEDGER, STAGED_CHANNEL):
                foreign = garbage(rng, await payloads(wal, channel))
                for payload in (*foreign, encode(Record(RecordType.CUT)), b"not a record"):
                    await wal.append(channel, payload)

        for batch in range(3):
            await pollute()
            first = await stage(wal, batch, 0, [("a", b"%d" % batch)] * 3)
            await pollute()
            await commit(wal, batch, [first, await stage(wal, batch, 1, [("a", b"%d" % batch)] * 3)])
        assert await values(wal) == Counter({("a", b"%d" % batch): 6 for batch in range(3)})

    run_virtual(main())


def test_a_ledger_of_a_newer_tidewal_stops_everything() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        attempt = await stage(wal, 0, 0, [("a", b"x")])
        await Ledger(wal, LEDGER).create()
        newer = bytearray(encode(Record(RecordType.LEDGER)))
        newer[2] += 1
        await wal.append(LEDGER, bytes(newer))
        with pytest.raises(CorruptLog, match="nothing is written, for that might double rows"):
            await commit(wal, 0, [attempt])

    run_virtual(main())


def test_a_ledgers_record_of_a_newer_version_stops_everything() -> None:
    async def main() -> None:
        wal = MemoryWal()
        await create(wal)
        attempt = await stage(wal, 0, 0, [("a", b"x")])
        ledger = Ledger(wal, LEDGER)
        await ledger.create()
        await ledger._append({"v": 2, "abandoned": 0})
        with pytest.raises(FormatTooNew, match="upgrade"):
            await commit(wal, 0, [attempt])

    run_virtual(main())


def test_a_log_that_takes_nothing_is_told_in_time() -> None:
    async def main() -> None:
        wal = MemoryWal(faults=FaultPlan(1, Rates(fail=1.0), channels="staged"))
        await create(wal)
        with pytest.raises(DeadlineExceeded, match=r"could not be written within 60 s \(the memory WAL was told"):
            await stage(wal, 0, 0, [("a", b"x")])

    run_virtual(main())


def test_many_topics_and_large_messages_fit_into_what_is_staged(rng: random.Random) -> None:
    async def main() -> None:
        wal = MemoryWal()
        names = [f"{number:03}" + "t" * 200 for number in range(300)]
        for name in names:
            await wal.create_channel(name, ChannelPolicy())
        limit = 8000
        await wal.create_channel(STAGED_CHANNEL, ChannelPolicy(retention_s=None, max_message_bytes=limit))
        stager = Stager(wal, STAGED_CHANNEL, 0, limit, DEADLINE_S)
        sent = [(rng.choice(names), rng.randbytes(rng.choice([10, stager.row_limit]))) for _ in range(400)]
        await stager.add(OutgoingMessage(topic, 1, payload) for topic, payload in sent)
        attempt = await stager.finish()
        ledger = Ledger(wal, LEDGER)
        await ledger.create()
        assert attempt is not None
        assert stager.targets == {topic for topic, _ in sent}
        await Publisher(wal, ledger, STAGED_CHANNEL, WRITER, DEADLINE_S).commit(0, [attempt], stager.targets)
        found = [(name, bytes(entry.payload)) for name in names for entry in wal.log.channels[name].entries]
        assert Counter(found) == Counter(sent)

    run_virtual(main())


@pytest.mark.slow
def test_the_deadline_is_for_standing_still() -> None:
    class Slow(MemoryWal):
        """The topics take an append, and then none for a while."""

        pause_s = 0.8 * DEADLINE_S
        ready_at = 0.0

        async def append_many(self, entries: Any) -> list[bytes]:
            if entries[0].channel in TOPICS:
                now = asyncio.get_running_loop().time()
                if now < self.ready_at:
                    raise Unavailable("not now")
                self.ready_at = now + self.pause_s
            return await super().append_many(entries)

    async def main() -> None:
        wal = Slow()
        await create(wal)
        begun = asyncio.get_running_loop().time()
        await commit(wal, 0, [await stage(wal, 0, 0, [("a", bytes(900))] * 6)])
        assert asyncio.get_running_loop().time() - begun > 2 * DEADLINE_S
        assert (await values(wal)).total() == 6
        wal.ready_at += 2 * DEADLINE_S
        with pytest.raises(DeadlineExceeded):
            await commit(wal, 1, [await stage(wal, 1, 0, [("a", b"x")])])

    run_virtual(main())
