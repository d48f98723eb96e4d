"""The two ends of a connection until they know each other, whatever they say then."""

from __future__ import annotations

import asyncio

from ..errors import BadRecord
from .connection import FramedConnection
from .frames import Head
from .handshake import VERSION, Handshake, arguments_of, name_in, new_nonce, nonce_in


class ConnectingEnd(FramedConnection):
    """The end that has made the connection. `on_message` gets what comes once both ends know each other."""

    def __init__(self, name: str, key: bytes, to: str) -> None:
        """`name` is the incarnation of this process, `to` the one that is to be at the other end; `key` is that of the
        handshake."""
        super().__init__()
        self._handshake = Handshake(key, client=name, server=to, client_nonce=new_nonce())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write(["hello", VERSION, self._handshake.client_nonce])

    def on_frame(self, head: Head, payload: bytes) -> None:
        if self.established:
            self.on_message(head, payload)
        elif not self._handshake.server_nonce:
            [nonce] = arguments_of(head, "challenge", 1)
            self._handshake.server_nonce = nonce_in(nonce)
            self.write(["proof", self._handshake.client, self._handshake.proof("client")])
        else:
            [proof] = arguments_of(head, "welcome", 1)
            self._handshake.check("server", proof)
            self.establish()

    def on_message(self, head: Head, payload: bytes) -> None:
        """As `on_frame`, of an end that has proved that it knows the secret."""
        raise NotImplementedError


class AcceptingEnd(FramedConnection):
    """The end that has taken the connection. `on_message` gets what comes once both ends know each other."""

    def __init__(self, name: str, key: bytes) -> None:
        """`name` is the incarnation of this process; `key` is that of the handshake."""
        super().__init__()
        self._handshake = Handshake(key, server=name)

    def on_frame(self, head: Head, payload: bytes) -> None:
        if self.established:
            self.on_message(head, payload)
        elif not self._handshake.client_nonce:
            self._greet(head)
        else:
            self._prove(head)

    def _greet(self, head: Head) -> None:
        version, nonce = arguments_of(head, "hello", 2)
        if version != VERSION:
            raise BadRecord(f"version {version!r} of this protocol, this node has {VERSION}", reason="version")
        self._handshake.client_nonce, self._handshake.server_nonce = nonce_in(nonce), new_nonce()
        self.write(["challenge", self._handshake.server_nonce])

    def _prove(self, head: Head) -> None:
        client, proof = arguments_of(head, "proof", 2)
        self._handshake.client = name_in(client)
        self._handshake.check("client", proof)
        self.write(["welcome", self._handshake.proof("server")])
        self.establish()

    def on_message(self, head: Head, payload: bytes) -> None:
        """As `on_frame`, of an end that has proved that it knows the secret."""
        raise NotImplementedError
