"""A transaction for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from ...runtime.errors import InvalidRequest
from ...runtime.groups.record_pack import RecordPack
from ...runtime.log.record import TagValue
from ..keys import Keys
from ..rows import Rows
from ..topics.messages import MessageBodies, Partitioner
from ..topics.sync_member import SyncTopicMember, WaitFor
from .inputs import check_member
from .transaction import Transaction, TransactionResult


class SyncTransaction:
    """`Transaction` with calls that return when they are done: the same parameters, results and errors. Made by
    `SyncClient.transaction`: `with client.transaction() as t`."""

    def __init__(self, transaction: Transaction, wait: WaitFor) -> None:
        """For `SyncClient.transaction`."""
        self._transaction, self._wait = transaction, wait

    def __repr__(self) -> str:
        return f"<SyncTransaction of {self._transaction!r}>"

    def __enter__(self) -> SyncTransaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(self._transaction.__aexit__(kind, error, trace))

    @property
    def result(self) -> TransactionResult | None:
        """`Transaction.result`."""
        return self._transaction.result

    def insert(self, collection: str, rows: Rows) -> None:
        """`Transaction.insert`."""
        self._wait(self._transaction.insert(collection, rows))

    def upsert(self, collection: str, rows: Rows) -> None:
        """`Transaction.upsert`."""
        self._wait(self._transaction.upsert(collection, rows))

    def delete(self, collection: str, keys: Keys) -> None:
        """`Transaction.delete`."""
        self._wait(self._transaction.delete(collection, keys))

    def apply(self, collection: str, rows: Rows) -> None:
        """`Transaction.apply`."""
        self._wait(self._transaction.apply(collection, rows))

    def send(
        self,
        topic: str,
        messages: MessageBodies,
        *,
        key: bytes | str | None = None,
        tags: Mapping[str, TagValue] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        """`Transaction.send`."""
        self._wait(self._transaction.send(topic, messages, key=key, tags=tags, partitioner=partitioner))

    def acknowledge(self, member: SyncTopicMember, delivered: RecordPack) -> None:
        """`Transaction.acknowledge`, of a member of the same client."""
        check_member(member, SyncTopicMember)
        if not member.is_of(self._wait):
            raise InvalidRequest("a transaction acknowledges what a member of its own client got", argument="member")
        self._wait(self._transaction.acknowledge(member.member, delivered))

    def commit(self) -> TransactionResult:
        """`Transaction.commit`."""
        return self._wait(self._transaction.commit())

    def rollback(self) -> None:
        """`Transaction.rollback`."""
        self._transaction.rollback()
