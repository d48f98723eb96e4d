"""Heartbeats: what a channel owner announces instead of storing ticks while nothing is written (guarantee 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgpack

from ..errors import BadRecord
from .record import DECODE_ERRORS, Record, RecordType, decode
from .wal import Payload

PRODUCER_HEARTBEATS = "producers.heartbeats"  # the channel of all named producers of a log


class Announcement(NamedTuple):
    """Nothing at or before `time` follows in `channel` behind the record (term, cseq)."""

    channel: str
    term: int
    cseq: int
    time: int


def heartbeat(announcements: Sequence[Announcement]) -> Record:
    """The record that holds `announcements`."""
    return Record(RecordType.HEARTBEAT, body=cast(bytes, msgpack.packb(announcements)))


def announcements(record: Record) -> list[Announcement]:
    """The announcements of a heartbeat, for `TtMsgStream.announce(*announcement)`. Raises `BadRecord`."""
    try:
        values = cast("tuple[tuple[object, ...], ...]", msgpack.unpackb(record.body, use_list=False))
        if type(values) is not tuple or not all(tuple(map(type, fields)) == (str, int, int, int) for fields in values):
            raise ValueError("an announcement is malformed")
    except DECODE_ERRORS as error:
        raise BadRecord(f"unreadable heartbeat: {error}", reason="heartbeat") from error
    return [Announcement(*cast("tuple[str, int, int, int]", fields)) for fields in values]


def heard(payload: Payload) -> list[Announcement]:
    """The announcements in an entry of a channel of heartbeats; none where it cannot be read, for another heartbeat
    follows."""
    try:
        return announcements(decode(payload))
    except BadRecord:
        return []
