"""Which partitions of a topic's epochs follow which, and where a partition ended."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from ..replicated.records import typed


class PartitionEnd(NamedTuple):
    """The record with which a partition ended: its `id` in the channel, and its timestamp, which is above that of each
    message before it. Nothing but ticks and the like follows it."""

    id: bytes
    ts: int

    @classmethod
    def from_wire(cls, wire: Any) -> PartitionEnd:
        """The end of a wire form. Raises `ValueError` for a malformed one."""
        id, ts = wire
        return cls(typed(id, bytes), typed(ts, int))


def predecessors(before: Sequence[str], count: int, partition: int, *, hashed: bool) -> list[str]:
    """Those of the partitions `before` that may have messages of a key that goes to number `partition` of `count` from
    now on. Where each key is `hashed` these are the ones of the same number modulo gcd(n, m), for a hash that is p
    modulo n and p' modulo m is the same modulo that; else they are all."""
    shared = gcd(len(before), count) if hashed else 1
    return [name for number, name in enumerate(before) if number % shared == partition % shared]
