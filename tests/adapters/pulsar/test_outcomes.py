"""What is certain of a request that failed: never sent, refused, or unknown; and what follows from it."""

from __future__ import annotations

import contextlib
import http
import socket
import urllib.error
from concurrent.futures import ThreadPoolExecutor

import pulsar
import pytest

from tidewal.adapters.pulsar.admin import Admin, _Refused
from tidewal.adapters.pulsar.client import Security
from tidewal.adapters.pulsar.failures import (
    MESSAGE_RESULTS,
    Outcome,
    call_failure,
    message_outcome,
    send_failure,
    web_outcome,
)
from tidewal.adapters.pulsar.ids import MessagePlace, encode
from tidewal.adapters.pulsar.producer import ChannelProducer
from tidewal.adapters.pulsar.topics import POLICY_PROPERTY, PulsarTopic, TopicContents
from tidewal.runtime.errors import ChannelNotFound, ConfigError, MessageTooLarge, TidewalError, Unavailable
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.log.wal import Append

RESULTS = sorted(set(pulsar.Result.__members__) - {"Ok"})
NEVER_SENT = {"MessageTooBig", "InvalidMessage", "ProducerQueueIsFull", "MemoryBufferIsFull"}


@pytest.mark.parametrize("result", RESULTS)
def test_a_message_is_certain_only_where_the_library_answers_before_it_queues(result):
    error = send_failure(result, "a", 5)
    assert isinstance(error, TidewalError)
    assert message_outcome(result) is (Outcome.NEVER_SENT if result in NEVER_SENT else Outcome.UNKNOWN)
    assert bool(error.fields.get("outcome_unknown")) == (result not in NEVER_SENT)
    assert (type(error) is Unavailable) == (result not in NEVER_SENT)


def test_the_table_names_results_of_the_library_and_a_result_of_later_is_unknown():
    assert set(MESSAGE_RESULTS) <= set(RESULTS)
    assert send_failure("SomethingNew", "a", 5).fields["outcome_unknown"]


@pytest.mark.parametrize("result", [result for result in RESULTS if hasattr(pulsar.exceptions, result)])
def test_every_exception_of_the_library_becomes_one_of_our_errors(result):
    error = call_failure(getattr(pulsar.exceptions, result)("x"), "trying")
    assert isinstance(error, TidewalError)
    assert "outcome_unknown" not in error.fields


@pytest.mark.parametrize("code", [status.value for status in http.HTTPStatus if status.value >= 300])
def test_an_answer_of_the_web_service_is_certain_only_where_it_comes_before_the_work(code):
    certain = code in {400, 401, 403, 404, 405, 409, 412, 429}
    assert web_outcome(code) is (Outcome.REFUSED if certain else Outcome.UNKNOWN)


def test_a_connection_that_was_never_there_sent_nothing():
    for reason in (ConnectionRefusedError(), socket.gaierror()):
        assert web_outcome(urllib.error.URLError(reason)) is Outcome.NEVER_SENT
    for error in (urllib.error.URLError(TimeoutError()), ConnectionResetError(), TimeoutError()):
        assert web_outcome(error) is Outcome.UNKNOWN


class Scripted(Admin):
    """The web service as a script: each request gets the next answer, the last one for ever."""

    def __init__(self, *answers):
        super().__init__("http://unused", "t/n", 0.05, Security())
        self._answers = list(answers)
        self.asked = 0

    def _once(self, method, url, body):
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


REFUSED_CONNECTION = urllib.error.URLError(ConnectionRefusedError())


@pytest.mark.parametrize(
    ("answers", "kind", "unknown"),
    [
        ([_Refused(500, "")], Unavailable, True),
        ([ConnectionResetError()], Unavailable, True),
        ([REFUSED_CONNECTION], Unavailable, False),
        ([_Refused(403, "")], ConfigError, False),
        ([_Refused(412, "")], Unavailable, False),
    ],
)
def test_a_change_that_fails_says_whether_it_may_have_happened(answers, kind, unknown):
    with pytest.raises(kind) as caught:
        Scripted(*answers).set_property(PulsarTopic("a"), "x", "y")
    assert caught.value.fields.get("outcome_unknown", False) is unknown
    with pytest.raises(kind) as caught:  # what only asks changes nothing
        Scripted(*answers).contents(PulsarTopic("a"))
    assert "outcome_unknown" not in caught.value.fields


