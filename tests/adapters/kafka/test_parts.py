"""The parts of the Kafka adapter that need no broker: ids and timestamps, options, errors, send queues."""

from __future__ import annotations

import asyncio
import inspect
import json
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import errors as kafka_errors
from aiokafka.record import MemoryRecords
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.kafka import catalog as channel_catalog
from tidewal.adapters.kafka import faults, open_wal
from tidewal.adapters.kafka.batch import ProducerBatch
from tidewal.adapters.kafka.catalog import ChannelCatalog, KafkaChannel
from tidewal.adapters.kafka.fetching import last_before
from tidewal.adapters.kafka.options import CODECS, parse
from tidewal.adapters.kafka.positions import FRESH_MS, from_native, offset_of, prefix, to_rows
from tidewal.adapters.kafka.send_queue import ChannelSendQueue, SubmitCall, SubmitPart
from tidewal.adapters.kafka.settings import KafkaSettings
from tidewal.adapters.kafka.topics import catalog_topic, channel_topic, configs
from tidewal.runtime.clock import compose
from tidewal.runtime.errors import ConfigError, FormatTooNew, InvalidRequest, Overloaded, TidewalError, Unavailable
from tidewal.runtime.log.admission import PendingBytes
from tidewal.runtime.log.wal import ChannelPolicy

NOW_MS = 1_700_000_000_000
OUT_OF_RANGE = kafka_errors.OffsetOutOfRangeError.errno
EVERY_ERROR = [
    error
    for _, error in inspect.getmembers(kafka_errors, inspect.isclass)
    if issubclass(error, kafka_errors.KafkaError) and error is not kafka_errors.BrokerResponseError
]


@pytest.mark.slow
@given(st.integers(0, 2**64 - 1))
def test_a_timestamp_comes_back_and_the_native_one_is_never_below_it(timestamp):
    ((native_ms, key, value, headers),) = to_rows([timestamp], [b"x"], NOW_MS)
    assert (key, value) == (None, b"x")
    assert native_ms >= max(timestamp >> 18, NOW_MS - FRESH_MS)
    assert from_native(native_ms, headers) == timestamp


def test_a_fresh_whole_timestamp_needs_no_header_and_a_foreign_record_has_the_native_one():
    ((native_ms, _, _, headers),) = to_rows([compose(NOW_MS)], [b""], NOW_MS)
    assert (native_ms, headers) == (NOW_MS, [])
    assert from_native(NOW_MS, [("ts", b"short"), ("other", bytes(8)), ("ts", None)]) == compose(NOW_MS)
    assert from_native(-1, []) == 0


@pytest.mark.slow
@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**63))
def test_ids_sort_by_incarnation_and_offset(incarnation, offset, other_incarnation, other_offset):
    id = prefix(incarnation) + offset.to_bytes(8, "big")
    other = prefix(other_incarnation) + other_offset.to_bytes(8, "big")
    assert (id < other) == ((incarnation, offset) < (other_incarnation, other_offset))
    assert offset_of(id, prefix(incarnation)) == offset
    if incarnation != other_incarnation:
        assert offset_of(other, prefix(incarnation)) is None
    assert offset_of(id[1:], prefix(incarnation)) is None


@given(st.text("ab-", min_size=1, max_size=3), st.text("ab.-_", min_size=1, max_size=4), st.integers(0, 99))
def test_no_two_channels_share_a_topic(log, name, incarnation):
    topic = channel_topic(log, name, incarnation)
    rest = topic.removeprefix(f"{log}.")
    assert rest.rpartition(".") == (name, ".", str(incarnation))
    assert topic.partition(".")[0] == log  # so that no other log has it
    assert topic != catalog_topic(log)


def test_the_longest_name_fits():
    assert len(channel_topic("p" * 40, "x" * 250, 2**63)) <= 249


