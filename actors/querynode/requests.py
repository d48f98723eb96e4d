"""The parameters of a QueryNode's methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict

from ...runtime.ownership import ChannelPoint, SyncPoint
from ...runtime.replicated.records import typed
from ..requests import Number
from .query import Request, from_wire


class FreshParams(TypedDict):
    """A collection and the freshness of its result. `session_ts` is the time of the client's last write. With `at` the
    result is as of that time, whatever the consistency."""

    collection: str
    consistency: Literal["strong", "session", "bounded", "eventually"]
    at: NotRequired[Number | None]
    session_ts: NotRequired[Number]
    staleness_ms: NotRequired[Number]


class QueryParams(FreshParams):
    """A query or a search."""

    request: Annotated[Request, PlainValidator(from_wire)]


class GetParams(FreshParams):
    """A get by keys, which are in the body."""

    columns: NotRequired[list[str] | None]


def point_to_wire(point: SyncPoint | None) -> object:
    """The wire form of what owners have said, which msgpack can pack."""
    return None if point is None else [point.time, {name: [end.term, end.cseq] for name, end in point.channels.items()}]


def _point_from_wire(wire: Any) -> SyncPoint | None:
    if wire is None:
        return None
    time, ends = wire
    channels = {
        typed(name, str): ChannelPoint(typed(term, int), typed(cseq, int), b"") for name, (term, cseq) in ends.items()
    }
    return SyncPoint(typed(time, int), channels)


class PartParams(TypedDict):
    """Some vchannels of a collection, and the time as of which the question in the body is about them. `present` is
    what the owners have said of their pchannels, where they were asked."""

    id: Number
    vchannels: list[str]
    at: Number
    present: Annotated[SyncPoint | None, PlainValidator(_point_from_wire)]


class HeldParams(TypedDict):
    """The id of a collection."""

    id: Number
