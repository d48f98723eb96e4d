"""Delayed messages as records of a delay channel, and their ids.

A message's effective due time is its due time, or the timestamp under which it was stored, where that is later. Its id
is its place in the order of release: effective due time, timestamp, number in its batch. So ids rise as messages are
released: whatever is stored from now on comes behind all that was due by now.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import datetime
from typing import Final, NamedTuple

from ..arguments import checked
from ..clock import compose, physical_ms, to_datetime, to_timestamp
from ..errors import BadRecord, InvalidRequest
from ..log.record import Record, RecordType
from ..ownership.batch import BATCH_TAGS

DELAY_MAX_MS: Final = 366 * 24 * 3600 * 1000
CHANNEL, DUE = "tidewal.channel", "tidewal.due"  # tags of a delayed message, for which channel it is, and when, in ms
ID, AT = "tidewal.id", "tidewal.at"  # tags of what is written again: a message's id, a cancellation's first timestamp

_ID = struct.Struct(">QQI")
_OWN_TAGS = frozenset({CHANNEL, DUE, ID, *BATCH_TAGS})  # which the message in its channel does not have


class DelayedId(NamedTuple):
    """What an id consists of."""

    due: int  # a timestamp
    stored: int  # a timestamp
    number: int

    def to_bytes(self) -> bytes:
        """Its bytes, which are ordered as ids are."""
        return _ID.pack(*self)

    @classmethod
    @checked
    def from_bytes(cls, id: bytes) -> DelayedId:
        """The parts of an id. Raises `InvalidRequest` for bytes that are none."""
        if len(id) != _ID.size:
            raise InvalidRequest(f"{id.hex()!r} is no id of a delayed message: take one that `schedule` has returned")
        return cls(*_ID.unpack(id))

    @classmethod
    def of(cls, due_ms: int, stored: int, number: int) -> DelayedId:
        """The id of a message that is due at `due_ms`, and was stored as the `number`th of a batch at `stored`."""
        return cls(max(compose(due_ms), stored), stored, number)


class DelayedMessage(NamedTuple):
    """A message that is due later, as it will be in `channel`; without a record it was cancelled."""

    id: bytes
    channel: str
    record: Record | None
    cancelled: int = 0  # at which timestamp


def due_ms(deliver_at: datetime | None, deliver_after_s: float | None, now_ms: int) -> int:
    """When a message is due, ms since 1970. Raises `InvalidRequest` unless one of both is given, for a moment without
    a time zone, and for one more than 366 days ahead. What is due in the past is due now."""
    if (deliver_at is None) == (deliver_after_s is None):
        raise InvalidRequest("say when the messages are due: either deliver_at or deliver_after_s")
    if deliver_at is not None:
        due = physical_ms(to_timestamp(deliver_at))
    else:
        due = now_ms + round((deliver_after_s or 0.0) * 1000)
    if due > now_ms + DELAY_MAX_MS:
        raise InvalidRequest(f"{to_datetime(compose(due)).isoformat()} is more than 366 days ahead")
    return max(due, now_ms)


def delayed_record(channel: str, record: Record, due_ms: int) -> Record:
    """The record of a delay channel for one that is due in `channel`. Raises `InvalidRequest` for what carries no
    data."""
    if record.type is not RecordType.ROWS:
        raise InvalidRequest(f"a record of type {record.type.name} cannot be delayed: only ROWS can")
    return replace(record, type=RecordType.DELAYED, tags={**record.tags, CHANNEL: channel, DUE: due_ms})


def cancellation(id: bytes) -> Record:
    """The record of a delay channel that cancels a message. It counts where its timestamp is below the message's
    effective due time."""
    return Record(RecordType.CANCELLED, key=id)


def rewritten(message: DelayedMessage) -> Record:
    """The record of a delay channel that says the same of `message` as those before, under the same id."""
    if message.record is None:
        return Record(RecordType.CANCELLED, key=message.id, tags={AT: message.cancelled})
    tags = {**message.record.tags, CHANNEL: message.channel, ID: message.id}
    return replace(message.record, type=RecordType.DELAYED, tags=tags)


def read_delayed(record: Record) -> DelayedMessage | None:
    """What a record of a delay channel says: a message, or that it is cancelled. None for other records, and for a
    cancellation that came too late. Raises `BadRecord`."""
    if record.type is RecordType.CANCELLED:
        return _read_cancellation(record)
    if record.type is not RecordType.DELAYED:
        return None
    id, channel, due = (record.tags.get(tag) for tag in (ID, CHANNEL, DUE))
    if isinstance(due, int):
        id = DelayedId.of(due, record.ts, record.part.number if record.part is not None else 0).to_bytes()
    if not isinstance(channel, str) or not isinstance(id, bytes):
        raise BadRecord("a delayed message without its channel or its due time", reason="header")
    tags = {name: value for name, value in record.tags.items() if name not in _OWN_TAGS}
    message = Record(
        RecordType.ROWS, vchannel=record.vchannel, key=record.key, tags=tags, trace=record.trace, body=record.body
    )
    return DelayedMessage(id, channel, message)


def _read_cancellation(record: Record) -> DelayedMessage | None:
    id, at = bytes(record.key), record.tags.get(AT, record.ts)
    if len(id) != _ID.size or not isinstance(at, int):
        raise BadRecord("a cancellation without the id of a message", reason="header")
    return DelayedMessage(id, "", None, at) if at < DelayedId.from_bytes(id).due else None
