"""Pulsar without a broker: ids, names, policies, options, errors, and what becomes of a submit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.pulsar import seek
from tidewal.adapters.pulsar.appending import Appender
from tidewal.adapters.pulsar.failures import send_failure
from tidewal.adapters.pulsar.ids import MessagePlace, before_ledger, decode, encode
from tidewal.adapters.pulsar.options import parse
from tidewal.adapters.pulsar.seek import begin
from tidewal.adapters.pulsar.topics import PulsarTopic, channel_of, contents_of, decode_policy, encode_policy
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.errors import (
    ChannelNotFound,
    Closed,
    ConfigError,
    CorruptLog,
    MessageTooLarge,
    Overloaded,
    Unavailable,
)
from tidewal.runtime.log.admission import PendingBytes
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, Durability, From, FromId, FromTime

NOW_MS = 1_700_000_000_000
number = st.integers(0, 2**40)
place = st.builds(MessagePlace, number, number, st.integers(0, 2**20))
channel_name = st.text("abP-_.~09partion", min_size=1, max_size=30).filter(lambda name: "~" not in name)


@pytest.mark.slow
@given(place, place)
def test_ids_sort_like_places_and_come_back(one, other):
    assert (encode(one) < encode(other)) == (one < other)
    assert decode(encode(one)) == one
    assert decode(encode(one)[:-1]) is None


@pytest.mark.slow
@given(channel_name, channel_name)
def test_no_two_channels_share_a_topic(one, other):
    assert channel_of(PulsarTopic(one).name) == one
    assert (PulsarTopic(one).name == PulsarTopic(other).name) == (one == other)


@pytest.mark.slow
@given(
    st.builds(
        ChannelPolicy,
        ephemeral=st.booleans(),
        acks=st.sampled_from(Durability),
        retention_s=st.none() | st.floats(0, 1e9),
        retention_bytes=st.none() | st.integers(0, 2**50),
        max_message_bytes=st.integers(1, 2**30),
        delivery=st.sampled_from(Delivery),
    )
)
def test_a_policy_comes_back_and_retention_is_never_zero(policy):
    assert decode_policy(encode_policy(policy), "a") == policy
    assert all(limit == -1 or limit > 0 for limit in PulsarTopic("a", policy).retention.values())


def test_a_stored_policy_with_a_negative_number_is_read() -> None:
    text = encode_policy(ChannelPolicy(retention_bytes=7)).replace('"retention_bytes": 7', '"retention_bytes": -7')
    assert decode_policy(text, "a") == ChannelPolicy(retention_bytes=0)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"acks": "some"}', '{"acks": "all", "delivery": "keep", "x": 1}'])
def test_a_policy_that_makes_no_sense_is_an_error(text):
    with pytest.raises(CorruptLog):
        decode_policy(text, "a")


def contents(ledgers, last, size=0, **properties):
    return contents_of(
        PulsarTopic("a"),
        {
            "ledgers": [{"ledgerId": ledger, "entries": entries} for ledger, entries in ledgers],
            "lastConfirmedEntry": last,
            "totalSize": size,
            "numberOfEntries": sum(entries for _, entries in ledgers),
            "properties": properties,
            "cursors": {"tidewal-hold.x": {"readPosition": "5:2"}, "pulsar.dedup": {"readPosition": "1:0"}},
        },
    )


def test_what_the_broker_counts_is_read_with_the_ledger_in_use():
    found = contents([(3, 4), (4, 0), (5, 7), (9, 0)], "9:1")
    assert found.ledgers == ((3, 4), (4, 0), (5, 7), (9, 2))
    assert found.first == MessagePlace(3, 0)
    assert found.holds == {"x": MessagePlace(5, 2)}
    assert contents([(3, 0)], "3:-1").first is None
    assert contents([(3, 4), (9, 0)], "3:3").end == MessagePlace(9, -1)
    truncated = {"tidewal.truncated": encode(MessagePlace(9, 0)).hex()}
    assert contents([(3, 4), (5, 7), (9, 0)], "9:1", **truncated).first == MessagePlace(5, 2)  # held


def test_a_gap_between_ledgers_is_seen():
    found = contents([(3, 4), (4, 0), (5, 7), (9, 0)], "9:1")
    assert not found.has_between(MessagePlace(3, 3), MessagePlace(5, 0), NOW_MS)
    assert found.has_between(MessagePlace(3, 2), MessagePlace(5, 0), NOW_MS)
    assert found.has_between(MessagePlace(3, 3), MessagePlace(9, 0), NOW_MS)
    assert found.has_between(MessagePlace(2, 0), MessagePlace(3, 0), NOW_MS)  # it is gone, so that is not known
    kept = {"tidewal.policy": encode_policy(ChannelPolicy(retention_s=60.0)), "tidewal.made": f"{NOW_MS}-x"}
    whole = contents([(3, 4), (5, 7), (9, 0)], "9:1", **kept)
    assert not whole.has_between(MessagePlace(2, -1), MessagePlace(3, 0), NOW_MS + 59_000)  # it was empty
    assert whole.has_between(MessagePlace(2, -1), MessagePlace(3, 0), NOW_MS + 61_000)
    assert whole.has_between(MessagePlace(2, -1), MessagePlace(5, 0), NOW_MS)
    assert whole.has_between(MessagePlace(2, 0), MessagePlace(3, 0), NOW_MS)  # it was not


class Filling:
    """A channel whose first messages land just after it was looked at."""

    def __init__(self, ledgers, last):
        self._ledgers, self._last = ledgers, last

    def contents(self, channel):
        number, entries = self._ledgers[-1]
        return contents(self._ledgers, f"{number}:{entries - 1}")

    def last(self, channel):
        return self._last


@pytest.mark.parametrize(
    "start", [From.EARLIEST, FromId(before_ledger(7)), FromId(before_ledger(7), inclusive=True), FromTime(NOW_MS << 18)]
)
def test_what_lands_while_a_reader_looks_for_its_place_is_behind_that(start):
    assert begin(Filling([(7, 0)], MessagePlace(7, 1)), "a", start) < MessagePlace(7, 0)


class Stored:
    """A channel whose entries, one message each, have these timestamps, in ledgers of 100."""

    def __init__(self, monkeypatch, timestamps, entry_bytes=100):
        self.places = [MessagePlace(number // 100, number % 100) for number in range(len(timestamps))]
        ledgers = sorted(Counter(place.ledger for place in self.places).items())
        last = self.places[-1]
        self.contents = contents(ledgers, f"{last.ledger}:{last.entry}", size=len(timestamps) * entry_bytes)
        self.timestamps, self.read = timestamps, 0
        monkeypatch.setattr(seek, "_messages", self._messages)

    def _messages(self, source, channel, after, queue_messages=None):
        for place, timestamp in zip(self.places, self.timestamps, strict=True):
            if place > after:
                self.read += 1
                yield place, timestamp

    def at(self, timestamp):
        return seek.find_time(None, "a", self.contents, timestamp)

    def expected(self, timestamp):
        found = (place for place, at in zip(self.places, self.timestamps, strict=True) if at >= timestamp)
        return next(found, None)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=4),
    st.integers(0, 2000),
)
def test_a_time_is_found_whatever_a_superseded_owner_wrote_late(owners, timestamp):
    """Each owner's entries, all later than those before, and then so many late entries of the one before."""
    timestamps = []
    for own, late in owners:
        limit = max(timestamps, default=0)
        timestamps += [limit + 1 + n for n in range(own)] + [limit] * late
    with pytest.MonkeyPatch.context() as monkeypatch:
        stored = Stored(monkeypatch, timestamps)
        for wanted in {timestamp, *timestamps}:
            assert stored.at(wanted) == stored.expected(wanted)


