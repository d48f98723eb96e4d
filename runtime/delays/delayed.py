"""Delayed messages as records of a delay channel, and their ids.

A message's effective due time is its due time, or the timestamp under which it was stored, where that is later. Its id
is its place in the order of release: effective due time, timestamp, number in its batch. So ids rise as messages are
released: whatever is stored from now on comes behind all that was due by now.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from datetime import datetime
from math import ceil
from typing import Final, NamedTuple, cast

from ..arguments import checked
from ..clock import compose, physical_ms, to_timestamp
from ..errors import BadRecord, InvalidRequest
from ..log.record import BatchPart, Record, RecordType, Tags, TagValue, make_record
from ..log.wal import ChannelPolicy, Payload
from ..ownership.batch import OWNERS_TAGS, recorded_source

DELAY_MAX_MS: Final = 366 * 24 * 3600 * 1000
DELAYABLE: Final = frozenset({RecordType.ROWS, RecordType.MESSAGE})
ROOM_BYTES: Final = 1024  # for what a message bears in its channel beside what it bears in the delay channel
CHANNEL, DUE = "tidewal.channel", "tidewal.due"  # tags of a delayed message, for which channel it is, and when, in ms
KIND = "tidewal.kind"  # tag: the record's type in its channel, where that is not ROWS

_ID = struct.Struct(">QQI")
_KINDS = {None: RecordType.ROWS, **{int(each): each for each in DELAYABLE}}  # by the tag
_OWN_TAGS = frozenset({CHANNEL, DUE, KIND, *OWNERS_TAGS})  # which the message in its channel does not have


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
    """A message that is due later, as it will be in `channel`, not before the wall clock is at `due_ms`."""

    id: bytes
    channel: str
    record: Record
    due_ms: int


def due_ms(deliver_at: datetime | None, deliver_after_s: float | None, now_ms: int) -> int:
    """When a message is due, ms since 1970, rounded up. Raises `InvalidRequest` unless one of both is given, for a
    moment without a time zone, and for one more than 366 days ahead."""
    if (deliver_at is None) == (deliver_after_s is None):
        raise InvalidRequest("say when the messages are due: either deliver_at or deliver_after_s")
    if deliver_at is not None:
        due = moment_ms(deliver_at)
    else:
        due = later_ms(now_ms, span_ms(cast(float, deliver_after_s)))
    check_due(due, now_ms)
    return due


def moment_ms(at: datetime) -> int:
    """A moment in ms since 1970, rounded up. Raises `InvalidRequest` for one without a time zone."""
    return physical_ms(to_timestamp(at)) + bool(at.microsecond % 1000)


def span_ms(seconds: float) -> int:
    """A delay in ms, rounded up. Raises `InvalidRequest` for what is none, or takes more than 366 days."""
    if not 0 <= seconds <= DELAY_MAX_MS / 1000:
        raise InvalidRequest(f"deliver_after_s is {seconds}, and must be from 0 to 366 days in seconds")
    return ceil(seconds * 1000)


def later_ms(now_ms: int, delay_ms: int) -> int:
    """When a message is due that is to wait for `delay_ms` from now on: `now_ms` was rounded down."""
    return now_ms + 1 + delay_ms


def check_due(due_ms: int, now_ms: int) -> None:
    """Raise `InvalidRequest` for more than 366 days from now."""
    if due_ms > later_ms(now_ms, DELAY_MAX_MS):
        raise InvalidRequest("the messages are due more than 366 days ahead: schedule them later")


def delay_policy(policy: ChannelPolicy) -> ChannelPolicy:
    """The policy of the delay channel of a channel with `policy`: what is pending is removed by no retention, and what
    it takes fits into that channel when it is due."""
    return ChannelPolicy(retention_s=None, max_message_bytes=max(ROOM_BYTES, policy.max_message_bytes - ROOM_BYTES))


def delayed_record(channel: str, record: Record, due_ms: int) -> Record:
    """The record of a delay channel for one that is due in `channel`. Raises `InvalidRequest` for what carries no
    data."""
    if record.type not in DELAYABLE:
        raise InvalidRequest(f"a record of type {record.type.name} cannot be delayed: only ROWS and MESSAGE can")
    tags: dict[str, TagValue] = {**_users_tags(record), CHANNEL: channel, DUE: due_ms}
    if record.type is not RecordType.ROWS:
        tags[KIND] = int(record.type)
    return _with_tags(record, RecordType.DELAYED, tags, record.body)


def _users_tags(record: Record) -> dict[str, TagValue]:
    return {name: value for name, value in record.tags.items() if name not in _OWN_TAGS}


def _with_tags(record: Record, kind: RecordType, tags: Tags, body: Payload) -> Record:
    """A record with the content of `record`, and nothing of its stamps: it may be one that was read."""
    return make_record(
        kind, 0, 0, 0, "", 0, None, record.vchannel, record.key, tags, record.trace, record.schema_version, body
    )


def cancellation(id: bytes) -> Record:
    """The record of a delay channel that cancels a message. It counts where its timestamp is below the message's
    effective due time."""
    return Record(RecordType.CANCELLED, key=id)


def delayed_place(record: Record) -> tuple[bytes, str] | None:
    """The id of the message that a record of a delay channel is, or cancels, and its channel, "" for a cancellation.
    None for other records, and for a cancellation that came too late. Raises `BadRecord`."""
    if record.type is RecordType.DELAYED:
        tag = record.tags.get
        channel, due, kind = tag(CHANNEL), tag(DUE), tag(KIND)
        if type(channel) is str and channel and type(due) is int and kind in _KINDS:
            ts, part = record.ts, record.part
            # as `DelayedId.of` has it
            return _ID.pack(max(compose(due), ts), ts, 0 if part is None else part.number), channel
        raise BadRecord("a delayed message without its channel, its due time or its type", reason="header")
    if record.type is not RecordType.CANCELLED:
        return None
    id = bytes(record.key)
    if len(id) != _ID.size:
        raise BadRecord("a cancellation without the id of a message", reason="header")
    return (id, "") if record.ts < DelayedId.from_bytes(id).due else None


def read_delayed(record: Record) -> DelayedMessage:
    """The message that a record of a delay channel is. Raises `BadRecord`, also for one that is none."""
    found = delayed_place(record)
    if found is None or not found[1]:
        raise BadRecord("no delayed message", reason="header")
    return message_of(*found, record)


def message_of(id: bytes, channel: str, record: Record) -> DelayedMessage:
    """The message that a record is whose `delayed_place` is `id` and `channel`. It has a copy of the body: no view of
    the MiBs that were read at once, which would stay in memory as a whole."""
    tags = record.tags
    kind, due = _KINDS[cast("int | None", tags.get(KIND))], cast(int, tags[DUE])
    return DelayedMessage(id, channel, _with_tags(record, kind, _users_tags(record), bytes(record.body)), due)


def as_stored(message: DelayedMessage) -> Record:
    """The record of a delay channel that says the same of `message`, under its id, as the one that was stored."""
    _, ts, number = DelayedId.from_bytes(message.id)
    delayed, part = delayed_record(message.channel, message.record, message.due_ms), BatchPart(ts, number, number + 1)
    return replace(delayed, ts=ts, part=part if number else None)


def due_of(record: Record) -> int:
    """The timestamp at which a record was due that a delay channel has released; 0 of any other."""
    source = recorded_source(record)
    return DelayedId.from_bytes(source[1]).due if source is not None and len(source[1]) == _ID.size else 0
