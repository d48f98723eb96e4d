"""`tidewal dlq`: the dead letters of a log, what its readers and consumer groups could not use."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..runtime.clock import HybridClock
from ..runtime.errors import BadRecord, InvalidRequest, TidewalError
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.record import Record, decode
from ..runtime.log.wal import Wal
from .connect import node_on, over_log
from .letters import OF_GROUPS, DeadLetter, Key, find, key_of, open_letters, open_of_groups, resolution
from .logging_setup import logged
from .one_line import one_line
from .open_log import LogUrl, Prefix
from .replay import REPLAYED, replay
from .results import AsJson, plain, print_rows, shown_bytes

if TYPE_CHECKING:
    from ..actors.client import Client

dlq: typer.Typer = typer.Typer(
    help="Dead letters, what readers and groups could not use: show, replay, drop.", no_args_is_help=True
)

COLUMNS = ("id", "time", "channel", "entry", "reason", "size", "times", "message")
COLUMNS_WITH_GROUPS = ("id", "time", "group", "channel", "entry", "reason", "attempts", "message")
DROPPED = "dropped"

OfChannel = Annotated[str, typer.Option("--channel", help="Only letters of this channel.")]
OfGroup = Annotated[str, typer.Option("--group", help="Only letters of this consumer group.")]
WithReason = Annotated[str, typer.Option("--reason", help="Only letters with this reason.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="The letters' ids, as `list` prints them.")]
All = Annotated[bool, typer.Option("--all", help="All letters, of those that the other options say.")]

Resolve = Callable[[Wal, Record, DeadLetter], Awaitable[None]]


@dlq.command("list")
@logged
def list_letters(
    url: LogUrl,
    channel: OfChannel = "",
    reason: WithReason = "",
    group: OfGroup = "",
    limit: Annotated[int, typer.Option(min=1, help="Only so many, the newest.")] = 50,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """List dead letters, the oldest first: where each bad entry is, and why it is one. With --json a line for each."""
    wanted = _filter(channel, reason, group)
    found = [
        each for each in over_log(url, lambda wal: open_letters(wal, Names(prefix)), read_only=True) if wanted(each)
    ]
    if found or as_json:
        columns = COLUMNS_WITH_GROUPS if any(letter.group for letter in found[-limit:]) else COLUMNS
        print_rows(columns, map(_fields, found[-limit:]), as_json=as_json)
    else:
        typer.echo("none")


@dlq.command()
@logged
def show(
    url: LogUrl,
    letter: Annotated[str, typer.Argument(metavar="ID", help="The letter's id, as `list` prints it.")],
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Show one dead letter with the bytes of the bad entry: as text where they are UTF-8, else in hex.

    Where the entry can be read as a record, its type, key, tags and value are shown, too.
    """
    fields = over_log(url, lambda wal: _details(wal, Names(prefix), letter), read_only=True)
    if as_json:
        typer.echo(json.dumps(fields, default=plain))
        return
    for name, value in fields.items():
        typer.echo(f"{name:10} {one_line(value) if isinstance(value, str) else json.dumps(value, default=plain)}")