def test_a_search_for_a_time_reads_few_large_entries(monkeypatch):
    stored = Stored(monkeypatch, list(range(5000)), entry_bytes=1024 * 1024)
    assert stored.at(4000) == stored.expected(4000)
    assert stored.read < 20 * 16


def test_a_position_in_a_ledger_without_entries_is_the_end_of_those_before():
    assert (
        MessagePlace(5, 2)
        < begin(Filling([(5, 3), (7, 0)], MessagePlace(7, 1)), "a", FromId(before_ledger(7)))
        < MessagePlace(7, 0)
    )


def test_options_win_over_the_url_and_that_over_settings():
    settings = load_settings(
        environment={},
        arguments={
            "pulsar.address": "unused",
            "pulsar.tenant": "t",
            "pulsar.namespace": "n",
            "pulsar.requestTimeout": 7,
            "pulsar.authPlugin": "token",
            "pulsar.authParams": "token:secret",
        },
    ).pulsar
    found = parse("pulsar://a:1,b:2", settings)
    assert (found.service_url, found.web_url, found.namespace) == ("pulsar://a:1,b:2", "http://a:8080", "t/n")
    assert (found.request_timeout_s, found.security.token) == (7, "secret")
    assert "secret" not in repr(found)
    found = parse("pulsar+ssl://[::1]/x/y?request_timeout_s=3&pending_bytes=9&validate_hostname=false", settings)
    assert (found.web_url, found.namespace) == ("https://[::1]:8443", "x/y")
    assert (found.request_timeout_s, found.pending_bytes, found.security.validate_hostname) == (3, 9, False)
    assert parse("pulsar://a?request_timeout_s=3", settings, request_timeout_s=2).request_timeout_s == 2
    assert parse("pulsar://a", settings.model_copy(update={"webaddress": "w:9"})).web_url == "http://w:9"
    webport = load_settings(environment={}, arguments={"pulsar.webport": 90}).pulsar
    assert parse("pulsar://a", webport).web_url == "http://a:90"


@pytest.mark.parametrize(
    "url",
    [
        "pulsar://",
        "pulsar:///public/default",
        "pulsar://a/only-tenant",
        "pulsar://a/x/y/z",
        "pulsar://a?unknown=1",
        "pulsar://a?request_timeout_s=soon",
        "pulsar://a?pending_bytes=0",
        "pulsar://a?namespace=x",
    ],
)
async def test_a_url_that_makes_no_sense_is_refused(url):
    with pytest.raises(ConfigError):
        await open_wal(url)


