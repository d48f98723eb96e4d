"""Entries that change the log's own state: they lie in the sections of channel number 0 (docs/object-log-format.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import msgpack

from ...runtime.log.policy_codec import decode_policy, encode_policy
from ...runtime.log.wal import ChannelPolicy
from .log_objects import run_key
from .section_codec import decode_sections, encode_sections
from .stored_channel import StoredSection


class ChannelCreated(NamedTuple):
    """A channel is created, unless there is one of the name. It gets the next number, which no channel had."""

    name: str
    policy: ChannelPolicy


class ChannelDropped(NamedTuple):
    """A channel and its entries are removed."""

    number: int


class Truncated(NamedTuple):
    """The entries of a channel before an id are removed, as far as no hold keeps them."""

    number: int
    id: bytes


class HoldMoved(NamedTuple):
    """A hold is at an id now; None: it is removed."""

    number: int
    holder: str
    id: bytes | None


class GroupMoved(NamedTuple):
    """A step of a group in a channel, `Change` of `runtime/groups/progress.py` but for the channel's number."""

    number: int
    group: str
    upto: bytes | None
    ids: tuple[bytes, ...]
    reset: bool
    metadata: bytes | None


class GroupForgotten(NamedTuple):
    """All positions of a group are removed."""

    group: str


class Compacted(NamedTuple):
    """A run of the epoch has these sections, in the place of those that had their entries."""

    epoch: int
    number: int
    sections: Sequence[StoredSection]


Control: TypeAlias = ChannelCreated | ChannelDropped | Truncated | HoldMoved | GroupMoved | GroupForgotten | Compacted

_NAMES: dict[type[Control], str] = {
    ChannelCreated: "create",
    ChannelDropped: "drop",
    Truncated: "truncate",
    HoldMoved: "hold",
    GroupMoved: "group",
    GroupForgotten: "forget",
    Compacted: "compact",
}


def encode_control(control: Control) -> bytes:
    """The payload of a control entry: a msgpack list, its kind first."""
    values: Sequence[object] = control
    if isinstance(control, ChannelCreated):
        values = (control.name, encode_policy(control.policy))
    if isinstance(control, Compacted):
        values = (control.epoch, control.number, encode_sections(control.sections, {}))
    return cast("bytes", msgpack.packb([_NAMES[type(control)], *values]))


def decode_control(payload: bytes | memoryview) -> Control:
    """The control entry of a payload. Raises `ValueError`, `TypeError`, `IndexError` and `struct.error` for a
    malformed one."""
    match cast("list[Any]", msgpack.unpackb(payload)):
        case ["create", str(name), policy] if isinstance(policy, dict):
            return ChannelCreated(name, decode_policy(cast("dict[str, Any]", policy)))
        case ["drop", int(number)]:
            return ChannelDropped(number)
        case ["truncate", int(number), bytes(id)]:
            return Truncated(number, id)
        case ["hold", int(number), str(holder), bytes() | None as at]:
            return HoldMoved(number, holder, at)
        case ["group", int(number), str(group), bytes() | None as upto, ids, bool(reset), bytes() | None as data] if (
            all(isinstance(id, bytes) for id in ids)
        ):
            return GroupMoved(number, group, upto, tuple(ids), reset, data)
        case ["forget", str(group)]:
            return GroupForgotten(group)
        case ["compact", int(epoch), int(number), [bytes(records), bytes(pieces)]]:
            return Compacted(epoch, number, decode_sections([records, pieces], [run_key(epoch, number)]))
        case _:
            raise ValueError("a control entry of an unknown kind, or a malformed one")
