"""The client for scripts and notebooks: `Client` without `await`, over an event loop on a thread of its own."""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ..runtime.arguments import checked
from ..runtime.catalog.catalog import Collection
from ..runtime.catalog.topics import RETENTION_S, Topic
from ..runtime.config.settings import Settings
from ..runtime.errors import Closed
from ..runtime.log.loop_thread import LoopThread
from ..runtime.log.record import TagValue
from ..runtime.log.wal import From
from ..runtime.rows.schema import CollectionSchema
from ..runtime.rpc.protocol import Params
from .client import (
    DEADLINE_S,
    FLUSH_DEADLINE_S,
    LOAD_DEADLINE_S,
    PAGE_ROWS,
    PARTITIONS,
    READY_DEADLINE_S,
    STATUS_DEADLINE_S,
    Client,
    Consistency,
    LoadState,
    QueryResult,
    Stats,
    Vector,
    WriteResult,
)
from .connection import CONNECT_DEADLINE_S, connect
from .keys import Keys
from .querynode.filter_params import FilterParams
from .querynode.search import Metric
from .rows import Rows
from .topics.messages import MessageBodies, Partitioner, SendResult
from .topics.requests import TopicReply
from .topics.sync_member import SyncTopicMember
from .transactions.sync_transaction import SyncTransaction

T = TypeVar("T")


@checked
def connect_sync(
    where: str | Path, *, settings: Settings | None = None, deadline_s: float = CONNECT_DEADLINE_S
) -> SyncClient:
    """Connect as `connect` does, with its parameters and errors, and return a client whose calls wait: for scripts and
    notebooks, also those whose event loop runs.

    Close it, or use it as a context manager: `with tidewal.connect_sync(where) as client`."""
    with ExitStack() as opened:
        loop = LoopThread("tidewal-client")
        opened.callback(loop.end)
        client = opened.enter_context(loop.entered(connect(where, settings=settings, deadline_s=deadline_s)))
        return SyncClient(client, loop, opened.pop_all())


