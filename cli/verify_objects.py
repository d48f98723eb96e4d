"""`tidewal verify objects`: every object of a log on object storage, read from the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..adapters.objects.backend import BACKEND
from ..runtime.errors import Unavailable
from ..runtime.log.redaction import shown_url
from .results import JsonLines, print_rows

if TYPE_CHECKING:
    from ..adapters.objects.check.findings import PartReport

DAMAGED = 1  # exit status of a check of stored data
COLUMNS = ("part", "state", "objects", "entries", "bytes")


def objects(
    url: Annotated[str, typer.Argument(help=f"The log: {BACKEND.url_form}, or one of its kind.")],
    as_json: JsonLines = False,
) -> None:
    """Read every object of a log on object storage and check it: checksums, that no block is missing, claims and ends
    of epochs, the order of ids, and checkpoints and runs against the blocks that they replace, as far as these remain.

    It reads the store, not the owner, which may write meanwhile, and needs the right to get and to list. Exits with 0
    when all is intact, with 1 when something is damaged.
    """
    reports = asyncio.run(_reports(url))
    damaged = sum(report.state == "damaged" for report in reports)
    verdict = {
        "intact": not damaged,
        "parts": len(reports),
        "objects": sum(report.objects for report in reports[:-1]),  # the last are the channels
        "bytes": sum(report.bytes for report in reports[:-1]),
        "entries": reports[-1].entries,
        "gone": sum(report.gone for report in reports),
        "damaged_parts": damaged,
    }
    if as_json:
        for report in reports:
            typer.echo(json.dumps(asdict(report)))
        typer.echo(json.dumps(verdict))
    else:
        _print(reports)
        outcome = f"damaged: {damaged} of {len(reports)} parts" if damaged else "intact"
        counts = "{objects:,} objects, {entries:,} entries, {bytes:,} bytes".format_map(verdict)
        typer.echo(f"{outcome}; {counts}; {verdict['gone']} deleted meanwhile")
    if damaged:
        raise typer.Exit(DAMAGED)


async def _reports(url: str) -> Sequence[PartReport]:
    from ..adapters.objects.check.verify import verify_objects

    store = BACKEND.store(url)
    try:
        return await verify_objects(store)
    except Unavailable as error:
        raise Unavailable(f"{shown_url(url)}: {error.message}") from error
    finally:
        await store.close()


def _print(reports: Sequence[PartReport]) -> None:
    """The parts as a table, and below it what is wrong in which of them."""
    print_rows(COLUMNS, map(asdict, reports))
    for report in reports:
        for finding in report.findings:
            typer.echo(f"{finding.key}  {finding.what}")
        if report.more_findings:
            typer.echo(f"{report.part}  … {report.more_findings:,} more")
