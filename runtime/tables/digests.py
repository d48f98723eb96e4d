"""The digest in the name of a table's file: pages of Parquet have checksums of their own, headers and the footer have
not."""

from __future__ import annotations

import re
from typing import Final, Protocol

import xxhash

DIGEST_BYTES: Final = 1 << 20  # at a time

_DIGEST = re.compile(r"-([0-9a-f]{16})\.parquet$")


class Readable(Protocol):
    """A file of Python or Arrow, at its beginning."""

    def read(self, size: int, /) -> bytes: ...


def digest_of(file: Readable) -> str:
    """The digest (XXH3, 64 bits) of the bytes of `file` from where it stands."""
    digest = xxhash.xxh3_64()
    while piece := file.read(DIGEST_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def digest_in(name: str) -> str:
    """The digest in the name of a file, "" where it has none."""
    found = _DIGEST.search(name)
    return found[1] if found else ""
