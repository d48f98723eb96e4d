"""Where sections are, as bytes: in checkpoints, and in entries that name a run (docs/object-log-format.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import cast

from .block import SectionRow
from .stored_channel import Piece, StoredSection

_SECTION = struct.Struct("<IIQQIIQQQIIQ")  # number of the key, further pieces, epoch, stored_ms; the row of a table
_PIECE = struct.Struct("<QQ")


def encode_sections(sections: Iterable[StoredSection], keys: dict[str, int]) -> list[bytes]:
    """Sections as they are stored: a record of each, and the pieces behind their first ones. `keys` numbers the keys of
    their objects."""
    records: list[bytes] = []
    pieces: list[int] = []
    for key, epoch, stored_ms, row, (_, *further) in sections:
        records.append(_SECTION.pack(keys.setdefault(key, len(keys)), len(further), epoch, stored_ms, *row))
        for piece in further:
            pieces += piece
    return [b"".join(records), struct.pack(f"<{len(pieces)}Q", *pieces)]


def decode_sections(wire: list[bytes], keys: Sequence[str]) -> list[StoredSection]:
    """The sections of their stored form. Raises `ValueError`, `IndexError` and `struct.error` for a malformed one."""
    records, packed = wire
    pieces = map(Piece._make, _PIECE.iter_unpack(packed))
    sections: list[StoredSection] = []
    for key, further, epoch, stored_ms, *row_values in _SECTION.iter_unpack(records):
        row = SectionRow._make(row_values)
        all_pieces = (Piece(0, row.first_seq), *islice(pieces, further))
        sections.append(StoredSection(keys[cast("int", key)], epoch, stored_ms, row, all_pieces))
    return sections
