"""The broker that looks after one group, or after the transactions of one name: found, asked, and found anew."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.protocol.coordination import FindCoordinatorRequest

from .. import faults
from ..cluster import CONTROL, Cluster


class Kind(IntEnum):
    """What a coordinator looks after, by Kafka's numbers."""

    GROUP = 0
    TRANSACTION = 1


class Code(IntEnum):
    """Codes in answers that decide what is done next; the library has no error for some of them."""

    LOADING = 14
    NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    METADATA_TOO_LARGE = 12
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TRANSACTION_STATE = 48
    INVALID_PRODUCER_MAPPING = 49
    CONCURRENT_TRANSACTIONS = 51
    NOT_EMPTY = 68
    GROUP_NOT_FOUND = 69
    MEMBER_ID_REQUIRED = 79
    UNSTABLE_OFFSET = 88
    PRODUCER_FENCED = 90


MOVED = frozenset({Code.NOT_AVAILABLE, Code.NOT_COORDINATOR})


class Coordinator:
    """Belongs to the I/O loop, as the cluster does."""

    def __init__(self, cluster: Cluster, kind: Kind, key: str) -> None:
        self._cluster, self._kind, self._key = cluster, kind, key
        self._node: int | None = None

    async def ask(self, request: object, connection: int = CONTROL) -> Any:
        """The answer to one request. Raises the library's errors, `StaleMetadata` where the broker is not known."""
        if self._node is None:
            self._node = await self._find()
        try:
            return await self._cluster.ask(self._node, request, connection)
        except faults.Foreign:
            self._node = None
            raise

    async def _find(self) -> int:
        """What goes wrong here must not be taken for what became of the request: that one was never sent."""
        try:
            found = await self._cluster.ask(None, FindCoordinatorRequest(self._key, self._kind))
            self.check(found.error_code)
        except faults.Foreign as error:
            if faults.final(error):
                raise
            raise kafka_errors.StaleMetadata(f"the coordinator of {self._key} is not known: {error!r}") from error
        node: int = found.coordinator_id
        return node

    def check(self, *codes: int, but: Iterable[int] = ()) -> int:
        """The first of an answer's codes that is not 0, where it is one of `but`; 0 where there is none. Any other is
        raised as the library's error."""
        code = next((code for code in codes if code), 0)
        if code in MOVED:
            self._node = None
        if code and code not in but:
            raise kafka_errors.for_code(code)(f"code {code}")
        return code
