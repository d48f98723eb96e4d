"""Writers as Spark calls them (pyspark.sql.datasource). Everything that matters is in `sink`.

Spark makes a writer anew for each batch, in several processes. What a writer needs travels with it; what its tasks
report to the driver travels in their commit messages.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from ..runtime.catalog.catalog import Collection
from ..runtime.clock import HybridClock
from ..runtime.errors import ChannelNotFound, CollectionNotFound, InvalidRequest, Unavailable
from ..runtime.log.blocking_reader import BlockingReader
from ..runtime.log.ledger_body import ledger_channel
from .log import open_log
from .plan.catalog_view import CatalogView
from .sink.chunks import chunks
from .sink.collection import ChunkSender, Task, division
from .sink.foreign import ForeignPlan, check_there, in_commits, plan_foreign
from .sink.ledger import DIGEST_MASK, POLICY, Ledger, MicroBatch, StagedRows, application
from .sink.messages import MessageMaker, MessagePlan, plan_messages
from .sink.options import SinkOptions
from .sink.rows import RowPlan, log_rows, plan_rows, schema_for
from .sink.topic import Publisher, Stager, producer_of, staged_name
from .sink.worker_log import WorkerLog, worker_log

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from ..runtime.rows.schema import CollectionSchema

QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
SHARDS: Final = 2  # of a collection that is made for a DataFrame

_clock = HybridClock()


@dataclass(frozen=True)
class TaskCommit(WriterCommitMessage):
    """What a task reports to the driver: the write that it belongs to, for collections the digest of its rows, and for
    topics the rows that it staged and the topics they go to."""

    task: Task
    digest: int = 0
    attempt: StagedRows | None = None
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectionSink:
    """Writes into a collection. Everything happens in the tasks."""

    options: SinkOptions
    collection: Collection
    plan: RowPlan

    @property
    def target(self) -> str:
        return f"collection {self.collection.id}"

    def write(self, task: Task, batches: Iterator[pa.RecordBatch]) -> TaskCommit:
        """Write the rows of one task, each once; of a batch that is done compute their digest only. Raises what
        `ChunkSender.send` and `MicroBatch.check_repeats` raise."""
        log, deadline_s = _retrying_log(self.options)
        ledger = Ledger(log.wal, ledger_channel(self.options.prefix, task.writer))
        done = log.retry(ledger.state, f"batch {task.batch}", deadline_s).done
        repeats = task.batch <= done.number
        if repeats and self.options.allow_old:
            return TaskCommit(task)
        if repeats:
            MicroBatch(task.batch, task.run).check_repeats(done)
        shards, chunk_bytes = log.retry(lambda: division(log.wal, self.collection), f"batch {task.batch}", deadline_s)
        rpc_client = partial(log.rpc_client, self.options.prefix)
        sender = ChunkSender(rpc_client, self.collection, task, deadline_s, allow_old=self.options.allow_old)
        rows = (log_rows(batch, self.plan) for batch in batches)
        divided = chunks(rows, self.collection.schema, shards=shards, chunk_bytes=chunk_bytes)
        digest = 0
        for number, chunk in enumerate(divided):
            digest += chunk.digest
            if not repeats:
                log.run(sender.send(number, chunk))
        sender.finish()
        return TaskCommit(task, digest & DIGEST_MASK)


@dataclass(frozen=True)
class TopicSink:
    """Writes into topics: tasks stage, the driver publishes."""

    options: SinkOptions
    plan: MessagePlan

    @property
    def target(self) -> str:
        return f"topics {','.join(self.options.topics)}"

    def write(self, task: Task, batches: Iterator[pa.RecordBatch]) -> TaskCommit:
        """Stage the rows of one task."""
        log, deadline_s = _retrying_log(self.options)
        stager = log.retry(lambda: self._stager(log, task), f"batch {task.batch}", deadline_s)
        limits: dict[str, int] = {}
        producer = producer_of(task.writer, task.batch, task.partition)
        maker = MessageMaker(self.plan, producer, _clock, limits)
        for batch in batches:
            for topic in self.plan.targets(batch) - limits.keys():
                found = log.retry(partial(log.wal.describe, topic), f"batch {task.batch}", deadline_s)
                limits[topic] = min(found.max_message_bytes, stager.row_limit)
            log.run(stager.add(maker.messages(batch)))
        return TaskCommit(task, attempt=log.run(stager.finish()), targets=tuple(stager.targets))

    async def _stager(self, log: WorkerLog, task: Task) -> Stager:
        staged = staged_name(ledger_channel(self.options.prefix, task.writer))
        await log.create(staged, POLICY)
        limit = (await log.wal.describe(staged)).max_message_bytes
        return Stager(log.wal, staged, task.partition, limit, self.options.deadline_s)


@dataclass(frozen=True)
class ForeignSink:
    """Writes into topics that others made. Everything happens in the tasks, at least once."""

    options: SinkOptions
    plan: ForeignPlan

    @property
    def target(self) -> str:
        return f"topic {self.plan.topic}"

    def write(self, task: Task, batches: Iterator[pa.RecordBatch]) -> TaskCommit:
        """Append the rows of one task; what is not certain to be there is appended again."""
        log, deadline_s = _retrying_log(self.options)
        for batch in batches:
            for part in in_commits(self.plan.entries(batch)):
                log.retry(partial(log.wal.append_many, part), f"batch {task.batch}", deadline_s)
        return TaskCommit(task)


Sink = CollectionSink | TopicSink | ForeignSink


def make_sink(options: SinkOptions, schema: StructType) -> Sink:
    """The sink for rows of `schema`. Raises what is wrong before anything is written: `CollectionNotFound`,
    `ChannelNotFound`, `InvalidSchema`, `ConfigError`, `Unavailable`."""
    with closing(open_log(options.wal)) as log:
        if options.collection:
            collection = _collection(log, options, schema)
            return CollectionSink(options, collection, plan_rows(schema, collection.schema, options.operation))
        if options.foreign:
            foreign = plan_foreign(schema, options.topics)
            if foreign.topic:
                check_there(log, options.wal, foreign.topic)
            return ForeignSink(options, foreign)
        for topic in options.topics:
            _check_there(log, topic)
    return TopicSink(options, plan_messages(schema, options.topics))


def _finish_batch(options: SinkOptions, batch: int, messages: Iterable[WriterCommitMessage | None]) -> None:
    """Note in the ledger that all tasks of a batch have written, and publish what they staged for topics. Raises what
    `Publisher.commit` raises."""
    written = [message for message in messages if isinstance(message, TaskCommit)]
    if not written or options.foreign:
        return
    log, deadline_s = _retrying_log(options)
    task = written[0].task
    channel = ledger_channel(options.prefix, task.writer)
    ledger = Ledger(log.wal, channel)
    log.retry(ledger.create, f"batch {batch}", deadline_s)
    if options.collection:
        done = MicroBatch(batch, task.run, sum(message.digest for message in written) & DIGEST_MASK)
        log.retry(lambda: _note(ledger, done, options.allow_old), f"batch {batch}", deadline_s)
        return
    publisher = Publisher(log.wal, ledger, staged_name(channel), task.writer, deadline_s, allow_old=options.allow_old)
    attempts = sorted(message.attempt for message in written if message.attempt is not None)
    log.run(publisher.commit(batch, attempts, {name for message in written for name in message.targets}, task.run))


async def _note(ledger: Ledger, batch: MicroBatch, allow_old: bool) -> None:
    done = (await ledger.state()).done
    if batch.number > done.number:
        await ledger.finish(batch)
    elif not allow_old:
        batch.check_repeats(done)


def _retrying_log(options: SinkOptions) -> tuple[WorkerLog, float]:
    """The log, opened with retries while its owner is away, and how long in seconds a batch may wait for it."""
    return worker_log(options.wal, options.deadline_s), options.deadline_s


def _collection(log: BlockingReader, options: SinkOptions, schema: StructType) -> Collection:
    try:
        return CatalogView(log, options.wal, options.prefix).collection(options.collection)
    except CollectionNotFound as error:
        if not options.primary_key:
            hint = "(option primaryKey, the name of a column, has it created)"
            raise CollectionNotFound(f"{error.message} {hint}", **error.fields) from None
    wanted = schema_for(schema, options.collection, options.primary_key)
    node = worker_log(options.wal)
    return node.run(_create(node, wanted, options))


async def _create(log: WorkerLog, schema: CollectionSchema, options: SinkOptions) -> Collection:
    """Create the collection, or find it where another writer has created it meanwhile."""
    rpc_client = await log.rpc_client(options.prefix)
    params = {"schema": schema.to_wire(), "shards": SHARDS}
    reply = await rpc_client.call("mixcoord", "create_collection", params, deadline_s=options.deadline_s)
    return Collection.from_wire(reply.values["collection"])


def _check_there(log: BlockingReader, topic: str) -> None:
    try:
        log.latest_id(topic)
    except ChannelNotFound as error:
        raise ChannelNotFound(
            f"no topic {topic!r}: create the channel first, or check option topic", channel=topic
        ) from error


class TidewalStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches: each is written once, by its query's id (or option `txnAppId`) and its number. In complete
    mode each holds all groups: in a collection they are replaced by key, to a topic they are appended again."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        try:
            self._sink: Sink | Unavailable = make_sink(options, schema)
        except Unavailable as error:  # raised by tasks: a writer that Spark makes to commit or to abort needs no sink
            self._sink = error

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        if isinstance(self._sink, Unavailable):
            raise self._sink
        context = cast(Any, TaskContext.get())
        app = self._options.app
        run, batch = context.getLocalProperty(QUERY), int(context.getLocalProperty(BATCH))
        writer = application(app, self._sink.target) if app else run
        return self._sink.write(Task(writer, batch, context.partitionId(), run), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Finish the batch: all its tasks have written."""
        _finish_batch(self._options, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Do nothing: the attempt that repeats the batch finds what there is of it."""


class TidewalBatchWriter(DataSourceArrowWriter):
    """Writes one DataFrame: once by `txnAppId` and `txnVersion` where they are given, else once per job."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest("Tidewal adds to what is there: use mode('append'); collections replace rows by key")
        self._sink = make_sink(options, schema)
        app = options.app
        self._writer = application(app, self._sink.target) if app else secrets.token_hex(16)
        self._version = options.version or 0
        if app:
            self._check_version()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task."""
        context = cast(Any, TaskContext.get())
        task = Task(self._writer, self._version, context.partitionId())
        return self._sink.write(task, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Finish the batch: all its tasks have written."""
        if self._sink.options.app:
            _finish_batch(self._sink.options, self._version, messages)
        elif isinstance(self._sink, TopicSink):
            _finish_batch(self._sink.options, self._version, messages)
            self._forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove the channels of a job that is not repeated; what tasks have written into a collection stays."""
        if not self._sink.options.app:
            self._forget()

    @property
    def _ledger(self) -> str:
        return ledger_channel(self._sink.options.prefix, self._writer)

    def _check_version(self) -> None:
        """Raise before anything is computed what the commit would raise."""
        log = worker_log(self._sink.options.wal)
        done = log.run(Ledger(log.wal, self._ledger).state()).done
        if self._version <= done.number and not self._sink.options.allow_old:
            MicroBatch(self._version).check_repeats(done)

    def _forget(self) -> None:
        if isinstance(self._sink, TopicSink):
            log = worker_log(self._sink.options.wal)
            for channel in (self._ledger, staged_name(self._ledger)):
                log.run(log.wal.drop_channel(channel))