def test_a_refusal_behind_an_unanswered_attempt_is_not_certain():
    admin = Scripted(ConnectionResetError(), _Refused(403, ""))
    admin._timeout_s = 10
    with pytest.raises(ConfigError) as caught:
        admin.set_property(PulsarTopic("a"), "x", "y")
    assert caught.value.outcome_unknown


@pytest.mark.slow
def test_a_channel_is_made_once_its_duplicates_are_removed():
    """The broker answers before a policy is in effect, and stores twice until then what is sent again."""
    off, on = {"deduplicationStatus": "Disabled"}, {"deduplicationStatus": "Enabled"}
    admin = Scripted(None, None, off, off, off, on)
    admin._timeout_s = 10
    admin.set_policies(PulsarTopic("a"))
    assert admin.asked == 6
    with pytest.raises(Unavailable):
        Scripted(None, None, off).set_policies(PulsarTopic("a"))
    died_before = Scripted(off, None, None, off, on)
    died_before._timeout_s = 10
    died_before.ensure_deduplication(PulsarTopic("a"))
    assert died_before.asked == 5
    Scripted(on).ensure_deduplication(PulsarTopic("a"))


class Id:
    def __init__(self, place):
        self._place = place

    def ledger_id(self):
        return self._place[0]

    def entry_id(self):
        return self._place[1]

    def batch_index(self):
        return 0


STORED_BEFORE = Id((-1, -1))


class Found:
    def __init__(self, place):
        self._place = place

    def message_id(self):
        return Id(self._place)

    def producer_name(self):
        return "mine"


class Broker:
    """A client whose producer answers when it is told to, and whose reader finds `stored`."""

    timeout_ms = 10

    def __init__(self, stored=()):
        self.stored = list(stored)
        self.ledgers = ((7, 0),)
        self.sent = []

    def producer(self, address, name):
        return self

    def contents(self, channel):
        if self.ledgers is None:
            raise ChannelNotFound(f"no channel {channel}; create it first", channel=channel)
        return TopicContents(None, self.ledgers, MessagePlace(self.ledgers[-1][0], -1), None, {})

    def send_async(self, message, answered):
        if self.sent is None:
            raise RuntimeError("what the library never does")
        self.sent.append(answered)

    def answer(self, number, result, id=STORED_BEFORE):
        self.sent[number - 1](getattr(pulsar.Result, result), id)

    def reader(self, address, after, queue_messages):
        return Reading([place for place in self.stored if place > after])


class Reading:
    def __init__(self, places):
        self._places = places

    def read_next(self, timeout_ms):
        if not self._places:
            raise pulsar.Timeout
        return Found(self._places.pop(0))

    def close_async(self, done):
        pass


@pytest.fixture
def producing():
    """A producer over a broker that has these places, with its answers by index."""
    with ThreadPoolExecutor(1) as executor:

        def make(stored, count):
            broker, answers = Broker(stored), {}
            end = MessagePlace(7, -1)
            producer = ChannelProducer(
                broker, PulsarTopic("a"), "", "mine", broker.contents, 7, end, 100, executor, print, StallWatch()
            )
            for index in range(1, count + 1):
                producer.send(Append("a", b"x"), index, answers.__setitem__)
            return producer, broker, answers

        yield make


def settle(producer):
    producer._executor.shutdown(wait=True)


def test_what_was_never_sent_takes_no_place(producing):
    producer, broker, answers = producing([MessagePlace(7, 0), MessagePlace(7, 1)], 3)
    broker.answer(2, "MessageTooBig")
    broker.answer(1, "Ok")
    broker.answer(3, "Ok")
    settle(producer)
    assert answers[1] == encode(MessagePlace(7, 0))
    assert type(answers[2]) is MessageTooLarge
    assert answers[3] == encode(MessagePlace(7, 1))
    assert not producer.broken


