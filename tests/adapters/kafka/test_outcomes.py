"""What became of a request, whatever the broker answers: each error code there is, over brokers that have written
before they answer wherever Kafka's may."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record import MemoryRecords

from tidewal.adapters.kafka import faults
from tidewal.adapters.kafka.faults import Operation, Outcome
from tidewal.adapters.kafka.groups.coordinator_broker import CoordinatorBroker, CoordinatorType
from tidewal.adapters.kafka.groups.offset_store import OffsetStore
from tidewal.adapters.kafka.groups.requests import CommittedOffset
from tidewal.adapters.kafka.groups.transaction import TransactionalProducer
from tidewal.adapters.kafka.options import KafkaOptions
from tidewal.adapters.kafka.sender import Sender
from tidewal.runtime.errors import ChannelNotFound, Fenced, TidewalError, Unavailable
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import run_virtual

EVERY_CODE = [*range(-1, 140)]  # brokers have more than the library has errors for
FROM_THE_LIBRARY = [
    error
    for _, error in inspect.getmembers(kafka_errors, inspect.isclass)
    if issubclass(error, kafka_errors.KafkaError) and not issubclass(error, kafka_errors.BrokerResponseError)
]
# What Kafka's brokers answer before they write, by its source; any other answer may come behind the append.
BEFORE_THE_APPEND = {2, 10, 17, 18, 19, 21, 29, 31, 32, 35, 42, 43, 45, 47, 48, 49, 53, 59}
BEFORE_THE_POSITION = {3, 12, 14, 22, 24, 25, 27, 28, 29, 30, 35}
BEFORE_THE_COMMIT = {14, 35, 47, 48, 49, 51, 53}
BEFORE_THE_CHANGE = {1, 14, 17, 24, 29, 30, 31, 35, 37, 38, 39, 40, 42, 44, 68}
ON_NO_ACCOUNT = {-1, 5, 6, 7, 8, 13, 15, 16, 20, 41, 46, 52, 55, 56, 60, 74, 89, 100}


class Broker:
    """Answers as `Cluster` does. Keeps a log, and knows batches by producer and sequence, as Kafka's brokers do."""

    def __init__(self):
        self.options = KafkaOptions("nowhere", delivery_timeout_s=2.0)
        self.stalls = StallWatch(Metrics("test"))
        self.log: list[bytes] = []
        self.answer = 0  # the code for the next batch, whatever has become of it
        self.cut_off = False
        self.led = True
        self._known: dict[int, list[tuple[int, int, int]]] = {}
        self._producers = 0

    async def ask(self, node, request):
        assert isinstance(request, InitProducerIdRequest)
        if self.cut_off:
            raise kafka_errors.StaleMetadata
        self._producers += 1
        return SimpleNamespace(error_code=0, producer_id=self._producers, producer_epoch=0)

    async def ask_leader(self, topic, request, connection, partition=0):
        if self.cut_off:
            raise kafka_errors.NodeNotReadyError
        batch = MemoryRecords(bytes(request._topics[0][1][0][1])).next_batch()
        answer, self.answer = self.answer, 0
        self.cut_off = bool(answer)
        offset = -1 if answer in BEFORE_THE_APPEND else self._append(batch)
        return SimpleNamespace(topics=[(topic, [(0, answer, -1 if answer else offset, -1, 0)])])

    def _append(self, batch):
        payloads = [record.value for record in batch]
        last = batch.base_sequence + len(payloads) - 1
        known = self._known.setdefault(batch.producer_id, [])
        for first, end, offset in known:
            if (first, end) == (batch.base_sequence, last):
                return offset
        assert not known or batch.base_sequence == known[-1][1] + 1, "no sequence is left out"
        known.append((batch.base_sequence, last, len(self.log)))
        self.log += payloads
        return known[-1][2]

    def leader(self, topic, partition=0):
        return 1 if self.led else None

    async def refresh(self):
        pass


async def gone():
    raise ChannelNotFound("gone", channel="a")


@pytest.mark.parametrize("code", EVERY_CODE)
def test_whatever_a_broker_answers_no_append_is_swallowed_and_none_is_wrongly_refused(code):
    """The answer is the last thing that is heard of the brokers for as long as an append may take."""

    async def run():
        broker = Broker()
        sender = Sender(broker, "topic", 0, gone)

        async def send(payload):
            return await sender.send(sender.batch([(None, None, payload, [])]))

        await send(b"before")
        broker.answer = code
        error = None
        try:
            await send(b"perhaps")
        except TidewalError as caught:
            error = caught
        unknown = error is not None and error.fields.get("outcome_unknown", False)
        assert unknown or (error is None) == (b"perhaps" in broker.log)
        broker.cut_off = False
        assert broker.log[await send(b"behind")] == b"behind"
        assert broker.log.count(b"perhaps") <= 1

    run_virtual(run())


def test_a_channel_that_is_gone_says_that_the_append_may_have_been_in_it():
    async def run():
        broker = Broker()
        sender = Sender(broker, "topic", 0, gone)
        broker.answer, broker.led = kafka_errors.NotLeaderForPartitionError.errno, False
        with pytest.raises(ChannelNotFound) as caught:
            await sender.send(sender.batch([(None, None, b"perhaps", [])]))
        assert caught.value.outcome_unknown
        broker.cut_off = False
        offset = await sender.send(sender.batch([(None, None, b"behind", [])]))
        assert broker.log[offset] == b"behind"

    run_virtual(run())


