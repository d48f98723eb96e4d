"""A part of a write as a request: from a door to an owner in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

from ..runtime.errors import TidewalError
from ..runtime.log.record import Record, RecordType, Tags
from ..runtime.log.wal import Payload
from ..runtime.ownership import Appended
from .local_owner import WritePart

SUBMITTED = "submitted"  # field of an error: the owner had taken the part, and the log has refused it


class SendAgain(TidewalError):
    """Of a write that was sent: its owner has certainly not taken it, or has ended before it knew the outcome
    (`outcome_unknown`). The door sends it again, so no client sees this."""

    retryable = True


@dataclass(frozen=True, slots=True)
class DoorPlace:
    """The place of a part among those that a `door` sends. Its `number` is above those before it; `after` is that of
    the last part for the same producer and owner of which the door did not know the outcome then, 0 for none."""

    door: str
    number: int
    after: int


def write_request(part: WritePart, place: DoorPlace, until: int) -> tuple[Mapping[str, Any], bytes]:
    """The parameters and the body of the request to append `part`; the owner refuses it after the time `until`."""
    records = [
        (channel, record.vchannel, dict(record.tags), len(record.body), record.schema_version)
        for channel, record in part.records
    ]
    params = {
        "collection": part.collection,
        "id": part.collection_id,
        "schema_version": part.schema_version,
        "producer": part.producer,
        "pseq": part.pseq,
        "rows": part.rows,
        "digest": part.digest,
        "channels": part.channels,
        "records": records,
        "place": [place.door, place.number, place.after],
        "until": until,
    }
    return params, b"".join(record.body for _, record in part.records)


def part_of(params: Mapping[str, Any], body: Payload) -> WritePart:
    """The part in a request. Raises `ValueError` or `LookupError` where the body is not that of its records."""
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
    )


def appended_values(appended: Appended) -> Mapping[str, Any]:
    """An outcome as the values of a reply."""
    return {"ts": appended.ts, "rows": appended.rows, "digest": appended.digest, "repeated": appended.repeated}


def appended_from(values: Mapping[str, Any]) -> Appended:
    """The outcome in a reply."""
    return Appended(values["ts"], values["rows"], repeated=values["repeated"], digest=values["digest"])
