"""How the two ends of a connection prove to each other that they know the cluster's secret, without telling it.

    → hello      version, nonce of the client
    ← challenge  nonce of the server
    → proof      incarnation of the client, proof
    ← welcome    proof

A proof is a keyed hash of both nonces, both incarnations and the side that makes it, so it is good for one connection
between these two, in one direction. Its key is derived from the secret and the id of the cluster. Who knows no secret
hears a random number, and nothing after a wrong proof. The nonces are new for each connection.

That says who is at the other end when a connection begins. That nobody on the way reads or changes what follows is for
TLS to see to.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import msgpack

from ..errors import BadRecord
from .frames import Head

VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32

Side = Literal["client", "server"]


def new_nonce() -> bytes:
    """A number that no connection had before."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(slots=True)
class Handshake:
    """One handshake, as far as it has come. `client` and `server` are the incarnations of the two processes."""

    key: bytes = field(repr=False)
    client: str = ""
    server: str = ""
    client_nonce: bytes = b""
    server_nonce: bytes = b""

    def proof(self, side: Side) -> bytes:
        """What `side` sends to show that it knows the secret."""
        said = [VERSION, side, self.client_nonce, self.server_nonce, self.client, self.server]
        return hmac.new(self.key, cast(bytes, msgpack.packb(said)), hashlib.sha256).digest()

    def check(self, side: Side, proof: object) -> None:
        """Raises `BadRecord` unless `proof` is that of `side`."""
        if not hmac.compare_digest(_of_length(proof, PROOF_BYTES), self.proof(side)):
            raise BadRecord("the other end does not know the cluster's secret, or is another node", reason="proof")


def arguments_of(head: Head, kind: str, count: int) -> list[Any]:
    """The arguments of a frame that is to be of this kind. Raises `BadRecord`."""
    if len(head) != count + 1 or head[0] != kind:
        raise BadRecord(f"a frame that is no {kind}", reason="frame")
    return list(head[1:])


def nonce_in(value: object) -> bytes:
    """The nonce of the other end. Raises `BadRecord`."""
    return _of_length(value, NONCE_BYTES)


def name_in(value: object) -> str:
    """The incarnation that the other end gives. Raises `BadRecord`."""
    if not isinstance(value, str):
        raise BadRecord("a name that is no text", reason="frame")
    return value


def _of_length(value: object, size: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != size:
        raise BadRecord(f"no {size} bytes", reason="frame")
    return value
