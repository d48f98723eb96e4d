"""Tidewal's log on Apache Pulsar: one persistent topic per channel, everything that is kept about it in the broker.

Differs from the embedded log, and says so in `capabilities`: a batch over several channels is not atomic. Consumer
groups have a topic of their own each (`groups.py`). Ids are Pulsar's own positions. A channel's policy is a property of
its topic; retention is Pulsar's, in whole minutes and MiB, and frees whole ledgers; what is truncated stops counting at
once and is freed by retention; a hold is a durable cursor, which the broker never passes. An ephemeral channel is a
topic with one minute and `ephemeral_bytes` of retention: it forgets later than it might. A position in a ledger that
was removed is lost, also where it was its last. Times are found by bisection, so they must ascend in a channel, as
owners write them.
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
from functools import partial
from typing import TypeVar

from ...runtime.errors import (
    ChannelExists,
    ChannelNotFound,
    Closed,
    InvalidRequest,
    Unavailable,
)
from ...runtime.metrics import Metrics
from ...runtime.read_only import refused
from ...runtime.stalls import Operation, StallWatch
from ...runtime.wakeup import Hub, Hubs
from ...runtime.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    OnAppended,
    Payload,
    Start,
)
from . import seeking
from .admin import DEFAULT_MESSAGE_BYTES, Admin
from .appending import Appender
from .client import Client, NativeProducer, NativeReader
from .failures import call_failure
from .groups import WithGroups
from .ids import Place, decode, encode
from .options import Options
from .reading import Feed, Reader
from .sending import Producer
from .topics import (
    HOLD_CURSOR,
    LEDGER_PROPERTY,
    TRUNCATED_PROPERTY,
    Survey,
    Topic,
    channel_of,
    check_name,
    is_name,
    is_topic_of_ours,
    truncated_property,
)

log = logging.getLogger("tidewal.pulsar")

T = TypeVar("T")

BLOCKING_CALLS = 16  # at a time, on threads
METADATA_BYTES = 1024  # that belong to a message beside its payload, at most


class Pulsar(WithGroups):
    """An open log in one namespace; see `Wal`."""

    name = "pulsar"
    capabilities = Capabilities(
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

    def __init__(self, options: Options, metrics: Metrics | None = None, *, read_only: bool = False) -> None:
        self._options, self._read_only = options, read_only
        self.stalls = StallWatch(metrics)
        self._namespace = options.namespace
        self.admin = Admin(options.web_url, options.namespace, options.request_timeout_s, options.security)
        self._client = Client(
            options.service_url,
            options.request_timeout_s,
            options.security,
            listener=options.listener,
            log_file=options.client_log,
        )
        self._executor = ThreadPoolExecutor(BLOCKING_CALLS, "tidewal-pulsar")
        self._hubs = Hubs()
        self._closed = False
        self._close_done: asyncio.Task[None] | None = None
        self.process = uuid.uuid4().hex
        self._producer_names = map("tidewal-{}-{}".format, itertools.repeat(self.process), itertools.count(1))
        self._policies: dict[str, ChannelPolicy] = {}
        self._made: dict[str, str] = {}  # which channel of the name was seen last
        self._largest = (
            DEFAULT_MESSAGE_BYTES - METADATA_BYTES
        )  # that the brokers take, whatever a channel's policy says
        self._message_bytes = self._largest  # that is told, where it shall be less
        self._feeds_lock = threading.Lock()
        self._feeds: dict[Feed, str] = {}
        self._openings: dict[Future[Feed], str] = {}  # whose readers still wait for them
        self._appender = Appender(self._open_producer, self._executor, options.pending_bytes)
        self.stalls.start()

    @staticmethod
    async def open(options: Options, metrics: Metrics | None = None, *, read_only: bool = False) -> Pulsar:
        """Connect, and make the namespace where there is none, but not to read only. Raises `Unavailable`,
        `ConfigError`."""
        wal = Pulsar(options, metrics, read_only=read_only)
        try:
            await wal.blocking(wal.admin.check_namespace if read_only else wal.admin.prepare_namespace)
            wal._largest = await wal.blocking(wal.admin.max_message_bytes) - METADATA_BYTES
            wal._message_bytes = min(wal._largest, options.max_message_bytes or wal._largest)
        except BaseException:
            await wal.close()
            raise
        return wal

    # ---- channels -----------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._check_open()
        check_name(channel)
        await self.blocking(partial(self._create, Topic(channel, policy)))
        self._channels_changed()

    def _create(self, topic: Topic) -> None:
        if self.admin.create(topic):
            self.admin.set_property(topic, LEDGER_PROPERTY, str(self.survey(topic.channel).end.ledger))
        else:
            existing = self.admin.survey(topic).policy
            if existing is None:
                raise ChannelExists(
                    f"there is a topic {topic.name} in {self._namespace} that is no channel", channel=topic.channel
                )
            if existing != topic.policy:
                raise ChannelExists(f"channel {topic.channel} exists with another policy", channel=topic.channel)
        self.admin.set_policies(topic)  # again where it exists: whoever made it may have died before this
        self._policies[topic.channel] = topic.policy

    async def channels(self) -> list[str]:
        self._check_open()
        names = [name for name in map(channel_of, await self.blocking(self.admin.topics)) if is_name(name)]
        found = await asyncio.gather(*(self.blocking(partial(self._is_channel, name)) for name in names))
        return sorted(name for name, is_channel in zip(names, found, strict=True) if is_channel)

    def _is_channel(self, channel: str) -> bool:
        if channel in self._policies:
            return True
        try:
            return self.survey(channel).policy is not None
        except ChannelNotFound:  # dropped meanwhile
            return False

    async def describe(self, channel: str) -> ChannelInfo:
        self._check_open()
        return await self.blocking(partial(self._describe, channel))

    def _describe(self, channel: str) -> ChannelInfo:
        survey = self.survey(channel)
        first, last = seeking.first_message(self, channel, survey), self.last(channel)
        assert survey.policy is not None
        return ChannelInfo(
            channel,
            survey.policy,
            None if first is None else encode(first),
            None if last.entry < 0 else encode(last),
            self._message_bytes,
        )

    async def drop_channel(self, channel: str) -> None:
        self._check_open()
        await self.blocking(partial(self._drop, channel))
        self._channels_changed()

    def _drop(self, channel: str) -> None:
        with contextlib.suppress(ChannelNotFound):
            self.survey(channel)
            self.admin.delete(Topic(channel))
        self._forget(channel)

    def _forget(self, channel: str) -> None:
        self._policies.pop(channel, None)
        self._appender.forget(channel)
        with self._feeds_lock:
            feeds = [feed for feed, name in self._feeds.items() if name == channel]
            openings = [opening for opening, name in self._openings.items() if name == channel]
            for opening in openings:
                del self._openings[opening]
        dropped = ChannelNotFound(f"channel {channel} was dropped", channel=channel)
        for opening in openings:
            opening.set_exception(dropped)
        for feed in feeds:
            feed.end(dropped)

    # ---- appending ----------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if entries:
            self._appender.submit(entries, done)
        else:
            self._check_open()
            done([])

    async def append(self, channel: str, payload: Payload, timestamp: int = 0) -> bytes:
        return (await self.append_many([Append(channel, payload, timestamp)]))[0]

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        self._check_open()
        if not entries:
            return []
        hub = self._hubs.current()
        future, done = self._hubs.promise()
        self._appender.queue(entries, done)
        if not hub.deferring:  # what other tasks append in this turn of the loop goes out together
            hub.defer(self._appender.wake)
        return await future

    def _open_producer(self, channel: str) -> Producer:
        if self._read_only:  # nobody but a group whose log has no beginning yet asks for one
            raise refused("append")
        survey = self.survey(channel)
        assert survey.policy is not None
        topic = Topic(channel, survey.policy)
        self.admin.ensure_deduplication(topic)
        end = seeking.after_last(self, channel, survey)
        address = self._address(topic)
        largest = min(survey.policy.max_message_bytes, self._largest)

        def make() -> Producer:
            return Producer(
                self._client,
                topic,
                address,
                next(self._producer_names),
                self.survey,
                survey.end.ledger,
                end,
                largest,
                self._executor,
                self._appender.flush_later,
                self.stalls,
            )

        return self._retried("append", channel, make)

    # ---- reading ------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        return Reader(partial(self._begin_opening, channel, start), self._executor, self._channels_changed)

    def _begin_opening(self, channel: str, start: Start) -> Future[Feed]:
        self._check_open()
        if start is From.LATEST:
            self._appender.stop(channel)  # what is appended from now on lies behind the end that is looked up
        opening: Future[Feed] = Future()
        with self._feeds_lock:
            self._openings[opening] = channel
        self._executor.submit(self._open_feed, channel, start, self._hubs.current(), opening)
        return opening

    def _open_feed(self, channel: str, start: Start, hub: Hub, opening: Future[Feed]) -> None:
        try:
            try:
                after = seeking.begin(self, channel, start)
            finally:
                if start is From.LATEST:
                    self._appender.go_on(channel)
            feed = Feed(self, channel, self._made[channel], after, hub)
        except Exception as error:  # whatever it is: somebody waits for the opening
            failure = call_failure(error, f"reading {channel}", channel=channel)
            if failure is not error:
                log.exception("no reader of %s", channel)
            with self._feeds_lock:
                if self._openings.pop(opening, None):
                    opening.set_exception(failure)
            return
        with self._feeds_lock:
            self._feeds = {known: name for known, name in self._feeds.items() if known.running}
            self._feeds[feed] = channel
            wanted = self._openings.pop(opening, None) is not None
            if wanted:
                opening.set_result(feed)
        if not wanted:
            feed.end(Closed("nobody wants this reader any more"))

    def open_reader(self, channel: str, start: Place, queue_messages: int | None = None) -> NativeReader:
        """A reader of the client library; what it prefetches is bounded by `prefetch_bytes`. Blocks."""
        policy = self.policy(channel)
        if queue_messages is None:
            message_bytes = min(policy.max_message_bytes, self._message_bytes)
            queue_messages = max(1, min(self._options.prefetch_bytes // message_bytes, 1000))
        make = partial(self._client.reader, self._address(Topic(channel)), start, queue_messages)
        return self._retried("read", channel, make)

    async def latest_id(self, channel: str) -> bytes | None:
        self._check_open()
        last = await self.blocking(partial(self.last, channel))
        return None if last.entry < 0 else encode(last)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        self._check_open()

        def find() -> Place | None:
            return seeking.find_time(self, channel, self.survey(channel), timestamp)

        found = await self.blocking(find)
        return None if found is None else encode(found)

    # ---- retention ----------------------------------------------------------------------------------------------

    async def truncate(self, channel: str, id: bytes) -> None:
        self._check_open()
        await self.blocking(partial(self._truncate, channel, id))

    def _truncate(self, channel: str, id: bytes) -> None:
        survey = self.survey(channel)
        place = _place(id)
        if survey.truncated is None or place > survey.truncated:
            self.admin.set_property(Topic(channel), TRUNCATED_PROPERTY, truncated_property(place))

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self._check_open()
        await self.blocking(partial(self._hold, channel, holder, id))

    def _hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self.survey(channel)
        topic, cursor = Topic(channel), HOLD_CURSOR + holder
        if id is None:
            self.admin.drop_cursor(topic, cursor)
        else:
            self.admin.keep_cursor(topic, cursor, _place(id))

    # ---- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        if self._close_done is None:
            self._close_done = asyncio.create_task(self._close())
        await asyncio.shield(self._close_done)

    async def _close(self) -> None:
        await self._close_groups()
        with self._feeds_lock:
            self._closed = True
            feeds = list(self._feeds)
            openings, self._openings = self._openings, {}
        for opening in openings:
            opening.set_exception(Closed("the Pulsar log is closed"))
        for feed in feeds:
            feed.end(Closed("the Pulsar log is closed"))
        await asyncio.to_thread(self._end)
        self._hubs.close()

    def _end(self) -> None:
        self._appender.close()
        self.admin.close()
        for feed in list(self._feeds):
            feed.join()
        self._executor.shutdown(wait=True)  # before the client is closed: what it makes then would never be made
        self._client.close()
        self.stalls.close()

    # ---- what all use -------------------------------------------------------------------------------------------

    @property
    def timeout_ms(self) -> int:
        return self._client.timeout_ms

    @property
    def timeout_s(self) -> float:
        return self._options.request_timeout_s

    def behind_all(self, channel: str) -> Place:
        """The last message of the channel, or where the first one will be. Blocks. Raises `ChannelNotFound`."""
        return seeking.after_last(self, channel, self.survey(channel))

    def publisher(self, channel: str, name: str, *, batches: bool) -> NativeProducer:
        """A producer of that name, which nobody else has meanwhile. Blocks. Raises `Unavailable`, `ChannelNotFound`."""
        topic = Topic(channel, self.policy(channel))
        self.admin.ensure_deduplication(topic)
        return self._client.producer(self._address(topic), name, batches=batches)

    def survey(self, channel: str) -> Survey:
        """What the channel's topic holds. Blocks. Raises `ChannelNotFound`, also for a topic that is no channel."""
        if not is_topic_of_ours(channel):
            raise ChannelNotFound(f"there can be no channel {channel!r}", channel=channel)
        try:
            survey = self.admin.survey(Topic(channel))
        except ChannelNotFound:
            self._policies.pop(channel, None)
            raise
        if survey.policy is None:
            raise ChannelNotFound(f"no channel {channel}; create it first", channel=channel)
        self._policies[channel] = survey.policy
        self._made[channel] = survey.made
        return survey

    def last(self, channel: str) -> Place:
        """The last message of the channel. Blocks. Raises `ChannelNotFound`."""
        self.policy(channel)
        return self.admin.last(Topic(channel))

    def policy(self, channel: str) -> ChannelPolicy:
        """Blocks only where the channel is not known. Raises `ChannelNotFound`."""
        policy = self._policies.get(channel)
        if policy is None:
            policy = self.survey(channel).policy
            assert policy is not None
        return policy

    def _retried(self, operation: Operation, channel: str, make: Callable[[], T]) -> T:
        """Try again while the broker does not answer and the channel is there, until the request timeout."""
        deadline = time.monotonic() + self._options.request_timeout_s
        waiting = self.stalls.begin(operation, channel)
        try:
            while True:
                connection = self._client.connection
                try:
                    return make()
                except Unavailable as error:
                    self.stalls.retry(waiting, error)
                    self.survey(channel)  # answered: so it may be the connection that is dead
                    self._client.renew(connection)
                    if self._closed or time.monotonic() > deadline:
                        raise
        finally:
            self.stalls.end(waiting)

    def _address(self, topic: Topic) -> str:
        return f"persistent://{self._namespace}/{topic.name}"

    async def blocking(self, call: Callable[[], T]) -> T:
        """Call on a thread."""
        try:
            future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        except RuntimeError as error:  # the threads are gone
            raise Closed("the Pulsar log is closed") from error
        return await future

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the Pulsar log is closed")


def _place(id: bytes) -> Place:
    place = decode(id)
    if place is None:
        raise InvalidRequest(f"{id.hex()} is no position of pulsar://")
    return place
