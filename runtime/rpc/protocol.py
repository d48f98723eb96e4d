"""Requests and replies as messages: roles send each other requests through ephemeral channels of the WAL, or by
another route where one leads to the node that is asked (`routes.py`).

Such a channel may lose, delay or duplicate a message. An `RpcClient` therefore repeats a request under the same number
until the reply is there or the deadline has passed; an `RpcServer` recognises the repetition, does not do the work
twice while it remembers, and repeats the reply. A server reads the requests that are sent after it was opened: a
request that a role served in an earlier incarnation is never served again, and a client that still waits repeats its
request. What is larger than a message may be travels in fragments.

A request is a record with the tags `method` and `values` (its parameters), a reply one with `ok` and `values`; either
may have a body of any bytes. `values` is a msgpack map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import msgpack

from ..errors import (
    BadRecord,
    ChannelNotFound,
    InvalidRequest,
    TidewalError,
)
from ..log.record import DECODE_ERRORS, Record, Tags
from ..log.wal import ChannelPolicy

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # of all its fragments

REQUEST_CHANNEL = ChannelPolicy(ephemeral=True, max_message_bytes=MESSAGE_BYTES_MAX, ephemeral_bytes=MESSAGE_BYTES_MAX)

REPLY_CHANNEL = replace(REQUEST_CHANNEL, temporary=True)

Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply: named values, and a body for large data."""

    values: Params
    body: memoryview


def request_tags(method: str, params: Params) -> Tags:
    """The tags of a request. Raises `InvalidRequest` for a parameter that cannot be encoded."""
    try:
        return {"method": method, "values": cast(bytes, msgpack.packb(params))}
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a parameter cannot be sent: {error}") from None


def reply_tags(ok: bool, values: Params) -> Tags:
    """The tags of a reply: the values of an answer, or (`ok` is False) the wire form of an error."""
    return {"ok": ok, "values": cast(bytes, msgpack.packb(values))}


def values_of(record: Record) -> dict[str, Any]:
    """The values of a request or reply. Raises `BadRecord`."""
    try:
        packed = cast(bytes, record.tags.get("values"))
        return dict(cast("dict[str, Any]", msgpack.unpackb(packed, strict_map_key=False)))
    except DECODE_ERRORS as error:
        raise BadRecord(f"unreadable values: {error}", reason="values") from error


def is_transient(error: TidewalError) -> bool:
    """Whether repeating may help: a role has not started yet, or the log refuses for now."""
    return error.retryable or isinstance(error, ChannelNotFound)


def ignore_outcome(_: list[bytes] | TidewalError) -> None:
    """The reply, or its absence, says what became of a message in an ephemeral channel."""
