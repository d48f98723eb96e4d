"""The parameters of the StreamingNode's methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator, TypeAdapter
from typing_extensions import TypedDict

from ...runtime.ownership import ChannelGrant
from ..requests import Number, WireCollection


class FlushParams(TypedDict):
    """The id of the collection to be stored."""

    id: Number


class OfChannels(TypedDict):
    """For methods that need the names of channels only."""

    channels: list[str]


class GrantParams(TypedDict):
    """The wire form of a `ChannelGrant`."""

    channel: str
    term: Number
    previous_limit: Number
    limit: Number
    checkpoint: bytes
    fences: dict[int, bytes]


def _grant(wire: object) -> ChannelGrant:
    fields: Any = _GRANT.validate_python(wire, strict=True)
    return ChannelGrant(**fields)


_GRANT = TypeAdapter(GrantParams)


class AcquireParams(TypedDict):
    """Channels to own, under new terms."""

    grants: list[Annotated[ChannelGrant, PlainValidator(_grant)]]


class AnnounceParams(TypedDict):
    """A collection that begins or ends."""

    what: Literal["create", "drop"]
    collection: WireCollection