class SyncClient:
    """`Client` with calls that return when they are done: the same methods, parameters, results and errors. Made by
    `connect_sync`.

    Any thread may call it, many at once. In a fork of the process that made it (a worker of `multiprocessing`, or of
    gunicorn with `--preload`) each call raises `InvalidRequest` at once: connect there. A call that is interrupted
    (Ctrl-C, the stop button of a notebook) goes on beside the program: read before writing again. In a program with an
    event loop a call blocks that loop: use `connect` there."""

    def __init__(self, client: Client, loop: LoopThread, opened: ExitStack) -> None:
        """For `connect_sync`: `client` belongs to `loop`, and `opened` closes what the two need."""
        self._client = client
        self._loop = loop
        self._close = weakref.finalize(self, opened.close)  # the end of the process closes it, too

    def __repr__(self) -> str:
        return f"<SyncClient of {self._client!r}{'' if self._close.alive else ', closed'}>"

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the calls that wait in other threads with `Closed`, and the connection. Later calls raise `Closed`; a
        second `close` does nothing."""
        self._close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        if not self._close.alive:
            call.close()
            raise Closed("the client is closed: connect again")
        return self._loop.run(call)

    def ready(self, *, node: str = "", deadline_s: float = READY_DEADLINE_S) -> None:
        """Wait until a Proxy accepts writes: that of any node, or of the one that the catalog knows as `node`."""
        self._wait(self._client.ready(node=node, deadline_s=deadline_s))

    def status(self, *, deadline_s: float = STATUS_DEADLINE_S) -> dict[str, Params | None]:
        """What each role says of its node (`node_status`), by the role's name; None for one that did not answer within
        `deadline_s`."""
        return self._wait(self._client.status(deadline_s=deadline_s))

    # ---- collections ------------------------------------------------------------------------------------------------

    def create_collection(
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
        made = self._client.create_collection(schema, shards=shards, replicas=replicas, deadline_s=deadline_s)
        return self._wait(made)

    def load_collection(
        self, collection: str, *, replicas: int | None = None, deadline_s: float = LOAD_DEADLINE_S
    ) -> None:
        """Have `replicas` QueryNodes get a collection into memory, as far as there are so many, and wait until its
        queries can be answered. By default as many as it has; after a release, as many as a new one gets. Raises
        `CollectionNotFound`, what is wrong with its tables, and `DeadlineExceeded`: loading goes on then."""
        self._wait(self._client.load_collection(collection, replicas=replicas, deadline_s=deadline_s))

    def release_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Let no QueryNode have a collection in memory: its queries raise `CollectionNotLoaded` until it is loaded
        again. It is written and stored as before. Raises `CollectionNotFound`."""
        self._wait(self._client.release_collection(collection, deadline_s=deadline_s))

    def load_state(self, collection: str, *, deadline_s: float = DEADLINE_S) -> LoadState:
        """Whether queries of a collection can be answered. Raises `CollectionNotFound`, and what is wrong with its
        tables."""
        return self._wait(self._client.load_state(collection, deadline_s=deadline_s))

    def drop_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Remove a collection with its rows, its tables and its hold on the log. Raises `CollectionNotFound`."""
        self._wait(self._client.drop_collection(collection, deadline_s=deadline_s))

    def describe_collection(self, collection: str, *, deadline_s: float = DEADLINE_S) -> Collection:
        """The collection as the catalog has it. Raises `CollectionNotFound`."""
        return self._wait(self._client.describe_collection(collection, deadline_s=deadline_s))

    def list_collections(self) -> list[str]:
        """The names of all collections, sorted."""
        return self._wait(self._client.list_collections())

    # ---- topics -----------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int = PARTITIONS,
        *,
        retention_s: float | None = RETENTION_S,
        retention_bytes: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Topic:
        """Create a topic, or find it there with the same arguments. Raises `TopicExists` where one differs. Each
        partition keeps its messages for `retention_s` seconds, and `retention_bytes` of them; None keeps all."""
        made = self._client.create_topic(
            name, partitions, retention_s=retention_s, retention_bytes=retention_bytes, deadline_s=deadline_s
        )
        return self._wait(made)

    def alter_topic(self, topic: str, partitions: int, *, hashed: bool = True, deadline_s: float = DEADLINE_S) -> Topic:
        """Let a topic have so many partitions from now on, more or fewer, and wait until these take messages. `hashed`
        is false where any sender has a partitioner of its own."""
        return self._wait(self._client.alter_topic(topic, partitions, hashed=hashed, deadline_s=deadline_s))

    def drop_topic(self, topic: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Remove a topic with its messages. Members that read it end with `TopicNotFound`."""
        self._wait(self._client.drop_topic(topic, deadline_s=deadline_s))

    def describe_topic(self, topic: str, *, deadline_s: float = DEADLINE_S) -> Topic:
        """The topic as the catalog has it. Raises `TopicNotFound`."""
        return self._wait(self._client.describe_topic(topic, deadline_s=deadline_s))

    def list_topics(self) -> list[Topic]:
        """All topics, by name."""
        return self._wait(self._client.list_topics())

    def send(
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
        """Send messages, up to 10,000 at once, and return when they are durable: those with a key to the partition of
        its hash, the others of one call to one partition, by turns. With `deliver_at` or `deliver_after_s` they are due
        later, and can be cancelled until then."""
        sent = self._client.send(
            topic,
            messages,
            key=key,
            tags=tags,
            partitioner=partitioner,
            deliver_at=deliver_at,
            deliver_after_s=deliver_after_s,
            deadline_s=deadline_s,
        )
        return self._wait(sent)

    def ask(
        self,
        topic: str,
        message: bytes | str,
        *,
        key: bytes | str | None = None,
        tags: Mapping[str, TagValue] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> TopicReply:
        """Send a request over a topic and return the reply of the member that serves it."""
        return self._wait(self._client.ask(topic, message, key=key, tags=tags, deadline_s=deadline_s))

    def cancel(self, topic: str, id: str, *, deadline_s: float = DEADLINE_S) -> bool:
        """Cancel a message that is due later, by one of `SendResult.ids`; False: it was due already."""
        return self._wait(self._client.cancel(topic, id, deadline_s=deadline_s))

    def subscribe(
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
    ) -> SyncTopicMember:
        """Become a member of the consumer group `group`, which shares the partitions of `topics` among its members."""
        joined = self._client.subscribe(
            topics,
            group,
            start=start,
            where=where,
            reset_to=reset_to,
            session_timeout_s=session_timeout_s,
            ack_timeout_s=ack_timeout_s,
            retry_topic=retry_topic,
            deadline_s=deadline_s,
        )
        return SyncTopicMember(self._wait(joined), self._wait)

    # ---- writes -----------------------------------------------------------------------------------------------------

    def insert(self, collection: str, rows: Rows, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Add rows, and wait until they are durable. A row whose key exists replaces it, as an upsert does."""
        return self._wait(self._client.insert(collection, rows, deadline_s=deadline_s))

    def upsert(self, collection: str, rows: Rows, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Add rows, or replace those of the same key as a whole."""
        return self._wait(self._client.upsert(collection, rows, deadline_s=deadline_s))

    def delete(self, collection: str, keys: Keys, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Remove the rows of `keys`; keys that are not there are no error."""
        return self._wait(self._client.delete(collection, keys, deadline_s=deadline_s))

    def apply(self, collection: str, rows: Rows, *, deadline_s: float = DEADLINE_S) -> WriteResult:
        """Write a mixed batch: its column `_op` says `insert`, `upsert` or `delete` for each row."""
        return self._wait(self._client.apply(collection, rows, deadline_s=deadline_s))

    def transaction(self, *, deadline_s: float = DEADLINE_S) -> SyncTransaction:
        """Begin a transaction over collections and topics: `with client.transaction() as t`, in it
        `t.insert(collection, rows)` and `t.send(topic, messages)`."""
        return SyncTransaction(self._client.transaction(deadline_s=deadline_s), self._wait)

    def flush(self, collection: str, *, deadline_s: float = FLUSH_DEADLINE_S) -> int:
        """Wait until everything acknowledged before this call is in the collection's table; returns the timestamp up
        to which it is."""
        return self._wait(self._client.flush(collection, deadline_s=deadline_s))

    def compact(self, collection: str, *, deadline_s: float = FLUSH_DEADLINE_S) -> Params:
        """Bring `<collection>/current` forward to what is flushed; returns its `time`, its `rows`, and the number of
        keys `merged`."""
        return self._wait(self._client.compact(collection, deadline_s=deadline_s))

    def cut(self, collection: str) -> int:
        """Store a cut at the present time of the log, which sees every write acknowledged before; returns its time."""
        return self._wait(self._client.cut(collection))

    # ---- queries ----------------------------------------------------------------------------------------------------

    def query(
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
        asked = self._client.query(
            collection,
            filter,
            filter_params=filter_params,
            columns=columns,
            order_by=order_by,
            limit=limit,
            consistency=consistency,
            at=at,
            deadline_s=deadline_s,
        )
        return self._wait(asked)

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
    ) -> Iterator[QueryResult]:
        """The rows for which `filter` holds, in pages of `batch_size` and in the order of their keys, `limit` at most,
        all of one time: `for page in client.query_iterator(…)`."""
        pages = self._client.query_iterator(
            collection,
            filter,
            filter_params=filter_params,
            columns=columns,
            batch_size=batch_size,
            limit=limit,
            consistency=consistency,
            at=at,
            deadline_s=deadline_s,
        )

        async def following() -> QueryResult | None:
            return await anext(pages, None)

        return iter(lambda: self._wait(following()), None)

    def count(
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
        asked = self._client.count(
            collection, filter, filter_params=filter_params, consistency=consistency, at=at, deadline_s=deadline_s
        )
        return self._wait(asked)

    def get(
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
        return self._wait(
            self._client.get(collection, keys, columns=columns, consistency=consistency, at=at, deadline_s=deadline_s)
        )

    def search(
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
        asked = self._client.search(
            collection,
            column,
            vector,
            metric=metric,
            top_k=top_k,
            filter=filter,
            filter_params=filter_params,
            columns=columns,
            consistency=consistency,
            at=at,
            deadline_s=deadline_s,
        )
        return self._wait(asked)

    def stats(self, collection: str, *, consistency: Consistency = "bounded") -> Stats:
        """How many row versions were applied, and how many rows there are."""
        return self._wait(self._client.stats(collection, consistency=consistency))
