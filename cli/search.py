"""`tidewal search`: the rows of a collection that are nearest to a vector."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, cast

import typer

from ..runtime.errors import InvalidRequest
from ..runtime.log.names import DEFAULT_PREFIX
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix
from .query import At, Columns, Consistency, Freshness, listed, print_result
from .results import AsJson


class Distance(StrEnum):
    """How far two vectors are from each other."""

    L2 = "L2"
    IP = "IP"
    COSINE = "COSINE"


@logged
def search(
    url: NodeUrl,
    collection: CollectionName,
    field: Annotated[str, typer.Argument(help="The field of vectors.")],
    vector: Annotated[str, typer.Argument(help='The vector as JSON: "[0.1, 0.2]".')],
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="How many rows.")] = 10,
    metric: Annotated[Distance, typer.Option(case_sensitive=False, help="The measure of distance.")] = Distance.COSINE,
    filter: Annotated[str, typer.Option(help="Only rows for which this filter holds.")] = "",
    columns: Columns = "",
    consistency: Consistency = Freshness.strong,
    at: At = None,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Print the rows nearest to a vector, the nearest first, with their distances.

    With --json a line for each.
    """
    numbers = _vector(vector)
    result = over_client(
        url,
        prefix,
        lambda client: client.search(
            collection,
            field,
            numbers,
            metric=metric.value,
            top_k=top_k,
            filter=filter or None,
            columns=listed(columns),
            consistency=consistency.value,
            at=at,
        ),
    )
    print_result(result, as_json=as_json)


def _vector(text: str) -> list[float]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise InvalidRequest(f'{text[:50]!r} is no vector: write a list of numbers, as "[0.1, 0.2]"')
    return cast("list[float]", found)
