"""A checkpoint, as bytes: the whole state of the log at one place (docs/object-log-format.md)."""

from __future__ import annotations

import struct
from typing import Any, Final, cast

import msgpack
from xxhash import xxh3_64_intdigest

from ...runtime.errors import CorruptLog
from ...runtime.groups.progress import GroupProgress
from ...runtime.log.policy_codec import decode_policy, encode_policy
from .block import check_version
from .garbage import Garbage
from .log_state import LogState
from .section_codec import decode_sections, encode_sections
from .stored_channel import StoredChannel

MAGIC: Final = b"TWOC"
VERSION: Final = 1

_HEADER = struct.Struct("<4sHxx16s16sQQQ")
_HASH = struct.Struct("<Q")

HEADER_BYTES: Final = _HEADER.size + _HASH.size


def encode_checkpoint(log: bytes, writer: bytes, state: LogState) -> bytes:
    """The checkpoint of this state. Its first `HEADER_BYTES` tell it from every other one."""
    keys: dict[str, int] = {}
    channels = [_wire_channel(channel, keys) for channel in state.channels()]
    wire = {
        "highest": state.highest,
        "ends": state.ends,
        "garbage": [state.garbage.deleted_to, state.garbage.blocks, state.garbage.objects],
        "keys": list(keys),
        "channels": channels,
    }
    body = cast("bytes", msgpack.packb(wire))
    head = _HEADER.pack(MAGIC, VERSION, log, writer, state.epoch, state.number, state.seq)
    return b"".join((head, _HASH.pack(xxh3_64_intdigest(head + body)), body))


def decode_checkpoint(data: bytes, key: str, log: bytes) -> LogState:
    """The state that a checkpoint of the log holds. Raises `CorruptLog` and `FormatTooNew`."""
    at = _decode_header(data, key, log)
    try:
        wire = cast("dict[str, Any]", msgpack.unpackb(data[HEADER_BYTES:], strict_map_key=False))
        state = LogState()
        state.epoch, state.number, state.seq = at
        state.highest, state.ends = wire["highest"], wire["ends"]
        (deleted_epoch, deleted_number), blocks, objects = wire["garbage"]
        noted = [(since_ms, (epoch, number)) for since_ms, (epoch, number) in blocks]
        state.garbage = Garbage((deleted_epoch, deleted_number), noted, objects)
        for channel in wire["channels"]:
            state.put(_channel_of(channel, wire["keys"]))
    except (ValueError, TypeError, KeyError, IndexError, struct.error) as error:
        raise CorruptLog(f"{key} is malformed", path=key, offset=HEADER_BYTES) from error
    return state


def place_of(data: bytes, key: str, log: bytes) -> tuple[int, int]:
    """The place, epoch and number of a block, of the checkpoint with this header. Raises as `decode_checkpoint`."""
    epoch, number, _ = _unpack_header(data, key, log)
    return epoch, number


def _decode_header(data: bytes, key: str, log: bytes) -> tuple[int, int, int]:
    header = _unpack_header(data, key, log)
    (checksum,) = _HASH.unpack_from(data, _HEADER.size)
    if xxh3_64_intdigest(data[: _HEADER.size] + data[HEADER_BYTES:]) != checksum:
        raise CorruptLog(f"{key} is not what was written there", path=key, offset=0)
    return header


def _unpack_header(data: bytes, key: str, log: bytes) -> tuple[int, int, int]:
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise CorruptLog(f"{key} is no checkpoint", path=key, offset=0)
    _, version, of_log, _, epoch, number, seq = _HEADER.unpack_from(data)
    check_version(key, version, VERSION)
    if of_log != log:
        raise CorruptLog(f"{key} is a checkpoint of another log", path=key, offset=8)
    return epoch, number, seq


def _wire_channel(channel: StoredChannel, keys: dict[str, int]) -> list[object]:
    return [
        channel.number,
        channel.name,
        encode_policy(channel.policy),
        channel.removed_to,
        channel.latest,
        channel.holds,
        {group: [each.acked_to, sorted(each.acked), each.metadata] for group, each in channel.groups.items()},
        encode_sections(channel.sections, keys),
    ]


def _channel_of(wire: list[Any], keys: list[str]) -> StoredChannel:
    number, name, policy, removed_to, latest, holds, groups, sections = wire
    progress = {group: GroupProgress(upto, set(acked), metadata) for group, (upto, acked, metadata) in groups.items()}
    found = decode_sections(sections, keys)
    return StoredChannel(number, name, decode_policy(policy), removed_to, latest, found, holds, progress)
