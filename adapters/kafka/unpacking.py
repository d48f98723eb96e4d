"""Compressed batches: unpacked up to a limit in bytes.

Brokers limit the compressed size of a batch, so a few KB may unpack to a GB. The output is limited while unpacking. A
batch that would exceed the limit, or cannot be unpacked, counts as one record without a value, at its last offset: it
stops no reader, and the record decoder treats it as an invalid record.
"""

from __future__ import annotations

import importlib
import logging
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from aiokafka.record import MemoryRecords

from ...runtime.errors import CorruptLog
from .batch import MAGIC
from .options import CODECS

_LENGTH = struct.Struct(">i")
_LENGTH_AT, _LENGTH_END = 8, 12  # the length of the batch after this field
_MAGIC_AT = 16
_ATTRIBUTES = struct.Struct(">h")
_ATTRIBUTES_AT = 21
_CODEC_BITS = 0b111
_HEADER_BYTES = 61  # before the records, which alone are compressed
_XERIAL, _XERIAL_BYTES = b"\x82SNAPPY\x00", 16  # how Java's producers frame snappy
_GZIP = 16 + zlib.MAX_WBITS

_log = logging.getLogger(__name__)


class TooLarge(Exception):
    """The unpacked batch would exceed the limit."""


class Unread(NamedTuple):
    """The record that stands for a batch that is not unpacked."""

    offset: int
    timestamp: int
    key: None = None
    value: None = None
    headers: tuple[()] = ()


class Packed:
    """A compressed batch; attributes of its header are delegated to the library's batch."""

    __slots__ = ("_batch", "_data")

    def __init__(self, batch: Any, data: bytes) -> None:
        self._batch, self._data = batch, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def unpacked(self, limit: int, *, whole: bool = False) -> Iterator[Any]:
        """Its records, of `limit` bytes at most; with `whole` a batch that is not unpacked raises `CorruptLog`. Raises
        the library's `UnsupportedCodecError` where the package that unpacks is missing."""
        unpack = _unpacker(self._batch.compression_type)
        if unpack is None:
            return iter(self._batch)
        try:
            return iter(list(self._plain(unpack(self._data[_HEADER_BYTES:], limit))))
        except Exception as error:  # each codec has errors of its own; the checksum is right, so reading again is vain
            reason = f"it is over {limit} bytes" if isinstance(error, TooLarge) else repr(error)
            return _unread(self._batch, reason, error, whole=whole)

    def _plain(self, records: bytes) -> Any:
        data = bytearray(self._data[:_HEADER_BYTES]) + records
        _LENGTH.pack_into(data, _LENGTH_AT, len(data) - _LENGTH_END)
        (attributes,) = _ATTRIBUTES.unpack_from(data, _ATTRIBUTES_AT)
        _ATTRIBUTES.pack_into(data, _ATTRIBUTES_AT, attributes & ~_CODEC_BITS)
        return MemoryRecords(bytes(data)).next_batch()


def plain(batch: Any, *, whole: bool = False) -> Iterator[Any]:
    """The records of a batch that is not compressed. A header whose name is no UTF-8, which brokers take, cannot be
    read by the library: it makes the batch one that cannot be unpacked."""
    try:
        return iter(list(batch))
    except UnicodeDecodeError as error:
        return _unread(batch, repr(error), error, whole=whole)


def _unread(batch: Any, reason: str, error: Exception, *, whole: bool) -> Iterator[Unread]:
    last, base = batch.next_offset - 1, batch.base_offset
    if whole:
        raise CorruptLog(
            f"the batch with the offsets {base} to {last} cannot be unpacked ({reason}): read on behind it",
            offset=base,
            last_offset=last,
        ) from error
    _log.warning(
        "the batch at %d is not unpacked, it counts as one record without a value at %d: %s", base, last, reason
    )
    return iter((Unread(last, batch.max_timestamp),))


class Legacy:
    """A message, or a compressed set of messages, in one of the two formats before batches (Kafka 0.10 and older):
    what the library's object lacks, the rest is delegated to it. Only foreign topics have them."""

    __slots__ = ("_batch", "base_offset")

    def __init__(self, batch: Any, base_offset: int) -> None:
        self._batch = batch
        self.base_offset: int = base_offset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batch)


def split(data: bytes) -> Iterator[Any]:
    """The batches in the answer to a fetch; a truncated last one is left out."""
    records, at = MemoryRecords(data), 0
    while records.has_next():
        batch: Any = records.next_batch()
        (length,) = _LENGTH.unpack_from(data, at + _LENGTH_AT)
        end = at + _LENGTH_END + length
        if data[at + _MAGIC_AT] < MAGIC:
            yield Legacy(batch, int.from_bytes(data[at : at + _LENGTH_AT], "big"))
        else:
            yield Packed(batch, data[at:end]) if batch.compression_type else batch
        at = end


def _unpacker(codec: int) -> Callable[[bytes, int], bytes] | None:
    if codec == CODECS["gzip"]:
        return _gunzip
    try:
        cramjam: Any = importlib.import_module("cramjam")
    except ImportError:
        return None
    if codec == CODECS["snappy"]:
        return partial(_unsnap, cramjam.snappy)
    names = {number: name for name, number in CODECS.items()}
    return partial(_into, getattr(cramjam, names[codec]).decompress_into)


def _gunzip(data: bytes, limit: int) -> bytes:
    out = bytearray()
    while data:
        member = zlib.decompressobj(_GZIP)
        out += member.decompress(data, limit + 1 - len(out))
        if len(out) > limit:
            raise TooLarge
        if not member.eof:
            raise EOFError("the data ends too early")
        data = member.unused_data
    return bytes(out)


def _unsnap(snappy: Any, data: bytes, limit: int) -> bytes:
    blocks = list(_xerial_blocks(data)) if data.startswith(_XERIAL) else [data]
    if sum(map(snappy.decompress_raw_len, blocks)) > limit:
        raise TooLarge
    return b"".join(bytes(snappy.decompress_raw(block)) for block in blocks)


def _xerial_blocks(data: bytes) -> Iterator[bytes]:
    at = _XERIAL_BYTES
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield data[at : at + length]
        at += length


def _into(decompress_into: Callable[[bytes, bytearray], int], data: bytes, limit: int) -> bytes:
    """Unpack into a buffer of `limit` bytes: the package raises an error for more."""
    room = bytearray(limit)
    return bytes(room[: decompress_into(data, room)])
