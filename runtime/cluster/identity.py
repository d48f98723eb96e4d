"""Which cluster a log belongs to, so that a process with the right URL and the wrong settings does not join.

The first process founds the cluster: it writes an id, and a check of the secret that its settings have. Each later one
compares both before it registers. The check is a keyed hash, which says nothing of the secret but whether one is it;
who can read the log can try secrets at leisure, so a secret is to be long and random.

This guards against mistakes: a laptop with the URL of production, a copied configuration, two clusters with one prefix.
It guards against no people: whoever may write to the log's broker may write any record to it, with this check or
without, and lead. Against them guard the broker's credentials and ACLs, or the permissions of the log's directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from uuid import uuid4

from ..errors import TidewalError, WrongCluster
from .cluster_log import ClusterLog
from .state import ClusterIdentity

FOUND_PAUSE_S = 0.1  # before looking again, after an error that may pass

_PURPOSE = "tidewal cluster "  # the same secret, used as a key elsewhere, gives no check of a cluster


def random_id() -> str:
    """An id that no cluster had before."""
    return uuid4().hex


def identity_of(id: str, secret: str) -> ClusterIdentity:
    """The identity of the cluster `id` with `secret`, which may be "": then every process without a secret belongs."""
    key = hashlib.sha256(_encoded(secret)).digest()  # HMAC pads shorter ones with zeros, so "" and "\0" would be one
    return ClusterIdentity(id, hmac.new(key, _encoded(_PURPOSE + id), hashlib.sha256).hexdigest())


def connection_key(secret: str) -> bytes:
    """The key by which nodes with this secret know each other when they connect (`runtime/direct/handshake.py`)."""
    return hmac.new(hashlib.sha256(_encoded(secret)).digest(), b"tidewal connection", hashlib.sha256).digest()


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # the environment may have bytes that are no text


async def found_or_check(log: ClusterLog, wanted_id: str, secret: str, *, new_id: Callable[[], str] = random_id) -> str:
    """The id of the cluster that `log`, which is open, belongs to. One that was not founded yet is founded: with
    `wanted_id`, or with one of `new_id` where that is "". Of several that found at once the first in the log counts,
    and the others are compared with it.

    Raises `WrongCluster` where `wanted_id` is given and the cluster has another one, or where `secret` is not the
    cluster's. Errors of the log that may pass are waited out; raises any other one."""
    identity = identity_of(wanted_id or new_id(), secret)
    while log.cluster.identity is None:
        try:
            await log.propose({"kind": "found", **identity.to_wire()})
        except TidewalError as error:
            if not error.retryable:
                raise
            if log.cluster.identity is None:  # otherwise another one came first, and is read by now
                await asyncio.sleep(FOUND_PAUSE_S)
    _check(log, log.cluster.identity, wanted_id, secret)
    return log.cluster.identity.id


def _check(log: ClusterLog, identity: ClusterIdentity, wanted_id: str, secret: str) -> None:
    if wanted_id not in ("", identity.id):
        wrong = f"cluster.id is {wanted_id!r}: leave it out, or set it to that of the log"
        raise _wrong_cluster(log, identity, "cluster.id", wrong)
    if identity != identity_of(identity.id, secret):
        raise _wrong_cluster(log, identity, "cluster.secret", _secrets_compared(identity, secret))


def _secrets_compared(identity: ClusterIdentity, secret: str) -> str:
    """What is wrong with `secret`, which is not the cluster's, and what to do. It tells neither secret."""
    if identity == identity_of(identity.id, ""):
        return "it has no secret: leave cluster.secret (TIDEWAL__CLUSTER__SECRET) out"
    given = "is not its secret" if secret else "is empty, and it has one"
    return f"cluster.secret {given}: set it (TIDEWAL__CLUSTER__SECRET) as the cluster's other nodes have it"


def _wrong_cluster(log: ClusterLog, identity: ClusterIdentity, key: str, wrong: str) -> WrongCluster:
    return WrongCluster(
        f"{log.channel} is of the cluster {identity.id!r}, and {wrong}, if this node belongs to that cluster; "
        "otherwise give it the URL, or the msgChannel.chanNamePrefix.cluster, of its own one",
        key=key,
        found=identity.id,
    )
