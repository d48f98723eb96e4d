"""The public client: collections, writes and queries. It reaches the roles through the log, as they reach each
other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Literal, TypeAlias, cast
from weakref import WeakValueDictionary

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
    TidewalError,
    TopicEpochEnded,
    TopicNotFound,
    of_unknown_outcome,
)
from ..runtime.groups.group_filter import check_group_filter
from ..runtime.log.names import Names
from ..runtime.log.record import TagValue
from ..runtime.log.wal import From, Payload, Wal
from ..runtime.rows.row_codec import encode_rows
from ..runtime.rows.schema import CollectionSchema
from ..runtime.rpc.client import RpcClient
from ..runtime.rpc.protocol import Params, Reply
from .keys import Keys, listed_keys
from .querynode.filter_params import FilterParams, parameters_named, with_values
from .querynode.query import COUNT_COLUMN, QueryRequest, SearchRequest
from .querynode.search import Metric
from .querynode.view import OrderBy, check_limit
from .rows import Rows, to_batch
from .topics.delayed_sends import cancel_delayed, due_params, send_delayed
from .topics.group_start import start_of_group
from .topics.member import TopicMember
from .topics.messages import Message, MessageBodies, Partitioner, PlacedMessage, SendResult, pack_messages
from .topics.requests import TopicReply, ask, partition_of_request
from .topics.send_turns import SendTurns
from .topics.sender import Sending, TopicSender, messages_of
from .transactions.buffer import TransactionBuffer
from .transactions.transaction import Transaction, TransactionCalls

Consistency: TypeAlias = Literal["strong", "session", "bounded", "eventually"]
"""How fresh the answer to a question must be, see `Client`."""

DEADLINE_S = 30.0
AGAIN_S = 0.1  # between two attempts of a write of unknown outcome
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
        self._pseqs = itertools.count(1)
        self._writing: dict[int, None] = {}  # the numbers of writes under way, in order
        self._collections: dict[str, Collection] = {}
        self._topics: dict[str, Topic] = {}
        self._sender = TopicSender(self._rpc.name)
        self._sends = itertools.count(1)  # in the order of calls
        self._send_turns = WeakValueDictionary[str, SendTurns]()  # by topic, while sends to it are under way
        self._session: dict[str, int] = {}
        self._describing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # while writes wait for that

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
        return self._know(Collection.from_wire(reply.values["collection"]))

    @checked
    async def drop_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Remove a collection with its rows, its tables and its hold on the log. Raises `CollectionNotFound`."""
        params = {
            "id": (await self.describe_collection(collection, deadline_s=deadline_s)).id
        }  # not a later collection of that name
        await self._rpc.call("mixcoord", "drop_collection", params, deadline_s=deadline_s)
        self._collections.pop(collection, None)
        self._session.pop(collection, None)

    @checked
    async def load_collection(
        self, collection: str, *, replicas: int | None = None, deadline_s: float = LOAD_DEADLINE_S
    ) -> None:
        """Have `replicas` QueryNodes get a collection into memory, as far as there are so many, and wait until its
        queries can be answered. By default as many as it has; after a release, as many as a new one gets. Raises
        `CollectionNotFound`, what is wrong with its tables, and `DeadlineExceeded`: loading goes on then."""
        end = asyncio.get_running_loop().time() + deadline_s
        params = {"collection": collection, "replicas": replicas}
        await self._rpc.call("mixcoord", "load_collection", params, deadline_s=deadline_s)
        while (await self.load_state(collection, deadline_s=deadline_s)).state != "Loaded":
            if asyncio.get_running_loop().time() > end:
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
        params = {"collection": collection}
        reply = await self._rpc.call("mixcoord", "describe_collection", params, deadline_s=deadline_s)
        return self._know(Collection.from_wire(reply.values["collection"]))

    async def list_collections(self) -> list[str]:
        """The names of all collections, sorted."""
        return list((await self._rpc.call("mixcoord", "list_collections")).values["collections"])

    def _know(self, collection: Collection) -> Collection:
        self._collections[collection.name] = collection
        return collection

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
        and a collection may have one name. Raises `InvalidRequest` for a name that is none, over the limits of topics
        and partitions, and where not all nodes know topics yet."""
        params = {
            "name": name,
            "partitions": partitions,
            "retention_s": None if retention_s is None else float(retention_s),
            "retention_bytes": retention_bytes,
        }
        reply = await self._rpc.call("mixcoord", "create_topic", params, deadline_s=deadline_s)
        return self._know_topic(Topic.from_wire(reply.values["topic"]))

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
        found = await self.describe_topic(topic, deadline_s=deadline_s)  # not a later topic of that name
        params = {"id": found.id, "epoch": found.epoch, "partitions": partitions, "hashed": hashed}
        reply = await self._rpc.call("mixcoord", "alter_topic", params, deadline_s=deadline_s)
        return self._know_topic(Topic.from_wire(reply.values["topic"]))

    @checked
    async def drop_topic(self, topic: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Remove a topic with its messages. Members that read it end with `TopicNotFound`. Raises `TopicNotFound`, and
        `DeadlineExceeded` where an owner is away: it is removed later."""
        found = await self.describe_topic(topic, deadline_s=deadline_s)  # not a later topic of that name
        await self._rpc.call("mixcoord", "drop_topic", {"id": found.id}, deadline_s=deadline_s)
        self._topics.pop(topic, None)
        self._sender.forget(found)

    @checked
    async def describe_topic(self, topic: str, *, deadline_s: float = DEADLINE_S) -> Topic:
        """The topic as the catalog has it. Raises `TopicNotFound`."""
        return (await self._described_topic(topic, deadline_s))[0]

    async def list_topics(self) -> list[Topic]:
        """All topics, by name."""
        reply = await self._rpc.call("mixcoord", "list_topics")
        return [Topic.from_wire(wire) for wire in reply.values["topics"]]

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
        waits until an `alter_topic` that is under way is done, and the topic keeps its number of partitions from then
        on.

        Raises `TopicNotFound`, `MessageTooLarge`, and as `insert` does."""
        due = due_params(deliver_at, deliver_after_s)
        sending = Sending(self._sender, messages_of(messages, key, tags), partitioner)
        turns, number = self._send_turns.setdefault(topic, SendTurns()), next(self._sends)
        until = _in_s(deadline_s)
        known = self._topics.get(topic) if turns.free else None
        with sending.partly_written():
            while True:
                found = known or await self._topic_in_turn(turns, number, topic, until)
                try:
                    return await self._send_in_turn(turns, number, found, sending, due, until)
                except TopicEpochEnded as error:
                    sending.divide(found, error)
                except TopicNotFound as error:
                    if known is None or sending.partitions or error.fields.get("outcome_unknown"):
                        raise
                known = None

    async def _send_in_turn(
        self, turns: SendTurns, number: int, topic: Topic, sending: Sending, due: Params, until: float
    ) -> SendResult:
        with turns.under_way(number, topic):
            to = topic
            try:
                if due:
                    to = await self._with_delays(topic, until)
                    return await send_delayed(to, sending.place(to), partial(self._send_to, to, due, until))
                reply = await self._send_to(topic, due, until, sending.place(topic))
                return sending.result(reply.values["ts"])
            except (TopicNotFound, TopicEpochEnded):
                turns.refused(topic)
                if self._topics.get(topic.name) in (topic, to):
                    del self._topics[topic.name]
                raise

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
        deadline_s: float = DEADLINE_S,
    ) -> TopicMember:
        """Become a member of the consumer group `group`, which shares the partitions of `topics` among its members. A
        group that is new to a topic begins at `start`, and in partitions that the topic gets later with the first
        message, also where no member was there meanwhile. `where` is its filter over the tags of messages, as that of
        `RecordMember`; `reset_to` and `session_timeout_s` are those of `Wal.join`. Raises `TopicNotFound`,
        `InvalidFilter`, and `Unsupported` on a log without groups."""
        check_group_filter(where)
        named = [topics] if isinstance(topics, str) else list(dict.fromkeys(topics))
        if not named:
            raise InvalidRequest("a member reads one topic at least", argument="topics")
        found = [(await self._described_topic(name, deadline_s))[0] for name in named]
        start = await start_of_group(self._wal, self._names, group, found, start, deadline_s)
        patterns = [self._names.topic_pattern(topic.id) for topic in found]
        member = await self._wal.join(
            group, patterns, start=start, reset_to=reset_to, session_timeout_s=session_timeout_s
        )
        fences: dict[str, Mapping[int, bytes]] = {}
        try:
            for name in named:  # read behind the start of the member: what a fence there hides is known then
                fences.update((await self._described_topic(name, deadline_s))[1])
        except BaseException:
            await member.aclose()
            raise
        describe = partial(self._described_topic, deadline_s=deadline_s)
        return TopicMember(self._wal, member, self._names, found, fences, describe, where)

    async def _described_topic(self, name: str, deadline_s: float) -> tuple[Topic, Mapping[str, Mapping[int, bytes]]]:
        values = (await self._rpc.call("mixcoord", "describe_topic", {"name": name}, deadline_s=deadline_s)).values
        fences = {channel: dict(each) for channel, each in values["fences"].items()}
        return self._know_topic(Topic.from_wire(values["topic"])), fences

    async def _topic_in_turn(self, turns: SendTurns, number: int, name: str, until: float) -> Topic:
        """The topic `name`, when it is this send's turn. The caller sends without waiting before."""
        try:
            async with asyncio.timeout_at(until), turns.turn(number):
                while True:
                    found = self._topics.get(name) or (await self._described_topic(name, _left_s(until)))[0]
                    if await turns.first(number):
                        return found
        except TimeoutError as error:
            if isinstance(error, TidewalError):
                raise
            raise DeadlineExceeded(f"{name} was not described in time, or earlier sends to it are not done") from None

    def _know_topic(self, topic: Topic) -> Topic:
        self._topics[topic.name] = topic
        turns = self._send_turns.get(topic.name)
        if turns is not None:
            turns.known(topic)
        return topic

    async def _send_to(self, topic: Topic, due: Params, until: float, placed: Sequence[PlacedMessage]) -> Reply:
        params = {**self._to(topic), **due}
        return await self._ask_to_write("send", params, pack_messages(placed), _left_s(until))

    def _to(self, topic: Topic) -> Params:
        """The parameters of what is written to a topic next."""
        described = {"topic": topic.name, "id": topic.id, "epoch": topic.epoch}
        return {**described, "producer": self._rpc.name, "pseq": next(self._pseqs)}

    async def _with_delays(self, topic: Topic, until: float) -> Topic:
        """The topic, once it takes messages that are due later."""
        if topic.delays:
            return topic
        reply = await self._rpc.call("mixcoord", "delay_topic", {"id": topic.id}, deadline_s=_left_s(until))
        return self._know_topic(Topic.from_wire(reply.values["topic"]))

    @checked
    async def cancel(self, topic: str, id: str, *, deadline_s: float = DEADLINE_S) -> bool:
        """Cancel a message that is due later, by one of `SendResult.ids`. True: it is not delivered, and that is
        durable. False: it was due already. Repeated it says what became of the message then: True where this, or an
        earlier one, came in time. Raises `TopicNotFound`, `InvalidRequest` for an id that is none of the topic, and as
        `send` does."""
        until = _in_s(deadline_s)

        async def ask_to_cancel(described: Topic, message: Params) -> bool:
            params = {**self._to(described), **message}
            return bool((await self._ask_to_write("cancel", params, b"", _left_s(until))).values["cancelled"])

        describe = partial(self.describe_topic, topic, deadline_s=deadline_s)
        return await cancel_delayed(id, self._topics.get(topic), describe, ask_to_cancel)

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
        `await t.insert(collection, rows)` and `await t.send(topic, messages)`. Its commit is a write of this client
        among the others: behind those that were called before, and with one number, so that it happens once.
        `deadline_s` is for its commit, and for each call that describes a collection or topic."""
        calls = TransactionCalls(
            self._known_collection,
            self._known_topic,
            self._sender.place,
            self._in_turn,
            lambda: next(self._pseqs),
            self._commit,
        )
        return Transaction(calls, deadline_s)

    async def _known_collection(self, name: str, deadline_s: float) -> Collection:
        return self._collections.get(name) or await self._described_in_turn(name, deadline_s)

    async def _known_topic(self, name: str, deadline_s: float) -> Topic:
        return self._topics.get(name) or (await self._described_topic(name, deadline_s))[0]

    @asynccontextmanager
    async def _in_turn(self, topics: Sequence[Topic], deadline_s: float) -> AsyncGenerator[None]:
        """The block writes to `topics` behind all that this client has sent to them before."""
        until = _in_s(deadline_s)
        numbered = [
            (topic, self._send_turns.setdefault(topic.name, SendTurns()), next(self._sends)) for topic in topics
        ]
        with ExitStack() as under_way:
            for topic, turns, number in numbered:
                if not turns.free:
                    await self._topic_in_turn(turns, number, topic.name, until)
                under_way.enter_context(turns.under_way(number, topic))
            yield

    async def _commit(self, buffer: TransactionBuffer, number: int, first: bool, deadline_s: float) -> int:
        """Have all of `buffer` written under that number of this client; returns the timestamp. One that is sent again
        later has its place already: no write waits for it any more."""
        parts, body = buffer.request()
        params = {"parts": [list(part) for part in parts], "producer": self._rpc.name, "pseq": number}
        ask = self._ask_to_write if first else self._ask_until_known
        try:
            ts: int = (await ask("commit", params, body, deadline_s)).values["ts"]
        except (CollectionNotFound, TopicNotFound, TopicEpochEnded, InvalidRows):
            for collection in buffer.collections:
                self._collections.pop(collection.name, None)
            for topic in buffer.topics:
                self._topics.pop(topic.name, None)
            raise
        for collection in buffer.collections:
            self._session[collection.name] = max(ts, self._session.get(collection.name, 0))
        return ts

    async def _write(self, name: str, rows: _RowsFor, op: str | None, deadline_s: float) -> WriteResult:
        known = self._collections.get(name)
        if known is not None and name not in self._describing:
            try:
                return await self._write_to(known, rows, op, deadline_s)
            except (CollectionNotFound, InvalidRows) as error:
                self._collections.pop(name, None)
                found = await self.describe_collection(name, deadline_s=deadline_s)
                if found == known or (found.id == known.id and error.fields.get("outcome_unknown")):
                    raise
        else:
            found = await self._described_in_turn(name, deadline_s)
        return await self._write_to(found, rows, op, deadline_s)

    async def _described_in_turn(self, name: str, deadline_s: float) -> Collection:
        """The collection `name`. Calls that do not know it yet go on in their order: one asks, the others wait."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        lock = self._describing.setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout_at(end):
                await lock.acquire()
        except TimeoutError:
            raise DeadlineExceeded(f"{name} was not described within {deadline_s:g} s") from None
        try:
            return self._collections.get(name) or await self.describe_collection(name, deadline_s=end - loop.time())
        finally:
            lock.release()

    async def _write_to(self, collection: Collection, rows: _RowsFor, op: str | None, deadline_s: float) -> WriteResult:
        schema = collection.schema
        batch = to_batch(rows(schema), schema, op=op)
        params = {
            "collection": collection.name,
            "id": collection.id,
            "schema_version": schema.version,
            "producer": self._rpc.name,
            "pseq": next(self._pseqs),
        }
        reply = await self._ask_to_write("write", params, encode_rows(batch), deadline_s)
        written = WriteResult(reply.values["ts"], reply.values["rows"])
        self._session[collection.name] = max(written.ts, self._session.get(collection.name, 0))
        return written

    async def _ask_to_write(self, method: str, params: Params, body: Payload, deadline_s: float) -> Reply:
        """Send the write under one number until its outcome is known, or `deadline_s` have passed: after an attempt of
        unknown outcome a refusal says nothing about that attempt."""
        pseq: int = params["pseq"]
        self._writing[pseq] = None
        try:
            return await self._ask_until_known(method, params, body, deadline_s)
        finally:
            del self._writing[pseq]

    async def _ask_until_known(self, method: str, params: Params, body: Payload, deadline_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        unknown: TidewalError | None = None

        def timed() -> Params:
            return {
                **params,
                "after": self._under_way_before(params["pseq"]),
                "deadline_s": max(end - loop.time(), 0.0),
            }

        while True:
            try:
                return await self._rpc.call("proxy", method, timed, body, deadline_s=end - loop.time())
            except TopicEpochEnded:  # that says what of it is written
                raise
            except TidewalError as error:
                if unknown is None and error.fields.get("outcome_unknown"):
                    unknown = error
                if unknown is None:
                    raise
                if not error.retryable or loop.time() + AGAIN_S >= end:
                    late = isinstance(error, DeadlineExceeded)  # of the time that earlier attempts had left
                    raise of_unknown_outcome(unknown if late else error) from None
            await asyncio.sleep(AGAIN_S)

    def _under_way_before(self, pseq: int) -> int:
        """The number of the write before `pseq` of which the outcome is not known yet; 0 for none. A door that has not
        had that one does not take this one."""
        numbers = reversed(self._writing)
        return next((number for number in numbers if number < pseq), 0)

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


def _in_s(seconds: float) -> float:
    """The loop's time in so many seconds."""
    return asyncio.get_running_loop().time() + seconds


def _left_s(until: float) -> float:
    return max(0.0, until - asyncio.get_running_loop().time())
