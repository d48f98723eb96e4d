"""What streams hand to their readers: positions and packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import msgpack

from .errors import BadRecord
from .record import DECODE_ERRORS, Record


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader stands in one channel: everything with a timestamp ≤ `timestamp` lies at or before `message_id`
    or was delivered already. What a reader saves; see `TtMsgStream.seek`."""

    channel: str
    message_id: bytes
    term: int
    cseq: int
    timestamp: int
    wal: str
    group: str = ""

    def to_bytes(self) -> bytes:
        """The position as msgpack, version 1."""
        fields = (self.channel, self.message_id, self.term, self.cseq, self.timestamp, self.wal, self.group)
        return cast(bytes, msgpack.packb((1, *fields)))

    @classmethod
    def from_bytes(cls, data: bytes) -> Position:
        """The position that `to_bytes` wrote. Raises `BadRecord`."""
        try:
            version, *fields = cast("tuple[object, ...]", msgpack.unpackb(data, use_list=False))
            types = (str, bytes, int, int, int, str, str)
            if version != 1 or len(fields) != len(types) or not all(map(isinstance, fields, types)):
                raise ValueError("not a position of version 1")
        except DECODE_ERRORS as error:
            raise BadRecord(f"unreadable position: {error}", reason="position") from error
        return cls(*fields)  # pyright: ignore[reportArgumentType] -- checked against `types` above


@dataclass(frozen=True, slots=True)
class MsgPack:
    """Messages of one or more channels, with where the channels stood before and after.

    From a `TtMsgStream` it holds exactly the messages with `begin_ts < ts <= end_ts`, in the order (ts, channel,
    cseq). From a `MsgStream` it holds what was there, and the timestamps are those of its first and last message.
    """

    begin_ts: int
    end_ts: int
    messages: list[Record]
    start_positions: Mapping[str, Position] = field(default_factory=dict[str, Position])
    end_positions: Mapping[str, Position] = field(default_factory=dict[str, Position])

    def __len__(self) -> int:
        return len(self.messages)
