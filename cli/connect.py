"""Run a coroutine over a log, or over a client of the node that runs on it, until it ends or a signal comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ..runtime.errors import DeadlineExceeded, Unavailable
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from .open_log import opened
from .signals import INTERRUPTED, Interrupted, until_stopped

if TYPE_CHECKING:
    from ..actors.client import Client

NODE_S = 15.0  # for a node to answer: longer than it takes over from one that was killed

CollectionName = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection.")]
Prefix = Annotated[str, typer.Option(help="Prefix of the cluster's channels.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

T = TypeVar("T")


def over_log(url: str, work: Callable[[Wal], Awaitable[T]], *, read_only: bool = False) -> T:
    """What `work` returns for the log at `url`, which is closed behind it. Opens it as `opened` does."""

    async def run() -> T:
        async with opened(url, read_only=read_only) as wal:
            return await work(wal)

    return completed(run())


def over_client(url: str, prefix: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """What `work` returns for a client of the node on the log at `url`. Raises `Unavailable` where none answers."""

    async def run() -> T:
        async with _connected(url, prefix) as client:
            return await work(client)

    return completed(run())


@asynccontextmanager
async def _connected(url: str, prefix: str) -> AsyncGenerator[Client]:
    from ..actors.client import Client

    if await find_backend(url).abandoned(url):
        raise _no_node(url)
    async with opened(url, read_only=False) as wal, Client(wal, prefix=prefix) as client:
        try:
            await client.ready(deadline_s=NODE_S)
        except DeadlineExceeded:
            raise _no_node(url) from None
        yield client


def _no_node(url: str) -> Unavailable:
    return Unavailable(
        f"no node answers on {shown_url(url)}: start one with `tidewal run` and the --data or --wal of this log"
    )


def completed(work: Coroutine[object, object, T]) -> T:
    """What `work` returns, on a loop of its own. A signal cancels it, and ends the command once it has drained."""
    import uvloop

    try:
        return uvloop.run(until_stopped(work))
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None
