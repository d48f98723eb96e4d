"""A part of a write as a request: from a door to an owner in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar, cast

import msgpack

from ..runtime.errors import Fenced, TidewalError, TopicEpochEnded
from ..runtime.log.record import Record, RecordType, Tags
from ..runtime.log.wal import Payload
from ..runtime.ownership import Appended
from ..runtime.replicated.records import typed
from .local_owner import WritePart

Label = TypeVar("Label", str, bytes)

SUBMITTED = "submitted"  # field of an error: the owner had taken the part, and the log has refused it


class SendAgain(TidewalError):
    """Of a write that was sent: its owner has certainly not taken it, or has ended before it knew the outcome
    (`outcome_unknown`). The door sends it again, so no client sees this."""

    retryable = True


def is_never_written(error: TidewalError) -> bool:
    """Whether an owner says of a write that no attempt of it will write what the error does not name: its messages are
    for an epoch that is over, or its acknowledgements of a member that may not move the group's position any more."""
    return isinstance(error, TopicEpochEnded) or (isinstance(error, Fenced) and "group" in error.fields)


@dataclass(frozen=True, slots=True)
class DoorPlace:
    """The place of a part among those that a `door` sends. Its `number` is above those before it; `after` is that of
    the last part for the same producer and owner of which the door did not know the outcome then, 0 for none."""

    door: str
    number: int
    after: int


def write_request(part: WritePart, place: DoorPlace, until: int, attempt: str = "") -> tuple[Mapping[str, Any], bytes]:
    """The parameters and the body of the request to append `part`, or to prepare it as this `attempt`; the owner
    refuses it after the time `until`."""
    if part.participants:
        params: dict[str, Any] = {**_described(part, place, until), "records": [], "transaction": True}
        return params | ({"attempt": attempt} if attempt else {}), _packed_participants(part)
    if part.kind is RecordType.MESSAGE:
        return {**_described(part, place, until), "records": [], "messages": True}, pack_labelled(part.records)
    params = {
        **_described(part, place, until),
        "records": [
            (channel, record.vchannel, dict(record.tags), len(record.body), record.schema_version)
            for channel, record in part.records
        ],
    }
    return params, b"".join(record.body for _, record in part.records)


def _described(part: WritePart, place: DoorPlace, until: int) -> dict[str, Any]:
    return {
        "collection": part.collection,
        "id": part.collection_id,
        "schema_version": part.schema_version,
        "producer": part.producer,
        "pseq": part.pseq,
        "rows": part.rows,
        "digest": part.digest,
        "channels": part.channels,
        "place": [place.door, place.number, place.after],
        "until": until,
    }


def pack_labelled(records: Sequence[tuple[str | bytes, Record]]) -> bytes:
    """The body of a request with many small messages, each with its channel, or its offset in a source: what describes
    them would not fit into the header of a request."""
    wire = [
        (label, int(each.type), each.vchannel, each.key, dict(each.tags), bytes(each.body)) for label, each in records
    ]
    return cast(bytes, msgpack.packb(wire))


def _packed_participants(part: WritePart) -> bytes:
    wire = [
        (
            each.collection,
            each.collection_id,
            each.schema_version,
            each.kind.value,
            each.rows,
            [
                (channel, record.vchannel, record.key, dict(record.tags), record.schema_version, bytes(record.body))
                for channel, record in each.records
            ],
        )
        for each in part.participants
    ]
    return cast(bytes, msgpack.packb(wire))


def _transaction(params: Mapping[str, Any], body: Payload) -> WritePart:
    """The transaction in a request, with its participants."""
    participants: list[WritePart] = []
    for name, id, version, number, rows, wire in cast("list[tuple[Any, ...]]", msgpack.unpackb(body)):
        kind = RecordType(number)
        if kind not in (RecordType.ROWS, RecordType.MESSAGE):
            raise ValueError(f"a participant with records of type {number}")
        records = [
            (
                typed(channel, str),
                Record(
                    kind,
                    vchannel=typed(vchannel, str),
                    key=typed(key, bytes),
                    tags=cast(Tags, typed(tags, dict)),
                    schema_version=typed(schema_version, int),
                    body=typed(content, bytes),
                ),
            )
            for channel, vchannel, key, tags, schema_version, content in wire
        ]
        named = {"collection": typed(name, str), "id": typed(id, int), "schema_version": typed(version, int)}
        participants.append(_part({**params, **named, "rows": typed(rows, int)}, records, kind))
    if not participants:
        raise ValueError("a transaction of nothing")
    part = transaction_of(participants, params["producer"], params["pseq"], params["channels"])
    return replace(part, rows=params["rows"])  # those of all owners


