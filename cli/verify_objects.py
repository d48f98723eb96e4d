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
UNCHECKED = 2  # ... that has found no damage, and has not seen all
COLUMNS = ("part", "state", "objects", "entries", "bytes")


def objects(
    url: Annotated[str, typer.Argument(help=f"The log: {BACKEND.url_form}, or one of its kind.")],
    as_json: JsonLines = False,
) -> None:
    """Read every object of a log on object storage and check it: checksums, that no block is missing, claims and ends
    of epochs, the order of ids, and checkpoints and runs against the blocks that they replace, as far as these remain.

    It reads the store, not the owner, which may write meanwhile, and needs the right to get and to list. Exits with 0
    when all is intact, with 1 when something is damaged, with 2 when an owner deleted something before it was read
    whose entries lie elsewhere now: run it again.
    """
    reports = asyncio.run(_reports(url))
    damaged, unchecked = (sum(report.state == state for report in reports) for state in ("damaged", "unchecked"))
    verdict = {
        "intact": not (damaged or unchecked),
        "parts": len(reports),
        "objects": sum(report.objects for report in reports[:-1]),  # the last are the channels
        "bytes": sum(report.bytes for report in reports[:-1]),
        "entries": reports[-1].entries,
        "gone": sum(report.gone for report in reports),
        "damaged_parts": damaged,
        "unchecked_parts": unchecked,
    }
    if as_json:
        for report in reports:
            typer.echo(json.dumps(asdict(report)))
        typer.echo(json.dumps(verdict))
    else:
        _print(reports)
        found = ((damaged, "damaged"), (unchecked, "not wholly checked"))
        outcome = ", ".join(f"{what}: {number} of {len(reports)} parts" for number, what in found if number) or "intact"
        counts = "{objects:,} objects, {entries:,} entries, {bytes:,} bytes".format_map(verdict)
        typer.echo(f"{outcome}; {counts}; {verdict['gone']} deleted meanwhile")
    if damaged or unchecked:
        raise typer.Exit(DAMAGED if damaged else UNCHECKED)


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
    """The parts as a table, and below it what is wrong, or was not checked, in which of them."""
    print_rows(COLUMNS, map(asdict, reports))
    for report in reports:
        for findings, more in ((report.findings, report.more_findings), (report.unchecked, report.more_unchecked)):
            for finding in findings:
                typer.echo(f"{finding.key}  {finding.what}")
            if more:
                typer.echo(f"{report.part}  … {more:,} more")
