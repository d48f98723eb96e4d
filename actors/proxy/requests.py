"""The parameters of the Proxy's methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import PlainValidator, TypeAdapter
from typing_extensions import TypedDict

from ...runtime.ownership import ChannelGrant
from ..requests import Number, WireCollection


class WriteParams(TypedDict):
    """Rows, which are in the body, for a collection as the client knows it. A repeated write has the same
    `producer` and `pseq`; `digest` says whether it has the same rows."""

    collection: str
    id: Number
    schema_version: Number
    producer: str
    pseq: Number
    digest: NotRequired[int]


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
