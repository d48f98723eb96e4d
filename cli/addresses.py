"""What `tidewal run` prints once it is ready: where the node is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias, cast

import typer

Addresses: TypeAlias = Mapping[str, object]
"""The log, the tables and the metrics of a node by these words; of one in several processes their ids, too, in
`processes`, by the names of the groups."""


def print_addresses(where: Addresses, as_json: bool) -> None:
    """Print them, a line each for people, or as one line of JSON."""
    if as_json:
        typer.echo(json.dumps(where))
        return
    processes = cast("Mapping[str, int | None]", where.get("processes", {}))
    lines = [(name, address) for name, address in where.items() if name != "processes"]
    lines += [(name, f"process {pid}") for name, pid in processes.items()]
    width = max(8, *(len(name) for name, _ in lines))
    for name, shown in lines:
        typer.echo(f"{name:{width}} {shown}")
    typer.echo("running; Ctrl-C ends it")
