"""`tidewal compact`: bring a collection's table of current rows forward to now."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from ..runtime.log.names import DEFAULT_PREFIX
from .connect import CollectionName, over_client
from .logging_setup import logged
from .open_log import NodeUrl, Prefix, shown_time
from .results import AsJson

if TYPE_CHECKING:
    from ..actors.client import Client
    from ..runtime.rpc.protocol import Params


@logged
def compact(url: NodeUrl, collection: CollectionName, as_json: AsJson = False, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Store what is acknowledged in the collection's tables, and bring `current`, its present rows, forward to that."""

    async def work(client: Client) -> Params:
        await client.flush(collection)
        return await client.compact(collection)

    done = over_client(url, prefix, work)
    if as_json:
        typer.echo(json.dumps({"collection": collection, **done}))
    else:
        moment = shown_time(done["time"])
        typer.echo(f"{collection}/current has {done['rows']:,} rows as of {moment}; {done['merged']:,} keys merged")