@pytest.mark.parametrize(
    ("operation", "before"),
    [
        (Operation.APPEND, BEFORE_THE_APPEND),
        (Operation.POSITION, BEFORE_THE_POSITION),
        (Operation.COMMIT, BEFORE_THE_COMMIT),
        (Operation.ADMINISTRATION, BEFORE_THE_CHANGE),
    ],
)
def test_only_what_a_broker_says_before_it_writes_is_certain(operation, before):
    certain = {
        code for code in EVERY_CODE if faults.outcome(kafka_errors.for_code(code)(), operation) is not Outcome.UNKNOWN
    }
    assert certain == before
    assert not certain & ON_NO_ACCOUNT
    for error in (OSError, TimeoutError, ConnectionResetError, KeyError):
        assert faults.outcome(error(), operation) is Outcome.UNKNOWN


@pytest.mark.parametrize("error", FROM_THE_LIBRARY, ids=lambda error: error.__name__)
def test_of_the_librarys_own_errors_only_those_from_before_sending_are_certain(error):
    never_sent = {"NodeNotReadyError", "StaleMetadata", "IncompatibleBrokerVersion", "UnsupportedCodecError"}
    expected = Outcome.NEVER_SENT if error.__name__ in never_sent else Outcome.UNKNOWN
    assert {faults.outcome(error(), operation) for operation in Operation} == {expected}


# ---- positions and transactions --------------------------------------------------------------------------------------


class Coordinated:
    """Answers as `Cluster` does, and looks after a group and a transaction: each answer is told in advance, as a code
    or an error to raise."""

    def __init__(self, *answers):
        self.options = KafkaOptions("nowhere", delivery_timeout_s=2.0)
        self.answers = list(answers)

    async def ask(self, node, request, connection=0):
        answer = self.answers.pop(0) if self.answers else kafka_errors.NodeNotReadyError()
        if isinstance(answer, BaseException):
            raise answer
        codes = [("topic", [(0, answer)])]
        return SimpleNamespace(error_code=answer, coordinator_id=1, topics=codes, producer_id=1, producer_epoch=0)

    async def retrying(self, what, attempt, changes=None):
        while True:
            try:
                return await attempt()
            except faults.Foreign as error:
                if faults.final(error) or not self.answers:
                    raise faults.mapped(error, what) from error


class Member:
    """A member of a group that is never thrown out."""

    group_id, kafka_member, generation = "group", "member", 1

    def __init__(self, cluster):
        self.coordinator = CoordinatorBroker(cluster, CoordinatorType.GROUP, "group")
        self.renewed = 0
        self.over = None

    async def settled(self):
        if self.over is not None:
            raise self.over

    def refused(self, code):
        self.over = Fenced("no member any more")

    def renew(self):
        self.renewed += 1


def store(*answers):
    """Store a position with these answers, the first to the question who coordinates: the error, and the member."""

    async def run():
        cluster = Coordinated(*answers)
        member = Member(cluster)
        try:
            await OffsetStore(cluster, member, 0).store({"topic": CommittedOffset(1, "")})
        except TidewalError as error:
            return error, member
        return None, member

    return run_virtual(run())


@pytest.mark.parametrize("code", [code for code in EVERY_CODE if code not in (0, *BEFORE_THE_POSITION)])
def test_a_position_that_may_be_stored_is_never_called_refused(code):
    error, member = store(0, code)
    assert error.fields["outcome_unknown"] is True
    # The library gives its own time limit a broker's code; that attempt may still arrive.
    assert member.renewed == (code == kafka_errors.RequestTimedOutError.errno)


@pytest.mark.parametrize("code", sorted(BEFORE_THE_POSITION - {22, 25, 27}))
def test_a_position_that_was_refused_is_known_to_be(code):
    error, member = store(0, code)
    assert error.fields.get("outcome_unknown") is None
    assert not member.renewed


def test_looking_for_the_coordinator_in_vain_stores_nothing():
    error, member = store(kafka_errors.GroupCoordinatorNotAvailableError.errno, TimeoutError())
    assert isinstance(error, Unavailable)
    assert error.fields == {}
    assert not member.renewed


def test_an_epoch_that_is_over_after_an_attempt_of_unknown_outcome_says_so():
    error, _ = store(0, kafka_errors.NotCoordinatorForGroupError.errno, 0, kafka_errors.UnknownMemberIdError.errno)
    assert isinstance(error, Fenced)
    assert error.outcome_unknown


@pytest.mark.parametrize("code", [code for code in EVERY_CODE if code not in (0, *BEFORE_THE_COMMIT, 90)])
def test_a_transaction_that_may_be_committed_is_never_called_aborted(code):
    async def run():
        producer = TransactionalProducer(Coordinated(0, code), "name")
        with pytest.raises(TidewalError) as caught:
            await producer._end((1, 0))
        return caught.value

    assert run_virtual(run()).fields["outcome_unknown"] is True
