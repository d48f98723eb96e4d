"""The blocks of the log, as bytes: docs/object-log-format.md.

A block has a header, a table with a row for each channel of which it has entries, and for each row a section: the
entries of that channel, in order. The header's checksum covers header and table; the table has one for each section, so
a section can be read, and trusted, alone.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from ...runtime.errors import CorruptLog, FormatTooNew

MAGIC: Final = b"TWOB"
VERSION: Final = 1
CONTROL: Final = 0  # the number under which a block's table has the entries that change the log's own state

_START = struct.Struct("<4sH")  # magic and version: these stay where they are in every version
_HEADER = struct.Struct("<4sHBx16s16sQQQIIQQ")
_HASH = struct.Struct("<Q")
_ROW = struct.Struct("<IIQQQIIQ")
_INDEX_BYTES = 12  # of an entry: its timestamp, and the length of its payload

HEADER_BYTES: Final = _HEADER.size + _HASH.size


class BlockKind(IntEnum):
    """What a block is for."""

    DATA = 1  # entries; without any it says only that its owner lives
    CAP = 2  # ends the epoch if its owner gets there
    FENCE = 3  # ends the epoch
    RUN = 4  # is no block of the log, but has the entries of many in its place


class StoredEntry(NamedTuple):
    """One entry of a section."""

    timestamp: int
    payload: bytes | memoryview


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block says of itself. `log` is the log's id and `writer` that of the process that wrote it, each 16 bytes;
    `number` is the block's in its epoch. `first_seq` is the first of the numbers, over all epochs, that its `count`
    entries have. Below `acked_to` all blocks of the epoch were there when this one was written, at `stored_ms` by the
    store's clock."""

    kind: BlockKind
    log: bytes
    writer: bytes
    epoch: int
    number: int
    first_seq: int
    count: int = 0
    acked_to: int = 0
    stored_ms: int = 0


class SectionRow(NamedTuple):
    """A row of a block's table: the section with so many `entries` of one channel, numbered from `first_seq` on. It
    lies at `offset` in the block and has `length` bytes."""

    channel: int
    entries: int
    first_seq: int
    min_timestamp: int
    max_timestamp: int
    offset: int
    length: int
    checksum: int


class Section(NamedTuple):
    """The entries of one channel, as they lie in a block, and the row that describes them."""

    row: SectionRow
    data: bytes | memoryview


class Block(NamedTuple):
    """A block, whole: its parts and its bytes."""

    header: BlockHeader
    table: tuple[SectionRow, ...]
    data: bytes

    @property
    def identity(self) -> bytes:
        """What tells it from every other block: its header, in which there is the checksum of the rest."""
        return self.data[:HEADER_BYTES]

    def section(self, row: SectionRow) -> memoryview:
        """The bytes of one section."""
        return memoryview(self.data)[row.offset : row.offset + row.length]


def encode_block(header: BlockHeader, entries: Mapping[int, Sequence[StoredEntry]]) -> Block:
    """The block with these entries, by channel, which get numbers from `header.first_seq` on, section by section. The
    header's `count` is set."""
    seq = header.first_seq
    sections: list[Section] = []
    for channel, of_channel in entries.items():
        if of_channel:
            data, stamps = encode_section(of_channel), [entry.timestamp for entry in of_channel]
            checksum = xxh3_64_intdigest(data)
            row = SectionRow(channel, len(stamps), seq, min(stamps), max(stamps), 0, len(data), checksum)
            sections.append(Section(row, data))
            seq += len(stamps)
    return join_block(replace(header, count=seq - header.first_seq), sections)


def join_block(header: BlockHeader, sections: Sequence[Section]) -> Block:
    """The block with these sections. Their offsets are set."""
    offset = HEADER_BYTES + _ROW.size * len(sections)
    table: list[SectionRow] = []
    for row, _ in sections:
        table.append(row._replace(offset=offset))
        offset += row.length
    head, rows = _encode_header(header, len(table)), b"".join(_ROW.pack(*row) for row in table)
    checked = _HASH.pack(xxh3_64_intdigest(head + rows))
    return Block(header, tuple(table), b"".join((head, checked, rows, *(data for _, data in sections))))


