"""`tidewal query`: the rows of a collection for which a filter holds."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.log.names import DEFAULT_PREFIX
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix
from .results import AsJson, print_rows

if TYPE_CHECKING:
    from ..actors.client import QueryResult


class Freshness(StrEnum):
    """What a query sees at least (`Client`)."""

    strong = "strong"
    session = "session"
    bounded = "bounded"
    eventually = "eventually"


Columns = Annotated[str, typer.Option(help="The columns to print, by comma; all by default.")]
Consistency = Annotated[Freshness, typer.Option(help="strong sees every write acknowledged before it began.")]

At = Annotated[
    int | None,
    typer.Option(min=1, help="Read the rows as they were at this time, that of a write, a cut or an answer."),
]


@logged
def query(
    url: NodeUrl,
    collection: CollectionName,
    expression: Annotated[str, typer.Argument(metavar="[EXPR]", help="A filter as Milvus writes them.")] = "",
    columns: Columns = "",
    order_by: Annotated[str, typer.Option(help="Columns to sort by, by comma; a column with - before it falls.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many rows.")] = None,
    count: Annotated[bool, typer.Option("--count", help="Print only how many rows there are.")] = False,
    consistency: Consistency = Freshness.strong,
    at: At = None,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Print the rows for which a filter holds: all without one.

    With --json a line for each, as `insert` reads them. Where stderr is a terminal it says how old the answer is.
    """
    if count:
        number = over_client(
            url,
            prefix,
            lambda client: client.count(collection, expression or None, consistency=consistency.value, at=at),
        )
        typer.echo(json.dumps({"count": number}) if as_json else str(number))
        return
    result = over_client(
        url,
        prefix,
        lambda client: client.query(
            collection,
            expression or None,
            columns=listed(columns),
            order_by=[(name.removeprefix("-"), not name.startswith("-")) for name in listed(order_by) or ()],
            limit=limit,
            consistency=consistency.value,
            at=at,
        ),
    )
    print_result(result, as_json=as_json)


def listed(names: str) -> list[str] | None:
    """The names that an option lists by comma; None where it lists none."""
    return [each.strip() for each in names.split(",") if each.strip()] or None


def print_result(result: QueryResult, *, as_json: bool) -> None:
    """Print the rows of an answer, and for people how many there are and how old they are."""
    print_rows(result.table.column_names, result.table.to_pylist(), as_json=as_json)
    if not as_json and sys.stderr.isatty():
        typer.echo(f"{result.table.num_rows:,} rows, {result.age_ms:.0f} ms old, in {result.took_ms:.1f} ms", err=True)
