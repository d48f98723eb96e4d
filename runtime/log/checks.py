"""What every log refuses in the same words: bad names, messages that are too large, channels that are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import ChannelExists, ChannelNotFound, InvalidRequest, MessageTooLarge, Unsupported
from .wal import Wal

_NAME = re.compile(r"[A-Za-z0-9._-]{1,250}")


def is_name(name: str) -> bool:
    """Whether `name` can name a channel, a group or a member."""
    return _NAME.fullmatch(name) is not None


def check_name(what: str, name: str) -> None:
    """Raise `InvalidRequest` unless `is_name`; `what` says for the message what it is to name."""
    if not is_name(name):
        raise InvalidRequest(f"{what} {name!r} is not 1-250 characters of A-Z a-z 0-9 . _ -")


def check_size(channel: str, size: int, limit: int) -> None:
    """Raise `MessageTooLarge` for a message of `size` bytes to a channel that takes `limit` bytes."""
    if size > limit:
        raise MessageTooLarge(
            f"a message of {size} bytes for {channel} is over its limit of {limit}", size=size, limit=limit
        )


def check_plain(keys: Sequence[object], headers: Sequence[object]) -> None:
    """Raise `Unsupported` for entries with a key or headers, which only foreign topics can carry. A `Tombstone` is
    refused where payloads are taken, by `payloads.owned` and `as_bytes`."""
    count = len(keys)
    if keys.count(None) != count or headers.count(()) != count:
        raise Unsupported(
            "keys and headers are for topics that others made (?topics=foreign): a channel of Tidewal carries payloads"
            " alone, put the rest into a record",
            capability="foreign_topics",
        )


def check_framed(wal: Wal, what: str) -> None:
    """Raise `Unsupported` on topics that others made for `what`, which needs records of Tidewal in them."""
    if wal.capabilities.foreign_topics:
        raise Unsupported(
            f"{what} writes and reads records of Tidewal, which topics that others made (?topics=foreign) do not have:"
            " use MsgStream, or channels of Tidewal",
            capability="foreign_topics",
        )


def not_found(channel: str) -> ChannelNotFound:
    """The error for a channel that there is not."""
    return ChannelNotFound(f"no channel {channel}; create it first", channel=channel)


def other_policy(channel: str) -> ChannelExists:
    """The error of creating a channel that there is, with another policy."""
    return ChannelExists(f"channel {channel} exists with another policy", channel=channel)
