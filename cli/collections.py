"""`tidewal list`, `describe`, `load`, `release`, `drop` and `delete`: a node's collections, and rows to remove from
one."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.catalog.catalog import Collection
from ..runtime.errors import CollectionNotFound, CollectionNotLoaded, InvalidRequest, TidewalError
from ..runtime.log.names import DEFAULT_PREFIX
from ..runtime.rows.schema import Field
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix, shown_time
from .results import AsJson, JsonLines, print_rows

if TYPE_CHECKING:
    from ..actors.client import Client, WriteResult

BATCH_KEYS = 10_000  # that one write deletes

LIST_COLUMNS = ("collection", "rows", "shards", "primary_key", "fields")
FIELD_COLUMNS = ("name", "type", "nullable", "dim")
NONE: list[str] = []

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@logged
def list_collections(url: NodeUrl, as_json: JsonLines = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """List the collections of a node: their rows, shards, primary key and fields.

    With --json a line for each. Rows that cannot be counted are "-" (null): `tidewal status` says why.
    """

    async def work(client: Client) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for name in await client.list_collections():
            with suppress(CollectionNotFound):  # dropped meanwhile
                found.append(await _described(client, name))
        return found

    found = over_client(url, prefix, work)
    if not found and not as_json:
        typer.echo("none")
        return
    shown = found if as_json else [each | {"fields": ", ".join(map(shown_field, each["fields"]))} for each in found]
    print_rows(LIST_COLUMNS, shown, as_json=as_json)


@logged
def describe(
    url: NodeUrl, collection: CollectionName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX
) -> None:
    """Show a collection: its rows, shards, primary key, and its fields with their types."""
    found = over_client(url, prefix, lambda client: _described(client, collection))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name in LIST_COLUMNS[:-1]:
        typer.echo(f"{name:12} {'-' if found[name] is None else found[name]}")
    typer.echo()
    print_rows(FIELD_COLUMNS, found["fields"])


@logged
def load(
    url: NodeUrl,
    collection: CollectionName,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="QueryNodes that are to have it, as far as there are so many.")
    ] = None,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Have QueryNodes get a collection into memory, and wait until its queries can be answered.

    Without --replicas as many as it has, and after a release as many as a new one gets. A collection that has been
    created is loaded, unless the settings or its creator say otherwise.
    """

    async def work(client: Client) -> int:
        await client.load_collection(collection, replicas=replicas)
        return (await client.load_state(collection)).replicas

    wanted = over_client(url, prefix, work)
    said = f"{collection} is loaded, by {wanted} QueryNodes as far as there are so many"
    typer.echo(json.dumps({"collection": collection, "state": "Loaded", "replicas": wanted}) if as_json else said)


@logged
def release(url: NodeUrl, collection: CollectionName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Let no QueryNode have a collection in memory; it is written and stored as before.

    Its queries are refused until it is loaded again (`tidewal load`).
    """
    over_client(url, prefix, lambda client: client.release_collection(collection))
    said = f"{collection} is released: its queries are refused until `tidewal load`"
    typer.echo(json.dumps({"collection": collection, "state": "NotLoad", "replicas": 0}) if as_json else said)


@logged
def drop(
    url: NodeUrl,
    collection: CollectionName,
    yes: Yes = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Drop a collection with its rows and its tables, for good.

    Says how many rows there are and asks before, unless --yes is given.
    """

    async def shown_rows(client: Client) -> str:
        try:
            return f"its {await client.count(collection, consistency='strong'):,} rows"
        except CollectionNotLoaded:
            return "its rows"

    if not yes:
        ask(f"Drop {collection} with {over_client(url, prefix, shown_rows)} and its tables, for good?")
    over_client(url, prefix, lambda client: client.drop_collection(collection))
    typer.echo(json.dumps({"collection": collection, "dropped": True}) if as_json else f"{collection} is dropped")


@logged
def delete(
    url: NodeUrl,
    collection: CollectionName,
    filter: Annotated[str, typer.Option(help="The rows for which this filter holds.")] = "",
    key: Annotated[list[str], typer.Option(help="The row with this primary key. Once for each.")] = NONE,
    yes: Yes = False,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Delete rows by their keys, or those for which a filter holds.

    With a filter it says how many rows there are and asks before, unless --yes is given. It deletes the keys that it
    found: a row that another client writes meanwhile goes with its key, one that fits the filter only later stays. Keys
    that are not there are no error.
    """
    if bool(filter) == bool(key):
        raise InvalidRequest("say which rows: with --filter, or with --key, once for each")

    async def find(client: Client) -> list[object]:
        name = (await client.describe_collection(collection)).schema.primary_key
        found = await client.query(collection, filter, columns=[name], consistency="strong")
        return [*found.table.column(name).to_pylist()]

    async def keys_given(client: Client) -> list[object]:
        field = (await client.describe_collection(collection)).schema.key
        return [_key_of(field, each) for each in key]

    keys = over_client(url, prefix, find if filter else keys_given)
    if filter and keys and not yes:
        ask(f"Delete {len(keys):,} rows of {collection}?")
    last = over_client(url, prefix, lambda client: _delete(client, collection, keys)) if keys else None
    if as_json:
        told = {"collection": collection, "keys": len(keys), "ts": last.ts if last else None}
        typer.echo(json.dumps(told | {"time": shown_time(last.ts) if last else None}))
    else:
        at = f", the last at ts {last.ts} ({shown_time(last.ts)})" if last else ""
        typer.echo(f"{len(keys):,} keys deleted from {collection}{at}")


async def _delete(client: Client, name: str, keys: list[object]) -> WriteResult | None:
    last = None
    for start in range(0, len(keys), BATCH_KEYS):
        last = await client.delete(name, keys[start : start + BATCH_KEYS])
    return last


def described_schema(collection: Collection) -> dict[str, Any]:
    """What `create` and `describe` say of a collection."""
    fields = [
        {"name": each.name, "type": each.type, "nullable": each.nullable, "dim": each.dim}
        for each in collection.schema.fields
    ]
    return {
        "collection": collection.name,
        "id": collection.id,
        "shards": len(collection.vchannels),
        "primary_key": collection.schema.primary_key,
        "fields": fields,
    }


async def _described(client: Client, name: str) -> dict[str, Any]:
    described = described_schema(await client.describe_collection(name))
    try:
        return described | {"rows": await client.count(name, consistency="strong")}
    except CollectionNotFound:
        raise
    except TidewalError:  # `status` says why; what the catalog knows is worth showing all the same
        return described | {"rows": None}


def shown_field(field: dict[str, Any]) -> str:
    """A field as `create --field` takes it."""
    dim = f":{field['dim']}" if field["dim"] else ""
    return f"{field['name']}:{field['type']}{'?' if field['nullable'] else ''}{dim}"


def _key_of(field: Field, text: str) -> object:
    try:
        return text if field.type == "varchar" else int(text)
    except ValueError:
        raise InvalidRequest(f"--key {text}: the primary key {field.name!r} is {field.type}, a whole number") from None


def ask(question: str) -> None:
    """Ask, and end the command with 1 unless the answer is yes. Raises `InvalidRequest` where standard
    input is no terminal."""
    if not sys.stdin.isatty():
        raise InvalidRequest(f"{question} Say it with --yes, because standard input is no terminal")
    typer.confirm(question, abort=True, err=True)
