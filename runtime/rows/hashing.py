"""Milvus' hash routing: which shard of a collection a primary key belongs to.

An int64 key hashes as murmur3 (x86, 32 bits, seed 0) of its 8 little-endian bytes, a varchar key as crc32 of its first
100 bytes of UTF-8; both lose their top bit, and the shard is the result modulo the number of shards. Equal keys
are always in one shard, whichever client wrote them, so this function may never change for a collection that exists.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Hashes: TypeAlias = npt.NDArray[np.uint32]
Shards: TypeAlias = npt.NDArray[np.intp]

HASHED_BYTES: Final = 100
_MASK: Final = 0x7FFFFFFF

_C1: Final = np.uint32(0xCC9E2D51)
_C2: Final = np.uint32(0x1B873593)
_FIVE: Final = np.uint32(5)
_ADD: Final = np.uint32(0xE6546B64)
_MIX1: Final = np.uint32(0x85EBCA6B)
_MIX2: Final = np.uint32(0xC2B2AE35)


def hash_int(key: int) -> int:
    """The 31-bit hash of an int64 key."""
    return int(_murmur3(np.array([key], dtype="<i8"))[0]) & _MASK


def hash_string(key: str) -> int:
    """The 31-bit hash of a varchar key."""
    return hash_key_bytes(key.encode())


def hash_key_bytes(key: bytes) -> int:
    """The 31-bit hash of a varchar key in UTF-8, or of a message's key."""
    return crc32(key[:HASHED_BYTES]) & _MASK


def shard_of_key(key: int | str, shards: int) -> int:
    """The shard of one key; use `shard_of` for a batch."""
    return (hash_string(key) if isinstance(key, str) else hash_int(key)) % shards


def shard_of(keys: pa.Array[Any], shards: int) -> Shards:
    """The shard of each key of an int64 or string array without nulls, in their order."""
    if shards == 1:
        return np.zeros(len(keys), dtype=np.intp)
    hashes = _hash_strings(keys) if pa.types.is_string(keys.type) else _murmur3(np.asarray(keys))
    return ((hashes & np.uint32(_MASK)) % np.uint32(shards)).astype(np.intp)


def _hash_strings(keys: pa.Array[Any]) -> Hashes:
    """crc32 of the first 100 bytes of each string. Arrow cuts them, so the Python loop calls zlib alone."""
    cut = pc.binary_slice(keys.view(pa.binary()), 0, HASHED_BYTES).to_numpy(zero_copy_only=False)
    return np.fromiter(map(crc32, cut), dtype=np.uint32, count=len(keys))


def _murmur3(keys: npt.NDArray[np.int64]) -> Hashes:
    """murmur3_x86_32 with seed 0 of the 8 bytes of each key: two blocks of 4 bytes, no tail."""
    halves = np.ascontiguousarray(keys, dtype="<i8").view("<u4")
    h = np.zeros(len(keys), dtype=np.uint32)
    for block in (halves[0::2], halves[1::2]):
        k = _rotate_left(block * _C1, 15) * _C2
        h = _rotate_left(h ^ k, 13) * _FIVE + _ADD
    h ^= np.uint32(8)
    h ^= h >> np.uint32(16)
    h *= _MIX1
    h ^= h >> np.uint32(13)
    h *= _MIX2
    h ^= h >> np.uint32(16)
    return h


def _rotate_left(x: Hashes, bits: int) -> Hashes:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))