def test_a_url_with_options_over_settings():
    settings = KafkaSettings.model_validate(
        {"brokerList": "elsewhere:1", "saslUsername": "me", "securityProtocol": "SASL_PLAINTEXT"}
    )
    options = parse("kafka://one:1,two:2/mine?request_timeout_s=2&pending_bytes=10", settings, pending_bytes=20)
    assert (options.bootstrap, options.prefix) == ("one:1,two:2", "mine")
    assert (options.request_timeout_s, options.pending_bytes) == (2.0, 20)
    assert options.client["sasl_plain_username"] == "me"
    assert parse("kafka://", settings).bootstrap == "elsewhere:1"
    assert parse("kafka://one:1").prefix == "tidewal"


@pytest.mark.parametrize(
    "url",
    [
        "kafka://",
        "kafka://one:1/a/b",
        "kafka://one:1/a.b",
        "kafka://one:1?nonsense=1",
        "kafka://one:1?batch_bytes=x",
        "kafka://one:port",
        "kafka://one:1,,two:2",
    ],
)
def test_a_url_that_says_nothing_is_refused(url):
    with pytest.raises(ConfigError):
        parse(url)


@pytest.mark.parametrize(
    "given", [{"securityProtocol": "NONSENSE"}, {"securityProtocol": "SASL_PLAINTEXT", "saslMechanisms": "NONSENSE"}]
)
async def test_a_login_that_the_client_does_not_know_is_refused(given):
    with pytest.raises(ConfigError):
        await open_wal("kafka://127.0.0.1:9", settings=KafkaSettings.model_validate(given))


def test_a_certificate_that_is_not_there_is_said():
    settings = KafkaSettings.model_validate({"ssl": {"enabled": True, "tlsCaCert": "/nowhere/ca.pem"}})
    with pytest.raises(ConfigError, match="certificates"):
        parse("kafka://one:1", settings)


def test_a_held_channel_is_not_left_to_the_brokers():
    options = parse("kafka://one:1")
    policy = ChannelPolicy(retention_s=60.0, retention_bytes=10**9)
    free, held = configs(policy, options), configs(policy, options, held=True)
    assert (free["retention.ms"], free["retention.bytes"]) == ("60000", "1000000000")
    assert (held["retention.ms"], held["retention.bytes"]) == ("-1", "-1")
    assert int(configs(ChannelPolicy(max_message_bytes=100), options)["max.message.bytes"]) > options.batch_bytes


@given(st.booleans(), st.integers(1, 2**27), st.integers(1, 2**40))
def test_the_largest_message_fits_into_a_segment(ephemeral, message_bytes, kept_bytes):
    policy = ChannelPolicy(
        ephemeral, max_message_bytes=message_bytes, retention_bytes=kept_bytes, ephemeral_bytes=kept_bytes
    )
    found = configs(policy, parse("kafka://one:1"))
    assert message_bytes < int(found["max.message.bytes"]) <= int(found["segment.bytes"])


@pytest.mark.parametrize("error", [*EVERY_ERROR, OSError, TimeoutError], ids=lambda error: error.__name__)
def test_every_error_of_the_client_becomes_one_of_ours(error):
    for unknown in (False, True):
        raised = faults.mapped(error(), "test", outcome_unknown=unknown)
        assert isinstance(raised, TidewalError)
    assert isinstance(error(), faults.Foreign)


# ---- send queues -----------------------------------------------------------------------------------------------------


class FakeSender:
    """Gives out offsets, batch by batch; refuses what holds a payload of `refused`, fails once with `failure`."""

    def __init__(self):
        self.batches: list[list[bytes]] = []
        self.prepared: list[list[bytes]] = []
        self.failure: TidewalError | None = None
        self.refused = b"refused"
        self.go = asyncio.Event()
        self.go.set()
        self._offsets = count()

    def batch(self, rows=()):
        return ProducerBatch(rows)

    def prepare(self, batch):
        self.prepared.append([row[2] for row in batch.rows()])

    async def send(self, batch):
        payloads = [row[2] for row in batch.rows()]
        self.batches.append(payloads)
        await asyncio.sleep(0)  # a broker does not answer at once
        await self.go.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if self.refused in payloads:
            raise InvalidRequest("refused")
        offsets = [next(self._offsets) for _ in payloads]
        return offsets[0]


