"""One run: a cluster of real processes, four clients, faults, and what all of them come to in the end."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ...actors.client import Client
from ...actors.connection import connect
from ...runtime.config.loading import load_settings
from ...runtime.config.settings import Settings
from ...runtime.errors import TidewalError
from ...runtime.tables.table_store import TableStore, open_tables
from ...runtime.testing.histories import history_checks as checks
from ...runtime.testing.histories.client_history import ClientCall, load_calls
from ..open_log import opened
from .checked_client import NUMBERS, ROWS_PER_CLIENT, THINGS, TRANSACTED_FROM
from .cluster_processes import LOOK_S, ClusterProcesses, SupervisedProcesses
from .final_state import read_final_state
from .process_faults import ProcessFaults
from .spark_export import SparkExport
from .topic_client import TopicClient
from .topic_work import KINDS, LATER, MESSAGES, TopicWork, topic_work

CLIENTS = 4
AT_ONCE = 4  # calls side by side of each writing task
SHARDS = 4
READY_S = 60.0
CALL_S = 60.0  # deadline of a call: longer than any fail-over
PROGRESS_WITHIN_S = 90.0  # of a fault each task of each client has an answer
SETTLED_WITHIN_S = 120.0  # of the last fault everything can be read
FLUSH_PAUSE_S, DEFINE_PAUSE_S = 1.0, 1.5
WRITES = ("insert", "set", "write_defined", "send", "later", "transaction")
TASKS = (
    ("insert",),
    ("set",),
    ("read",),
    ("flush", "compact", "create_collection", "write_defined", "drop_collection"),
)
DROPPED_WITHIN_S = 60.0

PREFIX_VARIABLE = "TIDEWAL__MSGCHANNEL__CHANNAMEPREFIX__CLUSTER"
SETTINGS = {
    "TIDEWAL__LOG__FORMAT": "text",
    "TIDEWAL__ROOTCOORD__DMLCHANNELNUM": "4",
    "TIDEWAL__DATANODE__FLUSHINTERVALS": "2",
    "TIDEWAL__DATANODE__COMPACTIONINTERVALS": "15",
    "TIDEWAL__LOG__LEVEL": "info",
}
"""Of the nodes: a short run is to flush and compact often, and exceptions are looked for in text."""


@dataclass(frozen=True, slots=True)
class KillPlan:
    """What a run is to do. Faults come for `faults_s` seconds, or until there were `faults`, if that is sooner. `home`
    is a directory of its own, and `tables` a path or prefix of its own, in `home` or elsewhere; the log at `url` may
    have others, for the channels' names begin with `prefix`. With `processes` a supervisor divides one node among so
    many, else there are `nodes` with all roles. With `spark` a query of Spark exports a collection meanwhile. With
    `topics` clients send messages and have transactions, too, and a group copies what it gets."""

    url: str
    home: Path
    tables: str
    prefix: str
    seed: int
    faults_s: float
    faults: int
    nodes: int
    processes: int
    spark: bool = False
    topics: bool = False


@dataclass(slots=True)
class KillReport:
    """What came of a run. Times are in seconds, of calls that succeeded."""

    faults: dict[str, int] = field(default_factory=dict[str, int])
    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    rows: int = 0
    reads: int = 0
    flushes: int = 0
    definitions: int = 0
    exports_failed: int = 0
    messages: int = 0
    messages_later: int = 0
    messages_cancelled: int = 0
    messages_copied: int = 0
    transactions: int = 0
    longest_write_s: float = 0.0
    slowest_read_s: float = 0.0
    violations: list[str] = field(default_factory=list[str])


class NoProgress(Exception):
    """A client had no answer for longer than any fail-over takes."""


async def run_kills(plan: KillPlan, say: Callable[[str], None], show: Callable[[str], None]) -> KillReport:
    """Start the processes, let clients work while they are killed, and check what came of it. All processes have ended
    when this returns or raises, also where it is cancelled, and unless a promise was broken the channels of the log are
    dropped, and tables outside of its directory removed. `say` is told each fault, `show` how far it is. Raises
    `DirectoryUnwritable` and `Unavailable` where no tables can be made."""
    report, tables = KillReport(), open_tables(plan.tables)
    await asyncio.to_thread(tables.prepare)
    async with AsyncExitStack() as stack:
        cluster = _cluster(plan)
        stack.push_async_callback(_remove_tables, tables, plan, report)
        stack.push_async_callback(_drop_channels, plan, report)
        stack.callback(lambda: report.violations.extend(cluster.complaints()))
        stack.push_async_callback(cluster.stop)
        show("the processes start")
        await cluster.start()
        try:
            await _work(plan, cluster, report, say, show)
        except NoProgress as stalled:
            report.violations.append(str(stalled))
        _count(report, load_calls(_histories(plan)))
        show("the processes end")
    return report


def _cluster(plan: KillPlan) -> ClusterProcesses:
    environment = {**os.environ, **SETTINGS, PREFIX_VARIABLE: plan.prefix}
    options = ["--data", str(plan.home), "--wal", plan.url, "--tables", plan.tables]
    if plan.processes:
        return SupervisedProcesses(plan.processes, options, environment, plan.home)
    names = [f"node-{number}" for number in range(1, plan.nodes + 1)]
    return ClusterProcesses(names, [*options, "--metrics-port", "0"], environment, plan.home)


def _histories(plan: KillPlan) -> list[Path]:
    return [plan.home / f"client-{number}.jsonl" for number in range(1, CLIENTS + 1)]


async def _work(
    plan: KillPlan,
    cluster: ClusterProcesses,
    report: KillReport,
    say: Callable[[str], None],
    show: Callable[[str], None],
) -> None:
    settings = load_settings(arguments={"msgChannel.chanNamePrefix.cluster": plan.prefix})
    async with connect(plan.url, settings=settings, deadline_s=READY_S) as client:
        for schema in (NUMBERS, THINGS):
            await client.create_collection(schema, shards=SHARDS, deadline_s=CALL_S)
        faults = ProcessFaults(cluster, random.Random(plan.seed), settings.cluster.lease_ms / 1000, say)
        async with _exporting(plan) as export, _topics(plan) as topics:
            await _faults(plan, cluster, faults, settings, topics, report, show)
            show("the histories are checked")
            report.violations += await _check(plan, client, export, topics)
            report.exports_failed = export.failures if export is not None else 0
            report.messages_copied = await topics.copied() if topics is not None else 0


async def _faults(
    plan: KillPlan,
    cluster: ClusterProcesses,
    faults: ProcessFaults,
    settings: Settings,
    topics: TopicWork | None,
    report: KillReport,
    show: Callable[[str], None],
) -> None:
    """Let clients work while there are faults, and until all processes are back."""
    async with _clients(plan, settings) as clients:
        await _progress(clients, topics, "the start")
        end_s = time.monotonic() + plan.faults_s
        while time.monotonic() < end_s and faults.counts.total() < plan.faults:
            what = await faults.inject()
            report.faults = dict(faults.counts)
            await _progress(clients, topics, what)
            acknowledged = sum(each.acknowledged.total() for each in clients)
            show(f"{faults.counts.total()} faults, {acknowledged:,} calls succeeded")
        show("all processes are to be back")
        await cluster.all_ready()


@asynccontextmanager
async def _exporting(plan: KillPlan) -> AsyncGenerator[SparkExport | None]:
    """A query of Spark at work while the block runs, where the plan has one."""
    if not plan.spark:
        yield None
        return
    export = SparkExport(plan.url, plan.prefix, NUMBERS.name, plan.home, os.environ)
    export.start()
    try:
        yield export
    finally:
        await export.kill()


@asynccontextmanager
async def _topics(plan: KillPlan) -> AsyncGenerator[TopicWork | None]:
    """Topics and a group at work while the block runs, where the plan has them."""
    if not plan.topics:
        yield None
        return
    async with topic_work(plan.url, plan.prefix, random.Random(f"{plan.seed}/topics")) as topics:
        yield topics


@asynccontextmanager
async def _clients(plan: KillPlan, settings: Settings) -> AsyncGenerator[list[TopicClient]]:
    """Clients at work while the block runs; each has a connection of its own."""
    owners = [history.stem for history in _histories(plan)]
    async with AsyncExitStack() as stack:
        clients: list[TopicClient] = []
        tasks: list[asyncio.Task[None]] = []
        for number, history in enumerate(_histories(plan)):
            connected: Client = await stack.enter_async_context(
                connect(plan.url, settings=settings, deadline_s=READY_S)
            )
            rng = random.Random(f"{plan.seed}/{number}")
            checked = TopicClient(connected, history.stem, history, rng, deadline_s=CALL_S, at_once=AT_ONCE)
            stack.callback(checked.close)
            clients.append(checked)
            works = [checked.insert(number * ROWS_PER_CLIENT), checked.set(), checked.read(owners)]
            works.append(checked.define(DEFINE_PAUSE_S) if number % 2 else checked.flush(FLUSH_PAUSE_S))
            if plan.topics:
                transacted = number * ROWS_PER_CLIENT + TRANSACTED_FROM
                works += [
                    checked.send(0, MESSAGES),
                    checked.send_later(0, LATER),
                    checked.transact(transacted, MESSAGES),
                ]
            tasks += map(asyncio.create_task, works)
        try:
            yield clients
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        finally:
            for checked in clients:
                checked.stopping.set()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        task.result()


async def _progress(clients: Sequence[TopicClient], topics: TopicWork | None, behind: str) -> None:
    """Wait until each task of each client had an answer since now, and the group a message: a call is to outlast one
    fault, not a row of them. Raises `NoProgress` where one has none in time."""
    had = _answers(clients, topics)

    def silent() -> list[str]:
        return [who for who, count in _answers(clients, topics).items() if count == had[who]]

    try:
        async with asyncio.timeout(PROGRESS_WITHIN_S):
            while silent():  # noqa: ASYNC110 -- other processes answer
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        who = ", ".join(silent())
        raise NoProgress(f"{who}: no answer for {PROGRESS_WITHIN_S:g} s behind this: {behind}") from None


def _answers(clients: Sequence[TopicClient], topics: TopicWork | None) -> dict[str, int]:
    """How many calls of each task of each client have succeeded, and how many messages the group has handled."""
    found = {
        f"{client.name} ({', '.join(kinds)})": sum(client.acknowledged[kind] for kind in kinds)
        for client in clients
        for kinds in (*TASKS, *(KINDS if topics is not None else ()))
    }
    return found if topics is None else found | {topics.members.group: topics.members.handled}


async def _check(plan: KillPlan, client: Client, export: SparkExport | None, topics: TopicWork | None) -> list[str]:
    """What the histories, strong reads, the tables, topics and Spark's export say about each other."""
    calls, owners = load_calls(_histories(plan)), [history.stem for history in _histories(plan)]
    try:
        async with asyncio.timeout(SETTLED_WITHIN_S):
            final = await read_final_state(client, open_tables(plan.tables), owners)
        of_topics = [] if topics is None else await topics.check(calls, final.ids, final.stored_ts, SETTLED_WITHIN_S)
        exported = None if export is None else await _exported(client, export)
    except (TimeoutError, TidewalError) as error:
        return [f"what was written cannot be read behind the last fault: {error!r}"]
    read, stored, present, spark = "a strong read", "the table's versions", "the compacted table", "Spark's export"
    return [
        *_hanging(calls),
        *checks.errors(calls),
        *checks.keys([*calls, *final.reads]),
        *checks.rows(calls, read, final.ids),
        *checks.rows(calls, stored, final.stored_ids),
        *checks.rows(calls, present, final.present_ids),
        *checks.same(stored, final.stored_ids, read, final.ids),
        *checks.same(present, final.present_ids, read, final.ids),
        *checks.rising(stored, final.number_order),
        *checks.versions(calls, stored, final.stored_versions),
        *checks.rising(stored, final.stored_versions),
        *checks.collections(calls, final.collections),
        *final.disagreements,
        *of_topics,
        *(checks.rows(calls, spark, exported) if exported is not None else ()),
        *(checks.same(spark, exported, read, final.ids) if exported is not None else ()),
    ]


