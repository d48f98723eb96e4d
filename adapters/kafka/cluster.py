"""Requests to the brokers, each bounded in time, with the leader of a topic looked up anew where it has changed.

Tidewal uses the library's connections, metadata and protocol, not its producer and consumer. These keep sequences,
retries and positions to themselves, so that a dead broker makes an idempotent send hang for ever, one refused record
makes it fail for ever, and a consumer may fall silent unnoticed. Here every request has an answer, an error, or a time
limit, and the caller decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from aiokafka import TopicPartition
from aiokafka import conn as connections
from aiokafka import errors as kafka_errors
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import (
    AlterConfigsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)
from aiokafka.protocol.offset import OffsetRequest

from ...runtime.errors import ConfigError, TidewalError, Unavailable, of_unknown_outcome
from ...runtime.log.stalls import StallWatch
from . import faults
from .options import KafkaOptions
from .requests import NO_ID, DescribeTopic, DescribeTopics

T = TypeVar("T")

EARLIEST, LATEST = -2, -1  # as timestamps of `offset`
PARTITION = 0  # the only one of a topic that Tidewal makes
CONTROL = 0  # the connection to each broker for what is not an append or a read
PAUSE_S = 0.1  # between two attempts
CLOSE_S = 5.0  # for connections to be closed in good order
METADATA_AGE_S = 30.0
TOPIC_RESOURCE = 2

_ALREADY_EXISTS = kafka_errors.TopicAlreadyExistsError.errno
_NOT_AUTHORIZED = kafka_errors.TopicAuthorizationFailedError.errno
_UNKNOWN_TOPIC = kafka_errors.UnknownTopicOrPartitionError.errno
_NO_LEADER = kafka_errors.LeaderNotAvailableError.errno

_log = logging.getLogger(__name__)


class TopicDescription(NamedTuple):
    """The id of a topic, `NO_ID` where the brokers give none, and the number of its partitions."""

    id: bytes
    partitions: int


class Cluster:
    """The brokers of one cluster. Belongs to one loop. Callers number the connections: requests on one connection are
    answered in turn, so a request that waits long needs its own."""

    def __init__(self, options: KafkaOptions, stalls: StallWatch) -> None:
        """Requests that are unanswered for too long are reported to `stalls`. Raises `ConfigError`."""
        self.options: KafkaOptions = options
        self.stalls: StallWatch = stalls
        try:
            self._client: Any = AIOKafkaClient(
                bootstrap_servers=options.bootstrap,
                client_id=options.client_id,
                request_timeout_ms=int(options.request_timeout_s * 1000),
                metadata_max_age_ms=int(METADATA_AGE_S * 1000),
                **options.client,
            )
        except ValueError as error:
            raise ConfigError(f"kafka.securityProtocol and kafka.sasl*: {error}", key="kafka") from error

    async def open(self, within_s: float | None = None) -> None:
        """Connect to the brokers, for `delivery_timeout_s` at most, or exactly `within_s` where given. Raises
        `Unavailable`, `ConfigError`."""
        try:
            await self.retrying("find the brokers", self._bootstrap, within_s=within_s)
        except Unavailable as error:
            raise Unavailable(
                f"no broker of Kafka answers at {self.options.bootstrap}: {str(error.__cause__) or 'no connection'}. "
                f"Check the address, that the brokers run, and that this machine reaches them"
            ) from error.__cause__
        await self.refresh()

    async def _bootstrap(self) -> None:
        """The library does not say why no broker can be used; `_try` finds out, so that a wrong password is not
        retried."""
        try:
            await self._client.bootstrap()
        except kafka_errors.KafkaConnectionError as error:
            for host, port, _ in self._client.hosts:
                if reason := await self._try(host, port):
                    raise reason from error
            raise

    async def _try(self, host: str, port: int) -> Exception | None:
        """Raise the library's error where connecting to this broker would fail on every attempt; return another one."""
        limits = {"request_timeout_ms": int(self.options.request_timeout_s * 1000)}
        try:
            connection: Any = await connections.create_conn(host, port, **limits, **self.options.client)
            connection.close()
        except faults.Foreign as error:
            if faults.final(error):
                raise
            return error
        return None

    async def close(self) -> None:
        """Close all connections, and with them the requests in flight. One whose broker does not take what was sent to
        it is left: the end of the I/O thread aborts it."""
        closing = asyncio.ensure_future(self._client.close())
        await asyncio.wait([closing], timeout=CLOSE_S)  # which needs no cancellation: the library may swallow one
        if closing.done():
            closing.result()

    async def refresh(self) -> None:
        """Refresh the metadata: which broker leads which topic. It is asked for all topics: asking for one would create
        that topic where the brokers are configured so."""
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                await self._client.force_metadata_update()
        except faults.Foreign as error:
            _log.debug("the brokers return no metadata: %r", error)

    def leader(self, topic: str, partition: int = PARTITION) -> int | None:
        """The node that leads a partition of the topic; None when it or its leader is not known."""
        node: int | None = self._client.cluster.leader_for_partition(TopicPartition(topic, partition))
        return None if node in (None, -1) else node

    def topics(self) -> set[str]:
        """All topics in the metadata."""
        return self._client.cluster.topics()

    def nodes(self) -> list[int]:
        """The ids of all brokers in the metadata."""
        return [broker.nodeId for broker in self._client.cluster.brokers()]

    async def ask(self, node: int | None, request: object, connection: int = CONTROL) -> Any:
        """Send one request to a node (None: any) over a connection and return the response, within `request_timeout_s`
        for connecting and the same for the answer. Raises the library's errors; `NodeNotReadyError` and `StaleMetadata`
        only where nothing was sent."""
        if node is None:
            node = self._client.get_random_node()
        if node is None:
            raise kafka_errors.StaleMetadata("no broker is known")
        async with asyncio.timeout(2 * self.options.request_timeout_s):  # connections are made one after the other
            return await self._client.send(node, request, group=connection)

    async def ask_leader(
        self, topic: str, request: object, connection: int = CONTROL, partition: int = PARTITION
    ) -> Any:
        """As `ask`, of the leader of a partition. Raises `StaleMetadata` where it has none."""
        node = self.leader(topic, partition)
        if node is None:
            raise kafka_errors.StaleMetadata(f"{topic} has no leader")
        return await self.ask(node, request, connection)

    def close_connection(self, connection: int) -> None:
        """Close this connection to every broker; the next request on it opens another."""
        connections: dict[tuple[int, int], Any] = self._client._conns  # the library closes all of them or none
        for key in [key for key in connections if key[1] == connection]:
            connections.pop(key).close()

    async def retrying(
        self,
        what: str,
        attempt: Callable[[], Awaitable[T]],
        changes: faults.Operation | None = None,
        *,
        within_s: float | None = None,
    ) -> T:
        """Call `attempt` until it succeeds, for `delivery_timeout_s` at most, which the last attempt may exceed; with
        `within_s` for that time, which no attempt exceeds. `what` is for error messages. Raises what `faults.mapped`
        makes of the last error, with `outcome_unknown` where an attempt `changes` something and may have taken
        effect."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.options.delivery_timeout_s if within_s is None else within_s)
        pause_s = 0.0  # the first error may only be due to old metadata
        unknown = False
        refusal: BaseException | None = None
        while True:
            limit = asyncio.timeout_at(None if within_s is None else deadline)
            try:
                async with limit:
                    return await attempt()
            except faults.Foreign as error:
                unknown |= changes is not None and faults.outcome(error, changes) is faults.Outcome.UNKNOWN
                if refusal is None or not limit.expired():  # an attempt that is cut off says nothing of its own
                    refusal = error
                if faults.final(error) or loop.time() >= deadline:
                    raise faults.mapped(refusal, what, outcome_unknown=unknown) from refusal
            except TidewalError as error:
                raise of_unknown_outcome(error) if unknown else error from error.__cause__
            await asyncio.sleep(pause_s)
            pause_s = PAUSE_S
            if self._client.cluster.brokers():
                await self.refresh()

    async def offset(self, topic: str, timestamp: int, partition: int = PARTITION) -> int | None:
        """The first offset whose native `timestamp` (ms) is at least that, None where there is none yet; for `EARLIEST`
        the first stored offset, for `LATEST` the one after the last acknowledged. Raises the library's errors."""
        request = OffsetRequest(-1, 0, [(topic, [(partition, timestamp)])])
        response = await self.ask_leader(topic, request, partition=partition)
        ((_, ((_, code, _, offset),)),) = response.topics
        _check(code)
        return offset if offset >= 0 else None

    async def bounds(self, topic: str, partition: int = PARTITION) -> tuple[int, int]:
        """The first offset and the one after the last. Raises the library's errors."""
        first, end = await asyncio.gather(
            self.offset(topic, EARLIEST, partition), self.offset(topic, LATEST, partition)
        )
        return first or 0, end or 0

    # ---- administration: the library's own calls do not raise the error of a single topic ----------------------------

    async def create_topic(self, topic: str, configs: dict[str, str]) -> None:
        """Create the topic with these settings, unless it exists. Raises the library's errors."""
        new: Any = (topic, 1, self.options.replication_factor, [], list(configs.items()))
        request = CreateTopicsRequest([new], self._time_limit_ms, False)
        response = await self._ask_controller(request)
        _check_creation(response, _ALREADY_EXISTS)
        await self.refresh()

    async def delete_topic(self, topic: str) -> None:
        """Delete the topic, if it exists. Raises the library's errors."""
        response = await self._ask_controller(DeleteTopicsRequest([topic], self._time_limit_ms))
        _check(response.topic_error_codes[0][1], _UNKNOWN_TOPIC)

    async def topic_id(self, topic: str) -> bytes | None:
        """The id of the topic with that name, `NO_ID` where the brokers give no ids; None when the controller says that
        there is no such topic. Raises the library's errors, `StaleMetadata` where only a broker does not know it
        yet."""
        try:
            response = await self.ask(
                self.leader(topic), DescribeTopic(topic)
            )  # the leader, which decides about appends and reads
        except NotImplementedError:  # raised by the library for brokers that are too old for the request
            await self.refresh()
            return NO_ID if self.leader(topic) is not None else await self._none_if_absent(topic)
        code, _, id, *_ = response.topics[0]
        if code == _UNKNOWN_TOPIC:
            return await self._none_if_absent(topic)
        _check(code, _NO_LEADER)
        found: bytes = id
        return found

    async def describe_topics(self, node: int | None = None) -> dict[str, TopicDescription]:
        """All topics that a node (None: any) knows, by name, without Kafka's internal ones and those that may not be
        read. Raises the library's errors."""
        try:
            response = await self.ask(node, DescribeTopics())
        except NotImplementedError:  # raised by the library for brokers that are too old for the request
            await self.refresh()
            known: Any = self._client.cluster
            names: set[str] = known.topics(exclude_internal_topics=True)
            return {name: TopicDescription(NO_ID, len(known.partitions_for_topic(name) or ())) for name in names}
        return {
            name: TopicDescription(id, 1 + max(partition[1] for partition in partitions))
            for code, name, id, internal, partitions, *_ in response.topics
            if code in (0, _NO_LEADER) and partitions and not internal
        }

    async def _none_if_absent(self, topic: str) -> None:
        """Brokers may learn of a topic late; the controller, which is asked whether it could be created, does not."""
        asked: Any = (topic, 1, self.options.replication_factor, [], [])
        response = await self._ask_controller(CreateTopicsRequest([asked], self._time_limit_ms, True))
        if response.topic_errors[0][1] == _ALREADY_EXISTS:
            raise kafka_errors.StaleMetadata(f"a broker does not know {topic} yet")
        _check_creation(response)

    async def configure_topic(self, topic: str, configs: dict[str, str]) -> None:
        """Set these settings of the topic, and the brokers' defaults for all others. Raises the library's errors."""
        response = await self.ask(None, AlterConfigsRequest([(TOPIC_RESOURCE, topic, list(configs.items()))]))
        _check(response.resources[0][0])

    async def topic_setting(self, topic: str, name: str) -> str | None:
        """The value of a setting of the topic, None without authorization. Raises the library's errors."""
        response = await self.ask(None, DescribeConfigsRequest([(TOPIC_RESOURCE, topic, [name])]))
        code, _, _, _, entries = response.resources[0]
        if code == _NOT_AUTHORIZED:
            return None
        _check(code)
        return next((entry[1] for entry in entries if entry[0] == name), None)

    async def delete_before(self, topic: str, offset: int) -> None:
        """Delete the records before an offset. Raises the library's errors."""
        request = DeleteRecordsRequest([(topic, [(PARTITION, offset)])], self._time_limit_ms)
        response = await self.ask_leader(topic, request)
        _check(_partition_code(response))

    async def _ask_controller(self, request: object) -> Any:
        controller = self._client.cluster.controller
        return await self.ask(None if controller is None else controller.nodeId, request)

    @property
    def _time_limit_ms(self) -> int:
        return int(self.options.request_timeout_s * 1000)


def _partition_code(response: Any) -> int:
    topic: Sequence[Any] = response.topics[0]
    return topic[1][0][2]


def _check(code: int, *fine: int, reason: Sequence[str | None] = ()) -> None:
    """Raise the library's error for a code that is neither 0 nor `fine`, with the broker's `reason`."""
    if code and code not in fine:
        raise faults.for_code(code)(*filter(None, reason))


def _check_creation(response: Any, *fine: int) -> None:
    """The same for the answer about one topic, with the controller's reason where this version of the answer has it."""
    _, code, *reason = response.topic_errors[0]
    _check(code, *fine, reason=reason)