def test_behind_an_unknown_outcome_no_place_is_guessed_and_the_producer_is_given_up(producing):
    producer, broker, answers = producing([MessagePlace(7, 0), MessagePlace(7, 1)], 3)
    broker.answer(1, "Ok", Id((7, 0)))
    broker.answer(2, "ProducerBlockedQuotaExceededException")  # stored or not
    broker.answer(3, "Ok")  # stored at 7:1, or behind it
    settle(producer)
    assert producer.broken
    assert answers[1] == encode(MessagePlace(7, 0))
    for index in (2, 3):
        assert answers[index].fields["outcome_unknown"]


def test_an_exception_while_sending_leaves_the_outcome_unknown(producing):
    producer, broker, answers = producing([], 0)
    broker.sent = None
    producer.send(Append("a", b"x"), 0, answers.__setitem__)
    assert producer.broken
    assert answers[0].fields["outcome_unknown"]


def test_an_answer_out_of_a_new_ledger_is_believed_once_the_topic_was_looked_at(producing):
    producer, broker, answers = producing([], 2)
    broker.ledgers = ((7, 1), (9, 1))
    broker.answer(1, "Ok", Id((7, 0)))
    broker.answer(2, "Ok", Id((9, 0)))
    settle(producer)
    assert answers == {1: encode(MessagePlace(7, 0)), 2: encode(MessagePlace(9, 0))}
    assert not producer.broken


def test_what_went_into_a_topic_that_is_no_channel_is_not_acknowledged(producing):
    """The topic was deleted, and came back when the library connected again."""
    producer, broker, answers = producing([], 1)
    broker.ledgers = None
    broker.answer(1, "Ok", Id((9, 0)))
    settle(producer)
    assert type(answers[1]) is ChannelNotFound
    assert producer.broken


def test_what_went_into_a_ledger_that_the_channel_does_not_have_is_unknown(producing):
    producer, broker, answers = producing([], 1)
    broker.ledgers = ((11, 0),)
    broker.answer(1, "Ok", Id((9, 0)))
    settle(producer)
    assert answers[1].fields["outcome_unknown"]
    assert producer.broken


OFF, ON, NONE = {"allowAutoTopicCreation": False}, {"allowAutoTopicCreation": True}, None
OURS, THEIRS = {POLICY_PROPERTY: ""}, {}
NO_LISTS = [], []  # of non-persistent topics, and of partitioned ones of these


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([None, None, None], 3),  # there is no namespace: it is made, and switched off
        ([{}, OFF], 2),
        ([{}, NONE, {"allowAutoTopicCreation": "false"}], 3),  # the brokers' own setting
        ([{}, NONE, {}, *NO_LISTS, ["persistent://t/n/a", "persistent://t/n/__change_events"], OURS, None], 8),
        ([{}, ON, *NO_LISTS, ["persistent://t/n/a"], None, None], 7),  # one that was deleted meanwhile
        ([{}, _Refused(403, "")], 2),  # we may not know: it is logged
    ],
)
def test_topics_that_make_themselves_are_switched_off(answers, asked):
    admin = Scripted(*answers)
    admin.prepare_namespace()
    assert admin.asked == asked


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([None], Unavailable),
        ([{}, ON], ConfigError),
        ([{}, NONE, {}], ConfigError),  # what the brokers do unless told otherwise
        ([{}, OFF], None),
        ([{}, NONE, {"allowAutoTopicCreation": "false"}], None),
        ([_Refused(403, "")], None),  # we may not know: it is logged
    ],
)
def test_a_namespace_is_read_only_where_reading_makes_no_topics(answers, error):
    admin = Scripted(*answers)
    with pytest.raises(error) if error else contextlib.nullcontext():
        admin.check_namespace()
    assert admin.asked == len(answers)


@pytest.mark.parametrize(
    ("lists", "named"),
    [
        ([*NO_LISTS, ["persistent://t/n/a", "persistent://t/n/b"], OURS, THEIRS], "'b'"),
        ([["non-persistent://t/n/live"], []], "'live'"),
        ([[], ["non-persistent://t/n/wide"]], "'wide'"),
    ],
)
def test_a_namespace_of_others_where_topics_make_themselves_is_refused(lists, named):
    admin = Scripted({}, ON, *lists)
    with pytest.raises(ConfigError) as caught:
        admin.prepare_namespace()
    assert named in caught.value.message
    assert admin.asked == 2 + len(lists)  # so nothing was changed
