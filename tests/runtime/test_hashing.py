"""Milvus' hash vectors, and the batch functions against their scalar twins."""

from __future__ import annotations

import struct

import mmh3
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.rows.hashing import hash_int, hash_string, shard_of, shard_of_key

INT_VECTORS = {
    0: 1669671676,
    1: 1392991556,
    10: 1857498428,
    100: 1177227376,
    1000: 679959820,
    10**4: 1785225994,
    10**5: 258819970,
    10**6: 1669527334,
    10**7: 112035536,
    10**8: 107125476,
    10**9: 913068403,
    10**10: 1151135,
    10**18: 2117120843,
    -1: 1651860712,
    12345: 342635441,
    2**63 - 1: 40977599,
}
STRING_VECTORS = {"abcdef": 1267612143, "x" * 100: 1577999759, "x" * 101: 1577999759, "milvus": 725768567}


@pytest.mark.parametrize(("key", "expected"), INT_VECTORS.items())
def test_int_vectors(key: int, expected: int) -> None:
    assert hash_int(key) == expected


@pytest.mark.parametrize(("key", "expected"), STRING_VECTORS.items())
def test_string_vectors(key: str, expected: int) -> None:
    assert hash_string(key) == expected


@pytest.mark.parametrize("shards", [1, 2, 3, 16])
def test_vectors_as_batches(shards: int) -> None:
    ints = shard_of(pa.array(list(INT_VECTORS), pa.int64()), shards)
    assert ints.tolist() == [value % shards for value in INT_VECTORS.values()]
    strings = shard_of(pa.array(list(STRING_VECTORS)), shards)
    assert strings.tolist() == [value % shards for value in STRING_VECTORS.values()]


@pytest.mark.slow
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_int_batch_equals_the_c_library(keys: list[int]) -> None:
    expected = [(mmh3.hash(struct.pack("<q", key), 0, signed=False) & 0x7FFFFFFF) % 7 for key in keys]
    assert shard_of(pa.array(keys, pa.int64()), 7).tolist() == expected
    assert [shard_of_key(key, 7) for key in keys] == expected


@pytest.mark.slow
@given(st.lists(st.text(max_size=120)), st.integers(0, 5))
def test_string_batch_equals_scalar_in_slices_too(keys: list[str], skip: int) -> None:
    sliced = pa.array(keys, pa.string()).slice(skip)
    assert shard_of(sliced, 5).tolist() == [shard_of_key(key, 5) for key in keys[skip:]]


def test_a_cut_inside_a_character_is_a_cut_of_bytes() -> None:
    key = "é" * 49 + "x" + "é" * 10  # byte 100 is the first half of a character
    assert shard_of(pa.array([key]), 1 << 20)[0] == shard_of_key(key, 1 << 20)
    assert hash_string(key) == hash_string(key + "tail")


def test_shards_fill_evenly() -> None:
    counts = np.bincount(shard_of(pa.array(np.arange(100_000)), 4), minlength=4)
    assert counts.min() > 24_000
