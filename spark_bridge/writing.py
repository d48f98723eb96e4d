"""Writers as Spark calls them (pyspark.sql.datasource). Everything that matters is in `sink`.

Spark makes a writer anew for each batch, in several processes. What a writer needs travels with it; what its tasks
tell the driver travels in their commit messages.
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

from ..runtime.catalog import Collection
from ..runtime.clock import HybridClock
from ..runtime.errors import ChannelNotFound, CollectionNotFound, InvalidRequest, Unavailable
from .log import Log, open_log
from .planning import Planner
from .sink.chunks import chunks
from .sink.collection import ChunkSender, Task, division
from .sink.ledger import DIGEST_MASK, POLICY, Attempt, Batch, Ledger, application, ledger_name
from .sink.messages import MessageMaker, MessagePlan, plan_messages
from .sink.options import SinkOptions
from .sink.rows import RowPlan, log_rows, plan_rows, schema_for
from .sink.topic import Publisher, Stager, producer_of, staged_name
from .sink.worker_log import WorkerLog, worker_log

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from ..runtime.schema import CollectionSchema

QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
SHARDS: Final = 2  # of a collection that is made for a DataFrame

_clock = HybridClock()


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver: whose write it was, for collections the digest of its rows, and for topics what it
    staged, to go where."""

    task: Task
    digest: int = 0
    attempt: Attempt | None = None
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

    def write(self, task: Task, batches: Iterator[pa.RecordBatch]) -> Written:
        """The rows of one task, each once; of a batch that is done their digest only. Raises what `ChunkSender.send`
        and `Batch.check_repeats` raise."""
        log, deadline_s = _patient_log(self.options)
        ledger = Ledger(log.wal, ledger_name(task.writer, self.options.prefix))
        done = log.persist(ledger.state, f"batch {task.batch}", deadline_s).done
        repeats = task.batch <= done.number
        if repeats and self.options.allow_old:
            return Written(task)
        if repeats:
            Batch(task.batch, task.run).check_repeats(done)
        shards, chunk_bytes = log.persist(lambda: division(log.wal, self.collection), f"batch {task.batch}", deadline_s)
        caller = partial(log.caller, self.options.prefix)
        sender = ChunkSender(caller, self.collection, task, deadline_s, allow_old=self.options.allow_old)
        rows = (log_rows(batch, self.plan) for batch in batches)
        divided = chunks(rows, self.collection.schema, shards=shards, chunk_bytes=chunk_bytes)
        digest = 0
        for number, chunk in enumerate(divided):
            digest += chunk.digest
            if not repeats:
                log.run(sender.send(number, chunk))
        sender.finish()
        return Written(task, digest & DIGEST_MASK)


@dataclass(frozen=True)
class TopicSink:
    """Writes into topics: tasks stage, the driver publishes."""

    options: SinkOptions
    plan: MessagePlan

    @property
    def target(self) -> str:
        return f"topics {','.join(self.options.topics)}"

    def write(self, task: Task, batches: Iterator[pa.RecordBatch]) -> Written:
        """Stage the rows of one task."""
        log, deadline_s = _patient_log(self.options)
        stager = log.persist(lambda: self._stager(log, task), f"batch {task.batch}", deadline_s)
        limits: dict[str, int] = {}
        producer = producer_of(task.writer, task.batch, task.partition)
        maker = MessageMaker(self.plan, producer, _clock, limits)
        for batch in batches:
            for topic in self.plan.targets(batch) - limits.keys():
                found = log.persist(partial(log.wal.describe, topic), f"batch {task.batch}", deadline_s)
                limits[topic] = min(found.max_message_bytes, stager.row_limit)
            log.run(stager.add(maker.messages(batch)))
        return Written(task, attempt=log.run(stager.finish()), targets=tuple(stager.targets))

    async def _stager(self, log: WorkerLog, task: Task) -> Stager:
        staged = staged_name(ledger_name(task.writer, self.options.prefix))
        await log.create(staged, POLICY)
        limit = (await log.wal.describe(staged)).max_message_bytes
        return Stager(log.wal, staged, task.partition, limit, self.options.deadline_s)


Sink = CollectionSink | TopicSink


def make_sink(options: SinkOptions, schema: StructType) -> Sink:
    """The sink for rows of `schema`. Raises what is wrong before anything is written: `CollectionNotFound`,
    `ChannelNotFound`, `InvalidSchema`, `ConfigError`, `Unavailable`."""
    with closing(open_log(options.wal)) as log:
        if options.collection:
            collection = _collection(log, options, schema)
            return CollectionSink(options, collection, plan_rows(schema, collection.schema, options.operation))
        for topic in options.topics:
            _check_there(log, topic)
    return TopicSink(options, plan_messages(schema, options.topics))


