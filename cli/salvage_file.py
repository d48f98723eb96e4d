"""The file into which `tidewal promote --salvage` writes what a promoted replica does not have of its source."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..runtime.errors import InvalidRequest
from ..runtime.file_sync import sync_file, sync_path
from ..runtime.log.replication_state import ReplicationState
from ..runtime.log.wal import Entry, Wal
from ..runtime.replication.forced_promotion import left_out
from ..runtime.replication.promotion import release_source
from ..runtime.replication.salvage import unreplicated_entries

PARTIAL = ".partial"  # how the name of a file ends that is not whole


def check_new(file: Path) -> None:
    """Raise `InvalidRequest` where `file` is there: it may be the only copy of what an earlier call has salvaged,
    and where its directory is not."""
    if file.exists():
        raise InvalidRequest(f"{file} is there already: give the name of a new file", argument="salvage")
    if not file.absolute().parent.is_dir():
        raise InvalidRequest(f"{file} cannot be written: there is no directory {file.parent}", argument="salvage")


async def write_salvaged(source: Wal, state: ReplicationState, file: Path) -> int:
    """Write what the promoted replica, whose `state` this is, does not have of `source`: a line of JSON for each entry.
    How many. The file is whole and durable when it is there, and `source` holds the entries until then. Raises
    `InvalidRequest` where it is there already or cannot be written, and errors of the log."""
    count = await _written(unreplicated_entries(source, state), file)
    await release_source(source, state)
    return count


async def write_left_out(target: Wal, state: ReplicationState, file: Path) -> int:
    """`write_salvaged` of what the promoted replica `target` has above its line."""
    return await _written(left_out(target, state), file)


async def _written(entries: AsyncIterator[tuple[str, Entry]], file: Path) -> int:
    try:
        with _new_file(file) as lines:
            return await _write(entries, lines)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error.strerror or error}", argument="salvage") from error


@contextmanager
def _new_file(file: Path) -> Generator[TextIO]:
    """What is written becomes `file`, durably, behind the block. No other call writes that one meanwhile."""
    partial = file.with_name(file.name + PARTIAL)
    try:
        lines = partial.open("x")
    except FileExistsError as error:
        raise InvalidRequest(
            f"{partial} is there: another call is writing it, or was killed; remove it then, and go on",
            argument="salvage",
        ) from error
    try:
        with lines:
            check_new(file)  # again: a call that was writing it then has ended
            yield lines
            lines.flush()
            sync_file(lines.fileno())
        partial.rename(file)
        sync_path(file.parent)
    finally:
        partial.unlink(missing_ok=True)


async def _write(entries: AsyncIterator[tuple[str, Entry]], lines: TextIO) -> int:
    count = 0
    async for channel, entry in entries:
        payload = base64.b64encode(entry.payload).decode()
        line = {"channel": channel, "id": entry.id.hex(), "timestamp": entry.timestamp, "payload": payload}
        lines.write(json.dumps(line) + "\n")
        count += 1
    return count
