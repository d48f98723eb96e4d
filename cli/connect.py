"""Run a coroutine over a log, or over a client of the node that runs on it, until it ends or a signal comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ..runtime.config.loading import load_settings
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.signals import INTERRUPTED, Interrupted, until_stopped
from .open_log import opened

if TYPE_CHECKING:
    from ..actors.client import Client

NODE_S = 15.0  # for a node to answer: longer than it takes over from one that was killed

CollectionName = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection.")]

T = TypeVar("T")


def over_log(url: str, work: Callable[[Wal], Awaitable[T]], *, read_only: bool = False) -> T:
    """What `work` returns for the log at `url`, which is closed behind it. Opens it as `opened` does."""

    async def run() -> T:
        async with opened(url, read_only=read_only) as wal:
            return await work(wal)

    return completed(run())


def over_client(url: str, prefix: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """What `work` returns for a client of the node on the log at `url`, as `node_on` finds it."""

    async def run() -> T:
        async with node_on(url, prefix) as client:
            return await work(client)

    return completed(run())


@asynccontextmanager
async def node_on(url: str, prefix: str) -> AsyncGenerator[Client]:
    """A client of the node on the log at `url`, which is a URL or, as for `connect`, a path. A node that is starting is
    waited for, also while its directory is not there yet. Raises `Unavailable` where none answers in `NODE_S`."""
    from rich.console import Console

    from ..actors.connection import connect

    settings = load_settings(arguments={"msgChannel.chanNamePrefix.cluster": prefix})
    async with AsyncExitStack() as stack:
        with Console(stderr=True).status(
            f"looking for a node at {shown_url(url)}"
        ):  # nothing where that is no terminal
            client = await stack.enter_async_context(connect(url, settings=settings, deadline_s=NODE_S))
        yield client


def completed(work: Coroutine[object, object, T]) -> T:
    """What `work` returns, on a loop of its own. A signal cancels it, and ends the command once it has drained."""
    import uvloop

    try:
        return uvloop.run(until_stopped(work))
    except Interrupted:
        raise typer.Exit(INTERRUPTED) from None