def _finish_batch(options: SinkOptions, batch: int, messages: Iterable[WriterCommitMessage | None]) -> None:
    """All tasks have written: that is noted, and what they staged for topics is published. Raises what
    `Publisher.commit` raises."""
    written = [message for message in messages if isinstance(message, Written)]
    if not written:
        return
    log, deadline_s = _patient_log(options)
    task = written[0].task
    channel = ledger_name(task.writer, options.prefix)
    ledger = Ledger(log.wal, channel)
    log.persist(ledger.create, f"batch {batch}", deadline_s)
    if options.collection:
        done = Batch(batch, task.run, sum(message.digest for message in written) & DIGEST_MASK)
        log.persist(lambda: _note(ledger, done, options.allow_old), f"batch {batch}", deadline_s)
        return
    publisher = Publisher(log.wal, ledger, staged_name(channel), task.writer, deadline_s, allow_old=options.allow_old)
    attempts = sorted(message.attempt for message in written if message.attempt is not None)
    log.run(publisher.commit(batch, attempts, {name for message in written for name in message.targets}, task.run))


async def _note(ledger: Ledger, batch: Batch, allow_old: bool) -> None:
    done = (await ledger.state()).done
    if batch.number > done.number:
        await ledger.finish(batch)
    elif not allow_old:
        batch.check_repeats(done)


def _patient_log(options: SinkOptions) -> tuple[WorkerLog, float]:
    """The log, also where its owner is away for a moment, and how long a batch may wait for it."""
    return worker_log(options.wal, options.deadline_s), options.deadline_s


def _collection(log: Log, options: SinkOptions, schema: StructType) -> Collection:
    try:
        return Planner(log, options.wal, options.collection, options.prefix).collection()
    except CollectionNotFound:
        if not options.primary_key:
            raise
    wanted = schema_for(schema, options.collection, options.primary_key)
    node = worker_log(options.wal)
    return node.run(_create(node, wanted, options))


async def _create(log: WorkerLog, schema: CollectionSchema, options: SinkOptions) -> Collection:
    """Made, or found as somebody else made it just now."""
    caller = await log.caller(options.prefix)
    params = {"schema": schema.to_wire(), "shards": SHARDS}
    reply = await caller.call("mixcoord", "create_collection", params, deadline_s=options.deadline_s)
    return Collection.from_wire(reply.values["collection"])


def _check_there(log: Log, topic: str) -> None:
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
        except Unavailable as error:  # told by the tasks: a writer that Spark makes to commit or to abort needs no sink
            self._sink = error

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """The rows of one task."""
        if isinstance(self._sink, Unavailable):
            raise self._sink
        context = cast(Any, TaskContext.get())
        app = self._options.app
        run, batch = context.getLocalProperty(QUERY), int(context.getLocalProperty(BATCH))
        writer = application(app, self._sink.target) if app else run
        return self._sink.write(Task(writer, batch, context.partitionId(), run), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """All tasks have written."""
        _finish_batch(self._options, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing: whoever writes the batch again finds what there is of it."""


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
        """The rows of one task."""
        context = cast(Any, TaskContext.get())
        task = Task(self._writer, self._version, context.partitionId())
        return self._sink.write(task, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks have written."""
        if self._sink.options.app:
            _finish_batch(self._sink.options, self._version, messages)
        elif isinstance(self._sink, TopicSink):
            _finish_batch(self._sink.options, self._version, messages)
            self._forget()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """A job that nobody repeats leaves no channels; what tasks have written into a collection stays."""
        if not self._sink.options.app:
            self._forget()

    @property
    def _ledger(self) -> str:
        return ledger_name(self._writer, self._sink.options.prefix)

    def _check_version(self) -> None:
        """Raise before anything is computed what would be raised in the end."""
        log = worker_log(self._sink.options.wal)
        done = log.run(Ledger(log.wal, self._ledger).state()).done
        if self._version <= done.number and not self._sink.options.allow_old:
            Batch(self._version).check_repeats(done)

    def _forget(self) -> None:
        if isinstance(self._sink, TopicSink):
            log = worker_log(self._sink.options.wal)
            for channel in (self._ledger, staged_name(self._ledger)):
                log.run(log.wal.drop_channel(channel))