def part_on(part: WritePart, channels: Set[str]) -> WritePart:
    """What of a write is for these pchannels, as a part of the same."""
    records = [each for each in part.records if each[0] in channels]
    there = (
        replace(each, records=[(channel, record) for channel, record in each.records if channel in channels])
        for each in part.participants
    )
    return replace(part, records=records, participants=[each for each in there if each.records])


def transaction_of(participants: Sequence[WritePart], producer: str, pseq: int, channels: int) -> WritePart:
    """The write of a transaction, from what it writes to each collection and topic."""
    records = [record for each in participants for record in each.records]
    rows = sum(each.rows for each in participants)
    return WritePart("", 0, 0, records, producer, pseq, rows, channels=channels, participants=participants)


def _unpacked(body: Payload, label: type[Label]) -> list[tuple[Label, Record]]:
    wire = cast("list[tuple[object, int, str, bytes, Tags, bytes]]", msgpack.unpackb(body))
    return [
        (
            typed(each, label),
            Record(
                RecordType(kind),
                vchannel=typed(vchannel, str),
                key=typed(key, bytes),
                tags=cast(Tags, typed(tags, dict)),
                body=typed(content, bytes),
            ),
        )
        for each, kind, vchannel, key, tags, content in wire
    ]


def part_of(params: Mapping[str, Any], body: Payload) -> WritePart:
    """The part in a request. Raises one of `DECODE_ERRORS` or `LookupError` where the body is not that of its
    records."""
    if params.get("transaction"):
        return _transaction(params, body)
    if params.get("messages"):
        return _part(params, _unpacked(body, str), RecordType.MESSAGE)
    described = cast("Sequence[tuple[str, str, Tags, int, int]]", params["records"])
    ends = list(accumulate(size for _, _, _, size, _ in described))
    if min((size for _, _, _, size, _ in described), default=0) < 0 or (ends or [0])[-1] != len(body):
        raise ValueError(f"{len(body)} bytes, and records of {[size for _, _, _, size, _ in described]}")
    view = memoryview(body)
    records = [
        (
            channel,
            Record(RecordType.ROWS, vchannel=vchannel, tags=tags, schema_version=version, body=view[end - size : end]),
        )
        for (channel, vchannel, tags, size, version), end in zip(described, ends, strict=True)
    ]
    return _part(params, records, RecordType.ROWS)


def _part(params: Mapping[str, Any], records: Sequence[tuple[str, Record]], kind: RecordType) -> WritePart:
    return WritePart(
        params["collection"],
        params["id"],
        params["schema_version"],
        records,
        params["producer"],
        params["pseq"],
        params["rows"],
        params["digest"],
        params["channels"],
        kind,
    )


def unpack_sourced(body: Payload) -> list[tuple[bytes, Record]]:
    """The messages of a source in a request, with their offsets, as `pack_labelled` has packed them. Raises one of
    `DECODE_ERRORS` where the body is no such."""
    records = _unpacked(body, bytes)
    if any(record.type is not RecordType.MESSAGE for _, record in records):
        raise ValueError("a source has messages alone")
    return records


def appended_values(appended: Appended) -> Mapping[str, Any]:
    """An outcome as the values of a reply."""
    return {"ts": appended.ts, "rows": appended.rows, "digest": appended.digest, "repeated": appended.repeated}


def appended_from(values: Mapping[str, Any]) -> Appended:
    """The outcome in a reply."""
    return Appended(values["ts"], values["rows"], repeated=values["repeated"], digest=values["digest"])
