"""A state that a log has in itself, as JSON: one entry, or parts of it where it is too long for one."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import xxhash

from ..errors import FormatTooNew

PART_BYTES = 512 * 1024  # of one entry: all logs take that much


def in_entries(fields: Mapping[str, Any], short_bytes: int) -> list[bytes]:
    """The entries that say `fields`, with their version `v`: one of at most `short_bytes`, or as many parts as are
    needed, compressed, and a short one, with which they count."""
    whole = json.dumps(fields).encode()
    if len(whole) <= short_bytes:
        return [whole]
    packed = b64encode(zlib.compress(whole)).decode()
    texts = [packed[at : at + PART_BYTES] for at in range(0, len(packed), PART_BYTES)] + [""]
    head = {"v": fields["v"], "whole": xxhash.xxh3_128_hexdigest(whole), "of": len(texts)}
    return [json.dumps({**head, "number": number, "text": text}).encode() for number, text in enumerate(texts)]


class EntryReader:
    """Reads such entries in order, of which `version` of `what` is known, and puts parts together."""

    def __init__(self, what: str, version: int) -> None:
        self._what, self._version = what, version
        self._parts: dict[str, dict[int, str]] = {}

    def take(self, payload: bytes) -> dict[str, Any] | None:
        """What an entry says, without its version; None while parts of it are missing. Raises `FormatTooNew` for
        another version, and what decoding raises: `ValueError`, `LookupError`, `TypeError`, `AttributeError`,
        `RecursionError`, `zlib.error`."""
        fields = self._fields(payload)
        if "whole" not in fields:
            return fields
        parts = self._parts.setdefault(fields["whole"], {})
        parts[fields["number"]] = fields["text"]
        if len(parts) < fields["of"]:
            return None
        del self._parts[fields["whole"]]
        return self._fields(zlib.decompress(b64decode("".join(map(parts.__getitem__, range(len(parts)))))))

    def _fields(self, payload: bytes) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(payload)
        if (version := fields.pop("v")) != self._version:
            raise FormatTooNew(
                f"the {self._what} of this log is of version {version!r}, known is {self._version}: upgrade"
            )
        return fields
