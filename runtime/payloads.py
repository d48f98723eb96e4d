"""Payloads that stay as they are: what a log has taken may not change before it is written, nor afterwards."""

from __future__ import annotations

from .wal import Payload


class Received(bytearray):
    """Memory that one frame of a connection fills. Nobody writes into it once the frame is whole."""


def owned(payload: Payload) -> bytes | memoryview:
    """The payload as something that nobody else writes into: itself where it is `bytes`, or a view of `bytes` or of a
    `Received`, else a copy. That a view is read-only says nothing of who may write into what it shows."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, memoryview) and isinstance(payload.obj, bytes | Received) and payload.c_contiguous:
        view = payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
        return view.toreadonly()
    return bytes(payload)
