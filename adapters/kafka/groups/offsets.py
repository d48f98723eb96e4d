"""A group's position in a channel as a committed offset, with what is acknowledged beyond it in the offset's metadata.

The committed offset is that of the entry behind the position, as Kafka's tools expect. The metadata are runs of
acknowledged offsets: `gap,length;gap,length`, where each gap counts from the end of the run before.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....runtime.errors import Overloaded
from ....runtime.groups.coordinator import MAX_SINGLE_ACKS
from ....runtime.groups.positions import just_before
from ....runtime.groups.progress import Progress
from ..catalog import Channel
from ..positions import HALF_BYTES
from .requests import Position

METADATA_BYTES = 4096  # what brokers take unless told otherwise (offset.metadata.max.bytes)


def id_before(channel: Channel, offset: int) -> bytes:
    """The position of a group that reads on at this offset."""
    return just_before(channel.prefix + offset.to_bytes(HALF_BYTES, "big"))


def offset_behind(channel: Channel, position: bytes) -> int:
    """Where a group with this position reads on."""
    return _offset(position) + 1 if position.startswith(channel.prefix) else 0


def to_position(channel: Channel, progress: Progress) -> Position:
    """What to commit. Raises `Overloaded` (`limit` "single_acks") when the metadata would be too long."""
    offset = offset_behind(channel, progress.acked_to)
    metadata = ";".join(f"{gap},{length}" for gap, length in _runs(offset, sorted(map(_offset, progress.acked))))
    if len(metadata) > METADATA_BYTES or len(progress.acked) > MAX_SINGLE_ACKS:
        raise Overloaded(
            f"there are {len(progress.acked)} single acknowledgements in {channel.name} behind an entry that is not"
            f" acknowledged; acknowledge that one",
            limit="single_acks",
        )
    return Position(offset, metadata)


def to_progress(channel: Channel, position: Position) -> Progress:
    """The same as the group has it. What something else has written into the metadata says nothing."""
    acked: set[bytes] = set()
    at = position.offset
    try:
        for run in filter(None, position.metadata.split(";")):
            gap, length = map(int, run.split(","))
            at += gap
            if gap < 0 or len(acked) + length > MAX_SINGLE_ACKS:
                raise ValueError(run)
            acked.update(channel.prefix + offset.to_bytes(HALF_BYTES, "big") for offset in range(at, at + length))
            at += length
    except (ValueError, OverflowError):
        acked = set()
    return Progress(id_before(channel, position.offset), acked)


def _runs(begin: int, offsets: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    at = begin
    for offset in offsets:
        if runs and offset == at:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((offset - at, 1))
        at = offset + 1
    return runs


def _offset(id: bytes) -> int:
    return int.from_bytes(id[HALF_BYTES:], "big")
