"""`tidewal catalog`: the collections of a log as a file, and collections from such a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ..runtime.catalog.catalog import READY, Catalog
from ..runtime.errors import BadRecord, InvalidRequest
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.rows.schema import CollectionSchema
from .connect import over_client, over_log
from .logging_setup import logged
from .open_log import LogUrl, NodeUrl, Prefix
from .results import AsJson
from .stored_cluster import cluster_of

if TYPE_CHECKING:
    from ..actors.client import Client

catalog: typer.Typer = typer.Typer(
    help="The collections of a log as a file, and collections from such a file: export, import.", no_args_is_help=True
)

VERSION = 1
KEY = "tidewal_catalog"  # its value is the version of the file


@catalog.command("export")
@logged
def export(url: LogUrl, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Print the collections of a log, with their schemas and shards, as JSON that `tidewal catalog import` takes.

    Asks no node: it is what the log says. Rows are not in it: those are in the tables and in the log.
    """
    found = over_log(url, lambda wal: cluster_of(wal, Names(prefix)), read_only=True)
    typer.echo(json.dumps(exported(found.catalog), indent=2))


@catalog.command("import")
@logged
def import_catalog(
    url: NodeUrl,
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="What `export` printed.")],
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Create the collections of a file, empty, with the shards that they had.

    One that is there already with the same fields and shards is left as it is. The file is checked first, and where a
    collection is refused those before it are there: import again when the reason is gone.
    """
    wanted = read_export(file)

    async def create(client: Client) -> list[str]:
        there = set(await client.list_collections())
        for schema, shards in wanted:
            await client.create_collection(schema, shards=shards)
        return [schema.name for schema, _ in wanted if schema.name not in there]

    created = over_client(url, prefix, create)
    if as_json:
        typer.echo(json.dumps({"created": created, "there": len(wanted) - len(created)}))
    else:
        typer.echo(f"{len(created)} collections created, {len(wanted) - len(created)} were there")


def exported(catalog: Catalog) -> dict[str, Any]:
    """The ready collections of a catalog, in the order in which they were created."""
    ready = sorted((each for each in catalog.collections.values() if each.state == READY), key=lambda each: each.id)
    collections = [{"schema": each.schema.to_wire(), "shards": each.shards} for each in ready]
    return {KEY: VERSION, "collections": collections}


def read_export(file: Path) -> Sequence[tuple[CollectionSchema, int]]:
    """The schemas and shards in a file that `exported` made. Raises `InvalidRequest` where it is none, or is one of a
    later version."""
    try:
        told = cast("Mapping[str, Any]", json.loads(file.read_text()))
        version = told[KEY]
        if version != VERSION:
            raise InvalidRequest(
                f"{file} has version {version}, this Tidewal reads {VERSION}: upgrade", argument="FILE"
            )
        return [_collection(each) for each in told["collections"]]
    except (ValueError, LookupError, TypeError, AttributeError, BadRecord) as error:
        raise InvalidRequest(
            f"{file} is nothing that `tidewal catalog export` printed: {error}", argument="FILE"
        ) from None


def _collection(told: Mapping[str, Any]) -> tuple[CollectionSchema, int]:
    shards = told["shards"]
    if type(shards) is not int or shards < 1:
        raise ValueError(f"{shards!r} shards")
    return CollectionSchema.from_wire(told["schema"]), shards
