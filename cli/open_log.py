"""Functions that commands share to read a log: open it without creating one, read its channels, fold its catalog."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.catalog.catalog import Catalog, catalog_fold
from ..runtime.clock import to_datetime
from ..runtime.config.loading import load_settings, url_of, wal_options
from ..runtime.errors import ChannelNotFound, CorruptLog, InvalidRequest, PositionLost
from ..runtime.log.names import Names
from ..runtime.log.opening import find_backend, open_wal, url_forms
from ..runtime.log.read_only import ReadOnlyWal
from ..runtime.log.wal import Entry, FromId, Start, Wal
from ..runtime.replicated.fold import Applied, Fold, State
from ..runtime.streams.stream_base import reading

if TYPE_CHECKING:
    from ..runtime.filters.record_filter import RecordFilter

ATTEMPTS = 10  # to read a state up to its end before the next snapshot has removed that

_LOG = f"The log: {url_forms()}, or the directory of an embedded one or of its node."

LogUrl = Annotated[str, typer.Argument(help=_LOG, callback=url_of)]
NodeUrl = Annotated[str, typer.Argument(help=_LOG)]  # a path stays one: its log may be there only when the node is
Prefix = Annotated[
    str,
    typer.Option(
        envvar="TIDEWAL__MSGCHANNEL__CHANNAMEPREFIX__CLUSTER",
        show_envvar=False,
        help="Prefix of the cluster's channels; by default that of the environment's settings.",
    ),
]


@asynccontextmanager
async def opened(url: str, *, read_only: bool = True) -> AsyncGenerator[Wal]:
    """The log at `url`: through its owner where there is one, for whose return it waits without taking over; else by
    owning the log while the block runs, or until a node requests it. The environment has the credentials for brokers.
    Raises `ConfigError` and `Unavailable` where there is no log, and `Unavailable` when the owner has gone and no other
    one comes. Unless `read_only`, a log of brokers that is not there is created."""
    backend = find_backend(url)
    if await backend.abandoned(url):  # it cannot be read in another way
        options = wal_options(load_settings(), url)
        # past `open_wal`, for a log that was migrated can still be looked at
        wal = ReadOnlyWal(await backend.open(url, **options)) if read_only else await open_wal(url, **options)
    else:
        wal = await open_wal(url, read_only=read_only, own=False, **wal_options(load_settings(), url))
    try:
        yield wal
    finally:
        await wal.close()


async def entries(
    wal: Wal, channel: str, start: Start, upto: bytes | None, where: RecordFilter | None = None
) -> AsyncIterator[Entry]:
    """The entries of `channel` from `start` to the one with id `upto`; None goes on for ever. With `where` as
    `Wal.read_where` has them."""
    async with reading(wal, channel, start, where) as batches:
        async for batch in batches:
            for entry in batch:
                yield entry
                if upto is not None and entry.id >= upto:
                    return


async def stored(wal: Wal, channel: str, where: RecordFilter | None = None) -> AsyncIterator[Entry]:
    """The entries that `channel` holds now; none when it does not exist. Raises `PositionLost` when retention removes
    them meanwhile. With `where` as `Wal.read_where` has them."""
    try:
        info = await wal.describe(channel)
    except ChannelNotFound:
        return
    if info.first_id is not None:
        # from that entry on: of a channel that retention empties nothing more may ever come
        async for entry in entries(wal, channel, FromId(info.first_id, inclusive=True), info.latest_id, where):
            yield entry


async def catalog_of(wal: Wal, names: Names) -> Fold[Catalog]:
    """The catalog as the log has it now."""
    return await folded(wal, names.catalog, catalog_fold)


async def folded(
    wal: Wal, channel: str, create: Callable[[], Fold[State]], on_applied: Callable[[Applied], object] = lambda _: None
) -> Fold[State]:
    """The replicated state in `channel` as the log has it now. `create` returns an empty fold; `on_applied` is called
    for each record behind the last snapshot, in order."""
    for attempts_left in reversed(range(ATTEMPTS)):
        fold = create()
        try:
            async for entry in stored(wal, channel):
                fold.read(entry)
            fold.settle()
        except (PositionLost, CorruptLog):  # a snapshot has replaced the next entries
            if not attempts_left:
                raise
            continue
        for applied in fold.replay():
            on_applied(applied)
        return fold
    raise AssertionError


def shown_time(ts: int) -> str:
    """The physical part of a timestamp as ISO 8601, UTC; "-" for 0 and for what no calendar has."""
    try:
        moment = to_datetime(ts)
    except InvalidRequest:
        return "-"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z") if ts else "-"
