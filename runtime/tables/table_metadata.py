"""What readers of a DataNode's Delta table need beside its columns (docs/delta.md): up to which T and position each
vchannel is stored in a version of it.

A flush is one commit: its rows, an application transaction for each vchannel with its T, and the positions of all
vchannels in the commit's metadata.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from ..errors import BadRecord, CorruptLog, DirectoryUnwritable, FormatTooNew, InvalidSchema, Unavailable
from ..streams.messages import Position
from .table_store import TableLocation

Positions: TypeAlias = dict[str, Position]  # by vchannel

FORMAT: Final = 1
FORMAT_KEY, SCHEMA_KEY, PRIMARY_KEY = "tidewal.format", "tidewal.schema", "tidewal.primaryKey"
POSITIONS_KEY: Final = "tidewal.positions"
FLUSH_KEY: Final = "tidewal.flush"  # the id of the flush that a commit is
TRANSACTION_PREFIX: Final = "tidewal/"

# What to do about a commit file that is damaged.
RESTORE_HINT: Final = (
    "copy it back from a backup of the tables, or drop the collection and write it again; a table `current`, which is "
    "made from `log`, may be removed instead"
)


def check_format(properties: Mapping[str, str | None], table: TableLocation) -> None:
    """Raise `InvalidSchema` unless a table with these properties is Tidewal's, `FormatTooNew` for a newer Tidewal's,
    `CorruptLog` where they do not say."""
    found = properties.get(FORMAT_KEY)
    if found is None:
        raise InvalidSchema(f"{table} is a Delta table, but not one of Tidewal's", path=table.uri)
    if not found.isdecimal():
        raise CorruptLog(f"{table} says that its {FORMAT_KEY} is {found!r}: {RESTORE_HINT}", path=table.uri)
    if int(found) > FORMAT:
        raise FormatTooNew(f"{table} was made by a newer Tidewal: upgrade", found=int(found), supported=FORMAT)


def transaction_of(vchannel: str) -> str:
    """The application transaction whose version is the T of `vchannel`."""
    return f"{TRANSACTION_PREFIX}{vchannel}"


def commit_name(version: int) -> str:
    """The name of the file of one commit."""
    return f"_delta_log/{version:020}.json"


def encode_positions(positions: Mapping[str, Position]) -> str:
    """The text under `POSITIONS_KEY`."""
    return json.dumps({vchannel: at.to_fields() for vchannel, at in positions.items()}, default=_encode_bytes)


@dataclass(frozen=True, slots=True)
class TableCommit:
    """The facts of one commit of a table.

    `own`: Tidewal made it; `positions` are those of all vchannels then, in a table of row versions. `changes`: it adds
    or removes rows, which an OPTIMIZE does not. `restored`: the version that a RESTORE went back to. `flush`: the id of
    the flush that it is, "" for others.
    """

    version: int
    operation: str
    own: bool
    changes: bool
    restored: int | None
    positions: Positions
    flush: str


def newest_own_commit(table: TableLocation, version: int, above: int = -1) -> TableCommit | None:
    """The newest commit from `version` down to (not with) `above` that Tidewal made; None when there is none.

    Raises `CorruptLog` (`path`, `version`, `operation`) when another tool has changed rows behind it: the rows
    that T and positions stand for may be gone then. Tidewal never commits behind such a change, so each one that was
    not undone is found here. A RESTORE of a version from before the change undoes it. `CorruptLog` (`path`, `version`)
    also where the file of one of these commits cannot be parsed; `DirectoryUnwritable` where it may not be read,
    `Unavailable` where it cannot be read now.

    Commit files are read directly: `history()` of the library numbers them wrongly when the snapshot is not the newest.
    """
    found: TableCommit | None = None
    foreign: list[TableCommit] = []
    for candidate in range(version, above, -1):
        commit = read_commit(table, candidate)
        if commit is not None and commit.own:
            found = commit
            break
        if commit is not None:
            foreign.append(commit)
    if foreign:
        _check_foreign(table, foreign[::-1])
    return found


def _check_foreign(table: TableLocation, foreign: Sequence[TableCommit]) -> None:
    """Raise `CorruptLog` unless the commits `foreign`, oldest first, leave the rows as they were before them."""
    change: TableCommit | None = None
    changes: dict[int | None, TableCommit | None] = {
        foreign[0].version - 1: None
    }  # up to each version, what changed rows
    for commit in foreign:
        if commit.restored in changes:
            change = changes[commit.restored]
        elif commit.changes and change is None:
            change = commit
        changes[commit.version] = change
    if change is not None:
        raise CorruptLog(
            f"version {change.version} of {table} ({change.operation}) is another tool's and changes rows, which only "
            "Tidewal may: go back to the version before with "
            f"deltalake.DeltaTable({table.uri!r}).restore({change.version - 1})",
            path=table.uri,
            version=change.version,
            operation=change.operation,
        )


def read_commit(table: TableLocation, version: int) -> TableCommit | None:
    """The commit, None where there is none, or its file was cleaned up. Raises as `newest_own_commit` does."""
    file = f"{table}/{commit_name(version)}"
    try:
        lines = table.read(commit_name(version)).splitlines()
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise DirectoryUnwritable(f"{file} cannot be read: {error.strerror}", path=file) from error
    except OSError as error:
        raise Unavailable(f"{file}: {error}", path=file) from error
    try:
        return _parse_commit(version, lines)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, BadRecord) as error:
        raise CorruptLog(
            f"{file} is damaged ({type(error).__name__}: {error}): {RESTORE_HINT}", path=file, version=version
        ) from error


def _parse_commit(version: int, lines: Sequence[bytes]) -> TableCommit:
    if not lines:
        raise ValueError("it is empty")
    own, changes = False, False
    info: dict[str, Any] = {}
    for line in lines:
        [(kind, action)] = json.loads(line).items()
        if kind == "commitInfo":
            info = action
            if POSITIONS_KEY in info:  # the first line of Tidewal's commits: the others need not be read
                own = True
                break
        elif kind == "txn":
            own |= action["appId"].startswith(TRANSACTION_PREFIX)
        elif kind in ("add", "remove"):
            changes |= action["dataChange"]
    operation, flush = str(info.get("operation")), str(info.get(FLUSH_KEY, ""))
    return TableCommit(version, operation, own, changes, _restored(info), _positions(info), flush)


def _positions(info: Mapping[str, Any]) -> Positions:
    text = info.get(POSITIONS_KEY)
    if not text:
        return {}
    positions = json.loads(text, object_hook=_decode_bytes)
    return {vchannel: Position.from_fields(fields) for vchannel, fields in positions.items()}


def _restored(info: Mapping[str, Any]) -> int | None:
    """The version that a commit went back to. Delta's libraries write it as text, or none where a time was given."""
    version = info.get("operationParameters", {}).get("version") if info.get("operation") == "RESTORE" else None
    return None if version is None else int(version)


def _encode_bytes(value: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(value).decode()}


def _decode_bytes(pairs: dict[str, object]) -> object:
    if pairs.keys() == {"base64"}:
        return base64.b64decode(cast(str, pairs["base64"]))
    return pairs
