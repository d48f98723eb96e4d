"""The broker that coordinates one group, or the transactions of one name: looked up, and looked up anew after
errors."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from aiokafka import errors as kafka_errors
from aiokafka.protocol.coordination import FindCoordinatorRequest

from .. import faults
from ..cluster import CONTROL, Cluster


class CoordinatorType(IntEnum):
    """What a broker coordinates, by Kafka's numbers."""

    GROUP = 0
    TRANSACTION = 1


class Code(IntEnum):
    """Error codes with a handling of their own; the library has no error for some of them."""

    LOADING = 14
    NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    METADATA_TOO_LARGE = 12
    ILLEGAL_GENERATION = 22
    INCONSISTENT_PROTOCOL = 23
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


class CoordinatorBroker:
    """Sends requests to the coordinator of a key. Belongs to the I/O loop, as the cluster does."""

    def __init__(self, cluster: Cluster, coordinator_type: CoordinatorType, key: str) -> None:
        self._cluster, self._type, self._key = cluster, coordinator_type, key
        self._node: int | None = None

    async def ask(self, request: object, connection: int = CONTROL) -> Any:
        """Send one request over a connection and return the response. Raises the library's errors, `StaleMetadata`
        where the broker is not known."""
        if self._node is None:
            self._node = await self._find()
        try:
            return await self._cluster.ask(self._node, request, connection)
        except faults.Foreign:
            self._node = None
            raise

    async def _find(self) -> int:
        """Look the broker up. An error here is raised as `StaleMetadata`: the caller's own request was never sent."""
        try:
            found = await self._cluster.ask(None, FindCoordinatorRequest(self._key, self._type))
            self.check(found.error_code)
        except faults.Foreign as error:
            if faults.final(error):
                raise
            raise kafka_errors.StaleMetadata(f"the coordinator of {self._key} is not known: {error!r}") from error
        node: int = found.coordinator_id
        return node

    def check(self, *codes: int, but: Iterable[int] = ()) -> int:
        """The first of an answer's codes that is not 0, if it is one of `but`; 0 if all are 0. Any other code is raised
        as the library's error."""
        code = next((code for code in codes if code), 0)
        if code in MOVED:
            self._node = None
        if code and code not in but:
            raise kafka_errors.for_code(code)(f"code {code}")
        return code
