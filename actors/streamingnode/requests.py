"""The parameters of the StreamingNode's methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict

from ...runtime.replicated.records import typed
from ..requests import Number, WireCollection
from ..write_requests import DoorPlace


def _records(wire: Any) -> list[tuple[str, str, dict[str, Any], int, int]]:
    return [
        (typed(channel, str), typed(vchannel, str), typed(tags, dict), typed(size, int), typed(version, int))
        for channel, vchannel, tags, size, version in wire
    ]


def _place(wire: Any) -> DoorPlace:
    door, number, after = wire
    return DoorPlace(typed(door, str), typed(number, int), typed(after, int))


class SettleParams(TypedDict):
    """A transaction that is to be committed (`TransactionId`), and pchannels that it writes to."""

    producer: str
    pseq: Number
    attempt: str
    channels: list[str]


class AppendFromParams(TypedDict):
    """Messages of a source for a partition of a topic, with their offsets in the body, and the offset `after` which
    they come there, later than the time `at`."""

    source: str
    channel: str
    after: bytes
    at: Number


class FlushParams(TypedDict):
    """The id of the collection to be stored, and those of its pchannels that are meant."""

    id: Number
    channels: list[str]


class SyncParams(TypedDict):
    """Pchannels, of the collection with this id. `at` is the time that is asked for, 0 for the present one; `exact` as
    for `ChannelOwner.sync`."""

    channels: list[str]
    id: NotRequired[Number]
    at: NotRequired[Number]
    exact: NotRequired[bool]


class AnnounceParams(TypedDict):
    """A collection that begins or ends, on those of its pchannels that are meant."""

    what: Literal["create", "drop"]
    collection: WireCollection
    channels: list[str]


class AppendParams(TypedDict):
    """A part of a write, see `write_requests.py`; the bodies of its records are in the body. With `messages` these are
    messages of a topic, all in the body; with `transaction` it is one, with its participants in the body, and with
    `attempt` that is to be prepared, as this attempt."""

    collection: str
    id: Number
    schema_version: Number
    producer: str
    pseq: Number
    rows: Number
    digest: int
    channels: Number
    records: Annotated[list[Any], PlainValidator(_records)]
    messages: NotRequired[bool]
    transaction: NotRequired[bool]
    attempt: NotRequired[str]
    place: Annotated[DoorPlace, PlainValidator(_place)]
    until: Number