class Rig:
    """A send queue, and the answers."""

    def __init__(self, batch_bytes=1000, limit_bytes=10**6):
        self.sender = FakeSender()
        self.channel = KafkaChannel("a", 5, ChannelPolicy(), "t.a.5", prefix(5))
        self.pending = PendingBytes(limit_bytes, "kafka://one:1")
        self.send_queue = ChannelSendQueue(self.channel, self.sender, self.pending, batch_bytes)
        self.answers: dict[str, object] = {}
        self.task: asyncio.Task[None] | None = None
        self.flushed: list[tuple[int, list[str]]] = []  # how many batches were sent by then, and what was answered

    def submit(self, name, *payloads, call=None, indexes=None):
        size = sum(map(len, payloads)) + 1
        call = call or SubmitCall(lambda result: self.answers.__setitem__(name, result), len(payloads), size)
        part = SubmitPart(call, indexes or range(len(payloads)))
        rows = to_rows([0] * len(payloads), payloads, NOW_MS)
        with self.pending.lock:
            self.pending.admit(size)
            started = self.send_queue.add(part, rows, list(map(len, payloads)))
        if started:
            self.task = asyncio.ensure_future(self.send_queue.run(self.flush))

    def flush(self):
        self.flushed.append((len(self.sender.batches), sorted(self.answers)))

    def ids(self, name):
        return [offset_of(id, prefix(5)) for id in self.answers[name]]


async def test_what_comes_while_a_batch_is_under_way_becomes_the_next_one():
    rig = Rig()
    rig.sender.go.clear()
    rig.submit("one", b"1")
    await asyncio.sleep(0)
    for name in ("two", "three"):
        rig.submit(name, name.encode())
    rig.sender.go.set()
    await rig.task
    assert rig.sender.batches == [[b"1"], [b"two", b"three"]]
    assert [rig.ids(name) for name in ("one", "two", "three")] == [[0], [1], [2]]
    assert rig.pending.bytes == 0


async def test_while_a_batch_is_under_way_a_full_one_is_prepared_and_the_answers_before_are_given():
    rig = Rig(batch_bytes=200)
    rig.submit("one", bytes(100))
    rig.submit("two", bytes(101))
    rig.submit("three", b"gathers")
    await rig.task
    assert rig.sender.prepared == [[bytes(101)]]
    assert rig.flushed == [(1, []), (2, ["one"]), (3, ["one", "two"]), (3, ["one", "three", "two"])]


async def test_a_batch_is_bounded_and_a_large_message_goes_alone():
    rig = Rig(batch_bytes=1000)
    large = bytes(5000)
    rig.submit("many", *[bytes([i]) * 300 for i in range(5)], large, b"end")
    await rig.task
    assert [len(batch) for batch in rig.sender.batches] == [2, 2, 1, 1, 1]
    assert rig.sender.batches[3] == [large]
    assert rig.ids("many") == list(range(7))


async def test_one_refused_message_costs_only_its_own_submit():
    rig = Rig()
    rig.send_queue.pause()
    for name in ("before", "refused", "behind"):
        rig.submit(name, name.encode())
    with rig.pending.lock:
        rig.send_queue.resume()
    await rig.task
    assert (rig.ids("before"), rig.ids("behind")) == ([0], [1])
    assert isinstance(rig.answers["refused"], InvalidRequest)


async def test_what_waits_behind_a_batch_without_a_broker_fails_with_it_but_for_certain():
    rig = Rig()
    rig.sender.go.clear()
    rig.sender.failure = Unavailable("gone", outcome_unknown=True)
    rig.submit("sent", b"1")
    await asyncio.sleep(0)
    rig.submit("waiting", b"2")
    rig.sender.go.set()
    await rig.task
    assert rig.answers["sent"].fields == {"outcome_unknown": True}
    assert isinstance(rig.answers["waiting"], Unavailable)
    assert rig.answers["waiting"].fields == {}
    rig.submit("later", b"3")
    await rig.task
    assert rig.ids("later") == [0]


