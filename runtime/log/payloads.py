"""Payloads that do not change: what a log has taken may not change before it is written, nor afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from struct import error as StructError
from struct import pack

from ..errors import InvalidRequest, Unsupported
from .wal import Payload, Tombstone


class Received(bytearray):
    """Memory that one frame of a connection fills. It is never written to once the frame is whole."""


def owned(payload: Payload) -> bytes | memoryview:
    """The payload as memory that no other code writes to: itself where it is `bytes`, or a view of `bytes` or of a
    `Received`, else a copy. That a view is read-only does not keep other code from writing to the memory behind it.
    Raises what `check_payload` raises."""
    if type(payload) is bytes:
        return payload
    if isinstance(payload, memoryview) and isinstance(payload.obj, bytes | Received) and payload.c_contiguous:
        view = payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
        return view.toreadonly()
    return as_bytes(payload)


def as_bytes(payload: Payload) -> bytes:
    """The payload as `bytes`. Raises what `check_payload` raises."""
    if type(payload) is bytes:
        return payload
    check_payload(payload)
    return bytes(payload)


def check_timestamps(timestamps: Sequence[object]) -> None:
    """Raise `InvalidRequest` for what is no integer of 64 bits, before it is queued: no log could store it."""
    try:
        pack(f"<{len(timestamps)}Q", *timestamps)
    except StructError:
        wrong = next(each for each in timestamps if not _is_stamp(each))
        raise InvalidRequest(f"a timestamp is an integer from 0 to 2**64 - 1, not {wrong!r}") from None


def _is_stamp(value: object) -> bool:
    try:
        pack("<Q", value)
    except StructError:
        return False
    return True


def check_payload(payload: object) -> None:
    """Raise `InvalidRequest` for text and other values that are no bytes: `bytes` makes zeros of a number. Raise
    `Unsupported` for a `Tombstone`, which only foreign topics can carry."""
    if isinstance(payload, Tombstone):
        raise Unsupported(
            "an entry without a payload is for topics that others made (?topics=foreign)", capability="foreign_topics"
        )
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidRequest(
            f"a payload is bytes, bytearray or memoryview, not {type(payload).__name__}: encode it first"
        )
