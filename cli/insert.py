"""`tidewal insert`: write the rows of a file, or of standard input, into a collection."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from ..runtime.errors import InvalidRequest, InvalidRows, TidewalError
from ..runtime.log.names import DEFAULT_PREFIX
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix, shown_time
from .results import AsJson
from .row_files import SUFFIXES, FileFormat, RowBatch, batches
from .stdin import in_thread, stdin_file

if TYPE_CHECKING:
    from ..actors.client import Client, WriteResult

STDIN = "-"


@logged
def insert(
    url: NodeUrl,
    collection: CollectionName,
    file: Annotated[str, typer.Argument(help="JSON lines, CSV with a header, or Parquet; - is standard input.")],
    form: Annotated[
        FileFormat | None, typer.Option("--format", help="What FILE is; by default what its suffix says, - is jsonl.")
    ] = None,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Write rows into a collection, in batches; a row whose key exists replaces that row.

    Each batch is durable when the next one begins. A row that does not fit is named with its line, and ends the
    command: of its batch nothing is written, of those before everything, so the corrected file can be written again.
    """
    form = form or _format_of(file)
    with ExitStack() as stack:
        source = _open(file, stack)
        rows, last = over_client(url, prefix, lambda client: _write(client, collection, source, form))
    found = {"collection": collection, "rows": rows, "ts": last.ts if last else None}
    if as_json:
        typer.echo(json.dumps(found | {"time": shown_time(last.ts) if last else None}))
    else:
        at = f", the last at ts {last.ts} ({shown_time(last.ts)})" if last else f": {_why_none(file, form)}"
        typer.echo(f"{rows:,} rows written into {collection}{at}")


def _why_none(file: str, form: FileFormat) -> str:
    what = "standard input" if file == STDIN else file
    return f"{what} has no rows" + (", it is empty or has only a header" if form is FileFormat.csv else "")


def _format_of(file: str) -> FileFormat:
    if file == STDIN:
        return FileFormat.jsonl
    suffix = Path(file).suffix.lower()
    if suffix not in SUFFIXES:
        raise InvalidRequest(f"{file}: say with --format what it is, because the name does not: {', '.join(SUFFIXES)}")
    return SUFFIXES[suffix]


def _open(file: str, stack: ExitStack) -> BinaryIO:
    if file == STDIN:
        return stdin_file()
    try:
        return stack.enter_context(Path(file).open("rb"))
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}") from None


async def _write(client: Client, name: str, source: BinaryIO, form: FileFormat) -> tuple[int, WriteResult | None]:
    """Write all rows; returns their number and what became of the last batch."""
    from rich.console import Console

    schema = (await client.describe_collection(name)).schema
    rows, last = 0, None
    with Console(stderr=True).status(f"{name}: reading") as progress:  # prints nothing where that is no terminal
        try:
            found = batches(source, form, schema)
            while (batch := await in_thread(partial(next, found, None))) is not None:
                last = await _write_batch(client, name, batch)
                rows += batch.count
                progress.update(f"{name}: {rows:,} rows")
        except TidewalError as error:
            error.message += f"; before it {rows:,} rows were written"
            raise
    return rows, last


async def _write_batch(client: Client, name: str, batch: RowBatch) -> WriteResult:
    try:
        return await client.insert(name, batch.rows)
    except InvalidRows as error:
        row = error.fields.get("row")
        if not isinstance(row, int):
            raise
        what = error.message.removeprefix(f"row {row}: ")
        raise InvalidRows(f"{batch.place(row)}: {what}", **error.fields) from None
