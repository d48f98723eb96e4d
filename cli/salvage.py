"""`tidewal salvage`: copy what can be read of a damaged log into a new directory, and report the losses."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..adapters.rocksmq.check.loss_report import loss_lines, losses_of
from ..adapters.rocksmq.check.salvage import SalvageReport
from ..adapters.rocksmq.check.salvage import salvage as copy_readable
from ..adapters.rocksmq.journal.losses import ACCEPT
from ..adapters.rocksmq.log_directory import found_directory, named_directory
from ..runtime.clock import SystemClock
from .results import AsJson
from .stored_catalog import damaged_catalogs

REINSERT = "docs/how-to/back-up.md says how to create it anew and insert its rows again"
DAMAGED = 1  # exit status: something is damaged, and no copy was asked for


def salvage(
    where: Annotated[str, typer.Argument(help="The damaged log: rocksmq:///absolute/path, or its directory.")],
    new: Annotated[
        str | None, typer.Argument(help="Where the copy goes: a directory that is empty or does not exist.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Let readers of the copy pass what is lost, now and in earlier salvages.")
    ] = False,
    tables: Annotated[
        str, typer.Option(help="Where the node's tables lie, if not beside the log: a directory or s3://bucket/prefix.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Copy all that can be read of a log that no process has open into the new directory NEW, and report what is
    damaged and lost; without NEW only report.

    The damaged log stays as it is, to the last byte. Readers of the copy that reach lost entries get PositionLost with
    the entry where the log continues, and a node may not start, unless the copy is made with --accept: so look at what
    is lost first. Exits with 1 when something is damaged and NEW is not given.
    """
    target = None if new is None else named_directory(new)
    directory = found_directory(where)
    report = copy_readable(directory, target, wall_ms=SystemClock().wall_ms(), accept=accept)
    fields = _fields(report, target)
    fields["catalogs"] = [asdict(each) for each in damaged_catalogs(directory, report.table, tables)]
    typer.echo(json.dumps(fields, indent=2) if as_json else _text(fields))
    if report.damages and target is None:
        raise typer.Exit(DAMAGED)


def _fields(report: SalvageReport, target: str | None) -> dict[str, Any]:
    losses = losses_of(report.table)
    return {
        "damages": [asdict(damage) for damage in report.damages],
        "losses": losses,
        "unnamed": report.unnamed,
        "frames": report.frames,
        "entries": report.entries,
        "copied_to": target,
        "copied_bytes": report.copied_bytes,
        "stops_readers": not all(loss["accepted"] for each in losses.values() for loss in each),
    }


def _text(fields: dict[str, Any]) -> str:
    lines: list[str] = []
    for damage in fields["damages"]:
        frames = f", {damage['frames']} frames lost" if damage["frames"] else ""
        lines.append(f"{damage['path']}  {damage['offset']} to {damage['end']}: {damage['what']}{frames}")
    lines += loss_lines(fields["losses"])
    lines += [f"{name}: a channel whose own name is lost" for name in fields["unnamed"]]
    lines += [line for catalog in fields["catalogs"] for line in _catalog_lines(catalog)]
    if not fields["damages"]:
        lines.append("nothing is damaged")
    if fields["stops_readers"]:
        lines.append(
            "readers that reach a loss end with PositionLost, and a node may not start; once you have seen what it is,"
            f" `{ACCEPT}` lets them pass in the copy NEW"
        )
    whole = f"{fields['frames']:,} frames with {fields['entries']:,} entries"
    if fields["copied_to"] is None:
        lines.append(f"{whole} can be read; nothing was written, `tidewal salvage DIR NEW` copies them")
    else:
        lines.append(f"copied to {fields['copied_to']}: {whole}, {fields['copied_bytes']:,} bytes")
    return "\n".join(lines)


def _catalog_lines(catalog: dict[str, Any]) -> list[str]:
    """What it means that records of the catalog are lost."""
    kept = ", ".join(catalog["collections"]) or "none"
    lines = [
        f"{catalog['channel']} is the catalog: what it has lost may be the creation of collections. Of collections are"
        f" left: {kept}"
    ]
    lines += [f"collection {name} is lost, and its tables are there: {REINSERT}" for name in catalog["tables"]]
    lines += [f"collection {name} is lost, unless it was dropped: it was flushed" for name in catalog["written"]]
    if catalog["refusal"]:
        lines.append(f"no node starts with what is left: {catalog['refusal']}. Without a backup begin a new log")
    return lines