async def test_what_is_left_of_a_submit_that_failed_is_not_sent():
    rig = Rig(batch_bytes=300)
    rig.send_queue.pause()
    rig.submit("one", b"refused", bytes(200), b"rest")
    rig.submit("other", b"other")
    with rig.pending.lock:
        rig.send_queue.resume()
    await rig.task
    assert isinstance(rig.answers["one"], InvalidRequest)
    assert rig.answers["one"].fields == {}
    assert rig.ids("other") == [0]
    assert rig.sender.batches == [[b"refused"], [b"other"]]


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(0, 300) | st.just(b"refused"), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 1000),
)
async def test_every_submit_is_answered_and_has_the_ids_of_its_entries(submits, batch_bytes):
    rig = Rig(batch_bytes=batch_bytes)
    rig.send_queue.pause()
    for number, sizes in enumerate(submits):
        payloads = [size if isinstance(size, bytes) else bytes([number]) * size for size in sizes]
        rig.submit(number, *payloads)
    with rig.pending.lock:
        rig.send_queue.resume()
    await rig.task
    assert rig.pending.bytes == 0
    assert list(rig.answers) == list(range(len(submits)))
    offsets = []
    for number, sizes in enumerate(submits):
        refused = b"refused" in sizes
        assert isinstance(rig.answers[number], InvalidRequest) == refused
        offsets += [] if refused else rig.ids(number)
    assert offsets == sorted(set(offsets))


@pytest.mark.parametrize("codec", [CODECS["none"], CODECS["gzip"]])
def test_a_batch_can_be_numbered_again(codec):
    batch = ProducerBatch(to_rows([compose(NOW_MS, 1), compose(NOW_MS)], [b"one" * 100, b""], NOW_MS), codec=codec)
    batch.add(to_rows([compose(NOW_MS, 2)], [b"two"], NOW_MS))
    rows = batch.rows()
    for producer, sequence in ((7, 1), 30), ((8, 0), 0):
        built = MemoryRecords(bytes(batch.build(producer, sequence))).next_batch()
        assert built.validate_crc()
        assert (built.producer_id, built.producer_epoch, built.base_sequence) == (*producer, sequence)
        assert [record.value for record in built] == [b"one" * 100, b"", b"two"]
        assert batch.rows() == rows
    assert [from_native(native_ms, headers) for native_ms, _, _, headers in rows] == [
        compose(NOW_MS, 1),
        compose(NOW_MS),
        compose(NOW_MS, 2),
    ]


async def test_a_submit_that_is_partly_in_has_an_unknown_outcome():
    rig = Rig(batch_bytes=300)
    rig.submit("half", bytes(200), b"refused")
    await rig.task
    assert rig.answers["half"].fields == {"outcome_unknown": True}
    assert rig.pending.bytes == 0


@pytest.mark.parametrize("unknown_first", [True, False])
def test_a_submit_of_which_one_channel_is_unknown_is_unknown_whatever_the_others_say(unknown_first):
    answers: list[TidewalError] = []
    call = SubmitCall(answers.append, 2, 2)
    call.split(2)
    errors = [Unavailable("no answer", outcome_unknown=True), Unavailable("never sent")]
    for error in errors if unknown_first else reversed(errors):
        if call.finished(error):
            call.answer()
    assert [answer.fields for answer in answers] == [{"outcome_unknown": True}]


async def test_no_batch_begins_while_a_reader_finds_its_start():
    rig = Rig()
    rig.send_queue.pause()
    rig.submit("one", b"1")
    for _ in range(10):
        await asyncio.sleep(0)
    assert rig.sender.batches == []
    with rig.pending.lock:
        rig.send_queue.resume()
    await rig.task
    assert rig.ids("one") == [0]


