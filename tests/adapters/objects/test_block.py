"""The codec of blocks: what goes in comes out, and what was changed on the way is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.adapters.objects.block import (
    HEADER_BYTES,
    VERSION,
    BlockHeader,
    BlockKind,
    StoredEntry,
    check_section,
    decode_block,
    decode_section,
    encode_block,
)
from tidewal.runtime.errors import CorruptLog, FormatTooNew

numbers = st.integers(0, 2**64 - 1)
entries = st.builds(StoredEntry, numbers, st.binary(max_size=200))
sections = st.dictionaries(st.integers(0, 2**32 - 1), st.lists(entries, max_size=20), max_size=5)
headers = st.builds(
    BlockHeader,
    st.sampled_from(BlockKind),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
    epoch=numbers,
    number=numbers,
    first_seq=st.integers(0, 2**63),
    acked_to=numbers,
)
SAMPLE = encode_block(
    BlockHeader(BlockKind.DATA, b"l" * 16, b"w" * 16, epoch=3, number=7, first_seq=100, acked_to=5),
    {0: [StoredEntry(0, b"control")], 9: [StoredEntry(5, b""), StoredEntry(2, b"payload")]},
)


@given(headers, sections)
def test_what_goes_in_comes_out(header: BlockHeader, by_channel: dict[int, list[StoredEntry]]) -> None:
    block = encode_block(header, by_channel)
    assert decode_block(block.data, "key") == block
    found = {row.channel: decode_section(block.section(row), row) for row in block.table}
    assert found == {channel: each for channel, each in by_channel.items() if each}
    assert block.header.count == sum(map(len, by_channel.values()))
    seq = header.first_seq
    for row in block.table:
        stamps = [entry.timestamp for entry in by_channel[row.channel]]
        assert (row.first_seq, row.entries) == (seq, len(stamps))
        assert (row.min_timestamp, row.max_timestamp) == (min(stamps), max(stamps))
        seq += row.entries


@given(st.integers(0, len(SAMPLE.data) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    changed = bytearray(SAMPLE.data)
    changed[at] ^= change
    with pytest.raises((CorruptLog, FormatTooNew)):
        decode_block(bytes(changed), "key")


@given(st.integers(0, len(SAMPLE.data) - 1))
def test_a_block_that_was_cut_off_is_noticed(length: int) -> None:
    with pytest.raises(CorruptLog) as caught:
        decode_block(SAMPLE.data[:length], "l0/3/7")
    assert caught.value.path == "l0/3/7"


@settings(max_examples=500)
@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_no_block(data: bytes) -> None:
    with pytest.raises((CorruptLog, FormatTooNew)):
        decode_block(data, "key")


def test_a_block_of_a_newer_version_is_told_from_a_broken_one() -> None:
    newer = bytearray(SAMPLE.data)
    newer[4] = VERSION + 1
    with pytest.raises(FormatTooNew) as caught:
        decode_block(bytes(newer), "key")
    assert (caught.value.found, caught.value.supported) == (VERSION + 1, VERSION)


def test_a_section_is_checked_alone() -> None:
    row = SAMPLE.table[1]
    section = bytearray(SAMPLE.section(row))
    check_section(bytes(section), row, "key")
    section[-1] ^= 1
    with pytest.raises(CorruptLog) as caught:
        check_section(bytes(section), row, "key")
    assert caught.value.offset == row.offset


def test_the_bytes_of_a_block_are_those_of_the_format() -> None:
    """What earlier versions have written is read by later ones: this text changes with `VERSION` alone."""
    assert SAMPLE.data.hex() == (
        "54574f42010001006c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c7777777777777777777777777777777703000000000000"
        "0007000000000000006400000000000000030000000200000005000000000000000000000000000000de616e17082f"
        "bbd50000000001000000640000000000000000000000000000000000000000000000c0000000130000001f0a5c0e49"
        "6911dd0900000002000000650000000000000002000000000000000500000000000000d30000001f000000a1ee9eaf"
        "f2a6243e000000000000000007000000636f6e74726f6c050000000000000002000000000000000000000007000000"
        "7061796c6f6164"
    )
