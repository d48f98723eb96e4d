"""What a message says that comes from the retry topic of a group: how often it failed, why, and which one it was.

It is the message as it was sent with three tags more, which handlers do not see among its tags.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple, cast

import msgpack

from ...runtime.log.record import DECODE_ERRORS, Tags
from ...runtime.replicated.records import typed

ATTEMPTS: Final = "tidewal.attempts"
REASON: Final = "tidewal.reason"
ORIGIN: Final = "tidewal.origin"
RETRIED_TAGS: Final = frozenset({ATTEMPTS, REASON, ORIGIN})
REASON_CHARACTERS: Final = 1_000
ATTEMPTS_MAX: Final = 2**31 - 1  # more are counted as so many


class Origin(NamedTuple):
    """Which message it was in its topic: the partition's number, its timestamp, its id."""

    topic: str
    partition: int
    ts: int
    id: bytes


class Retried(NamedTuple):
    """What the tags say: `attempts` that failed, or gave the message back, and the `reason` of the last one."""

    attempts: int
    reason: str
    origin: Origin

    def tags(self) -> Tags:
        """The tags of a copy."""
        origin = cast(bytes, msgpack.packb(self.origin))
        return {ATTEMPTS: self.attempts, REASON: self.reason[:REASON_CHARACTERS], ORIGIN: origin}


def retried_of(tags: Tags) -> Retried | None:
    """What a message with these tags says, which lies in a retry topic; None for one that is no copy."""
    match tags.get(ATTEMPTS), tags.get(REASON), tags.get(ORIGIN):
        case int(attempts), str(reason), bytes(packed):
            with suppress(*DECODE_ERRORS):
                topic, partition, ts, id = cast("list[object]", msgpack.unpackb(packed))
                origin = Origin(typed(topic, str), typed(partition, int), typed(ts, int), typed(id, bytes))
                return Retried(min(max(0, attempts), ATTEMPTS_MAX), reason, origin)
        case _:
            pass
    return None
