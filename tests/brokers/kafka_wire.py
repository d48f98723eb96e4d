"""Two questions to Kafka in its own protocol, asked without a client: what is ready, and who leads."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

METADATA, METADATA_VERSION = 3, 5
DESCRIBE_QUORUM, DESCRIBE_QUORUM_VERSION = 55, 0
CLIENT = "tidewal-tests"
ANSWER_WITHIN_S = 2.0

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Partition:
    """Who has a partition; `leader` is -1 where nobody leads."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The nodes that take part, and the partitions of the topics asked for, by topic and number."""

    nodes: frozenset[int]
    topics: dict[str, dict[int, Partition]]


def metadata(address: tuple[str, int], topics: Sequence[str] = ()) -> Metadata:
    """Ask a node; OSError where it does not answer."""
    body = struct.pack(">i", len(topics)) + b"".join(_string(topic) for topic in topics) + b"\0"
    answer = _ask(address, METADATA, METADATA_VERSION, _string(CLIENT) + body)
    answer.number("i")  # throttle time
    nodes = answer.list(lambda: (answer.number("i"), answer.text(), answer.number("i"), answer.text())[0])
    answer.text()  # the cluster's id
    answer.number("i")  # a node to send administration to; not the controller that leads

    def partition() -> tuple[int, Partition]:
        answer.number("h")  # error: no leader is one
        number, leader = answer.number("i"), answer.number("i")
        replicas, in_sync, _offline = (tuple(answer.list(lambda: answer.number("i"))) for _ in range(3))
        return number, Partition(leader, replicas, in_sync)

    def topic() -> tuple[str, dict[int, Partition]]:
        answer.number("h")  # error: an unknown topic has no partitions
        name = answer.text()
        answer.number("b")  # internal or not
        return name, dict(answer.list(partition))

    return Metadata(frozenset(nodes), dict(answer.list(topic)))


def quorum_leader(address: tuple[str, int]) -> int:
    """Ask a node which controller leads; -1 where none does, OSError where the node does not answer."""
    name = b"__cluster_metadata"
    # In this protocol's compact form: lengths plus one, and an empty list of tagged fields behind each structure.
    topic = bytes([len(name) + 1]) + name + b"\x02" + struct.pack(">i", 0) + b"\0" + b"\0"
    answer = _ask(address, DESCRIBE_QUORUM, DESCRIBE_QUORUM_VERSION, _string(CLIENT) + b"\0" + b"\x02" + topic + b"\0")
    answer.number("B")  # no tagged fields in the header
    if answer.number("h") != 0 or answer.number("B") != 2:
        return -1
    answer.take(answer.number("B") - 1)  # the topic's name
    if answer.number("B") != 2:
        return -1
    _partition, error, leader = answer.number("i"), answer.number("h"), answer.number("i")
    return leader if error == 0 else -1


class _Answer:
    """Takes a response apart, from its beginning to its end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        if self._at + count > len(self._data):
            raise ConnectionError("a short answer")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, kind: str) -> int:
        return struct.unpack(f">{kind}", self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self.take(max(self.number("h"), 0)).decode()

    def list(self, item: Callable[[], _Item]) -> list[_Item]:
        return [item() for _ in range(self.number("i"))]


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _ask(address: tuple[str, int], key: int, version: int, request: bytes) -> _Answer:
    request = struct.pack(">hhi", key, version, 1) + request
    with socket.create_connection(address, ANSWER_WITHIN_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _receive(connection, 4))
        answer = _Answer(_receive(connection, size))
    answer.number("i")  # the number of the question
    return answer


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the node closed the connection")
        parts += part
    return bytes(parts)
