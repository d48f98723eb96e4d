"""How commands print rows: as a table for people, or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated

import typer

from ..runtime.log.wal import Payload
from .one_line import one_line

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON, a line for each.")]
UNFOLDED = 100_000  # columns of a terminal that folds no row


def plain(value: object) -> str:
    """Values that JSON does not have: ids and bodies in hex, times as ISO 8601."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if isinstance(value, datetime) else str(value)


def shown_bytes(name: str, content: Payload) -> dict[str, str]:
    """Bytes of a message as JSON has them: text where they are UTF-8, else in hex."""
    try:
        return {name: str(content, "utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_hex": content.hex()}


def print_rows(columns: Sequence[str], rows: Iterable[Mapping[str, object]], *, as_json: bool = False) -> None:
    """Print `rows`: a line of JSON for each, or one table of `columns`, in which nothing is cut off. On a terminal long
    cells are folded; in a file or a pipe each row is one line."""
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, default=plain))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(name)), overflow="fold") for name in columns))
    console = Console()
    if not console.is_terminal:
        console.width = UNFOLDED
    console.print(table)


def print_titled(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, object]], *more: str) -> None:
    """Print a title, the table of `rows` below it, "none" where there are no rows, and `more` lines; then an empty
    line."""
    typer.echo(title)
    if rows:
        print_rows(columns, rows)
    for line in more if rows else ("none",):
        typer.echo(f"  {line}")
    typer.echo()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return one_line(value) if isinstance(value, str) else json.dumps(value, default=plain).strip('"')