async def _exported(client: Client, export: SparkExport) -> list[int]:
    """What Spark has written, once it has read up to now."""
    await client.cut(NUMBERS.name)
    await export.finish()
    return export.ids()


def _hanging(calls: Sequence[ClientCall]) -> list[str]:
    """Calls that nobody answered, for longer than any fail-over takes."""
    late = [call for call in calls if call.outcome == "unknown" and _took_s(call) >= CALL_S]
    shown = [f"{call.client}: {call.kind} {call.about} had no answer for {CALL_S:g} s" for call in late[: checks.SHOWN]]
    return [*shown, f"{len(late)} calls had no answer for {CALL_S:g} s"] if late else []


def _count(report: KillReport, calls: Sequence[ClientCall]) -> None:
    writes = [call for call in calls if call.kind in WRITES]
    done = [call for call in calls if call.outcome == "ok"]
    report.acknowledged = sum(call.outcome == "ok" for call in writes)
    report.refused = sum(call.outcome == "refused" for call in writes)
    report.unknown = sum(call.outcome == "unknown" for call in writes)
    report.rows = sum(call.about.get("count", 0) or len(call.about.get("values", ())) for call in done)
    report.reads = sum(call.kind == "read" for call in done)
    report.flushes = sum(call.kind in ("flush", "compact") for call in done)
    report.definitions = sum(call.kind in ("create_collection", "drop_collection") for call in done)
    report.messages = sum(len(call.about.get("entries", ())) for call in done)
    report.messages_later = sum(call.kind == "later" for call in done)
    report.messages_cancelled = sum(call.kind == "cancel" and call.result["cancelled"] for call in done)
    report.transactions = sum(call.kind == "transaction" for call in done)
    report.longest_write_s = max((_took_s(call) for call in done if call.kind in WRITES), default=0.0)
    report.slowest_read_s = max((_took_s(call) for call in done if call.kind == "read"), default=0.0)


def _took_s(call: ClientCall) -> float:
    return ((call.ended or call.began) - call.began) / 1e9


async def _drop_channels(plan: KillPlan, report: KillReport) -> None:
    """Drop what the run has created in a log that is not its own, unless somebody is to look at it."""
    if report.violations or str(plan.home) in plan.url:
        return
    async with asyncio.timeout(DROPPED_WITHIN_S), opened(plan.url, read_only=False) as wal:
        for channel in await wal.channels():
            if channel.startswith(plan.prefix):
                await wal.drop_channel(channel)
        for group in await wal.groups() if plan.topics else ():
            if group.name.startswith(plan.prefix):
                await wal.drop_group(group.name)


async def _remove_tables(tables: TableStore, plan: KillPlan, report: KillReport) -> None:
    """Remove the tables of a run that are not in its directory, unless somebody is to look at them."""
    if report.violations or Path(tables.uri).is_relative_to(plan.home):
        return

    def remove() -> None:
        for collection in {table.collection for table in tables.tables()}:
            tables.remove(collection)

    await asyncio.to_thread(remove)
