"""Payloads that do not change: what a log has taken may not change before it is written, nor afterwards."""

from __future__ import annotations

from ..errors import InvalidRequest
from .wal import Payload


class Received(bytearray):
    """Memory that one frame of a connection fills. It is never written to once the frame is whole."""


def owned(payload: Payload) -> bytes | memoryview:
    """The payload as memory that no other code writes to: itself where it is `bytes`, or a view of `bytes` or of a
    `Received`, else a copy. That a view is read-only does not keep other code from writing to the memory behind it.
    Raises what `check_payload` raises."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, memoryview) and isinstance(payload.obj, bytes | Received) and payload.c_contiguous:
        view = payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
        return view.toreadonly()
    return as_bytes(payload)


def as_bytes(payload: Payload) -> bytes:
    """The payload as `bytes`. Raises what `check_payload` raises."""
    if isinstance(payload, bytes):
        return payload
    check_payload(payload)
    return bytes(payload)


def check_payload(payload: object) -> None:
    """Raise `InvalidRequest` for text and other values that are no bytes: `bytes` makes zeros of a number."""
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise InvalidRequest(
            f"a payload is bytes, bytearray or memoryview, not {type(payload).__name__}: encode it first"
        )
