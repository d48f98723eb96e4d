"""Read a log that another process owns, through the Unix socket in its directory.

Both sides speak frames of a 4-byte big-endian length and a msgpack body: the request `[method, argument, …]`, the
answer `["ok", result]` or `["error", picture of the error]`, one request at a time on a connection:

    channels                              → names
    describe   channel                    → [policy, first id, latest id]
    latest_id  channel                    → id or nil
    id_at      channel timestamp          → id or nil
    read       channel start upto wait_s  → [[[id, timestamp, payload], …], next id, latest id]

`start` is ["earliest"], ["latest"], ["id", id, inclusive], ["time", timestamp] or ["next", next id of the last answer].
`read` answers what there is, at most `ANSWER_BYTES` of payloads but at least one entry, and waits up to `wait_s` (≤
`WAIT_LIMIT_S`) while there is nothing. Ids over `upto` (may be nil) are left out.

This module imports nothing heavy: Spark's workers start with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from struct import Struct
from typing import Any, cast

import msgpack

from .errors import BadRecord, Closed, PositionLost, Unavailable, from_wire
from .wal import ChannelInfo, ChannelPolicy, Delivery, Durability, Entry, From, FromId, FromTime, Start

SOCKET_NAME = "socket"
REQUEST_BYTES = 64 * 1024
ANSWER_BYTES = 4 * 1024 * 1024
FRAME_BYTES = 256 * 1024 * 1024  # more than any answer; above it the peer is no RocksMQ
WAIT_LIMIT_S = 60.0
TIMEOUT_S = 30.0
LENGTH = Struct(">I")
_SOCKET_PATH_BYTES = 100  # the system's limit is 108, and it counts bytes


def encode_policy(policy: ChannelPolicy) -> dict[str, object]:
    """A msgpack-able picture of a policy."""
    return {**asdict(policy), "acks": policy.acks.value, "delivery": policy.delivery.value}


def decode_policy(picture: dict[str, Any]) -> ChannelPolicy:
    """Raises `ValueError` and `TypeError` for what pictures none. Fields that are missing have their defaults."""
    acks, delivery = Durability(picture.get("acks", "all")), Delivery(picture.get("delivery", "keep"))
    fields: dict[str, Any] = {**picture, "acks": acks, "delivery": delivery}
    return ChannelPolicy(**fields)


def encode_start(start: Start) -> list[object]:
    match start:
        case From():
            return [start.value]
        case FromId(id, inclusive):
            return ["id", id, inclusive]
        case FromTime(timestamp):
            return ["time", timestamp]


def decode_start(picture: Sequence[Any]) -> Start | int:
    """The start, or the next id as a number. Raises `ValueError`."""
    match picture:
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


def pack(message: object) -> bytes:
    """A frame, length included."""
    body = cast(bytes, msgpack.packb(message))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """The message in a frame's body. Raises `BadRecord`."""
    try:
        return cast(object, msgpack.unpackb(body))
    except (ValueError, RecursionError, MemoryError, msgpack.UnpackException) as error:
        raise BadRecord(f"no frame of this protocol: {error}", reason="frame") from None


def result_of(answer: Any) -> Any:
    """What a request asked for. Raises the error that the owner answered with."""
    match answer:
        case ["ok", result]:
            return result
        case ["error", picture] if isinstance(picture, dict):
            raise from_wire(cast("dict[str, object]", picture))
        case _:
            raise BadRecord("the owner answered something else than this protocol says", reason="frame")


def entries_of(rows: Sequence[Any]) -> list[Entry]:
    return [Entry(*row) for row in rows]


def info_of(channel: str, result: Sequence[Any]) -> ChannelInfo:
    policy, first_id, latest_id = result
    return ChannelInfo(channel, decode_policy(policy), first_id, latest_id)


@contextlib.contextmanager
def socket_path(directory: str) -> Generator[str]:
    """A path to the socket that fits into an address: through an open descriptor where the plain one is too long."""
    path = os.path.join(directory, SOCKET_NAME)
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
        yield path
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def unavailable(directory: str, error: Exception) -> Unavailable:
    reason = str(error) or type(error).__name__
    return Unavailable(f"the owner of {directory} does not answer: {reason}", path=directory)


class BlockingClient:
    """Reads a log from another process, blocking. Not thread-safe.

    Connects when first used and again after a failure. Every method raises `Unavailable` where no owner answers within
    `timeout_s`, `ChannelNotFound`, and `Closed` after `close`.
    """

    def __init__(self, directory: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._directory = os.path.abspath(directory)
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._closed = False

    def channels(self) -> list[str]:
        """The names of all channels, sorted."""
        return self._ask("channels")

    def describe(self, channel: str) -> ChannelInfo:
        return info_of(channel, self._ask("describe", channel))

    def latest_id(self, channel: str) -> bytes | None:
        """The id of the last acknowledged entry, None when there was none ever."""
        return self._ask("latest_id", channel)

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry whose timestamp is ≥ `timestamp`, None when there is none yet."""
        return self._ask("id_at", channel, timestamp)

    def read(self, channel: str, after: bytes | None = None, upto: bytes | None = None) -> Iterator[list[Entry]]:
        """Batches of entries behind `after` (None: from the first there is) up to and with `upto` (None: the last one
        acknowledged when the reading gets there). Raises `PositionLost` when retention has removed what comes next,
        and when the channel ends before `upto`."""
        start: list[object] = encode_start(From.EARLIEST if after is None else FromId(after))
        while True:
            rows, next_id, latest_id = self._ask("read", channel, start, upto, 0.0)
            if rows:
                yield entries_of(rows)
                if rows[-1][0] == upto:
                    return
            elif upto is not None and (latest_id is None or latest_id < upto):
                raise PositionLost(
                    f"channel {channel} ends before {upto.hex()}", requested=upto, first_available=latest_id
                )
            else:
                return
            start = ["next", next_id]

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        self._closed = True
        self._disconnect()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, *request: object) -> Any:
        if self._closed:
            raise Closed("the client is closed")
        fresh = self._socket is None
        try:
            return self._ask_once(request)
        except Unavailable:
            if fresh:
                raise
        return self._ask_once(request)  # the owner may have been restarted since; requests only read

    def _ask_once(self, request: Sequence[object]) -> Any:
        try:
            connection = self._socket or self._connect()
            connection.sendall(pack(request))
            (size,) = LENGTH.unpack(_receive(connection, LENGTH.size))
            if size > FRAME_BYTES:
                raise ConnectionError(f"an answer of {size} bytes")
            answer = unpack(_receive(connection, size))
        except (OSError, BadRecord) as error:
            self._disconnect()
            raise unavailable(self._directory, error) from error
        except BaseException:
            self._disconnect()  # an answer may still be on its way
            raise
        return result_of(answer)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(self._timeout_s)
            with socket_path(self._directory) as path:
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        self._socket = connection
        return connection

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        taken = connection.recv_into(view)
        if not taken:
            raise ConnectionError("the connection ended")
        view = view[taken:]
    return bytes(data)
