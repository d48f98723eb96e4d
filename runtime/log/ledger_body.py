"""What the records of a Spark writer's ledger hold, as far as the log's own commands must know it.

A record says that a batch is decided, with ids of the log, or that one is done (`spark_bridge/sink/ledger.py`). Staged
rows are records of the same type, in a channel of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, cast

import msgpack

from ..errors import BadRecord, check_version
from .record import DECODE_ERRORS, Record

LEDGER_VERSION: Final = 1
_LEDGER: Final = re.compile(r".+-spark-[0-9a-f-]{32,36}")  # ids of writers are 32 hex digits, or a UUID
STAGED: Final = "-staged"  # with it a ledger's name is that of the channel of its staged rows


def ledger_channel(prefix: str, writer: str) -> str:
    """The ledger's channel. `writer` is a query's or a job's id."""
    return f"{prefix}-spark-{writer}"


def is_ledger(channel: str) -> bool:
    """Whether a channel is named like a ledger, with any prefix: a program's own may have much in it."""
    return _LEDGER.fullmatch(channel) is not None


def ledger_body(record: Record) -> dict[str, Any]:
    """The content of a ledger's record. Raises `BadRecord`, and `FormatTooNew` for a newer Tidewal's."""
    try:
        body = cast("dict[str, Any]", msgpack.unpackb(record.body))
        check_version("a record of the ledger", body["v"], LEDGER_VERSION)
        int(body["done"] if "done" in body else body["batch"])
    except (*DECODE_ERRORS, LookupError) as error:
        raise BadRecord(f"a malformed record of a ledger: {error!r}", reason="body") from error
    return body


def undone_batch(bodies: Iterable[dict[str, Any]]) -> int | None:
    """The number of the batch that is decided and not done; None for none."""
    done = decided = -1
    for body in bodies:
        if "done" in body:
            done = max(done, int(body["done"]))
        else:
            decided = max(decided, int(body["batch"]))
    return decided if decided > done else None
