"""The WAL on Apache Pulsar: one persistent topic per channel, with all metadata of the channel in the broker.

Unlike in the embedded log, as `capabilities` says, a batch over several channels is not atomic. Each consumer group has
a topic of its own (`groups/service.py`). Ids are Pulsar's own positions. A channel's policy is a property of its topic;
retention is Pulsar's, in whole minutes and MiB, and frees whole ledgers; truncated entries are gone for readers at once
and freed by retention; a hold is a durable cursor, which the broker never passes. An ephemeral channel is a topic with
one minute and `ephemeral_bytes` of retention: it forgets later than it might. A position in a ledger that was removed
is lost, also where it was its last. Times are found by bisection, so they must ascend in a channel, as owners write
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ...runtime.errors import (
    ChannelExists,
    ChannelNotFound,
    Closed,
    InvalidRequest,
    Unavailable,
    Unsupported,
)
from ...runtime.groups.coordinator_client import CoordinatorClient
from ...runtime.groups.group_wal import GroupWal
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_name, is_name, not_found, other_policy
from ...runtime.log.read_only import refused
from ...runtime.log.stalls import Operation, StallWatch
from ...runtime.log.stamps import stamped
from ...runtime.log.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    OnAppended,
    Start,
)
from ...runtime.loop_bridge import LoopNotifier
from ...runtime.metrics.metrics import Metrics
from . import foreign_topics, seek
from .admin import DEFAULT_MESSAGE_BYTES, Admin
from .appending import Appender, plain
from .client import NativeMessage, NativeProducer, NativeReader, PulsarClient, timestamp_of
from .failures import call_failure
from .foreign_producer import ForeignProducer
from .groups.service import Groups
from .ids import MessagePlace, decode, encode
from .options import PulsarOptions
from .producer import ChannelProducer, FlushingProducer
from .reader import ChannelFetcher, Reader
from .topics import (
    GROUP_LOG,
    HOLD_CURSOR,
    LEDGER_PROPERTY,
    TRUNCATED_PROPERTY,
    PulsarTopic,
    TopicContents,
    channel_of,
    is_foreign,
    is_topic_of_ours,
    truncated_property,
)

log: logging.Logger = logging.getLogger("tidewal.pulsar")
FOREIGN_CAPABILITIES: Capabilities = Capabilities(
    atomic_batches=False,
    seek_by_time=True,
    truncate=False,
    multi_process_write=True,
    one_node=False,
    groups=True,
    individual_acks=True,
    foreign_topics=True,
)

T = TypeVar("T")

BLOCKING_CALLS = 16  # at a time, on threads
METADATA_BYTES = 1024  # of a message besides its payload, at most


class Pulsar(GroupWal):
    """A `Wal` in one namespace; open it with `open`."""

    name = "pulsar"
    capabilities: Capabilities = Capabilities(
        atomic_batches=False,
        seek_by_time=True,
        truncate=True,
        multi_process_write=True,
        one_node=False,
        groups=True,
        individual_acks=True,
        atomic_commits=True,
        ephemeral_bounds=False,
    )

    def __init__(self, options: PulsarOptions, metrics: Metrics | None = None, *, read_only: bool = False) -> None:
        super().__init__(f"{options.service_url}/{options.namespace}", metrics)
        self._options, self._read_only = options, read_only
        self.stalls: StallWatch = StallWatch(metrics)
        self._namespace = options.namespace
        self.admin: Admin = Admin(options.web_url, options.namespace, options.request_timeout_s, options.security)
        self._client = PulsarClient(
            options.service_url,
            options.request_timeout_s,
            options.security,
            listener=options.listener,
            log_file=options.client_log,
        )
        self._executor = ThreadPoolExecutor(BLOCKING_CALLS, "tidewal-pulsar")
        self.process: str = uuid.uuid4().hex
        self._producer_names = map("tidewal-{}-{}".format, itertools.repeat(self.process), itertools.count(1))
        self._policies: dict[str, ChannelPolicy] = {}
        self._incarnations: dict[str, str] = {}  # by channel, as seen last
        self._largest = (
            DEFAULT_MESSAGE_BYTES - METADATA_BYTES
        )  # that the brokers accept, whatever a channel's policy allows
        self._message_bytes = self._largest  # the limit that `describe` returns, which an option may lower
        self._fetchers_lock = threading.Lock()
        self._fetchers: dict[ChannelFetcher, str] = {}
        self._openings: dict[Future[ChannelFetcher], str] = {}  # for which readers still wait
        self._groups: Groups | None = None  # created with the first call that needs them, on its loop
        self.foreign: bool = options.foreign
        if self.foreign:
            self.capabilities = FOREIGN_CAPABILITIES
        self._appender = Appender(
            self._open_foreign_producer if self.foreign else self._open_producer,
            self._executor,
            PendingBytes(options.pending_bytes, self._shown),
            foreign_topics.checked if self.foreign else plain,
        )
        self.stalls.start()

    @staticmethod
    async def open(options: PulsarOptions, metrics: Metrics | None = None, *, read_only: bool = False) -> Pulsar:
        """Connect, and create the namespace where there is none, unless `read_only`. Stalls are counted in `metrics`.
        Raises `Unavailable`, `ConfigError`."""
        wal = Pulsar(options, metrics, read_only=read_only)
        try:
            await wal.blocking(partial(wal.admin.reach, min(options.connect_timeout_s, options.request_timeout_s)))
            await wal.blocking(wal._check_namespace)
            wal._largest = await wal.blocking(wal.admin.max_message_bytes) - METADATA_BYTES
            wal._message_bytes = min(wal._largest, options.max_message_bytes or wal._largest)
        except BaseException:
            await wal.close()
            raise
        return wal

    def _check_namespace(self) -> None:
        if self.foreign:
            self.admin.require_namespace()
        elif self._read_only:
            self.admin.check_namespace()
        else:
            self.admin.prepare_namespace()

    # ---- channels -----------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._check_changes("create_channel")
        check_name("channel name", channel)
        await self.blocking(partial(self._create, PulsarTopic(channel, policy)))
        self._channels_changed()

    def _create(self, topic: PulsarTopic) -> None:
        if self.admin.create(topic):
            self.admin.set_property(topic, LEDGER_PROPERTY, str(self.contents(topic.channel).end.ledger))
        else:
            existing = self.admin.contents(topic).policy
            if existing is None:
                raise ChannelExists(
                    f"there is a topic {topic.name} in {self._namespace} that is not a channel", channel=topic.channel
                )
            if existing != topic.policy:
                raise other_policy(topic.channel)
        self.admin.set_policies(topic)  # also where it exists: its creator may have died before this
        self._policies[topic.channel] = topic.policy

    async def channels(self) -> list[str]:
        self._check_open()
        if self.foreign:
            names = map(channel_of, await self.blocking(self.admin.topics))
            return sorted(filter(is_foreign, names), key=foreign_topics.in_order)
        names = [name for name in map(channel_of, await self.blocking(self.admin.topics)) if is_name(name)]
        found = await asyncio.gather(*(self.blocking(partial(self._is_channel, name)) for name in names))
        return sorted(name for name, is_channel in zip(names, found, strict=True) if is_channel)

    def _is_channel(self, channel: str) -> bool:
        if channel in self._policies:
            return True
        try:
            return self.contents(channel).policy is not None
        except ChannelNotFound:  # dropped meanwhile
            return False

    async def describe(self, channel: str) -> ChannelInfo:
        self._check_open()
        return await self.blocking(partial(self._describe, channel))

    def _describe(self, channel: str) -> ChannelInfo:
        contents = self.contents(channel)
        first, last = seek.first_message(self, channel, contents), self.last(channel)
        assert contents.policy is not None
        return ChannelInfo(
            channel,
            contents.policy,
            None if first is None else encode(first),
            None if last.entry < 0 else encode(last),
            self._message_bytes,
        )

    async def drop_channel(self, channel: str) -> None:
        self._check_changes("drop_channel")
        await self.blocking(partial(self._drop, channel))
        self._channels_changed()

    def _drop(self, channel: str) -> None:
        with contextlib.suppress(ChannelNotFound):
            self.contents(channel)
            self.admin.delete(PulsarTopic(channel))
        self._forget(channel)

    def _forget(self, channel: str) -> None:
        self._policies.pop(channel, None)
        self._appender.forget(channel)
        with self._fetchers_lock:
            fetchers = [fetcher for fetcher, name in self._fetchers.items() if name == channel]
            openings = [opening for opening, name in self._openings.items() if name == channel]
            for opening in openings:
                del self._openings[opening]
        dropped = ChannelNotFound(f"channel {channel} was dropped", channel=channel)
        for opening in openings:
            opening.set_exception(dropped)
        for fetcher in fetchers:
            fetcher.end(dropped)

    # ---- appending ----------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if entries:
            self._appender.submit(entries, done)
        else:
            self._check_open()
            done([])

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        self._check_open()
        if not entries:
            return []
        notifier = self._notifiers.current()
        future, done = self._notifiers.promise()
        self._appender.queue(stamped(entries), done)
        if not notifier.deferring:  # appends of other tasks in this iteration of the loop are sent together
            notifier.defer(self._appender.wake)
        return await future

    def _open_producer(self, channel: str) -> ChannelProducer:
        if self._read_only:  # only a group whose log has no records yet asks for a producer
            raise refused("append")
        contents = self.contents(channel)
        assert contents.policy is not None
        topic = PulsarTopic(channel, contents.policy)
        self.admin.ensure_deduplication(topic)
        end = seek.after_last(self, channel, contents)
        address = self._address(topic)
        largest = min(contents.policy.max_message_bytes, self._largest)

        def make() -> ChannelProducer:
            return ChannelProducer(
                self._client,
                topic,
                address,
                next(self._producer_names),
                self.contents,
                contents.end.ledger,
                end,
                largest,
                self._executor,
                self._appender.flush_later,
                self.stalls,
            )

        return self._retried("append", channel, make)

    def _open_foreign_producer(self, channel: str) -> FlushingProducer:
        """The producer of a channel, or of a topic with partitions, which makes neither. A group's log is Tidewal's."""
        if not self.is_foreign(channel):
            return self._open_producer(channel)
        if ":" in channel or not self.admin.partitions(channel):
            self.contents(channel)
        topic = PulsarTopic(channel, foreign_topics.POLICY)

        def make() -> ForeignProducer:
            return ForeignProducer(
                self._client,
                topic,
                self._address(topic),
                next(self._producer_names),
                self._message_bytes,
                self._appender.flush_later,
                self.stalls,
            )

        return self._retried("append", channel, make)

    # ---- reading ------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        return Reader(partial(self._begin_opening, channel, start), self._executor, self._channels_changed)

    def _begin_opening(self, channel: str, start: Start) -> Future[ChannelFetcher]:
        self._check_open()
        if start is From.LATEST:
            self._appender.pause(channel)  # entries appended from now on come after the end that is looked up
        opening: Future[ChannelFetcher] = Future()
        with self._fetchers_lock:
            self._openings[opening] = channel
        self._executor.submit(self._open_fetcher, channel, start, self._notifiers.current(), opening)
        return opening

    def _open_fetcher(
        self, channel: str, start: Start, notifier: LoopNotifier, opening: Future[ChannelFetcher]
    ) -> None:
        try:
            try:
                after = seek.begin(self, channel, start)
            finally:
                if start is From.LATEST:
                    self._appender.resume(channel)
            fetcher = ChannelFetcher(self, channel, self._incarnations[channel], after, notifier)
        except Exception as error:  # any error: a reader waits for the opening
            failure = call_failure(error, f"reading {channel}", channel=channel)
            if failure is not error:
                log.exception("no reader of %s", channel, extra={"channel": channel})
            with self._fetchers_lock:
                if self._openings.pop(opening, None):
                    opening.set_exception(failure)
            return
        with self._fetchers_lock:
            self._fetchers = {known: name for known, name in self._fetchers.items() if known.running}
            self._fetchers[fetcher] = channel
            wanted = self._openings.pop(opening, None) is not None
            if wanted:
                opening.set_result(fetcher)
        if not wanted:
            fetcher.end(Closed("the reader is closed"))

    def open_reader(self, channel: str, start: MessagePlace, queue_messages: int | None = None) -> NativeReader:
        """Open a reader of the client library from the entry of `start`. It prefetches `queue_messages`, by default as
        many as fit into `prefetch_bytes`. Blocks. Raises `Unavailable`, `ChannelNotFound`."""
        policy = self.policy(channel)
        if queue_messages is None:
            message_bytes = min(policy.max_message_bytes, self._message_bytes)
            queue_messages = max(1, min(self._options.prefetch_bytes // message_bytes, 1000))
        make = partial(self._client.reader, self._address(PulsarTopic(channel)), start, queue_messages)
        return self._retried("read", channel, make)

    async def latest_id(self, channel: str) -> bytes | None:
        self._check_open()
        last = await self.blocking(partial(self.last, channel))
        return None if last.entry < 0 else encode(last)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        self._check_open()

        def find() -> MessagePlace | None:
            return seek.find_time(self, channel, self.contents(channel), timestamp)

        found = await self.blocking(find)
        return None if found is None else encode(found)

    # ---- retention ----------------------------------------------------------------------------------------------

    async def truncate(self, channel: str, id: bytes) -> None:
        self._check_changes("truncate")
        await self.blocking(partial(self._truncate, channel, id))

    def _truncate(self, channel: str, id: bytes) -> None:
        contents = self.contents(channel)
        place = _place(id)
        if contents.truncated is None or place > contents.truncated:
            self.admin.set_property(PulsarTopic(channel), TRUNCATED_PROPERTY, truncated_property(place))

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self._check_changes("hold")
        await self.blocking(partial(self._hold, channel, holder, id))

    def _hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self.contents(channel)
        topic, cursor = PulsarTopic(channel), HOLD_CURSOR + holder
        if id is None:
            self.admin.drop_cursor(topic, cursor)
        else:
            self.admin.keep_cursor(topic, cursor, _place(id))

    # ---- groups -------------------------------------------------------------------------------------------------

    async def _coordinator_client(self) -> CoordinatorClient:
        self._check_open()
        if self._groups is None:
            self._groups = Groups(self)
        return self._groups

    def _channels_changed(self) -> None:
        """To be called when a channel was created or dropped."""
        if self._groups is not None:
            self._groups.channels_changed()

    # ---- the end ------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        with self._fetchers_lock:
            self._closed = True
            fetchers = list(self._fetchers)
            openings, self._openings = self._openings, {}
        closed = self._closed_error()
        for opening in openings:
            opening.set_exception(closed)
        for fetcher in fetchers:
            fetcher.end(closed)
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._appender.close()
        self.admin.close()
        for fetcher in list(self._fetchers):
            fetcher.join()
        self._executor.shutdown(
            wait=True
        )  # before the client is closed: opening a producer or reader would never return then
        self._client.close()
        self.stalls.close()

    # ---- shared -------------------------------------------------------------------------------------------------

    @property
    def timeout_ms(self) -> int:
        return self._client.timeout_ms

    @property
    def timeout_s(self) -> float:
        return self._options.request_timeout_s

    def behind_all(self, channel: str) -> MessagePlace:
        """The last message of the channel, or the place before the first one to come. Blocks. Raises
        `ChannelNotFound`."""
        return seek.after_last(self, channel, self.contents(channel))

    def publisher(self, channel: str, name: str, *, batches: bool) -> NativeProducer:
        """Open a producer with a name that no other producer has until it is closed. Blocks. Raises `Unavailable`,
        `ChannelNotFound`."""
        topic = PulsarTopic(channel, self.policy(channel))
        self.admin.ensure_deduplication(topic)
        return self._client.producer(self._address(topic), name, batches=batches)

    def contents(self, channel: str) -> TopicContents:
        """The contents of the channel's topic. Blocks. Raises `ChannelNotFound`, also for a topic that is not a
        channel."""
        if not is_topic_of_ours(channel) and not (self.foreign and is_foreign(channel)):
            raise ChannelNotFound(f"there can be no channel {channel!r}", channel=channel)
        try:
            contents = self.admin.contents(PulsarTopic(channel))
        except ChannelNotFound as error:
            self._policies.pop(channel, None)
            if not self.is_foreign(channel):
                raise
            raise ChannelNotFound(
                f"no topic {channel} in {self._namespace}, or one with partitions, which are {channel}:0 and so on:"
                " topics of others are made by their own tools",
                channel=channel,
            ) from error
        if self.is_foreign(channel):
            contents = replace(contents, policy=foreign_topics.POLICY)
        if contents.policy is None:
            raise not_found(channel)
        self._policies[channel] = contents.policy
        self._incarnations[channel] = contents.incarnation
        return contents

    def is_foreign(self, channel: str) -> bool:
        """Whether the topic is of others: the logs of groups are Tidewal's."""
        return self.foreign and not channel.startswith(GROUP_LOG)

    def timestamp_of(self, channel: str, message: NativeMessage) -> int:
        """The hybrid timestamp of a message."""
        return foreign_topics.timestamp_of(message) if self.is_foreign(channel) else timestamp_of(message)

    def _check_changes(self, call: str) -> None:
        """Raise `Closed`, and `Unsupported` on topics of others, of which nothing is changed."""
        self._check_open()
        if self.foreign:
            raise Unsupported(
                f"{call} would change a topic that others made (?topics=foreign): use the tools of its owner",
                capability="foreign_topics",
            )

    def last(self, channel: str) -> MessagePlace:
        """The last message of the channel. Blocks. Raises `ChannelNotFound`."""
        self.policy(channel)
        return self.admin.last(PulsarTopic(channel))

    def policy(self, channel: str) -> ChannelPolicy:
        """The policy of the channel. Blocks only where it is not known yet. Raises `ChannelNotFound`."""
        policy = self._policies.get(channel)
        if policy is None:
            policy = self.contents(channel).policy
            assert policy is not None
        return policy

    def _retried(self, operation: Operation, channel: str, make: Callable[[], T]) -> T:
        """Call `make`, again while the broker does not answer and the channel exists, until the request timeout."""
        deadline = time.monotonic() + self._options.request_timeout_s
        waiting = self.stalls.begin(operation, channel)
        try:
            while True:
                connection = self._client.connection
                try:
                    return make()
                except Unavailable as error:
                    self.stalls.retry(waiting, error)
                    self.contents(channel)  # this was answered: so the connection may be dead
                    self._client.renew(connection)
                    if self._closed or time.monotonic() > deadline:
                        raise
        finally:
            self.stalls.end(waiting)

    def _address(self, topic: PulsarTopic) -> str:
        return f"persistent://{self._namespace}/{topic.name}"

    async def blocking(self, call: Callable[[], T]) -> T:
        """Run `call` on a thread of the executor. Raises `Closed` once that is shut down."""
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        except RuntimeError as error:  # the threads are gone
            raise self._closed_error() from error
        return await future


def _place(id: bytes) -> MessagePlace:
    place = decode(id)
    if place is None:
        raise InvalidRequest(f"{id.hex()} is not a position of pulsar://")
    return place
