"""What readers of a DataNode's Delta table need to know of it beside its columns (docs/delta.md): where it lies, and up
to which T and position each vchannel is stored in a version of it.

A flush is one commit: its rows, an application transaction for each vchannel with its T, and the positions of all
vchannels in the commit's metadata.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias, cast

from .errors import FormatTooNew, InvalidRequest, InvalidSchema

PositionValue: TypeAlias = str | int | float | bytes | bool | None
Position: TypeAlias = Mapping[str, PositionValue]
Positions: TypeAlias = dict[str, dict[str, PositionValue]]

FORMAT: Final = 1
FORMAT_KEY, SCHEMA_KEY, PRIMARY_KEY = "tidewal.format", "tidewal.schema", "tidewal.primaryKey"
POSITIONS_KEY: Final = "tidewal.positions"


def log_table(root: str | Path, collection: str) -> Path:
    """Where the row versions of a collection lie in the folder of the tables."""
    return Path(root) / collection / "log"


def check_format(properties: Mapping[str, str | None], path: Path) -> None:
    """Raise `InvalidSchema` unless a table with these properties is Tidewal's, `FormatTooNew` for a newer Tidewal's."""
    found = properties.get(FORMAT_KEY)
    if found is None:
        raise InvalidSchema(f"{path} is a Delta table, but none of Tidewal's", path=str(path))
    if int(found) > FORMAT:
        raise FormatTooNew(f"{path} was made by a newer Tidewal", found=int(found), supported=FORMAT)


def transaction_of(vchannel: str) -> str:
    """The application transaction whose version is the T of `vchannel`."""
    return f"tidewal/{vchannel}"


def commit_file(table: Path, version: int) -> Path:
    """The file of one commit."""
    return table / "_delta_log" / f"{version:020}.json"


def encode_positions(positions: Mapping[str, Position]) -> str:
    """The text under `POSITIONS_KEY`. Raises `InvalidRequest` for a value that a position cannot hold."""
    return json.dumps(positions, default=_encode_bytes)


def positions_at(table: Path, version: int, above: int = -1) -> Positions | None:
    """The positions in the newest commit from `version` down to (not with) `above` that has them: each flush writes
    those of all vchannels. None when there is none.

    Commit files are read directly: `history()` of the library numbers them wrongly when the snapshot is not the newest.
    """
    for candidate in range(version, above, -1):
        found = _positions_in(commit_file(table, candidate))
        if found is not None:
            return found
    return None


def _positions_in(commit: Path) -> Positions | None:
    try:
        lines = commit.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        if b'"commitInfo"' in line:
            text = json.loads(line)["commitInfo"].get(POSITIONS_KEY)
            return None if text is None else cast(Positions, json.loads(text, object_hook=_decode_bytes))
    return None


def _encode_bytes(value: object) -> dict[str, str]:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    raise InvalidRequest(f"a position cannot hold {type(value).__name__}")


def _decode_bytes(pairs: dict[str, object]) -> object:
    if pairs.keys() == {"base64"}:
        return base64.b64decode(cast(str, pairs["base64"]))
    return pairs
