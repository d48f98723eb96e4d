"""What becomes of a batch whatever its broker answers; each answer is told in advance, and what was sent looked at."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record import MemoryRecords

from tidewal.adapters.kafka import sender as sender_module
from tidewal.adapters.kafka.options import KafkaOptions
from tidewal.adapters.kafka.sender import Sender
from tidewal.runtime.errors import ChannelNotFound, ConfigError, InvalidRequest, Unavailable
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.metrics.metrics import Metrics

OUT_OF_TIME = 0.0  # as the time for an append: the first failure is the last


@dataclass(frozen=True)
class Sent:
    """How a batch was marked, and what is in it."""

    producer: int
    sequence: int
    payloads: tuple[bytes, ...]


class FakeCluster:
    """Answers each append with the next of `answers`: an offset, a class of error for its code, or one to raise."""

    def __init__(self, *answers, delivery_timeout_s=30.0):
        self.options = KafkaOptions("nowhere", delivery_timeout_s=delivery_timeout_s)
        self.metrics = Metrics("test")
        self.stalls = StallWatch(self.metrics)
        self.answers = list(answers)
        self.sent: list[Sent] = []
        self.led = True
        self.under_way = lambda: None
        self._producers = 0

    async def ask(self, node, request):
        assert isinstance(request, InitProducerIdRequest)
        self._producers += 1
        return SimpleNamespace(error_code=0, producer_id=self._producers, producer_epoch=0)

    async def ask_leader(self, topic, request, connection, partition=0):
        self.under_way()
        batch = MemoryRecords(bytes(request._topics[0][1][0][1])).next_batch()
        self.sent.append(Sent(batch.producer_id, batch.base_sequence, tuple(record.value for record in batch)))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        code, offset = (answer.errno, -1) if isinstance(answer, type) else (0, answer)
        return SimpleNamespace(topics=[(topic, [(0, code, offset, -1, 0)])])

    def leader(self, topic, partition=0):
        return 1 if self.led else None

    async def refresh(self):
        pass


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(sender_module, "PAUSE_S", 0.0)


async def missing():
    raise ChannelNotFound("gone", channel="a")


def sending(cluster):
    sender = Sender(cluster, "topic", 0, missing)

    async def send(*payloads):
        return await sender.send(sender.batch([(None, None, payload, []) for payload in payloads]))

    return send


async def test_batches_are_numbered_by_their_records():
    cluster = FakeCluster(0, 2, 3)
    send = sending(cluster)
    assert [await send(b"1", b"2"), await send(b"3"), await send(b"4")] == [0, 2, 3]
    assert cluster.sent == [Sent(1, 0, (b"1", b"2")), Sent(1, 2, (b"3",)), Sent(1, 3, (b"4",))]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (0, Sent(1, 2, (b"3",))),
        (kafka_errors.MessageSizeTooLargeError, Sent(1, 0, (b"3",))),
        (kafka_errors.RequestTimedOutError, Sent(2, 0, (b"3",))),
    ],
    ids=["appended", "refused", "unknown"],
)
async def test_a_batch_that_is_prepared_has_the_number_that_is_right_when_its_turn_comes(answer, expected):
    cluster = FakeCluster(answer, 2, delivery_timeout_s=OUT_OF_TIME)
    sender = Sender(cluster, "topic", 0, missing)
    first, second = (
        sender.batch([(None, None, payload, []) for payload in payloads]) for payloads in ((b"1", b"2"), (b"3",))
    )
    sender.prepare(second)  # there is no producer yet
    cluster.under_way = lambda: sender.prepare(second)
    with suppress(InvalidRequest, Unavailable):
        await sender.send(first)
    cluster.under_way = lambda: None
    await sender.send(second)
    assert cluster.sent[1] == expected


@pytest.mark.parametrize(
    "trouble",
    [
        kafka_errors.NotLeaderForPartitionError,
        kafka_errors.NotEnoughReplicasError,
        kafka_errors.NotEnoughReplicasAfterAppendError,
        kafka_errors.RequestTimedOutError,
        kafka_errors.UnknownError,
        kafka_errors.KafkaStorageError,
        kafka_errors.NodeNotReadyError(),
        kafka_errors.KafkaConnectionError(),
        TimeoutError(),
        ConnectionResetError(),
    ],
    ids=repr,
)
async def test_what_may_pass_is_sent_again_under_the_same_number(trouble):
    cluster = FakeCluster(trouble, trouble, 7, 8)
    send = sending(cluster)
    assert await send(b"1") == 7
    assert await send(b"2") == 8
    assert cluster.sent == [Sent(1, 0, (b"1",))] * 3 + [Sent(1, 1, (b"2",))]
    assert cluster.metrics.value("wal_backend_retry_total", channel_name="topic", operation="append") == 2


@pytest.mark.parametrize(
    ("trouble", "unknown"),
    [
        (kafka_errors.NotEnoughReplicasError, False),
        (kafka_errors.NotLeaderForPartitionError, True),
        (kafka_errors.UnknownTopicOrPartitionError, True),
        (kafka_errors.LeaderNotAvailableError, True),
        (kafka_errors.NodeNotReadyError(), False),
        (kafka_errors.NotEnoughReplicasAfterAppendError, True),
        (kafka_errors.RequestTimedOutError, True),
        (kafka_errors.UnknownError, True),
        (kafka_errors.KafkaConnectionError(), True),
        (TimeoutError(), True),
    ],
    ids=repr,
)
async def test_out_of_time_the_error_says_whether_the_batch_may_be_there(trouble, unknown):
    cluster = FakeCluster(trouble, 5, delivery_timeout_s=OUT_OF_TIME)
    send = sending(cluster)
    with pytest.raises(Unavailable) as caught:
        await send(b"1")
    assert caught.value.fields.get("outcome_unknown", False) is unknown
    assert cluster.metrics.value("wal_backend_outcome_unknown_total", channel_name="topic") == unknown
    assert await send(b"2") == 5
    # A batch that may be there keeps its number for itself; what comes next has another producer.
    assert cluster.sent[1] == (Sent(2, 0, (b"2",)) if unknown else Sent(1, 0, (b"2",)))


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (kafka_errors.MessageSizeTooLargeError, InvalidRequest),
        (kafka_errors.InvalidTimestampError, InvalidRequest),
        (kafka_errors.TopicAuthorizationFailedError, ConfigError),
    ],
)
async def test_a_refused_batch_takes_no_number(refusal, error):
    cluster = FakeCluster(0, refusal, 1)
    send = sending(cluster)
    await send(b"1")
    with pytest.raises(error):
        await send(b"refused")
    assert await send(b"2") == 1
    assert cluster.sent[2] == Sent(1, 1, (b"2",))


async def test_a_refusal_behind_an_attempt_that_may_have_arrived_is_an_unknown_outcome():
    cluster = FakeCluster(TimeoutError(), kafka_errors.MessageSizeTooLargeError, 1)
    send = sending(cluster)
    with pytest.raises(Unavailable) as caught:
        await send(b"1")
    assert caught.value.outcome_unknown
    await send(b"2")
    assert cluster.sent[2] == Sent(2, 0, (b"2",))


@pytest.mark.parametrize("lost", [kafka_errors.OutOfOrderSequenceNumber, kafka_errors.UnknownProducerId])
async def test_a_producer_that_the_brokers_have_forgotten_gets_another_number(lost):
    cluster = FakeCluster(0, lost, 1)
    send = sending(cluster)
    await send(b"1")
    assert await send(b"2") == 1
    assert cluster.sent[1:] == [Sent(1, 1, (b"2",)), Sent(2, 0, (b"2",))]


async def test_but_not_where_the_batch_may_be_there_already():
    cluster = FakeCluster(TimeoutError(), kafka_errors.OutOfOrderSequenceNumber)
    with pytest.raises(Unavailable) as caught:
        await sending(cluster)(b"1")
    assert caught.value.outcome_unknown


@pytest.mark.parametrize("answer", [-1, kafka_errors.DuplicateSequenceNumber])
async def test_a_duplicate_without_an_offset_is_never_taken_for_an_id(answer):
    cluster = FakeCluster(answer, 4)
    send = sending(cluster)
    with pytest.raises(Unavailable) as caught:
        await send(b"1")
    assert caught.value.outcome_unknown
    assert await send(b"2") == 4


async def test_a_topic_that_is_gone_for_good_is_said_to_be():
    cluster = FakeCluster(kafka_errors.UnknownTopicOrPartitionError)
    cluster.led = False
    with pytest.raises(ChannelNotFound):
        await sending(cluster)(b"1")


async def test_numbers_begin_again_at_the_end(monkeypatch):
    monkeypatch.setattr(sender_module, "SEQUENCES", 3)
    cluster = FakeCluster(0, 2, 4)
    send = sending(cluster)
    for _ in range(3):
        await send(b"1", b"2")
    assert [sent.sequence for sent in cluster.sent] == [0, 2, 1]


async def test_a_cancelled_send_gives_its_number_up():
    cluster = FakeCluster(asyncio.CancelledError(), 0)
    send = sending(cluster)
    with pytest.raises(asyncio.CancelledError):
        await send(b"1")
    await send(b"2")
    assert cluster.sent[1] == Sent(2, 0, (b"2",))
