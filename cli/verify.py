"""`tidewal verify`: check stored data without changing it, and the code that many nodes rest on. `journal` reads every
frame of an embedded log, `objects` every object of one on object storage, `tables` every page of the tables, `cluster`
simulates clusters under faults, `kills` kills real nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..adapters.rocksmq.check.findings import SegmentReport
from ..adapters.rocksmq.check.loss_report import channels_of, journal_summary, loss_lines
from ..adapters.rocksmq.check.opening_check import refusal
from ..adapters.rocksmq.check.verify import verify as scrub
from ..adapters.rocksmq.log_directory import local_directory
from ..adapters.rocksmq.owner.directory import locked
from ..runtime.errors import ConfigError, Unavailable
from .results import JsonLines, print_rows
from .verify_cluster import cluster
from .verify_kills import kills
from .verify_objects import DAMAGED, objects

SEGMENT_COLUMNS = ("path", "state", "frames", "entries", "channels", "bytes")
TABLE_COLUMNS = ("collection", "table", "files", "rows", "bytes")

verify: typer.Typer = typer.Typer(
    help="Check stored data without changing it, and what many nodes rest on.", no_args_is_help=True
)
verify.command()(cluster)
verify.command()(kills)
verify.command()(objects)


@verify.callback()
def _root() -> None:  # pyright: ignore[reportUnusedFunction] -- typer keeps it: one command alone would lose its name
    pass


@verify.command()
def journal(
    where: Annotated[str, typer.Argument(help="The log: rocksmq:///absolute/path, or its directory.")],
    as_json: JsonLines = False,
) -> None:
    """Read every frame of a log and check it: headers, checksums, sequences, ids, the index, and whether a node can
    open it.

    While a process has the log open, its files are read up to the last good frame, and its index is not checked;
    otherwise no process can open the log while it is read. Entries that a salvage could not save are listed, and are no
    damage. Exits with 0 when all is intact, with 1 when something is damaged or a node refuses the log.
    """
    segments = frames = damaged = 0
    size = 0
    found: list[SegmentReport] = []
    directory = local_directory(where)
    with locked(directory) as unowned:
        for report in scrub(directory, owned=not unowned):
            segments, frames, size = segments + 1, frames + report.frames, size + report.end
            damaged += report.state == "damaged"
            if as_json:
                typer.echo(json.dumps(_fields(report)))
            else:
                found.append(report)
        refused = _refusal(directory) if unowned else ""
        losses: dict[str, Any] = {} if damaged else journal_summary(directory)["losses"]
    verdict: dict[str, Any] = {
        "intact": not (damaged or refused),
        "segments": segments,
        "frames": frames,
        "bytes": size,
        "damaged_segments": damaged,
        "refused": refused,
        "losses": losses,
        "index": "checked" if unowned else "in use, not checked",
    }
    if as_json:
        typer.echo(json.dumps(verdict))
    else:
        _print(found)
        for line in loss_lines(losses):
            typer.echo(line)
        if refused:
            typer.echo(f"a node refuses this log: {refused}")
        whole = "cannot be opened" if refused else "intact"
        outcome = f"damaged: {damaged} of {segments} segments" if damaged else whole
        typer.echo(f"{outcome}; {segments} segments, {frames:,} frames, {size:,} bytes; index {verdict['index']}")
    if damaged or refused:
        raise typer.Exit(DAMAGED)


@verify.command()
def tables(
    directory: Annotated[
        str, typer.Argument(help="The directory of a node, its folder `tables`, or a prefix of a bucket with tables.")
    ],
    as_json: JsonLines = False,
) -> None:
    """Read every page of the tables and check it: that the files are there, page checksums, and numbers of rows; and
    that no other tool has changed rows.

    A node may run meanwhile. Files of `current`, which the Delta library writes, have no checksums: that table is
    derived from `log`, so remove it where it is damaged, and compaction creates it again. Exits with 0 when all is
    intact, with 1 when something is damaged.
    """
    from ..actors.datanode.table_check import check_tables
    from ..runtime.tables.table_store import open_tables

    below = Path(directory) / "tables"
    store = open_tables(str(below) if below.is_dir() else directory)
    try:
        if not store.exists():
            raise ConfigError(f"there is no folder {directory}", key="directory")
        if not (below.is_dir() or Path(directory).absolute().name == "tables" or store.tables()):
            raise ConfigError(
                f"{directory} holds no tables: name the directory of a node, or its folder `tables`", key="directory"
            )
    except PermissionError:
        raise  # said as for every path that is given
    except OSError as error:
        raise Unavailable(f"{directory}: {error.strerror}", path=directory) from error
    files = damaged = rows = size = 0
    seen: dict[tuple[str, str], dict[str, int]] = {}
    damages: list[str] = []
    for report in check_tables(store):
        files, rows, size = files + bool(report.file), rows + report.rows, size + report.bytes
        damaged += bool(report.damage)
        if as_json:
            typer.echo(json.dumps(asdict(report)))
            continue
        row = seen.setdefault((report.collection, report.table), {**dict.fromkeys(TABLE_COLUMNS[2:], 0)})
        for name, counted in zip(TABLE_COLUMNS[2:], (bool(report.file), report.rows, report.bytes), strict=True):
            row[name] += counted
        if report.damage:
            damages.append(f"{report.collection}/{report.table}/{report.file}  damaged: {report.damage}")
    if seen:
        rows_of = ({"collection": of, "table": table, **row} for (of, table), row in sorted(seen.items()))
        print_rows(TABLE_COLUMNS, rows_of)
    for line in damages:
        typer.echo(line)
    verdict = {"intact": not damaged, "files": files, "rows": rows, "bytes": size, "damaged": damaged}
    outcome = f"damaged: {damaged} of {files} files" if damaged else "intact"
    typer.echo(json.dumps(verdict) if as_json else f"{outcome}; {files} files, {rows:,} rows, {size:,} bytes")
    if damaged:
        raise typer.Exit(DAMAGED)


def _refusal(directory: str) -> str:
    """Why a node refuses the log, which no process has open; "" where it does not."""
    from .stored_catalog import catalog_refusal

    error = refusal(directory)
    return error.message if error is not None else catalog_refusal(directory, channels_of(directory))


def _fields(report: SegmentReport) -> dict[str, Any]:
    fields = asdict(report)
    fields["channels"] = {
        str(number): {"last_id": f"{last_id:016x}", "bytes": size}
        for number, (last_id, size) in report.channels.items()
    }
    return fields


def _print(reports: Sequence[SegmentReport]) -> None:
    """The segments as a table, and below it what is wrong in which of them."""
    rows = ({**asdict(report), "channels": len(report.channels), "bytes": report.end} for report in reports)
    print_rows(SEGMENT_COLUMNS, rows)
    for report in reports:
        for line in _findings(report):
            typer.echo(line)


def _findings(report: SegmentReport) -> list[str]:
    lines: list[str] = []
    for finding in report.findings:
        end = f" to {finding.end}" if finding.end is not None else ""
        lost = f", {finding.lost_frames} frames lost" if finding.lost_frames is not None else ""
        lines.append(f"{report.path}  at {finding.offset}{end}: {finding.what}{lost}")
    if report.more_findings:
        lines.append(f"{report.path}  … {report.more_findings:,} more")
    return lines
