"""`tidewal dlq`: the dead letters of a log, records that its readers could not use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ..runtime.errors import BadRecord, InvalidRequest
from ..runtime.log.names import DEFAULT_PREFIX, Names
from ..runtime.log.record import Record, RecordType, decode
from ..runtime.log.wal import Entry, FromId, Wal
from .connect import AsJson, Prefix, over_log
from .open_log import LogUrl, entries, shown_time, stored
from .results import plain, print_rows, shown_bytes

dlq = typer.Typer(help="Show dead letters: records that readers could not use.", no_args_is_help=True)

COLUMNS = ("id", "time", "channel", "entry", "reason", "size", "times", "message")


@dataclass(slots=True)
class DeadLetter:
    """A dead letter as commands show it: its own id, and the channel and id of the bad entry; `times` counts how often
    it was kept, which readers do again when they start before it."""

    id: str
    time: str
    channel: str
    entry: str
    reason: str
    size: int
    message: str
    times: int = 1


@dlq.command("list")
def list_letters(
    url: LogUrl,
    channel: Annotated[str, typer.Option(help="Only letters of this channel.")] = "",
    reason: Annotated[str, typer.Option(help="Only letters with this reason.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Only so many, the newest.")] = 50,
    as_json: AsJson = False,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """List dead letters, the oldest first: where each bad entry is, and why it is one. With --json a line for each."""
    found = over_log(url, lambda wal: _newest(wal, Names(prefix), channel, reason, limit), read_only=True)
    if found or as_json:
        print_rows(COLUMNS, map(asdict, found), as_json=as_json)
    else:
        typer.echo("none")


@dlq.command()
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
        typer.echo(f"{name:10} {value if isinstance(value, str) else json.dumps(value, default=plain)}")


async def _newest(wal: Wal, names: Names, channel: str, reason: str, limit: int) -> list[DeadLetter]:
    newest: dict[tuple[str, str], DeadLetter] = {}
    async for record in _letters(stored(wal, names.dead_letters)):
        letter = _letter(record)
        if (channel and letter.channel != channel) or (reason and letter.reason != reason):
            continue
        before = newest.pop((letter.channel, letter.entry), None)
        letter.times += before.times if before else 0
        newest[letter.channel, letter.entry] = letter
        if len(newest) > limit:
            del newest[next(iter(newest))]
    return list(newest.values())


async def _details(wal: Wal, names: Names, letter: str) -> dict[str, Any]:
    try:
        id = bytes.fromhex(letter)
    except ValueError:
        raise InvalidRequest(f"{letter!r} is no id: `tidewal dlq list` prints those of the letters") from None
    ends = await wal.describe(names.dead_letters)
    if ends.first_id is not None and ends.latest_id is not None and ends.first_id <= id <= ends.latest_id:
        async for record in _letters(entries(wal, names.dead_letters, FromId(id, inclusive=True), id)):
            if record.id == id:
                fields = asdict(_letter(record))
                del fields["times"]
                return fields | shown_bytes("bytes", record.body) | _inside(record)
    raise InvalidRequest(f"there is no dead letter {letter}: `tidewal dlq list` prints the ids")


async def _letters(found: AsyncIterator[Entry]) -> AsyncIterator[Record]:
    async for entry in found:
        try:
            record = decode(entry.payload, entry.id)
        except BadRecord:  # another program wrote it here: `tail` shows it
            continue
        if record.type is RecordType.DEAD_LETTER:
            yield record


def _letter(record: Record) -> DeadLetter:
    channel, reason, message = (str(record.tags.get(name, "")) for name in ("channel", "reason", "message"))
    size = record.tags.get("size")
    size = size if isinstance(size, int) else len(record.body)
    return DeadLetter(record.id.hex(), shown_time(record.ts), channel, record.key.hex(), reason, size, message)


def _inside(letter: Record) -> dict[str, Any]:
    """The fields of the record in a letter, as far as it can be read."""
    try:
        record = decode(letter.body)
    except BadRecord:
        return {}
    fields = {"type": record.type.name, "ts": record.ts, "tags": dict(record.tags)}
    return {"record": fields | shown_bytes("key", record.key) | shown_bytes("value", record.body)}
