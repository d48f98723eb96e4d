"""Where a releaser may begin to read a delay channel that holds more than it needs at first."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .pending import DelayedPlace

_FIXED = struct.Struct(">QQ20sQQ")
_NONE = bytes(20)


class DelayHead(NamedTuple):
    """From `place` on the delay channel has all that is pending with ids below `horizon`, or, where that is b"", all
    that is pending: written again there, or stored since. What was left out begins at `left_out`."""

    place: DelayedPlace
    horizon: bytes = b""
    left_out: DelayedPlace | None = None

    def to_bytes(self) -> bytes:
        """Its bytes, which rise with the place: they are the offset of a source."""
        id, term, cseq = self.place
        other = self.left_out or DelayedPlace(bytes(len(id)), 0, 0)
        return id + _FIXED.pack(term, cseq, self.horizon or _NONE, other.term, other.cseq) + other.id

    @classmethod
    def from_bytes(cls, data: bytes) -> DelayHead | None:
        """The head of an offset; None for one that says nothing. All ids of a channel are of one length."""
        size, rest = divmod(len(data) - _FIXED.size, 2)
        if size <= 0 or rest:
            return None
        term, cseq, horizon, left_term, left_cseq = _FIXED.unpack(data[size : size + _FIXED.size])
        left_out = DelayedPlace(data[size + _FIXED.size :], left_term, left_cseq) if horizon != _NONE else None
        return cls(DelayedPlace(data[:size], term, cseq), b"" if horizon == _NONE else horizon, left_out)
