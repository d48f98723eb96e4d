"""A group's position in a channel as a committed offset, with what is acknowledged beyond it in the offset's metadata.

The committed offset is that of the entry after the position, as Kafka's tools expect. Its metadata are runs of
acknowledged offsets: `gap,length;gap,length`, where each gap counts from the end of the run before; behind a space
follows what members have stored with the position, in base64.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable

from ....runtime.errors import Overloaded
from ....runtime.groups.coordinator import MAX_SINGLE_ACKS
from ....runtime.groups.positions import just_before
from ....runtime.groups.progress import GroupProgress
from ..catalog import KafkaChannel
from ..positions import HALF_BYTES
from .requests import CommittedOffset

METADATA_BYTES = 4096  # what brokers take unless told otherwise (offset.metadata.max.bytes)


def id_before(channel: KafkaChannel, offset: int) -> bytes:
    """The position of a group that reads next at this offset."""
    return just_before(channel.prefix + offset.to_bytes(HALF_BYTES, "big"))


def offset_behind(channel: KafkaChannel, position: bytes) -> int:
    """The offset at which a group with this position reads next."""
    return _offset(position) + 1 if position.startswith(channel.prefix) else 0


def to_position(channel: KafkaChannel, progress: GroupProgress) -> CommittedOffset:
    """The offset and metadata to commit for `progress`. Raises `Overloaded` (`limit` "single_acks") when the metadata
    would be too long."""
    offset = offset_behind(channel, progress.acked_to)
    metadata = ";".join(f"{gap},{length}" for gap, length in _runs(offset, sorted(map(_offset, progress.acked))))
    if progress.metadata:
        metadata += f" {b64encode(progress.metadata).decode()}"
    if len(metadata) > METADATA_BYTES or len(progress.acked) > MAX_SINGLE_ACKS:
        raise Overloaded(
            f"there are {len(progress.acked)} single acknowledgements in {channel.name} after an entry that is not"
            f" acknowledged, too many beside {len(progress.metadata)} bytes of metadata; acknowledge that one",
            limit="single_acks",
        )
    return CommittedOffset(offset, metadata)


def to_progress(channel: KafkaChannel, position: CommittedOffset) -> GroupProgress:
    """The progress for a committed offset. Metadata of other clients is ignored."""
    acked: set[bytes] = set()
    at = position.offset
    runs, _, encoded = position.metadata.partition(" ")
    try:
        metadata = b64decode(encoded, validate=True)
        for run in filter(None, runs.split(";")):
            gap, length = map(int, run.split(","))
            at += gap
            if gap < 0 or len(acked) + length > MAX_SINGLE_ACKS:
                raise ValueError(run)
            acked.update(channel.prefix + offset.to_bytes(HALF_BYTES, "big") for offset in range(at, at + length))
            at += length
    except (ValueError, OverflowError):
        acked.clear()
        metadata = b""
    return GroupProgress(id_before(channel, position.offset), acked, metadata)


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
