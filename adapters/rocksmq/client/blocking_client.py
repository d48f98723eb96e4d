"""A blocking reader of a RocksMQ, for processes without an event loop.

It imports nothing heavy: Spark's workers start with it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ....runtime.errors import BadRecord, Closed, PositionLost, Unavailable
from ....runtime.log.wal import ChannelInfo, Entry, From, FromId
from ..address import Address
from ..protocol import FRAME_BYTES, HEADER, ROW, TIMEOUT_S, encode, encode_start, info_of, result_in, split

CONNECT_S = 2.0
PAUSE_S = 0.05


class BlockingClient:
    """Reads a log from another process, blocking, one request at a time. Not thread-safe.

    Connects when first used, and survives a change of owner. Every method raises `Unavailable` where no owner answers
    within `timeout_s` seconds (`CONNECT_S` when none ever did), `ChannelNotFound`, and `Closed` after `close`. `advice`
    is a sentence for the message of `Unavailable`, without its full stop.
    """

    def __init__(self, directory: str | Address, *, timeout_s: float = TIMEOUT_S, advice: str = "") -> None:
        self._address = Address.of_directory(directory) if isinstance(directory, str) else directory
        self._timeout_s = timeout_s
        self._advice = advice
        self._socket: socket.socket | None = None
        self._closed = False
        self._met = False  # an owner has answered before

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

    def read(
        self, channel: str, after: bytes | None = None, upto: bytes | None = None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        """Batches of entries behind `after` (None: from the first there is), with `inclusive` that one too, up to
        and with `upto` (None: the last one that is acknowledged when the reader gets there). Raises `PositionLost` when
        retention has removed what comes next, and when the channel ends before `upto`."""
        start: list[object] = encode_start(From.EARLIEST if after is None else FromId(after, inclusive))
        while True:
            entries, next_id, latest_id = self._ask("read", channel, start, upto, 0.0)
            if entries:
                yield entries
                if entries[-1].id == upto:
                    return
            elif upto is not None and (latest_id is None or latest_id < upto):
                raise PositionLost(
                    f"channel {channel} ends before {upto.hex()}",
                    requested=upto,
                    first_available=latest_id,
                    channel=channel,
                )
            else:
                return
            start = ["next", next_id]

    def alive(self) -> bool:
        """Whether the client is connected, as far as is known without a request."""
        if self._socket is None:
            return False
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False  # the connection has ended, or has an answer to no request

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        self._closed = True
        self._disconnect()

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        """Send a request and return its result. It is repeated after a change of owner: requests only read."""
        if self._closed:
            raise Closed("the client is closed")
        deadline = time.monotonic() + (self._timeout_s if self._met else min(self._timeout_s, CONNECT_S))
        while True:
            try:
                result = self._ask_once(method, arguments, deadline)
                break
            except (OSError, BadRecord, Unavailable) as error:
                self._disconnect()
                if time.monotonic() + PAUSE_S >= deadline:
                    raise self._address.unavailable(error, advice=self._advice) from error
            except BaseException:
                self._disconnect()  # an answer may still come
                raise
            time.sleep(PAUSE_S)
        if isinstance(result, Exception):
            raise result
        return result

    def _ask_once(self, method: str, arguments: Sequence[object], deadline: float) -> Any:
        """The result, which may be an error of the owner. Raises `OSError`, `BadRecord` and `Unavailable` where there
        is no answer."""
        connection = self._socket
        if connection is None:
            connection = self._socket = self._address.new_socket()
            connection.settimeout(_left(deadline))
            with self._address.target() as target:
                connection.connect(target)
            hello = _exchange(connection, ("hello", *self._address.hello(None)), deadline)
            if isinstance(hello, Exception):
                raise hello
            self._met = True
        result = _exchange(connection, (method, *arguments), deadline)
        if isinstance(result, Unavailable):  # the owner is closing; another may come
            raise result
        return result

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()


def _exchange(connection: socket.socket, request: Sequence[object], deadline: float) -> Any:
    connection.settimeout(_left(deadline))
    connection.sendall(encode([1, *request])[0])
    header = _receive(connection, bytearray(HEADER.size), 0, deadline)
    head_bytes, rows, payload_bytes = HEADER.unpack(header)
    size = HEADER.size + head_bytes + rows * ROW.size + payload_bytes
    if size > FRAME_BYTES:
        raise ConnectionError(f"an answer of {size} bytes")
    data = bytearray(size)
    data[: HEADER.size] = header
    frame = split(memoryview(_receive(connection, data, HEADER.size, deadline)), lasting=True)
    return result_in(frame)[1]


def _receive(connection: socket.socket, data: bytearray, at: int, deadline: float) -> bytearray:
    """Fill `data` from `at` on. Raises `OSError`."""
    with memoryview(data) as view:
        while at < len(data):
            connection.settimeout(_left(deadline))
            taken = connection.recv_into(view[at:])
            if not taken:
                raise ConnectionError("the connection ended")
            at += taken
    return data


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
