"""`tidewal verify kills`: real nodes are killed under clients whose histories are checked."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit
from uuid import uuid4

import typer

from ..runtime.config.loading import url_of
from ..runtime.errors import ConfigError
from ..runtime.log.redaction import shown_url
from ..runtime.signals import INTERRUPTED, Interrupted, until_stopped
from .one_line import one_line
from .results import AsJson

if TYPE_CHECKING:
    from .kills.kill_run import KillPlan, KillReport

VIOLATED = 1  # exit status
NODES = 3
PROCESSES = 4
FAULTS_MAX = 1_000_000


LogOption = Annotated[
    str, typer.Option(help="The log, by its URL; by default an embedded one in the directory.", callback=url_of)
]
Minutes = Annotated[float, typer.Option(min=0.0, help="For how many minutes processes are killed.")]
Faults = Annotated[
    int, typer.Option("--kills", min=1, help="End after so many kills, stops and ends, if that is sooner.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Repeats what a run has drawn by lot.")]
Nodes = Annotated[int, typer.Option(min=1, max=20, help="Nodes with all roles, on a log of brokers.")]
Processes = Annotated[int, typer.Option(min=2, max=20, help="Processes of the one node on an embedded log.")]
WithTopics = Annotated[
    bool, typer.Option("--topics", help="Let clients have topics and transactions, too, and a group; needs such a log.")
]
WithSpark = Annotated[
    bool, typer.Option("--spark", help="Let a query of Spark export a collection beside; needs a JDK.")
]
Data = Annotated[
    Path | None, typer.Option(help="An empty directory for tables, logs and histories; by default a temporary one.")
]
Tables = Annotated[
    str, typer.Option(help="A directory or s3://bucket/prefix below which the tables lie, instead of that directory.")
]


def kills(
    log: LogOption = "",
    minutes: Minutes = 5.0,
    faults: Faults = FAULTS_MAX,
    seed: Seed = None,
    nodes: Nodes = NODES,
    processes: Processes = PROCESSES,
    topics: WithTopics = False,
    spark: WithSpark = False,
    data: Data = None,
    tables: Tables = "",
    as_json: AsJson = False,
) -> None:
    """Start real nodes on a log, kill, stop and end them at random under clients, and check that nothing is lost.

    Processes are killed (SIGKILL), stopped for longer than their lease (SIGSTOP, SIGCONT), and ended (SIGTERM), and
    started again. Meanwhile four clients write, read with strong consistency, flush, compact, create and drop
    collections, and with --spark a query of Spark exports one. With --topics they send messages, some to be due later,
    of which they cancel some, and write rows and messages in transactions, and a group whose handlers fail and give
    back copies what was sent.

    Checked is at the end: each row that was acknowledged is there once, in a strong read, in the table's versions, in
    the compacted table, and in what Spark has exported; no strong read was older than what was acknowledged before it;
    each client's writes are in their order; each message is there once, in the order of its key, and was copied once;
    those that were due later came then, in the order of due times, unless they were cancelled in time; transactions are
    there as a whole, at one timestamp, or not at all; each process ended as it was asked to.

    Another cluster on the log is not touched: the channels have a prefix of their own, and are dropped at the end; so
    have tables below --tables, which are removed. Exits with 0 when all held, with 1 otherwise; then logs, histories
    and tables are kept, and named.
    """
    from .kills.kill_run import KillPlan

    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    home = _home(data)
    url = log or url_of(str(home / "log"))
    embedded, prefix = not urlsplit(url).netloc, f"kills-{uuid4().hex[:8]}"
    plan = KillPlan(
        url=url,
        home=home,
        tables=f"{tables.rstrip('/')}/{prefix}" if tables else str(home / "tables"),
        prefix=prefix,
        seed=seed,
        faults_s=minutes * 60,
        faults=faults,
        nodes=nodes,
        processes=processes if embedded else 0,
        spark=spark,
        topics=topics,
    )
    _verify(plan, keep=data is not None, as_json=as_json)


def _verify(plan: KillPlan, *, keep: bool, as_json: bool) -> None:
    """Run it, and print what came of it. Its directory is removed unless something was violated, or it is to stay."""
    from rich.console import Console

    from .kills.kill_run import run_kills

    began_s, console, held = time.monotonic(), Console(stderr=True, highlight=False), False
    divided = f"one node of {plan.processes} processes" if plan.processes else f"{plan.nodes} nodes"
    console.print(f"seed {plan.seed}: {divided} on {shown_url(plan.url)}, in {plan.home}", soft_wrap=True)

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - began_s:7.1f} s  {what}")

    try:
        with console.status("") as progress:  # prints nothing where that is no terminal
            report = asyncio.run(until_stopped(run_kills(plan, say, progress.update)))
        held = not report.violations
    except Interrupted:
        held = True
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if held and not keep:
            shutil.rmtree(plan.home, ignore_errors=True)
    found = {"held": held, "seed": plan.seed, "took_s": round(time.monotonic() - began_s, 1), **asdict(report)}
    if not held:
        found |= {"directory": str(plan.home), "prefix": plan.prefix, "tables": plan.tables}
    typer.echo(json.dumps(found)) if as_json else _print(plan, report, found)
    if not held:
        raise typer.Exit(VIOLATED)


def _home(data: Path | None) -> Path:
    if data is None:
        return Path(tempfile.mkdtemp(prefix="tidewal-kills-"))
    data.mkdir(parents=True, exist_ok=True)
    if os.listdir(data):
        raise ConfigError(f"{data} is not empty: the run needs a directory of its own", key="data")
    return data.absolute()


def _print(plan: KillPlan, report: KillReport, found: dict[str, Any]) -> None:
    for violation in report.violations:
        typer.echo(one_line(violation))
    if report.violations:
        typer.echo(
            f"see {found['directory']}: what the processes said (*.log), what each client asked and got "
            f"(client-*.jsonl); the tables in {found['tables']}; and the channels {found['prefix']}-* in the log"
        )
    topics = (
        f"{report.messages:,} messages, of which {report.messages_copied:,} passed a filter and were copied, "
        f"{report.messages_later:,} to be due later, of which {report.messages_cancelled:,} were cancelled, "
        f"{report.transactions:,} transactions; "
    )
    faults = ", ".join(f"{count} {what}" for what, count in sorted(report.faults.items()))
    typer.echo(
        f"{'violated' if report.violations else 'held'}; {sum(report.faults.values())} faults ({faults}), "
        f"{report.acknowledged:,} writes of {report.rows:,} rows acknowledged, {report.refused:,} refused, "
        f"{report.unknown:,} unknown, longest {report.longest_write_s:.1f} s; {report.reads:,} strong reads, slowest "
        f"{report.slowest_read_s:.1f} s; {report.flushes:,} flushes, {report.definitions:,} collections created or "
        f"dropped; {topics if plan.topics else ''}Spark failed {report.exports_failed} times; {found['took_s']:.0f} s"
    )