def join_sections(sections: Sequence[Section]) -> Section:
    """The section with the entries of several of one channel, in order."""
    rows = [row for row, _ in sections]
    parts: list[list[memoryview]] = [[], [], []]
    for row, data in sections:
        view, lengths, payloads = memoryview(data), 8 * row.entries, _INDEX_BYTES * row.entries
        for part, of_section in zip(parts, (view[:lengths], view[lengths:payloads], view[payloads:]), strict=True):
            part.append(of_section)
    joined = b"".join(each for part in parts for each in part)
    row = rows[0]._replace(
        entries=sum(row.entries for row in rows),
        min_timestamp=min(row.min_timestamp for row in rows),
        max_timestamp=max(row.max_timestamp for row in rows),
        length=len(joined),
        checksum=xxh3_64_intdigest(joined),
    )
    return Section(row, joined)


def _encode_header(header: BlockHeader, rows: int) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.log,
        header.writer,
        header.epoch,
        header.number,
        header.first_seq,
        header.count,
        rows,
        header.acked_to,
        header.stored_ms,
    )


def encode_section(entries: Sequence[StoredEntry]) -> bytes:
    """The section with these entries."""
    count = len(entries)
    stamps = struct.pack(f"<{count}Q", *(entry.timestamp for entry in entries))
    lengths = struct.pack(f"<{count}I", *(len(entry.payload) for entry in entries))
    return b"".join((stamps, lengths, *(entry.payload for entry in entries)))


def decode_block(data: bytes, key: str) -> Block:
    """The block that lies under `key`, with every checksum checked. Raises `CorruptLog` and `FormatTooNew`."""
    header, rows = _decode_header(data, key)
    end = HEADER_BYTES + rows * _ROW.size
    head = data[: _HEADER.size]
    (checksum,) = _HASH.unpack_from(data, _HEADER.size)
    if len(data) < end or xxh3_64_intdigest(head + data[HEADER_BYTES:end]) != checksum:
        raise _corrupt(key, 0)
    block = Block(header, tuple(map(SectionRow._make, _ROW.iter_unpack(data[HEADER_BYTES:end]))), data)
    for row in block.table:
        check_section(block.section(row), row, key)
    return block


def _decode_header(data: bytes, key: str) -> tuple[BlockHeader, int]:
    if len(data) < HEADER_BYTES:
        raise _corrupt(key, 0)
    magic, version = _START.unpack_from(data)
    if magic != MAGIC:
        raise _corrupt(key, 0)
    check_version(key, version, VERSION)
    _, _, kind, log, writer, epoch, number, first_seq, count, rows, *of_owner = _HEADER.unpack_from(data)
    if kind not in BlockKind._value2member_map_:
        raise _corrupt(key, 6)
    return BlockHeader(BlockKind(kind), log, writer, epoch, number, first_seq, count, *of_owner), rows


def check_version(key: str, version: int, supported: int) -> None:
    """Raise `FormatTooNew` for an object in a version of its format that this Tidewal does not know."""
    if version > supported:
        raise FormatTooNew(
            f"{key} was written by a newer Tidewal, in version {version} of the format: upgrade this one",
            found=version,
            supported=supported,
        )


def check_section(section: bytes | memoryview, row: SectionRow, key: str) -> None:
    """Raise `CorruptLog` for a section that is not what its row in the table says."""
    if len(section) != row.length or xxh3_64_intdigest(section) != row.checksum:
        raise _corrupt(key, row.offset)


def decode_section(section: bytes | memoryview, row: SectionRow) -> list[StoredEntry]:
    """The entries of a section that was checked. Their payloads are views of it."""
    count, view = row.entries, memoryview(section).toreadonly()
    stamps = struct.unpack_from(f"<{count}Q", view)
    lengths = struct.unpack_from(f"<{count}I", view, 8 * count)
    ends = list(accumulate(lengths, initial=_INDEX_BYTES * count))
    return [StoredEntry(stamps[at], view[ends[at] : ends[at + 1]]) for at in range(count)]


def _corrupt(key: str, offset: int) -> CorruptLog:
    return CorruptLog(f"{key} is not what was written there, at byte {offset}", path=key, offset=offset)
