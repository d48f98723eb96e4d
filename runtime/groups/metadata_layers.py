"""Layers of a position's metadata: what reads through a group's member stores its own part around that of its caller.

1 byte 0xF7, 1 byte the layer, 2 bytes length of its part (big-endian), its part, the metadata inside
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

_HEAD = Struct(">BBH")
_MAGIC = 0xF7  # begins no UTF-8 text


class Layer(IntEnum):
    """Who stores a part."""

    ATTEMPTS = 1
    RECORDS = 2
    FILTER = 3  # inside RECORDS: a Tidewal that knows no filters hands it on
    TRANSACTIONS = 4  # inside FILTER


def wrap(layer: Layer, part: bytes, inside: bytes) -> bytes:
    """Metadata with the `part` of a layer around what is `inside`; without a part that alone, but for what begins like
    the layer itself: `unwrap` would take it for one."""
    needed = part or inside.startswith(bytes((_MAGIC, layer)))
    return _HEAD.pack(_MAGIC, layer, len(part)) + part + inside if needed else inside


def unwrap(layer: Layer, metadata: bytes) -> tuple[bytes, bytes]:
    """The part of a layer, b"" where it has stored none, and the metadata inside."""
    if len(metadata) >= _HEAD.size:
        magic, found, size = _HEAD.unpack_from(metadata)
        end = _HEAD.size + size
        if (magic, found) == (_MAGIC, layer) and end <= len(metadata):
            return metadata[_HEAD.size : end], metadata[end:]
    return b"", metadata
