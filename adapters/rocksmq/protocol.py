"""The protocol between the owner of a RocksMQ directory and other processes, version 2.

A frame is a 12-byte header (three big-endian numbers: bytes of the head, rows, bytes of the payloads), the head
(msgpack), the rows and the payloads. A row is 24 bytes: channel, payload length, id, timestamp. Entries travel as rows
and payloads, everything else in the head; so the memory that a head can use is small, and payloads are copied once.

Requests are `[seq, method, *arguments]`, answers `[seq, "ok", result]` or `[seq, "error", wire form of the error]`, in
any order; many may be in flight. With seq 0 no answer is wanted. The first request is `hello`; a frame that breaks the
rules, and a refused `hello`, end the connection after the error, whose seq is 0 where the request's is not known.

    hello      version client token         → {boot, frame_bytes, filters, waiting_requests}
    beat       anything …                   → nil
    channels                                → names
    describe   channel                      → [policy, first id, latest id]
    latest_id  channel                      → id or nil
    id_at      channel timestamp            → id or nil
    read       channel start upto wait_s where → [entries, next id, latest id]
    create     channel policy               → nil
    drop       channel                      → nil
    truncate   channel id                   → nil
    hold       channel holder id            → nil
    append     number settled entries       → ids
    appends    number settled entries       → ids, joined
    cancel     seq                          → nil
    stand_down                              → nil
    group.*    as `runtime/groups/request_service.py` says, single ids as `owner/group_service.py` does

`client` is 16 bytes that name the asking process, or nil for one that only reads; with `number` they let the owner
recognise an append that is sent again; all numbers up to `settled` are answered. `appends` carries up to `APPENDS`
appends of one entry each: the first has the seq and the number of the request, the others those that follow. One answer
has the joined ids of all, or each gets an answer of its own, as `append` does. `token` may be missing, except over TCP.
`boot` counts the owner's incarnations, `frame_bytes` is what rows and payloads of one request may have together,
`filters` the language of filters that the owner evaluates (`FILTER_LANGUAGE`; one that does not say it evaluates none),
`waiting_requests` how many it lets wait at once on a connection (one that does not say it: 256).
`start` is ["earliest"], ["latest"], ["id", id, inclusive], ["time", timestamp] or ["next", next id of the last answer].
`read` answers with what there is, about `ANSWER_BYTES` of payloads but at least one entry, and waits up to `wait_s` (≤
`WAIT_LIMIT_S`) while there is nothing; `cancel` ends a request that waits, without an answer. Ids over `upto` (may be
nil) are left out. `where` may be missing; it is a filter, from a client of the same language (`upto` is nil then). In
the place of each run of entries that do not pass, the answer has a row with the channel 1 and the state of a `LeftOut`
as its payload; some that do not pass are sent all the same (`EntryFilter`). `stand_down` asks the owner to close the
directory for a process that insists on owning it; it raises `DirectoryInUse` when the owner does as well.

Where a request carries entries, its last argument in the head is the list of channel names that the rows' channel
numbers count from 0, and ids are 0. Where an answer does, the first item of its result is nil in the head, and the
rows' channels are 0 (but for `where`). Without any, both are the empty list.

This module imports nothing heavy: the blocking client does not, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple, TypeAlias, cast

import msgpack

from ...runtime.errors import BadRecord, InvalidRequest, from_wire
from ...runtime.log.left_out import LeftOut
from ...runtime.log.policy_codec import decode_policy
from ...runtime.log.wal import (
    Append,
    ChannelInfo,
    Entry,
    From,
    FromId,
    FromTime,
    Headers,
    Payload,
    Start,
)

VERSION = 3
HEAD_BYTES = 256 * 1024  # of a request: the worst that msgpack makes of it is 64 times that, for 20 ms
APPENDS = 1024  # in one request
ANSWER_BYTES = 4 * 1024 * 1024
FRAME_BYTES = 1024 * 1024 * 1024  # more than any answer; above it the peer is no RocksMQ
WAIT_LIMIT_S = 60.0
TIMEOUT_S = 30.0
HEADER = Struct(">III")
ROW = Struct(">II8sQ")
_NO_ID = bytes(8)
_make_append = cast("Callable[[tuple[str, Payload, int, None, Headers]], Append]", partial(tuple.__new__, Append))
_make_entry = cast("Callable[[tuple[bytes, int, Payload, None, Headers]], Entry]", partial(tuple.__new__, Entry))
_NO_KEYS: Iterable[None] = repeat(None)
_NO_HEADERS: Iterable[Headers] = repeat(())
_JOIN_BYTES = 16 * 1024  # payloads below this are cheaper to copy than to send from where they are
_VIEW_BYTES = 4 * 1024  # the same for keeping them

WireForm: TypeAlias = dict[str, object]


# ---- content of heads -----------------------------------------------------------------------------------------------


def encode_start(start: Start) -> list[object]:
    match start:
        case From():
            return [start.value]
        case FromId(id, inclusive):
            return ["id", id, inclusive]
        case FromTime(timestamp):
            return ["time", timestamp]


def decode_start(wire: Sequence[Any]) -> Start | int:
    """The start of a wire form, or the next id as a number. Raises `ValueError` for a malformed one."""
    match wire:
        case ["earliest" | "latest" as name]:
            return From(name)
        case ["id", bytes(id), bool(inclusive)]:
            return FromId(id, inclusive)
        case ["time", int(timestamp)]:
            return FromTime(timestamp)
        case ["next", bytes(id)] if len(id) == 8:
            return int.from_bytes(id, "big")
        case _:
            raise ValueError("no start")


def pack_head(message: object) -> bytes:
    """The head of a frame with `message`. Raises `InvalidRequest` for a value that msgpack cannot encode."""
    try:
        return cast(bytes, msgpack.packb(message))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"the request cannot be sent: {error}") from None


def unpack(head: bytes | memoryview) -> Any:
    """The message in a frame's head. Raises `BadRecord`."""
    try:
        return cast(object, msgpack.unpackb(head, max_ext_len=0))
    except (ValueError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise BadRecord(f"no frame of this protocol: {error}", reason="frame") from None


def info_of(channel: str, result: Sequence[Any]) -> ChannelInfo:
    policy, first_id, latest_id = result
    return ChannelInfo(channel, decode_policy(policy), first_id, latest_id)


# ---- frames ----------------------------------------------------------------------------------------------------------


class ProtocolFrame(NamedTuple):
    """A frame that was received. `lasting`: its memory is its own; else use it before more is received."""

    head: memoryview
    rows: memoryview
    payloads: memoryview
    lasting: bool

    @property
    def size(self) -> int:
        return len(self.head) + len(self.rows) + len(self.payloads)


def split(frame: memoryview, *, lasting: bool) -> ProtocolFrame:
    """The parts of a whole frame; `lasting` as in `ProtocolFrame`."""
    head_bytes, rows, _ = HEADER.unpack_from(frame)
    rows_at = HEADER.size + head_bytes
    payloads_at = rows_at + rows * ROW.size
    return ProtocolFrame(frame[HEADER.size : rows_at], frame[rows_at:payloads_at], frame[payloads_at:], lasting)


def encode(message: object, rows: Sequence[bytes] = (), payloads: Sequence[Payload] = ()) -> list[Payload]:
    """The buffers of a frame, in order; large payloads are not copied. Raises `InvalidRequest`."""
    head = pack_head(message)
    if not rows:
        return [HEADER.pack(len(head), 0, 0) + head]
    size = sum([len(payload) for payload in payloads])
    header = HEADER.pack(len(head), len(rows), size)
    if size <= _JOIN_BYTES or size < len(payloads) * _VIEW_BYTES:
        return [b"".join((header, head, *rows, *payloads))]
    return [b"".join((header, head, *rows)), *payloads]


def encode_request(seq: int, method: str, arguments: Sequence[object], entries: Sequence[Append] = ()) -> list[Payload]:
    """The buffers of a request; `entries` are its last argument. Raises `InvalidRequest`."""
    names: dict[str, int] = {}
    try:
        rows = [
            ROW.pack(names.setdefault(channel, len(names)), len(payload), _NO_ID, timestamp)
            for channel, payload, timestamp, _, _ in entries
        ]
    except (StructError, TypeError) as error:
        raise InvalidRequest(f"an entry cannot be sent: {error}") from None
    return encode([seq, method, *arguments, list(names)], rows, [entry[1] for entry in entries])


def encode_entries(seq: int, entries: Sequence[Entry], next_id: bytes, latest_id: bytes | None) -> list[Payload]:
    """The buffers of an answer to `read`."""
    if not entries:
        nothing: list[Entry] = []
        return encode([seq, "ok", [nothing, next_id, latest_id]])
    rows = [ROW.pack(0, len(payload), id, timestamp) for id, timestamp, payload, _, _ in entries]
    return encode([seq, "ok", [None, next_id, latest_id]], rows, [entry.payload for entry in entries])


def encode_filtered(seq: int, entries: Sequence[Entry], next_id: bytes, latest_id: bytes | None) -> list[Payload]:
    """The buffers of an answer to `read` with a filter, where some of `entries` are `LeftOut`s."""
    if not entries:
        return encode_entries(seq, entries, next_id, latest_id)
    rows = [ROW.pack(isinstance(entry, LeftOut), len(entry.payload), entry.id, entry.timestamp) for entry in entries]
    return encode([seq, "ok", [None, next_id, latest_id]], rows, [entry.payload for entry in entries])


def appends_in(frame: ProtocolFrame, names: Sequence[Any]) -> list[Append]:
    """The entries of a request. Raises `InvalidRequest`.

    No payload keeps much more memory alive than it has itself: only one that is most of the frame is not copied.
    """
    if len(frame.rows) == ROW.size:
        number, length, _, timestamp = ROW.unpack(frame.rows)
        payload = frame.payloads.toreadonly() if frame.lasting else bytes(frame.payloads)
        if number or length != len(payload) or len(names) != 1:
            raise InvalidRequest("the row of the request does not fit the rest of it")
        return [Append(names[0], payload, timestamp)]
    numbers, lengths, _, timestamps = zip(*ROW.iter_unpack(frame.rows), strict=True)
    bodies = _bodies(frame, lengths, len(frame.payloads) // 2 + 1 if frame.lasting else FRAME_BYTES)
    try:
        channels = list(map(names.__getitem__, numbers))
    except IndexError:
        raise InvalidRequest("a row names a channel that the request does not") from None
    return list(map(_make_append, zip(channels, bodies, timestamps, _NO_KEYS, _NO_HEADERS)))  # noqa: B905 -- endless


def entries_in(frame: ProtocolFrame) -> list[Entry]:
    """The entries of an answer. Raises `BadRecord`."""
    numbers, lengths, ids, timestamps = zip(*ROW.iter_unpack(frame.rows), strict=True)
    bodies = _bodies(frame, lengths, _VIEW_BYTES if frame.lasting else FRAME_BYTES)
    if any(numbers):
        rows = zip(numbers, ids, timestamps, bodies, strict=True)
        return [LeftOut.of(id, ts, bytes(body)) if number else Entry(id, ts, body) for number, id, ts, body in rows]
    return list(map(_make_entry, zip(ids, timestamps, bodies, _NO_KEYS, _NO_HEADERS)))  # noqa: B905 -- endless


def _bodies(frame: ProtocolFrame, lengths: Sequence[int], view_bytes: int) -> Sequence[bytes | memoryview]:
    """The payloads; those of `view_bytes` and more are views of the frame, which is not written to again."""
    ends = list(accumulate(lengths))
    if ends[-1] != len(frame.payloads):
        raise BadRecord("the rows of a frame do not fit its payloads", reason="frame")
    slices = map(slice, [0, *ends], ends)
    if max(lengths) >= view_bytes:
        parts = map(frame.payloads.toreadonly().__getitem__, slices)
        return [part if len(part) >= view_bytes else bytes(part) for part in parts]
    if ends[-1] < len(lengths) * _VIEW_BYTES:  # slices of bytes are made faster than bytes of slices
        return list(map(bytes(frame.payloads).__getitem__, slices))
    return list(map(bytes, map(frame.payloads.__getitem__, slices)))


def result_in(frame: ProtocolFrame) -> tuple[int, Any]:
    """The seq and the outcome of an answer, with its entries: a `TidewalError` where it is one. Raises `BadRecord`."""
    message = unpack(frame.head)
    match message:
        case [int(seq), "ok", bytes(result)] if not len(frame.rows):  # the most frequent
            return seq, result
        case [int(seq), "ok", result]:
            if len(frame.rows):
                if not isinstance(result, list) or not result:
                    raise BadRecord("an answer has entries, but its result has no room for them", reason="frame")
                cast("list[object]", result)[0] = entries_in(frame)
            return seq, cast(object, result)
        case [int(seq), "error", dict()]:
            return seq, from_wire(cast(WireForm, message[2]))
        case _:
            raise BadRecord("the owner answered with something that this protocol does not have", reason="frame")
