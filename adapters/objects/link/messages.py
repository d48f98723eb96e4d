"""What processes say to each other over a link.

Frames are those of direct connections (`runtime/direct/frames.py`), and so is the handshake; each end bears the id of
its process, as claims and blocks have it, in hexadecimal digits. Then the process that is no owner sends, with numbers
that ascend on its link:

    submit NUMBER           payload: entries and control entries for one block
    ask NUMBER METHOD       payload: the arguments; 0: no answer is wanted
    forget NUMBER           the answer to an `ask` is not waited for any more

and the owner:

    done NUMBER             payload: the ids of a submit's entries, or the result of an `ask`
    failed NUMBER           payload: the wire form of an error
    block EPOCH NUMBER      payload: a block that is acknowledged, behind all before it
    read                    a block was acknowledged that is not sent: it is in the store
    over                    this process owns the log no more, and refuses what comes from now on

Payloads are msgpack, but for blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, cast

import msgpack

from ....runtime.errors import BadRecord, InvalidRequest, TidewalError, from_wire, to_wire
from ....runtime.log.checks import check_name
from ....runtime.log.payloads import check_timestamps
from ....runtime.log.wal import Append
from ..control import ChannelCreated, ChannelDropped, Control, HoldMoved, Truncated, decode_control, encode_control

LINK_BYTES: Final = 32 * 1024 * 1024  # of submits on their way over one link, unless one alone is larger
MESSAGE_BYTES: Final = 128 * 1024 * 1024  # of one message: a submit of 64 MiB with what surrounds its entries


def pack(value: object) -> bytes:
    """The payload with a value of plain parts."""
    return cast("bytes", msgpack.packb(value))


def unpack(payload: bytes) -> Any:
    """The value of a payload. Raises what msgpack raises for a malformed one."""
    return cast("object", msgpack.unpackb(payload, max_ext_len=0))


def encode_submit(entries: Sequence[Append], controls: Sequence[Control]) -> bytes:
    """The payload of a submit."""
    names: dict[str, int] = {}
    rows = [(names.setdefault(entry.channel, len(names)), entry.timestamp, entry.payload) for entry in entries]
    return pack([list(names), rows, [encode_control(control) for control in controls]])


def decode_submit(payload: bytes) -> tuple[list[Append], list[Control]]:
    """The entries and control entries of a submit. Raises `BadRecord`, and what a malformed payload raises."""
    names, rows, controls = unpack(payload)
    try:
        entries = [Append(names[name], body, timestamp) for name, timestamp, body in rows]
        check_entries(entries)
        return entries, [_checked(decode_control(control)) for control in controls]
    except (IndexError, KeyError, struct.error, InvalidRequest) as error:
        raise BadRecord(f"a submit that is none: {error}", reason="frame") from error


def check_entries(entries: Sequence[Append]) -> None:
    """Raise `InvalidRequest` for entries of another process that no block can have: they would be found out only where
    the block is made, which may have those of others, too."""
    check_timestamps([entry.timestamp for entry in entries])
    if not all(type(entry.channel) is str and type(entry.payload) is bytes for entry in entries):
        raise InvalidRequest("an entry has the name of a channel, and bytes")


def _checked(control: Control) -> Control:
    """The control entry, if it is one that a process makes that does not own the log."""
    if isinstance(control, ChannelCreated):
        check_name("channel name", control.name)
    elif not isinstance(control, ChannelDropped | Truncated | HoldMoved):
        raise InvalidRequest("a control entry that the owner alone makes")
    return control


def encode_error(error: BaseException) -> bytes:
    """The payload of an error."""
    return pack(to_wire(error))


def decode_error(payload: bytes) -> TidewalError:
    """The error of a payload. Raises `BadRecord`."""
    wire = unpack(payload)
    if not isinstance(wire, dict):
        raise BadRecord("an error that is none", reason="frame")
    return from_wire(cast("dict[str, object]", wire))
