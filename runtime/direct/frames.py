"""Frames of the connections between nodes, as the socket of a RocksMQ has them: lengths, a small head, a payload.

    4 bytes length of the head, 4 bytes length of the payload, head (a msgpack array: kind, arguments …), payload

Both numbers are big-endian. A length over its limit is refused when it has come, before anything else of the frame is
kept or decoded. The payload is the record of a request or a reply, as the log has it (`runtime/log/record.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, cast

import msgpack

from ..errors import BadRecord
from ..log.record import DECODE_ERRORS

HEADER = Struct(">II")
HEAD_BYTES = 1024

Head = Sequence[Any]


def encode_frame(head: Head, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    packed = cast(bytes, msgpack.packb(head))
    return b"".join((HEADER.pack(len(packed), len(payload)), packed, payload))


class FrameSplitter:
    """Makes frames of what has arrived. `payload_bytes` is how large a payload may be from now on."""

    def __init__(self, payload_bytes: int = 0) -> None:
        self.payload_bytes: int = payload_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Head, bytes]]:
        """The heads and payloads of the frames that are whole now. Raises `BadRecord` for what is no frame."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            head_bytes, payload_bytes = HEADER.unpack_from(self._buffer)
            if not 0 < head_bytes <= HEAD_BYTES or payload_bytes > self.payload_bytes:
                raise BadRecord(f"a frame of {head_bytes} and {payload_bytes} bytes may not come", reason="frame")
            payload_at = HEADER.size + head_bytes
            end = payload_at + payload_bytes
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                head, payload = bytes(view[HEADER.size : payload_at]), bytes(view[payload_at:end])
            del self._buffer[:end]
            yield _decode_head(head), payload


def _decode_head(head: bytes) -> Head:
    try:
        decoded = cast(object, msgpack.unpackb(head, max_ext_len=0))
    except DECODE_ERRORS as error:
        raise BadRecord(f"no head of a frame: {error}", reason="frame") from error
    if not isinstance(decoded, list):
        raise BadRecord("the head of a frame is no array", reason="frame")
    return cast("list[Any]", decoded)
