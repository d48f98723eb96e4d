"""What the node has kept aside as unusable, written out at a violation: a row that is lost may be among it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.brokers.producers import everything
from tidewal.runtime.errors import BadRecord, TidewalError
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import Wal


async def save_dead_letters(wal: Wal, path: Path) -> str:
    """Write all dead letters to `path`, one JSON object a line: where each was, why it was kept, and its bytes in hex.
    Returns how many there are, or why they could not be read."""
    try:
        entries = await everything(wal, Names().dead_letters)
    except (TidewalError, OSError, TimeoutError) as error:
        return f"not read: {error!r}"
    with path.open("w") as file:
        for entry in entries:
            picture: dict[str, object]
            try:
                letter = decode(entry.payload, entry.id)
                picture = {"id": letter.key.hex(), **letter.tags, "ts": letter.ts, "body": bytes(letter.body).hex()}
            except BadRecord as error:  # the run's own garbage
                picture = {"id": entry.id.hex(), "unreadable": error.reason, "body": bytes(entry.payload).hex()}
            file.write(json.dumps(picture, default=str) + "\n")
    return f"{len(entries)} in {path.name}"
