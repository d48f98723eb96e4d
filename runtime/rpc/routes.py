"""By which ways requests and replies travel: the log, or a connection between two nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..log.names import Names
from ..log.record import Record
from ..log.wal import Append, OnAppended, Wal
from .protocol import REQUEST_CHANNEL


class ReplyRoute(Protocol):
    """How replies get to clients. `message_bytes` is how large one message may be."""

    message_bytes: int

    def send(self, client: str, payloads: Sequence[bytes], sent: OnAppended) -> None:
        """Send one reply, whole or in fragments. `sent` gets what becomes of it where that is known, on any thread.
        Raises what refuses it at once."""
        ...


class LogReplies:
    """The log as the way of replies: through the reply channel of each client."""

    def __init__(self, wal: Wal, names: Names) -> None:
        self.message_bytes: int = REQUEST_CHANNEL.max_message_bytes
        self._wal, self._names = wal, names

    def send(self, client: str, payloads: Sequence[bytes], sent: OnAppended) -> None:
        """`ReplyRoute.send`."""
        channel = self._names.replies(client)
        self._wal.submit([Append(channel, payload) for payload in payloads], sent)


RequestKey = tuple[str, int]  # a client's name, and its number of a request


class Asker(Protocol):
    """What waits for the reply to a request that went by a `RequestRoute`."""

    def replied(self, record: Record) -> None:
        """The reply has come."""
        ...

    def lost(self) -> None:
        """No reply will come by this way any more; whether the request was served is not known."""
        ...


class RequestRoute(Protocol):
    """A way to one other node, beside the log."""

    def ask(self, role: str, payload: bytes, key: RequestKey, asker: Asker) -> None:
        """Send a request: the record with this key, for `role` of that node. Raises `Overloaded` where too much waits
        to be sent, and then has sent nothing."""
        ...

    def forget(self, key: RequestKey) -> None:
        """Nobody waits for this reply any more."""
        ...


class RequestRoutes(Protocol):
    """The ways to other nodes, as far as there are any now."""

    def find(self, node: str) -> RequestRoute | None:
        """The way to the process with this incarnation; None where only the log leads there."""
        ...
