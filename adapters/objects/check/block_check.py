"""What one block says of itself, against what it holds: its checksums may be right, and what they cover wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ..block import Block, BlockKind, SectionRow, decode_section, encode_section


def block_faults(block: Block) -> Iterator[str]:
    """What is wrong in a block or a run whose checksums are right."""
    header, table = block.header, block.table
    end, seq = table[0].offset if table else len(block.data), header.first_seq
    for row in table:
        if row.offset != end:
            yield f"the section of channel {row.channel} begins at byte {row.offset}, not {end}"
        end = row.offset + row.length
        if header.kind is BlockKind.DATA and row.first_seq != seq:
            yield f"the entries of channel {row.channel} count from {row.first_seq}, not from {seq}"
        seq = row.first_seq + row.entries
        if not _section_fits(block.section(row), row):
            yield f"the section of channel {row.channel} is not what its row in the table says"
    if end != len(block.data):
        yield f"its sections end at byte {end}, the object at {len(block.data)}"
    counted = sum(row.entries for row in table) if header.kind is BlockKind.DATA else 0
    if header.count != counted:
        yield f"it counts {header.count} entries, and has {counted}"
    if header.kind is BlockKind.DATA and header.acked_to > header.number:
        yield f"it says that the blocks before {header.acked_to} were there, itself among them"


def _section_fits(section: memoryview, row: SectionRow) -> bool:
    try:
        entries = decode_section(section, row)
    except struct.error:
        return False
    stamps = [entry.timestamp for entry in entries]
    return (
        bool(stamps)
        and (min(stamps), max(stamps)) == (row.min_timestamp, row.max_timestamp)
        and encode_section(entries) == bytes(section)
    )
