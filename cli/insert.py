"""`tidewal insert` and `tidewal apply`: write the rows, or the changes, of a file or of standard input into a
collection."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer

from ..runtime.errors import InvalidRequest, InvalidRows, MessageTooLarge, TidewalError
from ..runtime.log.names import DEFAULT_PREFIX
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix, shown_time
from .results import AsJson
from .row_files import COMMA, SUFFIXES, FileFormat, RowBatch, batches
from .stdin import in_thread, stdin_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ..actors.client import Client, WriteResult
    from ..actors.rows import Rows

    Write = Callable[[str, Rows], Awaitable[WriteResult]]

STDIN = "-"
GZIP = ".gz"
TAB = "\t"

# What an error advises to a program, and to a person who has a file.
_ADVICE = {"give a datetime": "give an ISO 8601 text", "give True or False": "give true or false"}
_CALL = re.compile(r", as \w+\(value\)")

File = Annotated[
    str, typer.Argument(help="JSON lines, CSV with a header, or Parquet, also with .gz; - is standard input.")
]
Form = Annotated[
    FileFormat | None,
    typer.Option("--format", help="What FILE is; by default what its suffix says, - is jsonl."),
]
Delimiter = Annotated[
    str, typer.Option(help="What is between the values of CSV: one character; by default a comma, of .tsv a tab (\\t).")
]


@logged
def insert(
    url: NodeUrl,
    collection: CollectionName,
    file: File,
    form: Form = None,
    delimiter: Delimiter = "",
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Write rows into a collection, in batches; a row whose key exists replaces that row.

    Each batch is durable when the next one begins. A row that does not fit is named with its line, and ends the
    command: of its batch nothing is written, of those before everything, so the corrected file can be written again.
    """
    load(url, collection, file, form, delimiter, as_json=as_json, prefix=prefix, changes=False)


@logged
def apply(
    url: NodeUrl,
    collection: CollectionName,
    file: File,
    form: Form = None,
    delimiter: Delimiter = "",
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Write changes into a collection, in batches: the column _op of each row says insert, upsert or delete.

    A delete needs its key only. Changes apply in their order. Batches, and rows that do not fit, are as those of
    `insert`.
    """
    load(url, collection, file, form, delimiter, as_json=as_json, prefix=prefix, changes=True)


def load(
    url: str,
    collection: str,
    file: str,
    form: FileFormat | None,
    delimiter: str,
    *,
    as_json: bool,
    prefix: str,
    changes: bool,
) -> None:
    """Write the rows of `file`, or the `changes` that they are, and print how many there were. Raises `InvalidRequest`
    for a file or options that cannot be used, `InvalidRows`, and what the client raises."""
    form = form or _format_of(file)
    between = _delimiter(file, form, delimiter)
    with ExitStack() as stack:
        source = _open(file, stack)
        rows, last = over_client(
            url, prefix, lambda client: _write(client, collection, source, form, between, changes=changes)
        )
    found = {"collection": collection, "rows": rows, "ts": last.ts if last else None}
    if as_json:
        typer.echo(json.dumps(found | {"time": shown_time(last.ts) if last else None}))
    else:
        what = "changes applied to" if changes else "rows written into"
        at = f", the last at ts {last.ts} ({shown_time(last.ts)})" if last else f": {_why_none(file, form)}"
        typer.echo(f"{rows:,} {what} {collection}{at}")


def _why_none(file: str, form: FileFormat) -> str:
    what = "standard input" if file == STDIN else file
    return f"{what} has no rows" + (", it is empty or has only a header" if form is FileFormat.csv else "")


def _is_gzip(file: str) -> bool:
    return file.lower().endswith(GZIP)


def _suffix(file: str) -> str:
    return Path(file.lower().removesuffix(GZIP)).suffix


def _format_of(file: str) -> FileFormat:
    if file == STDIN:
        return FileFormat.jsonl
    if _suffix(file) not in SUFFIXES:
        raise InvalidRequest(f"{file}: say with --format what it is, because the name does not: {', '.join(SUFFIXES)}")
    return SUFFIXES[_suffix(file)]


def _delimiter(file: str, form: FileFormat, given: str) -> str:
    if not given:
        return TAB if _suffix(file) == ".tsv" else COMMA
    if form is not FileFormat.csv:
        raise InvalidRequest("--delimiter is for CSV: say --format csv, or leave it out")
    character = TAB if given == r"\t" else given
    if len(character) != 1 or character in '"\r\n':
        raise InvalidRequest(f"--delimiter is one character, or \\t for a tab, not {given!r}")
    return character


def _open(file: str, stack: ExitStack) -> BinaryIO:
    if file == STDIN:
        return stdin_file()
    try:
        return stack.enter_context(cast(BinaryIO, gzip.open(file)) if _is_gzip(file) else Path(file).open("rb"))
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}") from None


async def _write(
    client: Client, name: str, source: BinaryIO, form: FileFormat, delimiter: str, *, changes: bool
) -> tuple[int, WriteResult | None]:
    """Write all rows; returns their number and what became of the last batch. Where it is cancelled it says how far it
    came."""
    from rich.console import Console

    schema = (await client.describe_collection(name)).schema
    write = client.apply if changes else client.insert
    rows, last, under_way = 0, None, 0
    with Console(stderr=True).status(f"{name}: reading") as progress:  # prints nothing where that is no terminal
        try:
            found = batches(source, form, schema, delimiter=delimiter)
            while (batch := await in_thread(partial(next, found, None))) is not None:
                under_way = batch.count
                async for count, written in _write_divided(write, name, batch):
                    rows, under_way, last = rows + count, under_way - count, written
                    progress.update(f"{name}: {rows:,} rows")
        except TidewalError as error:
            error.message += f"; before it {rows:,} rows were written"
            raise
        except asyncio.CancelledError:
            typer.echo(f"stopped; {rows:,} rows were written{_perhaps(under_way)}", err=True)
            raise
    return rows, last


def _perhaps(rows: int) -> str:
    return f", and perhaps the next {rows:,}" if rows else ""


async def _write_divided(write: Write, name: str, batch: RowBatch) -> AsyncIterator[tuple[int, WriteResult]]:
    """Write `batch`: as one, or where that is more than the log takes in one commit, in halves, in order. Yields how
    many rows each write had, and what became of it."""
    waiting = [batch]
    while waiting:
        part = waiting.pop()
        try:
            result = await _write_batch(write, name, part)
        except MessageTooLarge as error:
            if part.count == 1 or error.outcome_unknown:
                raise
            waiting += reversed(part.halves())
        else:
            yield part.count, result


async def _write_batch(write: Write, name: str, batch: RowBatch) -> WriteResult:
    try:
        return await write(name, batch.rows)
    except InvalidRows as error:
        row, column = error.fields.get("row"), error.fields.get("column")
        place = batch.place(row) if isinstance(row, int) else batch.place_of_column(str(column)) if column else ""
        what = _for_a_file(error.message.removeprefix(f"row {row}: "))
        raise InvalidRows(f"{place}: {what}" if place else what, **error.fields) from None
    except MessageTooLarge as error:
        if batch.count == 1:
            error.message = f"{batch.place(0)}: {error.message}"
        raise


def _for_a_file(message: str) -> str:
    """The advice for a program in words for a person who has a file."""
    for before, after in _ADVICE.items():
        message = message.replace(before, after)
    return _CALL.sub("", message)
