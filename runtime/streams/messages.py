"""What streams give to their readers: positions and packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgpack

from ..errors import BadRecord
from ..log.record import DECODE_ERRORS, Record

_POSITION_TYPES = (str, bytes, int, int, int, str, str)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader stands in one channel: everything with a timestamp ≤ `timestamp` lies at or before `message_id`
    or was delivered already. A reader saves it and goes on from it with `TtMsgStream.seek`."""

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
            version, *values = cast("tuple[object, ...]", msgpack.unpackb(data, use_list=False))
            if version != 1 or len(values) != len(_POSITION_TYPES):
                raise ValueError("not a position of version 1")
        except DECODE_ERRORS as error:
            raise BadRecord(f"unreadable position: {error}", reason="position") from error
        return cls._of(values)

    def to_fields(self) -> dict[str, object]:
        """The fields by name, as tables keep them: those have no group."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "group"}

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Position:
        """The position with the fields that `to_fields` returns. Raises `BadRecord`."""
        return cls._of([*(fields.get(name) for name in cls.__slots__ if name != "group"), ""])

    @classmethod
    def _of(cls, values: Sequence[object]) -> Position:
        if not all(map(isinstance, values, _POSITION_TYPES)):
            raise BadRecord(f"no position: {values}", reason="position")
        return cls(*values)  # pyright: ignore[reportArgumentType] -- checked against their types


@dataclass(frozen=True, slots=True)
class MsgPack:
    """Messages of one or more channels, with the positions of the channels before and after.

    From a `TtMsgStream` it holds exactly the messages with `begin_ts < ts <= end_ts`, in the order (ts, channel,
    cseq). From a `MsgStream` it holds the messages that were there, and the timestamps are those of its first and last
    message.
    """

    begin_ts: int
    end_ts: int
    messages: list[Record]
    start_positions: Mapping[str, Position] = field(default_factory=dict[str, Position])
    end_positions: Mapping[str, Position] = field(default_factory=dict[str, Position])

    def __len__(self) -> int:
        return len(self.messages)