@dlq.command("replay")
@logged
def replay_letters(
    url: LogUrl,
    ids: Ids = None,
    all_of_them: All = False,
    channel: OfChannel = "",
    reason: WithReason = "",
    group: OfGroup = "",
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Write what is in dead letters to the place that it came from again, with a new timestamp.

    A group's letter is appended to its channel, which every group on that channel gets; rows of a collection and
    messages of a topic are written through the node, which has to run. A message that failed in the retry topic of a
    group goes there again, and to no other group. A letter that was replayed or dropped before is left alone.
    """
    names = Names(prefix)

    async def work(wal: Wal) -> int:
        async with _lazy_node(url, prefix) as to_node:

            async def again(wal: Wal, record: Record, letter: DeadLetter) -> None:
                await replay(wal, names, record, letter, to_node)

            chosen = await _chosen(wal, names, ids, all_of_them, _filter(channel, reason, group))
            return await _resolve(wal, names, chosen, REPLAYED, again, as_json=as_json)

    _finish(over_log(url, work))


@dlq.command()
@logged
def drop(
    url: LogUrl,
    ids: Ids = None,
    all_of_them: All = False,
    channel: OfChannel = "",
    reason: WithReason = "",
    group: OfGroup = "",
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Drop dead letters: they are listed no more, and their bytes go with the retention of their channel.

    A letter that was replayed or dropped before is left alone.
    """
    names = Names(prefix)

    async def away(wal: Wal, _: Record, letter: DeadLetter) -> None:
        await wal.append_many([resolution(names, letter, DROPPED, HybridClock())])

    async def work(wal: Wal) -> int:
        chosen = await _chosen(wal, names, ids, all_of_them, _filter(channel, reason, group))
        return await _resolve(wal, names, chosen, DROPPED, away, as_json=as_json)

    _finish(over_log(url, work))


# ---- which letters --------------------------------------------------------------------------------------------------


def _filter(channel: str, reason: str, group: str) -> Callable[[DeadLetter], bool]:
    def wanted(letter: DeadLetter) -> bool:
        asked = ((channel, letter.channel), (reason, letter.reason), (group, letter.group))
        return all(not wish or wish == found for wish, found in asked)

    return wanted


async def _chosen(
    wal: Wal, names: Names, ids: Sequence[str] | None, all_of_them: bool, wanted: Callable[[DeadLetter], bool]
) -> list[str]:
    if bool(ids) == all_of_them:
        raise InvalidRequest("name the letters by their ids, or all that the options say with --all")
    return [*ids] if ids else [each.id for each in await open_letters(wal, names) if wanted(each)]


# ---- what becomes of them -------------------------------------------------------------------------------------------


async def _resolve(wal: Wal, names: Names, ids: Sequence[str], done: str, resolve: Resolve, *, as_json: bool) -> int:
    """Resolve letters one after the other, and tell of each. Returns how many could not be. One that is refused does
    not keep the others."""

    def tell(id: str, state: str, error: str = "") -> None:
        if as_json:
            typer.echo(json.dumps({"id": id, "state": state, "error": error}))
        else:
            if state == "removed":
                state = "replayed or dropped before, or retention has removed it"
            verb = "was" if "before" in state else "is"
            typer.echo(f"{id}: {one_line(error)}" if error else f"{id} {verb} {state}", err=bool(error))

    found: list[tuple[Record, DeadLetter]] = []
    for id in ids:  # first: a wrong id changes nothing
        try:
            found.append(await find(wal, names, id))
        except InvalidRequest as error:
            if not error.fields.get("gone"):
                raise
            tell(id, "removed")
    failed = 0
    just_done: set[Key] = set()
    for record, letter in found:
        if letter.resolved or key_of(letter) in just_done:
            tell(letter.id, f"{letter.resolved or done} before")
            continue
        try:
            await resolve(wal, record, letter)
        except TidewalError as error:
            if error.retryable:
                raise
            failed += 1
            tell(letter.id, "failed", f"{type(error).__name__}: {error.message}")
        else:
            just_done.add(key_of(letter))
            tell(letter.id, done)
    if any(letter.id.startswith(OF_GROUPS) for _, letter in found):
        await _truncate(wal, names)
    return failed


async def _truncate(wal: Wal, names: Names) -> None:
    """Let go of the letters of groups before the first that is open. Those of readers stay: a reader that keeps an
    entry again is to find what became of it."""
    newest = await wal.latest_id(names.group_dead_letters)  # first: a letter that comes meanwhile is not listed
    still = await open_of_groups(wal, names)
    if still is None:
        return
    first = min((bytes.fromhex(letter.id.removeprefix(OF_GROUPS)) for letter in still), default=None)
    upto = first or newest
    if upto is not None and wal.capabilities.truncate:
        await wal.truncate(names.group_dead_letters, upto)


def _finish(failed: int) -> None:
    if failed:
        raise typer.Exit(1)


@asynccontextmanager
async def _lazy_node(url: str, prefix: str) -> AsyncGenerator[Callable[[], Awaitable[Client]]]:
    """Connects to the node when it is asked for the first time."""
    clients: list[Client] = []
    async with AsyncExitStack() as stack:

        async def connect() -> Client:
            if not clients:
                clients.append(await stack.enter_async_context(node_on(url, prefix)))
            return clients[0]

        yield connect


# ---- showing --------------------------------------------------------------------------------------------------------


def _fields(letter: DeadLetter) -> dict[str, Any]:
    fields = asdict(letter)
    del fields["resolved"]
    return fields


async def _details(wal: Wal, names: Names, id: str) -> dict[str, Any]:
    record, letter = await find(wal, names, id)
    fields = asdict(letter)
    del fields["times"]
    return fields | shown_bytes("bytes", record.body) | _inside(record)


def _inside(letter: Record) -> dict[str, Any]:
    """The fields of the record in a letter, as far as it can be read."""
    try:
        record = decode(letter.body)
    except BadRecord:
        return {}
    fields = {"type": record.type.name, "ts": record.ts, "tags": dict(record.tags)}
    return {"record": fields | shown_bytes("key", record.key) | shown_bytes("value", record.body)}
