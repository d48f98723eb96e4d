"""A transaction of a client: begun, filled, and committed or rolled back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from ...runtime.arguments import checked
from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.topics import Topic
from ...runtime.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OutcomeUnknown,
    TidewalError,
    TopicEpochEnded,
    TopicNotFound,
    of_unknown_outcome,
)
from ...runtime.groups.coordinator_client import GroupAcks
from ...runtime.groups.record_pack import RecordPack
from ...runtime.log.record import TagValue
from ...runtime.rows.schema import CollectionSchema
from ..keys import Keys, listed_keys
from ..rows import Rows, to_batch
from ..topics.member import TopicMember
from ..topics.messages import Message, MessageBodies, Partitioner, PlacedMessage
from ..topics.sender import messages_of
from ..write_requests import is_never_written
from .buffer import TransactionBuffer
from .inputs import TransactionInputs


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """A transaction that is durable: its timestamp in the log, which all of it has; how many rows it wrote to
    collections, deletes among them, and how many messages to topics. One of nothing writes nothing; its `ts` is 0."""

    ts: int
    rows: int
    messages: int


@dataclass(frozen=True, slots=True)
class TransactionCalls:
    """What a transaction asks of its client: collections and topics by name, within so many seconds; messages with
    their partitions; the turn among its sends to these topics; the number of the client's next write; and to have a
    buffer written under that number with acknowledgements of a group, within so many seconds, which is sent for the
    first time or not. That returns the timestamp, and raises what a write does, and an error of which
    `is_never_written` says that it will never be written."""

    collection: Callable[[str, float], Awaitable[Collection]]
    topic: Callable[[str, float], Awaitable[Topic]]
    place: Callable[[Topic, Sequence[Message], Partitioner | None], list[PlacedMessage]]
    in_turn: Callable[[Sequence[Topic], float], AbstractAsyncContextManager[None]]
    next_number: Callable[[], int]
    commit: Callable[[TransactionBuffer, GroupAcks | None, int, bool, float], Awaitable[int]]


class Transaction:
    """Writes to collections and topics that readers see all of or nothing, at one timestamp. Made by
    `Client.transaction`: `async with client.transaction() as t`.

    Its calls check and convert what they get, and keep it in memory: 16 MiB at most, for up to 100 collections and
    topics. Nothing is in the log before the commit, which is one write of the client. The end of the block commits; an
    error that leaves it rolls back. A call that raises adds nothing. Each is to be awaited: one that was not, or is not
    done, lets the commit raise `InvalidRequest`.
    """

    def __init__(self, calls: TransactionCalls, deadline_s: float) -> None:
        self._calls, self._deadline_s = calls, deadline_s
        self._buffer = TransactionBuffer()
        self._inputs = TransactionInputs()
        self._acks: GroupAcks | None = None  # of the inputs, as they are committed
        self._adding = 0  # calls that are not done
        self._order = asyncio.Lock()  # of its calls: one describes a collection or topic while others wait
        self._committing = asyncio.Lock()
        self._number: int | None = None  # of the commit among the client's writes, where that may be in the log
        self._alone_unknown = False  # whether its acknowledgements, with nothing beside, are stored
        self._result: TransactionResult | None = None
        self._rolled_back = False

    def __repr__(self) -> str:
        return f"<Transaction of {self._buffer.rows} rows and {self._buffer.messages} messages, {self._state}>"

    @property
    def _state(self) -> str:
        if self._rolled_back:
            return "rolled back"
        if self._result is not None:
            return "committed"
        return "of unknown outcome" if self._number is not None or self._alone_unknown else "open"

    @property
    def result(self) -> TransactionResult | None:
        """What the commit has returned; None without it."""
        return self._result

    async def __aenter__(self) -> Transaction:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._rolled_back:
            await self.commit()
        elif self._state == "open":
            self.rollback()

    # ---- what it writes ---------------------------------------------------------------------------------------------

    @checked
    def insert(self, collection: str, rows: Rows) -> Coroutine[Any, Any, None]:
        """Add rows, as `Client.insert` does. Raises `CollectionNotFound`, `InvalidRows`, `MessageTooLarge` where the
        transaction has too many bytes then, and `InvalidRequest` where it takes no more."""
        return self._add(self._add_rows(collection, lambda _: rows, "insert"))

    @checked
    def upsert(self, collection: str, rows: Rows) -> Coroutine[Any, Any, None]:
        """Add rows, or replace those of the same key as a whole. Raises as `insert` does."""
        return self._add(self._add_rows(collection, lambda _: rows, "upsert"))

    @checked
    def delete(self, collection: str, keys: Keys) -> Coroutine[Any, Any, None]:
        """Remove the rows of `keys`, also of those that the transaction has added before. Raises as `insert` does."""
        listed = listed_keys(keys)
        return self._add(self._add_rows(collection, lambda schema: {schema.primary_key: listed}, "delete"))

    @checked
    def apply(self, collection: str, rows: Rows) -> Coroutine[Any, Any, None]:
        """Add a mixed batch, as `Client.apply` does. Raises as `insert` does."""
        return self._add(self._add_rows(collection, lambda _: rows, None))

    @checked
    def send(
        self,
        topic: str,
        messages: MessageBodies,
        *,
        key: bytes | str | None = None,
        tags: Mapping[str, TagValue] | None = None,
        partitioner: Partitioner | None = None,
    ) -> Coroutine[Any, Any, None]:
        """Add messages, as `Client.send` does, up to 10,000 for one topic. Raises `TopicNotFound`, and as `insert`
        does."""
        return self._add(self._add_messages(topic, messages_of(messages, key, tags), partitioner))

    @checked
    def acknowledge(self, member: TopicMember, delivered: RecordPack) -> Coroutine[Any, Any, None]:
        """Acknowledge a pack with the commit, as `RecordMember.acknowledge` does by itself: the group's position moves
        where the transaction is written, and only there. `member` is that of `Client.subscribe`, of the same log; a
        transaction takes up to 64 packs, of one member. Raises `InvalidRequest`, and `Unsupported` (`capability`
        "atomic_acks") for a member of groups that an adapter has in a way of its own."""
        return self._add(self._add_input(member, delivered))

    def _add(self, adding: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None]:
        """`adding`, counted from this call on: what is never awaited is not left out unnoticed."""
        self._adding += 1
        return self._added(adding)

    async def _added(self, adding: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._order:
                await adding
        finally:
            self._adding -= 1

    async def _add_rows(self, name: str, rows: Callable[[CollectionSchema], Rows], op: str | None) -> None:
        self._check_open()
        # all rows are for one version of it
        collection = self._buffer.collection(name) or await self._calls.collection(name, self._deadline_s)
        batch = to_batch(rows(collection.schema), collection.schema, op=op)
        self._check_open()
        self._buffer.add_rows(collection, batch)

    async def _add_messages(self, name: str, messages: Sequence[Message], partitioner: Partitioner | None) -> None:
        self._check_open()
        topic = self._buffer.topic(name) or await self._calls.topic(name, self._deadline_s)
        self._check_open()
        self._buffer.add_messages(topic, self._calls.place(topic, messages, partitioner))

    async def _add_input(self, member: TopicMember, delivered: RecordPack) -> None:
        self._check_open()
        self._inputs.add(member, delivered)

    def _check_open(self) -> None:
        if self._state != "open" or self._committing.locked():
            state = "being committed" if self._committing.locked() else self._state
            raise InvalidRequest(f"the transaction is {state}, and takes no more: begin another one")

    # ---- its end ----------------------------------------------------------------------------------------------------

    async def commit(self) -> TransactionResult:
        """Write all of it, and return once it is durable; again it returns the same. Raises, with nothing written,
        what `Client.insert` and `Client.send` raise: `CollectionNotFound`, `TopicNotFound` and `InvalidRows` where one
        was dropped or changed since the client described it (begin anew: that describes it again), `Overloaded`, after
        which it may be called again. Where it acknowledges what a member got, it raises `Fenced`, with nothing written,
        once another member may have that, `InvalidRequest` where it was acknowledged before, and `Overloaded` (`limit`
        "decided_positions") for positions of too many groups.

        After `DeadlineExceeded`, or an error with the field `outcome_unknown`, it may be written, all of it: called
        again the commit is the same write, so it happens once, and tells. Of a transaction of nothing but
        acknowledgements it stays unknown: `OutcomeUnknown`, and the member gets again what is not stored."""
        async with self._committing:
            if self._result is None:
                self._check_complete()
                ts = await self._write() if self._buffer.size else await self._acknowledge_alone()
                self._result = TransactionResult(ts, self._buffer.rows, self._buffer.messages)
            return self._result

    def _check_complete(self) -> None:
        if self._rolled_back:
            raise InvalidRequest("the transaction is rolled back: begin another one")
        if self._adding:
            raise InvalidRequest(f"{self._adding} calls of the transaction were not awaited, or are not done")

    async def _acknowledge_alone(self) -> int:
        """Acknowledge, where it writes nothing. An unknown outcome stays one: no number tells the log that it is the
        same, and the position is the next member's, too."""
        if self._alone_unknown:
            raise OutcomeUnknown(
                "whether the acknowledgements of this transaction, which writes nothing, are stored is not known: the "
                "member gets again what is not",
                outcome_unknown=True,
            )
        self._alone_unknown = True
        over = f"no answer to the acknowledgements within {self._deadline_s:g} s"
        try:
            async with _limited(self._deadline_s, DeadlineExceeded(over, outcome_unknown=True)):
                await self._inputs.commit_alone()
        except TidewalError as error:
            self._alone_unknown = _may_be_written(error)
            raise
        self._alone_unknown = False
        return 0

    async def _write(self) -> int:
        first = self._number is None
        try:
            if self._number is not None:
                return await self._calls.commit(self._buffer, self._acks, self._number, False, self._deadline_s)
            async with self._calls.in_turn(self._buffer.topics, self._deadline_s):
                return await self._write_with_inputs()
        except TidewalError as error:
            if is_never_written(error):
                self._number = None
                if isinstance(error, TopicEpochEnded):
                    raise TopicNotFound(error.message, topic=error.topic) from None
                raise
            if not first:  # says nothing of the attempts before
                raise of_unknown_outcome(error) from None
            if not _may_be_written(error):
                self._number = None
            raise

    async def _write_with_inputs(self) -> int:
        """Write it for the first time; letters and what a node is asked about positions come before, in the same time.
        The write keeps its deadline itself."""
        over = DeadlineExceeded(
            f"within {self._deadline_s:g} s letters of bad records were not written, or no node has fenced the group's "
            "position, and nothing of the transaction is written: call `commit` again",
            outcome_unknown=False,
        )
        async with _limited(self._deadline_s, over) as limit:
            return await self._inputs.commit_with(partial(self._write_first, limit))

    async def _write_first(self, limit: asyncio.Timeout, acks: GroupAcks | None) -> int:
        limit.reschedule(None)
        self._acks, self._number = acks, self._calls.next_number()
        try:
            return await self._calls.commit(self._buffer, acks, self._number, True, self._deadline_s)
        except TidewalError as error:
            raise (of_unknown_outcome(error) if _may_be_written(error) else error) from None  # the member must know

    def rollback(self) -> None:
        """Write nothing of it, and acknowledge nothing: `redeliver` of the member has a pack delivered again. Raises
        `InvalidRequest` where it is committed, or may be."""
        if self._state == "open" and not self._committing.locked():
            self._rolled_back = True
            self._buffer, self._inputs = TransactionBuffer(), TransactionInputs()
        elif not self._rolled_back:
            raise InvalidRequest("the transaction was committed, or may have been: call `commit` again to learn that")


@asynccontextmanager
async def _limited(seconds: float, over: DeadlineExceeded) -> AsyncGenerator[asyncio.Timeout]:
    """The block has so many seconds, or `over` is raised."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise over from None


def _may_be_written(error: TidewalError) -> bool:
    unknown = isinstance(error, DeadlineExceeded | OutcomeUnknown)
    return bool(error.fields.get("outcome_unknown", unknown))