async def test_too_much_at_once_is_refused_but_never_a_single_message():
    rig = Rig(limit_bytes=100)
    rig.submit("large", bytes(500))
    with pytest.raises(Overloaded) as caught:
        rig.submit("more", b"1")
    assert caught.value.limit == "pending_bytes"
    await rig.task
    rig.submit("more", b"1")
    await rig.task
    assert rig.ids("more") == [1]


GARBAGE = [
    (b"channel/\xff/key", b"{}"),
    (b"channel/a", b"7"),
    (b"channel/a/key", b'{"policy": {"acks": []}}'),
    (b"channel/a/key", b"[" * 100_000),
    (b"hold/1/a", b'{"offset": Infinity}'),
    (b"topic/none/key", b'{"id": "00"}'),
    (b"queue/1/g", b'{"v": "one"}'),
    (None, b"\xff"),
]


async def test_garbage_in_the_catalog_is_skipped_and_a_record_of_a_newer_tidewal_stops_the_reader(monkeypatch):
    rows = [*GARBAGE, (b"channel/a/1", b'{"policy": {}}'), (b"channel/a/2", b'{"v": 2, "replaces": "1"}')]
    readable = len(GARBAGE) + 1
    newer_is_there = asyncio.Event()

    async def fetch(cluster, topic, offset, connection, **_):
        if offset == readable:
            await newer_is_there.wait()
        end = readable if offset < readable else len(rows)
        found = [SimpleNamespace(offset=at, key=rows[at][0], value=rows[at][1]) for at in range(offset, end)]
        return SimpleNamespace(batches=found, next_offset=end)

    monkeypatch.setattr(channel_catalog, "fetch", fetch)
    monkeypatch.setattr(channel_catalog, "records", lambda batches, *_: batches)
    options = parse("kafka://one:1")
    catalog = ChannelCatalog(SimpleNamespace(options=options), (1, 2), lambda: None)
    following = asyncio.create_task(catalog.follow())
    await catalog._until(readable)
    assert catalog.names() == ["a"]
    assert catalog.find("a").incarnation == len(GARBAGE)
    newer_is_there.set()
    with pytest.raises(FormatTooNew, match="upgrade"):
        await catalog._until(len(rows))
    await following
    with pytest.raises(FormatTooNew, match="upgrade"):
        await catalog.write_channel("b", ChannelPolicy())


async def test_a_channel_that_is_dropped_while_it_is_made_is_made_again():
    catalog = ChannelCatalog(SimpleNamespace(options=parse("kafka://one:1")), (1, 2), lambda: None)
    written = []

    async def write(changes):
        for key, value in changes:
            written.append(key)
            catalog._apply(len(written), key.encode(), None if value is None else json.dumps(value).encode())
            if len(written) == 1:  # before the maker has looked, another process drops what it sees
                catalog._apply(10, key.encode(), None)

    catalog._write = write
    found = await catalog.write_channel("a", ChannelPolicy())
    assert catalog.find("a") is found
    assert found.incarnation == len(written) == 2


class Leader:
    """Answers to each fetch with `code` and `data`; its log begins at `first`."""

    def __init__(self, code: int = 0, data: bytes = b"", first: int = 0) -> None:
        self._code, self._data, self._first = code, data, first

    async def ask_leader(self, topic: str, request: Any, connection: int = 0, partition: int = 0) -> Any:
        return SimpleNamespace(API_VERSION=4, topics=[(topic, [(0, self._code, 0, 0, [], self._data)])])

    async def offset(self, topic: str, timestamp: int, partition: int = 0) -> int:
        return self._first


@pytest.mark.parametrize("code", [0, OUT_OF_RANGE])
async def test_a_new_leader_that_does_not_know_its_end_yet_says_nothing_of_what_is_there(code):
    """It has the entries and answers with none of them: taken for an empty channel, acknowledged ones would not be."""
    with pytest.raises(kafka_errors.StaleMetadata):
        await last_before(cast(Any, Leader(code)), "topic", 5, 0)


async def test_what_is_removed_is_no_last_entry():
    assert await last_before(cast(Any, Leader(OUT_OF_RANGE, first=5)), "topic", 5, 0) is None
