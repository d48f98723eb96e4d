"""The public client: collections, writes and queries. It reaches the roles through the log, as they reach each
other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgpack
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..runtime.arguments import checked
from ..runtime.catalog.catalog import Collection
from ..runtime.catalog.topics import RETENTION_S, Topic
from ..runtime.cluster.roles import ROLE_NAMES
from ..runtime.errors import (
    CollectionNotFound,
    DeadlineExceeded,
    InvalidRequest,
    InvalidRows,
    TopicEpochEnded,
    TopicNotFound,
)
from ..runtime.groups.coordinator_client import GroupAcks
from ..runtime.groups.group_filter import check_group_filter
from ..runtime.log.names import Names
from ..runtime.log.record import TagValue
from ..runtime.log.wal import From, Wal
from ..runtime.rows.row_codec import encode_rows
from ..runtime.rows.schema import CollectionSchema
from ..runtime.rpc.client import RpcClient
from ..runtime.rpc.protocol import Params, Reply
from .deadlines import in_s, left_s
from .described import Described, WritePlace
from .keys import Keys, listed_keys
from .numbered_writes import NumberedWrites
from .querynode.filter_params import FilterParams, parameters_named, with_values
from .querynode.query import COUNT_COLUMN, QueryRequest, SearchRequest
from .querynode.search import Metric
from .querynode.view import OrderBy, check_limit
from .rows import Rows, to_batch
from .topics.delayed_sends import due_params
from .topics.member import TopicMember
from .topics.messages import Message, MessageBodies, Partitioner, SendResult
from .topics.requests import TopicReply, ask, partition_of_request
from .topics.retry_topics import check_no_retry_topic
from .topics.sender import messages_of
from .topics.topic_calls import TopicCalls
from .transactions.buffer import TransactionBuffer
from .transactions.transaction import Transaction, TransactionCalls

Consistency: TypeAlias = Literal["strong", "session", "bounded", "eventually"]
"""How fresh the answer to a question must be, see `Client`."""

DEADLINE_S = 30.0
AGAIN_S = 0.1  # between two questions whether a collection is loaded
FLUSH_DEADLINE_S = 300.0
LOAD_DEADLINE_S = 300.0
READY_DEADLINE_S = 300.0
STATUS_DEADLINE_S = 5.0
PAGE_ROWS = 1_000  # of an iterator
PARTITIONS = 8  # of a topic


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A write that is durable: its timestamp in the log, and its rows."""

    ts: int
    rows: int


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows, and how fresh they are: everything up to `tsafe` is in them; that was `age_ms` before the log's present.
    `waited_ms` went into waiting for the freshness asked for, `took_ms` into the query itself."""

    table: pa.Table
    tsafe: int
    age_ms: float
    waited_ms: float
    took_ms: float


@dataclass(frozen=True, slots=True)
class LoadState:
    """Whether queries of a collection can be answered: "Loaded", "Loading" or "NotLoad", as Milvus calls it. `replicas`
    is how many QueryNodes are to have each vchannel in memory, as far as there are so many; `vchannels` names those
    that have it up to now."""

    state: Literal["Loaded", "Loading", "NotLoad"]
    replicas: int
    vchannels: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


@dataclass(frozen=True, slots=True)
class Stats:
    """Row versions ever applied, by operation, and the current number of rows, as of `tsafe`."""

    versions: Mapping[str, int]
    rows: int
    tsafe: int


Vector: TypeAlias = Annotated[
    Sequence[float] | npt.NDArray[np.floating[Any] | np.integer[Any]], "one vector, a list of numbers"
]
"""One vector: a list of numbers or an array of one dimension."""
_RowsFor: TypeAlias = Callable[[CollectionSchema], Rows]


class Client:
    """An async context manager. Many calls may run at once; writes are appended in the order in which they are called,
    whichever nodes fail meanwhile. One whose deadline has passed is not waited for by later ones.

    `wal` is the open log, `prefix` that of the cluster's channels. `name` is the producer's: it must never have been
    used before, because writes are deduplicated by it. By default it is random.

    Every call raises the typed error of the role that refused it (`runtime/errors.py`): `Overloaded` and other
    retryable ones may be tried again unchanged. A write of unknown outcome is repeated under the same number, so it
    happens once; after `DeadlineExceeded`, or an error with the field `outcome_unknown`, it may have happened: read
    before writing again. After any other error it has not. `deadline_s` of a call is in seconds; when it passes without
    a reply, the call raises `DeadlineExceeded`.

    Consistency of a query: `strong` sees every write acknowledged before it began, anywhere; `session` this
    client's own writes; `bounded` (the default) nothing older than `common.gracefulTime` (5 s); `eventually`
    waits only for what was there when the node started. With `at` a query reads the rows as they were at that time
    instead: the `ts` of a write, the time of a cut, or the `tsafe` of another answer, so that several queries see one
    state. Of the last 10 s (`queryNode.retentionDuration`) memory has all rows; older times are read from the
    collection's table, which takes as long as loading it.
    """

    @checked
    def __init__(self, wal: Wal, *, prefix: str = Names().prefix, name: str = "") -> None:
        self._wal, self._names = wal, Names(prefix)
        self._rpc = RpcClient(wal, self._names, name=name)
        self._writes = NumberedWrites(self._rpc)
        self._collections = Described(self._describe)
        self._topics = TopicCalls(wal, self._names, self._rpc, self._writes)
        self._session: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Client {self._rpc.name!r}>"

    async def __aenter__(self) -> Client:
        await self._rpc.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @checked
    async def ready(self, *, node: str = "", deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until a Proxy accepts writes: that of any node, or of the one that the catalog knows as `node`."""
        params = {"to": node} if node else {}
        await self._rpc.call("proxy", "ready", params, deadline_s=deadline_s)

    @checked
    async def status(self, *, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Params | None]:
        """What each role says of its node (`node_status`), by the role's name; None for one that did not answer within
        `deadline_s`."""

        async def ask(role: str) -> Params | None:
            try:
                return (await self._rpc.call(role, "status", deadline_s=deadline_s)).values
            except DeadlineExceeded:
                return None

        return dict(zip(ROLE_NAMES, await asyncio.gather(*map(ask, ROLE_NAMES)), strict=True))

    async def close(self) -> None:
        """End the calls that wait for a reply, and drop the reply channel."""
        await self._rpc.close()

    # ---- collections ------------------------------------------------------------------------------------------------

    @checked
    async def create_collection(
        self,
        schema: CollectionSchema,
        *,
        shards: int = 2,
        replicas: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Collection:
        """Create a collection of `shards` shards, or find it there with the same schema and shards. Raises
        `CollectionExists` where either differs. `replicas` QueryNodes get a new one into memory, as far as there are so
        many (by default `queryNode.replicas`, 2); with 0 it is to be loaded before it is queried."""
        params = {"schema": schema.to_wire(), "shards": shards, "replicas": replicas}
        reply = await self._rpc.call("mixcoord", "create_collection", params, deadline_s=deadline_s)
        return self._collections.know(Collection.from_wire(reply.values["collection"]))

    @checked
    async def drop_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Remove a collection with its rows, its tables and its hold on the log. Raises `CollectionNotFound`."""
        found = await self._describe(collection, deadline_s)  # not a later collection of that name
        await self._rpc.call("mixcoord", "drop_collection", {"id": found.id}, deadline_s=deadline_s)
        self._collections.forget(found)
        self._session.pop(collection, None)

    @checked
    async def load_collection(
        self, collection: str, *, replicas: int | None = None, deadline_s: float = LOAD_DEADLINE_S
    ) -> None:
        """Have `replicas` QueryNodes get a collection into memory, as far as there are so many, and wait until its
        queries can be answered. By default as many as it has; after a release, as many as a new one gets. Raises
        `CollectionNotFound`, what is wrong with its tables, and `DeadlineExceeded`: loading goes on then."""
        until = in_s(deadline_s)
        params = {"collection": collection, "replicas": replicas}
        await self._rpc.call("mixcoord", "load_collection", params, deadline_s=deadline_s)
        while (await self.load_state(collection, deadline_s=deadline_s)).state != "Loaded":
            if not left_s(until):
                raise DeadlineExceeded(f"{collection} was not loaded within {deadline_s:g} s; loading goes on")
            await asyncio.sleep(AGAIN_S)

    @checked
    async def release_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Let no QueryNode have a collection in memory: its queries raise `CollectionNotLoaded` until it is loaded
        again. It is written and stored as before. Raises `CollectionNotFound`."""
        await self._rpc.call("mixcoord", "release_collection", {"collection": collection}, deadline_s=deadline_s)

    @checked
    async def load_state(self, collection: str, *, deadline_s: float = DEADLINE_S) -> LoadState:
        """Whether queries of a collection can be answered. Raises `CollectionNotFound`, and what is wrong with its
        tables."""
        params = {"collection": collection}
        values = (await self._rpc.call("querynode", "load_state", params, deadline_s=deadline_s)).values
        replicas, vchannels = values["replicas"], values["vchannels"]
        state = ("Loaded" if all(vchannels.values()) else "Loading") if replicas else "NotLoad"
        return LoadState(state, replicas, vchannels)

    @checked
    async def describe_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> Collection:
        """The collection as the catalog has it. Raises `CollectionNotFound`."""
        return await self._describe(collection, deadline_s)

    async def _describe(self, collection: str, deadline_s: float) -> Collection:
        params = {"collection": collection}
        reply = await self._rpc.call("mixcoord", "describe_collection", params, deadline_s=deadline_s)
        return self._collections.know(Collection.from_wire(reply.values["collection"]))

    async def list_collections(self) -> list[str]:
        """The names of all collections, sorted."""
        return list((await self._rpc.call("mixcoord", "list_collections")).values["collections"])

    # ---- topics -----------------------------------------------------------------------------------------------------

    @checked
    async def create_topic(
        self,
        name: str,
        partitions: int = PARTITIONS,
        *,
        retention_s: float | None = RETENTION_S,
        retention_bytes: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Topic:
        """Create a topic, or find it there with the same arguments. Raises `TopicExists` where one differs. Each
        partition keeps its messages for `retention_s` seconds, and `retention_bytes` of them; None keeps all. A topic
        and a collection may have one name. Raises `InvalidRequest` for a name that is none or that of a group's retry
        topic (`….retry.…`), over the limits of topics and partitions, and where not all nodes know topics yet."""
        check_no_retry_topic(name)
        return await self._topics.create(name, partitions, retention_s, retention_bytes, deadline_s)

    @checked
    async def alter_topic(
        self, topic: str, partitions: int, *, hashed: bool = True, deadline_s: float = DEADLINE_S
    ) -> Topic:
        """Let a topic have so many partitions from now on, more or fewer, and wait until these take messages. Sends and
        members go on meanwhile: messages of one key keep their order, and what the partitions before have is read
        before what follows it. A topic that has so many is fine. `hashed` is false where any sender has a partitioner
        of its own: then each new partition is read only when all before are read to their ends.

        Raises `TopicNotFound`, `InvalidRequest` over the limit, for a topic that has messages that are due later, and
        where another call alters the topic at the same time, and `DeadlineExceeded` where an owner is away: it goes on,
        and the call may be repeated."""
        return await self._topics.alter(topic, partitions, hashed, deadline_s)

    @checked
    async def drop_topic(self, topic: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Remove a topic with its messages. Members that read it end with `TopicNotFound`. Raises `TopicNotFound`, and
        `DeadlineExceeded` where an owner is away: it is removed later."""
        await self._topics.drop(topic, deadline_s)

    @checked
    async def describe_topic(self, topic: str, *, deadline_s: float = DEADLINE_S) -> Topic:
        """The topic as the catalog has it. Raises `TopicNotFound`."""
        return await self._topics.describe(topic, deadline_s)

    async def list_topics(self) -> list[Topic]:
        """All topics, by name."""
        return await self._topics.list()

    @checked
    async def send(
        self,
        topic: str,
        messages: MessageBodies,
        *,
        key: bytes | str | None = None,
        tags: Mapping[str, TagValue] | None = None,
        partitioner: Partitioner | None = None,
        deliver_at: datetime | None = None,
        deliver_after_s: float | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> SendResult:
        """Send messages, up to 10,000 at once, and return when they are durable. `key` and `tags` are those of all that
        are bodies alone.

        A message with a key goes to partition `hash(key) % partitions`, where the hash is that of varchar keys of
        collections; those of one call without a key go to one partition, by turns. A `partitioner` says for each
        message to which of so many partitions it goes. Messages of one client are in a partition in the order of its
        calls, and those of one call all or none; where the topic is altered meanwhile a part may be there when an error
        is raised, which has `outcome_unknown` then.

        With `deliver_at`, a moment up to 366 days ahead, or `deliver_after_s`, from the arrival at a node on, they are
        due later: each is put into its partition then, never before, once, in the order of due times, and where these
        are equal in that of calls. Until then it can be cancelled by its id (`SendResult.ids`). Each is one of its own;
        of a call that raises an error with `outcome_unknown` some partitions may have theirs. The first of a topic
        waits until an `alter_topic` that is under way is done.

        Raises `TopicNotFound`, `MessageTooLarge`, and as `insert` does."""
        due = due_params(deliver_at, deliver_after_s)
        return await self._topics.send(topic, messages_of(messages, key, tags), partitioner, due, deadline_s)

    @checked
    async def ask(
        self,
        topic: str,
        message: bytes | str,
        *,
        key: bytes | str | None = None,
        tags: Mapping[str, TagValue] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> TopicReply:
        """Send a request over a topic and return the reply of the member that serves it (by `serve`, or by
        `TopicMember.reply`).

        The request is a message with `key` and `tags`, durable as any, and served at least once: it is sent again under
        the same id (`TopicRequest.id`) where no reply comes, after 5 s first. Raises the error that the server replies
        with, `DeadlineExceeded` when no reply came within `deadline_s` seconds (the request may be served all the
        same), and what `send` raises."""

        def send(number: int, more: Mapping[str, TagValue], left_s: float) -> Awaitable[SendResult]:
            place = None if key is not None else partial(partition_of_request, number)
            return self.send(topic, Message(message, key, more), partitioner=place, deadline_s=left_s)

        return await ask(self._rpc, topic, send, dict(tags or {}), deadline_s)

    @checked
    async def subscribe(
        self,
        topics: str | Sequence[str],
        group: str,
        *,
        start: From = From.EARLIEST,
        where: str | None = None,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
        ack_timeout_s: float | None = None,
        retry_topic: bool = False,
        deadline_s: float = DEADLINE_S,
    ) -> TopicMember:
        """Become a member of the consumer group `group`, which shares the partitions of `topics` among its members. A
        group that is new to a topic begins at `start`, and in partitions that the topic gets later with the first
        message, also where no member was there meanwhile. `where` is its filter over the tags of messages, as that of
        `RecordMember`; `reset_to`, `session_timeout_s` and `ack_timeout_s` are those of `Wal.join`.

        With `retry_topic` what fails at one member, or is given back (`TopicMember.nack`), goes to a topic of the group
        (`<topic>.retry.<group>`, for each of `topics`), and is tried again from there: it holds up nothing, and is
        passed by later messages of its key. The topic is made if it is missing. All members of a group do the same.
        Raises `TopicNotFound`, `InvalidFilter`, `InvalidRequest` where a retry topic cannot be called so, and
        `Unsupported` on a log without groups."""
        check_group_filter(where)
        named = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
        if not named:
            raise InvalidRequest("a member reads one topic at least", argument="topics")
        return await self._topics.subscribe(
            named, group, start, where, reset_to, session_timeout_s, ack_timeout_s, retry_topic, deadline_s
        )

    @checked
    async def cancel(self, topic: str, id: str, *, deadline_s: float = DEADLINE_S) -> bool:
        """Cancel a message that is due later, by one of `SendResult.ids`. True: it is not delivered, and that is
        durable. False: it was due already; each call is judged for itself, so False from a later one does not say that
        an earlier one came too late. A request that is repeated in the call, as its answer was lost, has one answer.
        Raises `TopicNotFound`, `InvalidRequest` for an id that is none of the topic, or of an epoch of it that has
        gone, and as `send` does."""
        return await self._topics.cancel(topic, id, deadline_s)

    # ---- writes -----------------------------------------------------------------------------------------------------

    @checked
    async def insert(self, collection: str, rows: Rows, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Add rows. A row whose key exists replaces it, as an upsert does: keys are not looked up before a write."""
        return await self._write(collection, lambda _: rows, "insert", deadline_s)

    @checked
    async def upsert(self, collection: str, rows: Rows, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Add rows, or replace those of the same key as a whole."""
        return await self._write(collection, lambda _: rows, "upsert", deadline_s)

    @checked
    async def delete(self, collection: str, keys: Keys, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Remove the rows of `keys`; keys that are not there are no error."""
        listed = listed_keys(keys)
        return await self._write(collection, lambda schema: {schema.primary_key: listed}, "delete", deadline_s)

    @checked
    async def apply(self, collection: str, rows: Rows, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Write a mixed batch: its column `_op` says `insert`, `upsert` or `delete` for each row; a delete needs only
        the key. All rows get one timestamp, are seen together, and apply in their order."""
        return await self._write(collection, lambda _: rows, None, deadline_s)

    @checked
    def transaction(self, *, deadline_s: float = DEADLINE_S) -> Transaction:
        """Begin a transaction over collections and topics: `async with client.transaction() as t`, in it
        `await t.insert(collection, rows)`, `await t.send(topic, messages)`, and `await t.acknowledge(member, pack)` of
        what it was made from. Its commit is a write of this client among the others: behind those that were called
        before, and with one number, so that it happens once. `deadline_s` is for its commit, and for each call that
        describes a collection or topic."""
        topics = self._topics
        calls = TransactionCalls(
            self._collections.find, topics.find, topics.place, topics.in_turn, self._writes.next_number, self._commit
        )
        return Transaction(calls, deadline_s)

    async def _commit(
        self, buffer: TransactionBuffer, acks: GroupAcks | None, number: int, first: bool, deadline_s: float
    ) -> int:
        """Have all of `buffer` and `acks` written under that number of this client; returns the timestamp. One that is
        sent again later has its place already: no write waits for it any more."""
        parts, body = buffer.request()
        params: Params = {"parts": [list(part) for part in parts]}
        if acks is not None:
            params = {**params, "acks": acks.to_wire()}
        send = self._writes.send_as if first else self._writes.send_again
        try:
            ts: int = (await send(number, "commit", params, body, deadline_s)).values["ts"]
        except (CollectionNotFound, TopicNotFound, TopicEpochEnded, InvalidRows):
            for collection in buffer.collections:
                self._collections.forget(collection)
            for topic in buffer.topics:
                self._topics.forget(topic)
            raise
        for collection in buffer.collections:
            self._session[collection.name] = max(ts, self._session.get(collection.name, 0))
        return ts

    async def _write(self, name: str, rows: _RowsFor, op: str | None, deadline_s: float) -> WriteResult:
        until = in_s(deadline_s)
        place = self._collections.place(name)
        known = place.at_once
        found = known or await place.in_turn(until)
        try:
            return await self._write_to(place, found, rows, op, until)
        except (CollectionNotFound, InvalidRows) as error:
            if known is None:
                raise
            self._collections.forget(known)
            found = await place.in_turn(until)
            if found == known or (found.id == known.id and error.fields.get("outcome_unknown")):
                raise
        return await self._write_to(place, found, rows, op, until)

    async def _write_to(
        self, place: WritePlace[Collection], collection: Collection, rows: _RowsFor, op: str | None, until: float
    ) -> WriteResult:
        schema = collection.schema
        with place.under_way(collection):
            body = encode_rows(to_batch(rows(schema), schema, op=op))
            params = {"collection": collection.name, "id": collection.id, "schema_version": schema.version}
            reply = await self._writes.send("write", params, body, left_s(until))
        written = WriteResult(reply.values["ts"], reply.values["rows"])
        self._session[collection.name] = max(written.ts, self._session.get(collection.name, 0))
        return written

    @checked
    async def flush(self, collection: str, *, deadline_s: float = FLUSH_DEADLINE_S) -> int:
        """Wait until everything acknowledged before this call is in the collection's table; returns the timestamp up
        to which it is. Raises `CorruptLog`, `FormatTooNew` or `InvalidSchema` where that table cannot be read: what is
        acknowledged stays in the log, and is stored when the table is repaired; and `PositionLost` where the log has
        lost rows that are not in the table."""
        reply = await self._rpc.call("proxy", "flush", {"collection": collection}, deadline_s=deadline_s)
        return int(reply.values["ts"])

    @checked
    async def compact(self, collection: str, *, deadline_s: float = FLUSH_DEADLINE_S) -> Params:
        """Bring `<collection>/current` forward to what is flushed; returns its `time`, its `rows`, and the number of
        keys `merged`."""
        return (await self._rpc.call("datanode", "compact", {"collection": collection}, deadline_s=deadline_s)).values

    @checked
    async def cut(self, collection: str) -> int:
        """Store a cut at the present time of the log, which sees every write acknowledged before; returns its time."""
        return int((await self._rpc.call("mixcoord", "cut", {"collection": collection})).values["time"])

    # ---- queries ----------------------------------------------------------------------------------------------------

    @checked
    async def query(
        self,
        collection: str,
        filter: str | None = None,
        *,
        filter_params: FilterParams | None = None,
        columns: Sequence[str] | None = None,
        order_by: Sequence[tuple[str, bool]] = (),
        limit: int | None = None,
        consistency: Consistency = "bounded",
        at: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> QueryResult:
        """The rows for which `filter` (Milvus' syntax) holds. `order_by` lists (column, ascending).

        `filter_params` are the values of the filter's `{names}`: `"page == {page}", filter_params={"page": page}`. Give
        what comes from others in this way; as a part of the filter it could change what that says. Raises
        `InvalidFilter`, with `parameter` where one has no value, is not used, or cannot be a value."""
        names = None if columns is None else tuple(columns)
        ordered = tuple(OrderBy(*each) for each in order_by)
        asked = QueryRequest(with_values(filter, filter_params), names, ordered, limit)
        with parameters_named(filter, filter_params):
            return await self._ask("query", collection, consistency, deadline_s, {"request": asked.to_wire(), "at": at})

    @checked
    def query_iterator(
        self,
        collection: str,
        filter: str | None = None,
        *,
        filter_params: FilterParams | None = None,
        columns: Sequence[str] | None = None,
        batch_size: int = PAGE_ROWS,
        limit: int | None = None,
        consistency: Consistency = "bounded",
        at: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> AsyncIterator[QueryResult]:
        """The rows for which `filter` holds, in pages of `batch_size` and in the order of their keys, `limit` at most:
        `async for page in client.query_iterator(…)`. All pages are of one time, that of the first (`tsafe`) or `at`,
        whatever is written and whichever nodes fail meanwhile; no node remembers the iterator. `deadline_s` is for each
        page. The other parameters and the errors are those of `query`."""
        if batch_size < 1:
            raise InvalidRequest(f"a page has one row at least, not {batch_size}")
        check_limit(limit)
        asked = with_values(filter, filter_params)

        async def pages() -> AsyncGenerator[QueryResult]:
            # Not as it was known: others may have created it anew, and rows in the order of another column than the key
            # that it has now would be left out.
            schema = (await self.describe_collection(collection, deadline_s=deadline_s)).schema
            key, left, after, time = schema.primary_key, limit, asked, at
            fetched = None if columns is None else list(dict.fromkeys([*columns, key]))
            while left is None or left > 0:
                rows = batch_size if left is None else min(batch_size, left)
                with parameters_named(filter, filter_params):
                    page = await self.query(
                        collection,
                        after,
                        columns=fetched,
                        order_by=[(key, True)],
                        limit=rows,
                        consistency=consistency,
                        at=time,
                        deadline_s=deadline_s,
                    )
                found, time = page.table.num_rows, page.tsafe
                if found:
                    yield page if columns is None else replace(page, table=page.table.select(list(columns)))
                if found < rows:
                    return
                behind = with_values(f"{key} > {{after}}", {"after": page.table.column(key)[-1].as_py()})
                after = behind if asked is None else f"({asked}) and {behind}"
                left = None if left is None else left - found

        return pages()

    @checked
    async def count(
        self,
        collection: str,
        filter: str | None = None,
        *,
        filter_params: FilterParams | None = None,
        consistency: Consistency = "bounded",
        at: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> int:
        """How many rows there are, or for how many `filter` holds, with `filter_params` as for `query`."""
        asked = QueryRequest(with_values(filter, filter_params), count=True)
        with parameters_named(filter, filter_params):
            answer = await self._ask(
                "query", collection, consistency, deadline_s, {"request": asked.to_wire(), "at": at}
            )
        return cast(int, answer.table.column(COUNT_COLUMN)[0].as_py())

    @checked
    async def get(
        self,
        collection: str,
        keys: Keys,
        *,
        columns: Sequence[str] | None = None,
        consistency: Consistency = "bounded",
        at: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> QueryResult:
        """The rows of `keys`; a key that is not there has no row."""
        params = {"columns": None if columns is None else list(columns), "at": at}
        try:
            body = cast(bytes, msgpack.packb(listed_keys(keys)))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"keys are integers or strings: {error}") from None
        return await self._ask("get", collection, consistency, deadline_s, params, body)

    @checked
    async def search(
        self,
        collection: str,
        column: str,
        vector: Vector,
        *,
        metric: Metric = "COSINE",
        top_k: int = 10,
        filter: str | None = None,
        filter_params: FilterParams | None = None,
        columns: Sequence[str] | None = None,
        consistency: Consistency = "bounded",
        at: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> QueryResult:
        """The `top_k` rows nearest to `vector` among those for which `filter` holds, the nearest first, with a column
        of their distances. Exact. `filter_params` are as for `query`."""
        names = None if columns is None else tuple(columns)
        try:
            numbers = tuple(float(x) for x in vector)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"a search takes one vector, a list of numbers: {error}") from None
        asked = SearchRequest(column, numbers, metric, top_k, with_values(filter, filter_params), names)
        with parameters_named(filter, filter_params):
            return await self._ask("query", collection, consistency, deadline_s, {"request": asked.to_wire(), "at": at})

    @checked
    async def stats(self, collection: str, *, consistency: Consistency = "bounded") -> Stats:
        """How many row versions were applied, and how many rows there are."""
        reply = await self._call("stats", collection, consistency, DEADLINE_S, {})
        return Stats(reply.values["versions"], reply.values["rows"], reply.values["tsafe"])

    async def _ask(
        self, method: str, collection: str, consistency: str, deadline_s: float, params: Params, body: bytes = b""
    ) -> QueryResult:
        reply = await self._call(method, collection, consistency, deadline_s, params, body)
        with pa.ipc.open_stream(pa.py_buffer(reply.body)) as reader:
            table = reader.read_all()
        values: Mapping[str, Any] = reply.values
        return QueryResult(table, values["tsafe"], values["age_ms"], values["waited_ms"], values["took_ms"])

    async def _call(
        self, method: str, collection: str, consistency: str, deadline_s: float, params: Params, body: bytes = b""
    ) -> Reply:
        full = {
            **params,
            "collection": collection,
            "consistency": consistency,
            "session_ts": self._session.get(collection, 0),
        }
        return await self._rpc.call("querynode", method, full, body, deadline_s=deadline_s)
