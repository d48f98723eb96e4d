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
    from .kills.kill_run import KillReport

VIOLATED = 1  # exit status
NODES = 3
PROCESSES = 4
FAULTS_MAX = 1_000_000


def kills(
    log: Annotated[
        str, typer.Option(help="The log, by its URL; by default an embedded one in the directory.", callback=url_of)
    ] = "",
    minutes: Annotated[float, typer.Option(min=0.0, help="For how many minutes processes are killed.")] = 5.0,
    faults: Annotated[
        int, typer.Option("--kills", min=1, help="End after so many kills, stops and ends, if that is sooner.")
    ] = FAULTS_MAX,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeats what a run has drawn by lot.")] = None,
    nodes: Annotated[int, typer.Option(min=1, max=20, help="Nodes with all roles, on a log of brokers.")] = NODES,
    processes: Annotated[
        int, typer.Option(min=2, max=20, help="Processes of the one node on an embedded log.")
    ] = PROCESSES,
    spark: Annotated[
        bool, typer.Option("--spark", help="Let a query of Spark export a collection beside; needs a JDK.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="An empty directory for tables, logs and histories; by default a temporary one.")
    ] = None,
    tables: Annotated[
        str,
        typer.Option(help="A directory or s3://bucket/prefix below which the tables lie, instead of that directory."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Start real nodes on a log, kill, stop and end them at random under clients, and check that nothing is lost.

    Processes are killed (SIGKILL), stopped for longer than their lease (SIGSTOP, SIGCONT), and ended (SIGTERM), and
    started again. Meanwhile four clients write, read with strong consistency, flush, compact, create and drop
    collections, and with --spark a query of Spark exports one. Checked is at the end: each row that was acknowledged is
    there once, in a strong read, in the table's versions, in the compacted table, and in what Spark has exported; no
    strong read was older than what was acknowledged before it; each client's writes are in their order; each process
    ended as it was asked to. Another cluster on the log is not touched: the channels have a prefix of their own, and
    are dropped at the end; so have tables below --tables, which are removed. Exits with 0 when all held, with 1
    otherwise; then logs, histories and tables are kept, and named.
    """
    from rich.console import Console

    from .kills.kill_run import KillPlan, run_kills

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
    )
    began_s, console, held = time.monotonic(), Console(stderr=True, highlight=False), False
    divided = f"one node of {processes} processes" if embedded else f"{nodes} nodes"
    console.print(f"seed {seed}: {divided} on {shown_url(url)}, in {home}", soft_wrap=True)

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
        if data is None and held:
            shutil.rmtree(home, ignore_errors=True)
    found = {"held": held, "seed": seed, "took_s": round(time.monotonic() - began_s, 1), **asdict(report)}
    if not held:
        found |= {"directory": str(home), "prefix": plan.prefix, "tables": plan.tables}
    typer.echo(json.dumps(found)) if as_json else _print(report, found)
    if not held:
        raise typer.Exit(VIOLATED)


def _home(data: Path | None) -> Path:
    if data is None:
        return Path(tempfile.mkdtemp(prefix="tidewal-kills-"))
    data.mkdir(parents=True, exist_ok=True)
    if os.listdir(data):
        raise ConfigError(f"{data} is not empty: the run needs a directory of its own", key="data")
    return data.absolute()


def _print(report: KillReport, found: dict[str, Any]) -> None:
    for violation in report.violations:
        typer.echo(one_line(violation))
    if report.violations:
        typer.echo(
            f"see {found['directory']}: what the processes said (*.log), what each client asked and got "
            f"(client-*.jsonl); the tables in {found['tables']}; and the channels {found['prefix']}-* in the log"
        )
    faults = ", ".join(f"{count} {what}" for what, count in sorted(report.faults.items()))
    typer.echo(
        f"{'violated' if report.violations else 'held'}; {sum(report.faults.values())} faults ({faults}), "
        f"{report.acknowledged:,} writes of {report.rows:,} rows acknowledged, {report.refused:,} refused, "
        f"{report.unknown:,} unknown, longest {report.longest_write_s:.1f} s; {report.reads:,} strong reads, slowest "
        f"{report.slowest_read_s:.1f} s; {report.flushes:,} flushes, {report.definitions:,} collections created or "
        f"dropped; Spark failed {report.exports_failed} times; {found['took_s']:.0f} s"
    )
