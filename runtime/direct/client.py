"""The end of a connection at the node that asks: it sends requests, and hands the replies to those that wait."""

from __future__ import annotations

import asyncio

from ..log.record import decode
from ..rpc.routes import Asker, RequestKey
from .connection import FramedConnection
from .frames import Head
from .handshake import VERSION, Handshake, arguments_of, new_nonce, nonce_in


class OutgoingConnection(FramedConnection):
    """A connection to another node: a `RequestRoute`. When it ends, all that wait for a reply are told."""

    def __init__(self, node: str, key: bytes, to: str) -> None:
        """`node` is the incarnation of this process, `to` the one that is to be at the other end."""
        super().__init__()
        self._handshake = Handshake(key, client=node, server=to, client_nonce=new_nonce())
        self._asking: dict[RequestKey, Asker] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(["hello", VERSION, self._handshake.client_nonce])

    def on_frame(self, head: Head, payload: bytes) -> None:
        if self.established:
            arguments_of(head, "reply", 0)
            self._conclude(payload)
        elif not self._handshake.server_nonce:
            [nonce] = arguments_of(head, "challenge", 1)
            self._handshake.server_nonce = nonce_in(nonce)
            self.write(["proof", self._handshake.client, self._handshake.proof("client")])
        else:
            [proof] = arguments_of(head, "welcome", 1)
            self._handshake.check("server", proof)
            self.establish()

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
