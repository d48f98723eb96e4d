"""The end of a connection at the node that asks: it sends requests, and hands the replies to those that wait."""

from __future__ import annotations

from ..log.record import decode
from ..rpc.routes import Asker, RequestKey
from .ends import ConnectingEnd
from .frames import Head
from .handshake import arguments_of


class OutgoingConnection(ConnectingEnd):
    """A connection to another node: a `RequestRoute`. When it ends, all that wait for a reply are told."""

    def __init__(self, node: str, key: bytes, to: str) -> None:
        """`node` is the incarnation of this process, `to` the one that is to be at the other end."""
        super().__init__(node, key, to)
        self._asking: dict[RequestKey, Asker] = {}

    def on_message(self, head: Head, payload: bytes) -> None:
        arguments_of(head, "reply", 0)
        self._conclude(payload)

    def _conclude(self, payload: bytes) -> None:
        record = decode(payload)
        asker = self._asking.pop((record.producer, record.pseq), None)
        if asker is not None:
            asker.replied(record)

    def ask(self, role: str, payload: bytes, key: RequestKey, asker: Asker) -> None:
        """`RequestRoute.ask`."""
        self.write(["request", role], payload)
        self._asking[key] = asker

    def forget(self, key: RequestKey) -> None:
        """`RequestRoute.forget`."""
        self._asking.pop(key, None)

    def on_end(self) -> None:
        asking, self._asking = self._asking, {}
        for asker in asking.values():
            asker.lost()