@pytest.mark.parametrize("scheme", ["pulsar", "pulsar+ssl"])
async def test_no_broker_at_the_address_is_an_error_in_time(scheme):
    with pytest.raises(Unavailable):
        async with asyncio.timeout(20):
            await open_wal(f"{scheme}://127.0.0.1:1", web_url="http://127.0.0.1:1", request_timeout_s=0.3)


async def test_opening_does_not_wait_for_a_broker_as_long_as_a_call_does():
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/.*refused.*Check the address"):
        async with asyncio.timeout(20):
            await open_wal("pulsar://127.0.0.1:1?connect_timeout_s=0.2", web_url="http://127.0.0.1:1")


class Producer:
    """Answers when it is told to."""

    def __init__(self, channel):
        self.max_message_bytes = 10
        self.broken = False
        self.sent = []
        self.closed = False

    def send(self, entry, index, answered):
        self.sent.append((bytes(entry.payload), lambda result: answered(index, result)))

    def flush(self):
        pass

    def close(self):
        self.closed = True


@contextlib.contextmanager
def appending(open_producer, pending_bytes=1_000_000):
    with ThreadPoolExecutor(2) as executor:
        appender = Appender(open_producer, executor, PendingBytes(pending_bytes, "pulsar://here"))
        yield appender
        appender.close()


async def test_a_submit_that_is_partly_in_has_an_unknown_outcome(helpers):
    producers = {name: Producer(name) for name in "ab"}
    answers = []
    with appending(producers.__getitem__) as appender:
        appender.submit([Append("a", b"1"), Append("b", b"2")], answers.append)
        await helpers.until(lambda: producers["b"].sent)
        producers["a"].sent[0][1](b"id")
        assert answers == []
        producers["b"].sent[0][1](send_failure("MessageTooBig", "b", 1))
    assert type(answers[0]) is MessageTooLarge
    assert answers[0].fields["outcome_unknown"]


async def test_appends_keep_their_order_while_producers_are_made_and_a_broken_one_is_replaced(helpers):
    made = {"a": [], "b": []}

    def make(channel):
        made[channel].append(Producer(channel))
        return made[channel][-1]

    answers = []
    with appending(make) as appender:
        for i in range(50):
            appender.submit([Append("ab"[i % 2], b"%d" % i), Append("a", b"%d" % i)], answers.append)
        await helpers.until(lambda: made["a"] and made["b"] and len(made["a"][0].sent) + len(made["b"][0].sent) == 100)
        order = [int(payload) for payload, _ in made["a"][0].sent]
        assert order == sorted(order)
        for producers in made.values():
            for _, answer in producers[0].sent:
                answer(b"id")
        assert answers == [[b"id", b"id"]] * 50
        made["a"][0].broken = True
        appender.submit([Append("a", b"new")], answers.append)
        await helpers.until(lambda: len(made["a"]) == 2 and made["a"][1].sent)
        assert made["a"][0].closed
        made["a"][1].sent[0][1](b"id")


async def test_a_missing_channel_fails_all_who_wait_for_it_and_only_those(helpers):
    found = Producer("a")

    def make(channel):
        if channel == "a":
            return found
        raise ChannelNotFound("none", channel=channel)

    missing, there = [], []
    with appending(make) as appender:
        for _ in range(5):
            appender.submit([Append("no", b"x")], missing.append)
            appender.submit([Append("a", b"x")], there.append)
        await helpers.until(lambda: len(missing) == 5 and len(found.sent) == 5)
        for _, answer in found.sent:
            answer(b"id")
    assert {type(error) for error in missing} == {ChannelNotFound}
    assert there == [[b"id"]] * 5


async def test_limits_and_the_end(helpers):
    producer = Producer("a")
    answers = []
    with appending(lambda _: producer, pending_bytes=600) as appender:
        appender.submit([Append("a", b"x")], answers.append)
        appender.submit([Append("a", b"x")], answers.append)
        with pytest.raises(Overloaded):
            appender.submit([Append("a", bytes(100))], print)
        await helpers.until(lambda: len(producer.sent) == 2)
        with pytest.raises(MessageTooLarge):
            appender.submit([Append("a", bytes(11))], print)
        for _, answer in producer.sent:
            answer(b"id")
    assert answers == [[b"id"]] * 2
    with pytest.raises(Closed):
        appender.submit([Append("a", b"x")], print)
    assert producer.closed


async def test_a_stopped_channel_waits_and_others_do_not(helpers):
    producers = {name: Producer(name) for name in "ab"}
    with appending(producers.__getitem__) as appender:
        appender.pause("a")
        appender.submit([Append("a", b"later")], lambda _: None)
        appender.submit([Append("b", b"now")], lambda _: None)
        await helpers.until(lambda: producers["b"].sent)
        assert producers["a"].sent == []
        appender.resume("a")
        await helpers.until(lambda: producers["a"].sent)
        for producer in producers.values():
            producer.sent[0][1](b"id")
