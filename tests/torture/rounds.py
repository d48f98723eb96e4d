"""A run: one log, one node, one Spark query, and rounds of clients, members of groups and faults over them.

Each round ends with a calm: what is away comes back, the clients end, the groups and Spark catch up, and all that is in
the log, the tables and the topic is compared with the histories.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from deltalake import DeltaTable

from tests.brokers.producers import everything
from tidewal.actors.client import Client
from tidewal.actors.topics.retry_topics import retry_topic_name
from tidewal.cli.kills.checked_client import NUMBERS, read_keys
from tidewal.cli.kills.topic_client import passing
from tidewal.runtime.delays.delayed import due_of
from tidewal.runtime.errors import BadRecord, TidewalError, TopicNotFound
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import ChannelPolicy, Entry, From, FromId, Wal
from tidewal.runtime.ownership.batch import SOURCE
from tidewal.runtime.streams.channel_reader import ChannelReader
from tidewal.runtime.testing.histories import history_checks as checks
from tidewal.runtime.testing.histories.client_history import ClientCall, load_calls

from .client import DEADLINE_S, ROWS_PER_CLIENT
from .faults import Fault, clock_step_ms, draw, garbage
from .forcing import (
    FORCE,
    as_of,
    contents,
    cut_short,
    is_of_line,
    line_time,
    not_salvaged,
    read_salvaged,
    without_undone,
)
from .inside import CHANNELS, COPIES, GROWING, LATER, TOPIC, open_log
from .letters import save_dead_letters
from .logs import LOGS, LogUnderTest
from .member import RETRIED, SENT
from .moving import drop_copies, move, salvage
from .workers import Worker

ROUND_S = 40.0
CALM_S = 180.0  # within which all must have come to an end behind the last fault
PAUSE_S = 0.3
LATE_MS = 2 * int(1000 * (ROUND_S + CALM_S))  # longer than a round takes
CLIENTS = 2
GROUPS = {
    "once": "exactly_once",
    "least": "at_least_once",
    SENT: "exactly_once",
    RETRIED: "exactly_once",
}  # the name of a group, and its semantics
MEMBERS = 2  # of each group
DELETED_GRACE_NS = 5_000_000_000  # in which a broker may still take what it was told to delete
READ_ENTRIES = 200  # of a channel, to make garbage of
MIN_PROGRESS = 5  # operations of a round that must have succeeded: otherwise nothing was tried

Result = TypeVar("Result")


class Violation(Exception):
    """A promise was broken, by the sentences in `found`."""

    def __init__(self, found: Sequence[str]) -> None:
        super().__init__("\n".join(found))
        self.found = list(found)


@dataclass
class Round:
    """What belongs to one round."""

    number: int
    clients: list[Worker] = field(default_factory=list)
    members: list[Worker] = field(default_factory=list)
    deleted: dict[str, int] = field(default_factory=dict)  # channel, and when it was gone
    first_id: int = 0
    ahead_ms: int = 0  # how far the node's wall clock was set ahead, at most
    histories: list[Path] = field(default_factory=list)
    line: float = math.inf  # the time up to which the log has what was written: it went on without its source

    @property
    def prefix(self) -> str:
        return f"r{self.number}"

    def channels(self, kind: str) -> list[str]:
        """Its channels `in`, or those of a group."""
        return [f"{self.prefix}-{kind}-{number}" for number in range(CHANNELS)]

    def calls(self) -> list[ClientCall]:
        """What its clients have called until now."""
        return load_calls(path for path in self.histories if path.exists())

    @property
    def is_forced(self) -> bool:
        """Whether its log went on without its source."""
        return self.line < math.inf


class Run:
    """An async context manager over a log of kind `name` in `folder`; `say` gets what is worth telling. In rounds, or
    behind them, another log may take the place of this one, in the ways in `moves`: in the usual ones of the log for
    None."""

    def __init__(
        self,
        name: str,
        folder: Path,
        seed: int,
        *,
        spark: bool,
        say: Callable[[str], None],
        round_s: float = ROUND_S,
        moves: Sequence[str] | None = None,
    ) -> None:
        self.log: LogUnderTest = LOGS[name](folder)
        self.moves: Sequence[str] = self.log.usual_moves if moves is None else moves
        self.folder, self._seed, self._spark, self._say, self._round_s = folder, seed, spark, say, round_s
        self._stack = AsyncExitStack()
        self._numbers = itertools.count()
        self._ids = itertools.count(0, ROWS_PER_CLIENT)
        self._lasting: list[Worker] = []
        self._connections = AsyncExitStack()
        self._moves = 0
        self._replica = ""
        self._copied: list[int] = []
        self._copied_to: bytes | None = None

    async def __aenter__(self) -> Run:
        async with AsyncExitStack() as stack:
            stack.push_async_exit(self._stop_log)
            await self.log.start()
            stack.push_async_callback(self._end_workers)
            stack.push_async_callback(self._connections.aclose)
            await self._start_lasting()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def _stop_log(self, kind: type[BaseException] | None, *_: object) -> None:
        """Behind a violation the brokers' data stays beside the histories."""
        await self.log.stop(keep=kind is not None)

    async def _start_lasting(self) -> None:
        """Start the node, connect to it, and start Spark's query, and the replicator."""
        self._node = self._start("node", "node", lambda life: (self.log.url, self.folder / "tables"))
        self._lasting.append(self._node)
        self._wal: Wal = await patiently(lambda: open_log(self.log.url, own=False))
        self._connections.push_async_callback(self._wal.close)
        self._client = await patiently(lambda: self._connections.enter_async_context(Client(self._wal)))
        await patiently(lambda: self._client.describe_collection("things"))
        if {"promote", FORCE} & {*self.moves}:
            replica = self._replica = self.log.next_url(f"replica-{self._moves}")
            self._lasting.append(self._start("replica", "replicator", lambda life: (self.log.url, replica)))
        if self._spark:
            home = self.folder / f"spark-{self._moves}"
            self._lasting.append(self._start("spark", "spark_copy", lambda life: (self.log.url, home)))

    async def _end_workers(self) -> None:
        for worker in self._lasting:
            await worker.kill_for_good()

    def _start(self, name: str, module: str, arguments: Callable[[int], Sequence[object]]) -> Worker:
        return Worker(name, module, self.folder / f"{name}.log", arguments)

    @property
    def _groups(self) -> dict[str, str]:
        """The groups of a round: none where the log has none."""
        return GROUPS if self._wal.capabilities.groups else {}

    def _channels(self, this: Round) -> list[str]:
        """All channels of a round."""
        return [name for kind in ("in", *self._groups) for name in this.channels(kind)]

    def draw(self, rng: random.Random) -> list[Fault]:
        """The faults of the next round."""
        members = [f"{group}{number}" for group in self._groups for number in range(MEMBERS)]
        clients = [f"client{number}" for number in range(CLIENTS)]
        others = [each.name for each in self._lasting if each is not self._node]
        workers = ["node", "node", *clients, *members, *others]
        of_log, decisive = sorted(self.log.disturbances), self.log.decisive
        return draw(rng, of_log, workers, self._round_s, decisive, moves=self.moves)

    async def round(self, faults: Sequence[Fault]) -> int:
        """Let clients and groups work under these faults, compare, and return how many operations succeeded. Raises
        `Violation`."""
        this = Round(next(self._numbers))
        for channel in self._channels(this):
            await patiently(lambda channel=channel: self._wal.create_channel(channel, ChannelPolicy()))
        self._start_clients(this)
        self._start_members(this)
        moves = [fault for fault in faults if fault.kind in self.moves]
        try:
            await self._disturb(this, [fault for fault in faults if fault not in moves])
            for fault in (each for each in moves if each.kind == FORCE):
                await self._force(this, fault)
            succeeded = await self._settle(this)
            for fault in (each for each in moves if each.kind != FORCE):
                await self._move(this, fault)
            await self._forget(this)
            return succeeded
        except Violation:
            said = await save_dead_letters(self._wal, self.folder / f"{this.prefix}-dead-letters.jsonl")
            self._say(f"dead letters: {said}")
            raise
        finally:
            for worker in (*this.clients, *this.members):
                await worker.kill_for_good()

    def _start_clients(self, this: Round) -> None:
        this.first_id = next(self._ids)
        owners = [f"{this.prefix}c{number}-0" for number in range(CLIENTS)]
        for number in range(CLIENTS):

            def arguments(life: int, number: int = number) -> Sequence[object]:
                history = self.folder / f"{this.prefix}c{number}-{life}.jsonl"
                this.histories.append(history)
                seed = f"{self._seed} {history.stem}"
                return self.log.url, history, seed, this.prefix, ",".join({*owners, history.stem}), next(self._ids)

            this.clients.append(self._start(f"client{number}", "client", arguments))

    def _start_members(self, this: Round) -> None:
        for group, semantics in self._groups.items():
            for number in range(MEMBERS):
                name = f"{group}{number}"

                def arguments(
                    life: int, name: str = name, group: str = group, semantics: str = semantics
                ) -> Sequence[object]:
                    return self.log.url, this.prefix, group, semantics, f"{self._seed} {this.prefix} {name} {life}"

                this.members.append(self._start(name, "member", arguments))

    # ---- faults -----------------------------------------------------------------------------------------------------

    async def _disturb(self, this: Round, faults: Sequence[Fault]) -> None:
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for fault in faults:
                    await asyncio.sleep(max(0.0, began + fault.at_s - time.monotonic()))
                    tasks.create_task(self._inject(this, fault))
                await asyncio.sleep(max(0.0, began + self._round_s - time.monotonic()))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several  # a `Violation` is one wherever it is met

    async def _inject(self, this: Round, fault: Fault) -> None:
        self._say(f"  {fault}")
        rng = random.Random(fault.seed)
        if fault.kind in self.log.disturbances:
            await self.log.disturbances[fault.kind](fault.length_s, rng)
        elif fault.kind == "garbage":
            await self._pollute(rng)
        elif fault.kind == "delete":
            await self._delete(this, rng)
        elif fault.kind == "grow":
            await self._grow(rng)
        else:
            await self._hurt(this, fault, rng)

    async def _hurt(self, this: Round, fault: Fault, rng: random.Random) -> None:
        everyone = {worker.name: worker for worker in (*self._lasting, *this.clients, *this.members)}
        worker = everyone[fault.target]
        if fault.kind == "kill":
            worker.kill()
        elif fault.kind == "pause":
            worker.pause()
            await asyncio.sleep(fault.length_s)
            worker.resume()
        else:
            step_ms = clock_step_ms(rng)
            if worker is self._node:
                this.ahead_ms = max(this.ahead_ms, step_ms)
            worker.tell(f"clock {step_ms}")
            await asyncio.sleep(fault.length_s)
            worker.tell("clock 0")

    async def _pollute(self, rng: random.Random) -> None:
        """Append garbage to a channel of the node's own, from outside: of replies, or, as often, of what lasts."""
        names = Names()
        internal = [name for name in await patiently(self._wal.channels) if name.startswith(names.prefix)]
        replies = [name for name in internal if name.startswith(names.replies(""))]
        lasting = sorted(set(internal) - set(replies))
        channel = rng.choice(rng.choice([replies or lasting, lasting]))  # a node that begins may have no replies yet
        real: list[bytes] = []
        try:
            async with asyncio.timeout(PAUSE_S):
                async for entries in self._wal.read(channel, From.EARLIEST):
                    real += [bytes(entry.payload) for entry in entries]
                    if len(real) >= READ_ENTRIES:
                        break
        except (TimeoutError, TidewalError):
            pass  # what was read until then will do
        self._say(f"           into {channel}")
        for payload in garbage(rng, real):
            try:
                await self._wal.append(channel, payload)
            except TidewalError as error:
                self._say(f"           {error!r}")
                return

    async def _delete(self, this: Round, rng: random.Random) -> None:
        doomed = [name for name in await patiently(self._wal.channels) if name.startswith(f"{this.prefix}-doomed")]
        doomed = sorted(set(doomed) - this.deleted.keys())
        if doomed:
            channel = rng.choice(doomed)
            await patiently(lambda: self.log.delete(self._wal, channel))
            this.deleted[channel] = time.monotonic_ns()

    async def _grow(self, rng: random.Random) -> None:
        """Give a topic another number of partitions; where the call fails it may get them yet."""
        try:
            name = rng.choice((GROWING, LATER))
            topic = await self._client.alter_topic(name, rng.randint(1, CHANNELS), deadline_s=DEADLINE_S)
            self._say(f"           {name} to {len(topic.partitions)} partitions, epoch {topic.epoch}")
        except TidewalError as error:
            self._say(f"           {error!r}")

    # ---- the end of a round -----------------------------------------------------------------------------------------

    async def _settle(self, this: Round) -> int:
        for worker in self._lasting:
            worker.resume()
        late = [worker.name for worker in this.clients if not await worker.stop()]
        found = [f"{name} did not end: a call of it hangs (see {name}.log)" for name in late]
        operations = this.calls()
        records = await self._sent(this, TOPIC)
        sent, grown = list(map(_content, records)), list(map(_content, await self._sent(this, GROWING)))
        if this.ahead_ms:  # what was to wait for a second then is due by this time, and so is what stands behind it
            self._node.tell(f"clock {this.ahead_ms + LATE_MS}")
        if self._groups:
            await self._until(lambda: self._drained(this), "the groups do not reach the ends of their channels")
            await self._until(lambda: self._passed_on(this, sent), "a group does not copy all that was sent")
        self._node.tell("clock 0")
        late = [worker.name for worker in this.members if not await worker.stop()]
        found += [f"{name} did not end (see {name}.log)" for name in late]
        found += checks.errors(operations) + self._after_deletion(this, operations)
        if this.is_forced:
            found += checks.keys(operations)
            operations = as_of(operations, this.line)
        found += await self._compare_channels(this, operations, sent, grown)
        found += await self._compare_delayed(this, operations)
        if found:  # a node over such a log may answer nothing any more
            raise Violation(found)
        found += await self._compare_rows(this, operations, records)
        found += checks.keys([*operations, *await self._final_reads(this)])
        succeeded = sum(operation.outcome == "ok" for operation in operations)
        kinds = Counter(operation.kind for operation in operations if operation.outcome == "ok")
        self._say("  " + ", ".join(f"{count} of {kind}" for kind, count in sorted(kinds.items())))
        if succeeded < MIN_PROGRESS:
            found.append(f"only {succeeded} of {len(operations)} operations succeeded")
        if found:
            raise Violation(found)
        return succeeded

    async def _force(self, this: Round, fault: Fault) -> None:
        """All processes are killed while they work, and the round goes on in another log, which has what lies below the
        line of the replica. What the old log had beyond is salvaged."""
        self._say(f"  {fault}")
        await self._until(lambda: self._has_line(this), "too little of the round comes below a line")
        everyone = (*self._lasting, *this.clients, *this.members)
        await asyncio.gather(*(worker.kill_for_good() for worker in everyone))
        self._lasting.clear()
        this.members.clear()
        await self._connections.aclose()
        this.line = await patiently(lambda: line_time(self._replica))
        calls = [call for call in this.calls() if call.outcome == "ok" and "ts" in call.result]
        above = sum(not is_of_line(call, this.line) for call in calls)
        self._say(f"           {above} of {len(calls)} operations are above the line")
        old, new = self.log.url, self.log.next_url(f"log-{self._moves}")
        await self._let_move(fault, self._replica, new)
        if found := await self._salvaged(this, old, new):
            raise Violation(found)
        await self._go_on(new)
        self._start_members(this)

    async def _has_line(self, this: Round) -> bool:
        """Whether enough of what was acknowledged in the round is below a line of the replica."""
        line = await line_time(self._replica)
        return sum(is_of_line(call, line) for call in this.calls()) >= MIN_PROGRESS

    async def _salvaged(self, this: Round, old: str, new: str) -> list[str]:
        """What is wrong with the old log, which is back, and what is neither salvaged from it nor in the new log, which
        no process uses yet. Of what Spark's query has written nothing is left there."""
        calls = this.calls()
        async with await open_log(old, own=True) as source:
            before = await contents(source, self._channels(this))
            inputs = {channel: await self._content(source, channel) for channel in this.channels("in")}
        found = checks.appends(calls, inputs) + checks.watched(calls, inputs)
        file, log = self.folder / f"{this.prefix}-salvaged.jsonl", self.folder / "move.log"
        if said := await salvage(self._replica, old, file, log):
            return [f"{said} (see {log.name})"]
        async with await open_log(new, own=True) as wal:
            await drop_copies(wal)
            after = await contents(wal, self._channels(this))
        salvaged = read_salvaged(file)
        return found + cut_short(before, after, salvaged) + not_salvaged(calls, this.line, salvaged)

    async def _move(self, this: Round, fault: Fault) -> None:
        """Let another log take the place of this one. All must be in it as it was, and the next rounds go on there."""
        self._say(f"  {fault}")
        before = await self._all_of(this)
        late = [worker.name for worker in self._lasting[1:] if not await worker.stop()]
        await patiently(lambda: drop_copies(self._wal))
        await self._connections.aclose()
        late += [self._node.name] if not await self._node.stop() else []
        if late:
            raise Violation([f"{name} did not end (see {name}.log)" for name in late])
        self._lasting.clear()
        old, new = self.log.url, self._replica if fault.kind == "promote" else self.log.next_url(f"log-{self._moves}")
        await self._let_move(fault, old, new)
        await self._go_on(new)
        after = await self._all_of(this)
        if lost := [name for name in before if before[name] != after.get(name)]:
            raise Violation([f"{name} is not in the new log what it was in the old one" for name in lost])
        if self._groups:
            await self._until(lambda: self._drained(this), "the positions of the groups are not the channels' ends")

    async def _let_move(self, fault: Fault, old: str, new: str) -> None:
        """Let the new log take the place of the old one by a command. Raises `Violation` where that fails."""
        log = self.folder / "move.log"
        if said := await move(fault.kind, old, new, self.folder / "tables", random.Random(fault.seed), log):
            raise Violation([f"{said} (see {log.name})"])

    async def _go_on(self, new: str) -> None:
        """Go on with a log that has taken the place of the one of now."""
        self._moves += 1
        self.log.url, self._copied, self._copied_to = new, [], None
        await self._start_lasting()

    async def _all_of(self, this: Round) -> dict[str, list[bytes]]:
        """What the round has left, by channel, partition and collection, without ids: these are other ones in another
        log."""
        found: dict[str, list[bytes]] = {}
        reader = await patiently(self.log.open_reader)
        try:
            for channel in self._channels(this):
                entries = await patiently(lambda channel=channel: everything(reader, channel))
                found[channel] = [bytes(entry.payload) for entry in entries]
        finally:
            await reader.close()
        for topic in (TOPIC, GROWING, LATER):
            for number, records in enumerate(await self._sent(this, topic)):
                found[f"partition {number} of {topic}"] = [bytes(each.body) for each in records]
        answer = await patiently(lambda: self._client.query(NUMBERS.name, columns=["id"], consistency="strong"))
        found[NUMBERS.name] = [b"%d" % id for id in sorted(answer.table["id"].to_pylist())]
        return found

    async def _forget(self, this: Round) -> None:
        """Drop the channels of the round."""
        for channel in self._channels(this):
            await patiently(lambda channel=channel: self._wal.drop_channel(channel))
        if self._groups:
            await patiently(lambda: self._drop_topic(retry_topic_name(TOPIC, f"{this.prefix}-{RETRIED}")))

    async def _drop_topic(self, name: str) -> None:
        with suppress(TopicNotFound):  # an earlier call has dropped it whose answer was late
            await self._client.drop_topic(name, deadline_s=DEADLINE_S)

    async def _drained(self, this: Round) -> bool:
        groups = {group.name: group.positions for group in await self._wal.groups()}
        for channel in this.channels("in"):
            last = await self._wal.latest_id(channel)
            for group in set(self._groups) - {SENT, RETRIED}:
                if last is not None and groups.get(f"{this.prefix}-{group}", {}).get(channel) != last:
                    return False
        return True

    async def _sent(self, this: Round, name: str) -> list[list[Record]]:
        """What the clients of the round have sent, as it lies in each partition of the topic, one epoch after the
        other: so what is in a partition stands behind what its predecessors have."""
        topic = await patiently(lambda: self._client.describe_topic(name))
        reader = await patiently(self.log.open_reader)
        try:
            channels = sorted(topic.places, key=lambda channel: topic.places[channel])
            return [await patiently(partial(_records, reader, channel, this.prefix)) for channel in channels]
        finally:
            await reader.close()

    async def _passed_on(self, this: Round, sent: Sequence[checks.Content]) -> bool:
        for group in (SENT, RETRIED):
            for channel, content in zip(this.channels(group), sent, strict=True):
                made = {bytes(entry.payload).decode() for entry in await everything(self._wal, channel)}
                if not made.issuperset(payload for _, payload in passing(content)):
                    return False
        return True

    async def _compare_channels(
        self,
        this: Round,
        operations: list[ClientCall],
        sent: Sequence[checks.Content],
        grown: Sequence[checks.Content],
    ) -> list[str]:
        channels = self._channels(this)
        reader = await patiently(self.log.open_reader)
        try:
            there = {channel: await self._content(reader, channel) for channel in channels}
        finally:
            await reader.close()
        inputs = {channel: there[channel] for channel in this.channels("in")}
        topics = {TOPIC: list(chain(*sent)), GROWING: list(chain(*grown))}
        found = checks.appends(operations, {**inputs, **topics}) + checks.watched(operations, inputs)
        for group, semantics in self._groups.items():
            of_topic = group in (SENT, RETRIED)
            given = [passing(content) for content in sent] if of_topic else list(inputs.values())
            for content, made in zip(given, this.channels(group), strict=True):
                exactly_once, ordered = semantics == "exactly_once" and not this.is_forced, group != RETRIED
                copied = without_undone(there[made], content, operations) if this.is_forced else there[made]
                found += checks.copies(made, content, copied, exactly_once=exactly_once, ordered=ordered)
        return found

    async def _content(self, reader: Wal, channel: str) -> checks.Content:
        entries = await patiently(lambda: everything(reader, channel))
        return [(entry.id.hex(), bytes(entry.payload).decode()) for entry in entries]

    async def _compare_delayed(self, this: Round, operations: list[ClientCall]) -> list[str]:
        """What is wrong with the messages that were due later, once they have come."""
        deadline = time.monotonic() + CALM_S
        while found := checks.delayed(operations, await self._released(this)):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(PAUSE_S)
        return found

    async def _released(self, this: Round) -> list[list[checks.ReleasedMessage]]:
        """By partition, and the delay channel from which they came, the messages that were due later, as they were put
        into it."""
        found: dict[tuple[int, str], list[checks.ReleasedMessage]] = defaultdict(list)
        for number, records in enumerate(await self._sent(this, LATER)):
            for each in records:
                released = checks.ReleasedMessage(bytes(each.body).decode(), due_of(each), each.ts)
                found[number, str(each.tags[SOURCE])].append(released)
        return list(found.values())

    async def _compare_rows(
        self, this: Round, operations: list[ClientCall], sent: Sequence[Sequence[Record]]
    ) -> list[str]:
        upto = next(self._ids)
        of_round = f"id >= {this.first_id} and id < {upto}"
        answer = await patiently(
            lambda: self._client.query(NUMBERS.name, of_round, columns=["id"], consistency="strong")
        )
        answered: list[int] = answer.table["id"].to_pylist()
        found = checks.rows(operations, "a strong read", answered)
        found += checks.transactions(
            operations, answered, dict(zip(this.channels(TOPIC), map(_content, sent), strict=True))
        )
        await patiently(lambda: self._client.flush(NUMBERS.name))
        table = DeltaTable(self.folder / "tables" / NUMBERS.name / "log").to_pyarrow_table(columns=["id", "_ts"])
        times = dict(zip(table["id"].to_pylist(), table["_ts"].to_pylist(), strict=True))
        messages = {bytes(each.body).decode(): each.ts for each in chain(*sent)}
        found += checks.transaction_times(operations, times, messages)
        stored = [id for id in table["id"].to_pylist() if this.first_id <= id < upto]
        found += checks.rows(operations, "the table", stored) + checks.same("the table", stored, "a read", answered)
        if self._spark and not found:
            await self._until(lambda: self._has_copied(set(answered)), "Spark does not copy what was written")
            copied = [id for id in self._copied if this.first_id <= id < upto]
            found += checks.rows(operations, "Spark's topic", copied)
        return found

    async def _has_copied(self, ids: set[int]) -> bool:
        """Read on in Spark's topic; whether these are there."""
        last = await self._wal.latest_id(COPIES)
        start = From.EARLIEST if self._copied_to is None else FromId(self._copied_to)
        reader = self._wal.read(COPIES, start)
        try:
            while last is not None and (self._copied_to or b"") < last:
                for entry in await anext(reader):
                    self._copied.append(int(decode(entry.payload, entry.id).body))
                    self._copied_to = entry.id
        finally:
            await reader.aclose()  # pyright: ignore[reportAttributeAccessIssue] -- see `Wal.read`
        return ids <= set(self._copied)

    async def _final_reads(self, this: Round) -> list[ClientCall]:
        found: list[ClientCall] = []
        for history in this.histories:
            owner, began = history.stem, time.monotonic_ns()
            rows = await patiently(lambda owner=owner: read_keys(self._client, owner, "strong", DEADLINE_S))
            about = {"owner": owner, "consistency": "strong"}
            found.append(ClientCall("the run", "read", about, began, time.monotonic_ns(), "ok", {"rows": rows}))
        return found

    def _after_deletion(self, this: Round, operations: Sequence[ClientCall]) -> list[str]:
        """Nothing may be acknowledged in a channel that was deleted from outside, until it is created anew."""
        found: list[str] = []
        for channel, deleted in this.deleted.items():
            later = [
                operation
                for operation in operations
                if operation.about.get("channel") == channel and operation.began > deleted + DELETED_GRACE_NS
            ]
            made = next((each.began for each in later if each.kind == "create" and each.outcome == "ok"), None)
            taken = [each for each in later if each.kind == "doomed" and each.outcome == "ok"]
            taken = [each for each in taken if made is None or each.began < made]
            if taken:
                found.append(f"{channel}: {len(taken)} appends were acknowledged after it had been deleted")
        return found

    async def _until(self, reached: Callable[[], Awaitable[bool]], otherwise: str) -> None:
        deadline = time.monotonic() + CALM_S
        while not await patiently(reached):
            if time.monotonic() > deadline:
                raise Violation([f"{otherwise} within {CALM_S:g} s"])
            await asyncio.sleep(PAUSE_S)


def _ignore(channel: str, entry: Entry, error: BadRecord) -> None:
    """Garbage, of which the group's members make dead letters."""


async def _records(reader: Wal, channel: str, prefix: str) -> list[Record]:
    """What a partition has of a round, without what no owner wrote."""
    records = ChannelReader(channel, on_bad=_ignore).accept(await everything(reader, channel))
    messages = [each for each in records if each.type is RecordType.MESSAGE]
    return [each for each in messages if bytes(each.body).startswith(f"{prefix}c".encode())]


def _content(records: Sequence[Record]) -> checks.Content:
    return [(each.id.hex(), bytes(each.body).decode()) for each in records]


async def patiently(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call until it succeeds. Raises `Violation` where it does not within `CALM_S`: then something does not recover."""
    deadline = time.monotonic() + CALM_S
    while True:
        try:
            async with asyncio.timeout(CALM_S):
                return await call()
        except (TidewalError, OSError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise Violation([f"the log or the node does not recover: {error!r}"]) from error
            await asyncio.sleep(PAUSE_S)
