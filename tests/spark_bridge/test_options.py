"""Options: what is wrong is named."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tidewal.runtime.clock import compose
from tidewal.runtime.errors import ConfigError
from tidewal.spark_bridge.log import open_log
from tidewal.spark_bridge.options import MicroBatchLimits, ReadOptions
from tidewal.spark_bridge.sink.options import SinkOptions

LOG = {"wal": "rocksmq:///data"}
GOOD = LOG | {"collection": "flights"}
TOPIC = LOG | {"topic": "orders, clicks"}


def test_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = ReadOptions.parse(GOOD, streaming=False), ReadOptions.parse(GOOD, streaming=True)
    assert (batch.starting, batch.ending) == ("earliest", "latest")
    assert stream.starting == "latest"
    assert stream.limits == MicroBatchLimits()
    assert not stream.limits.bounded
    assert stream.fail_on_data_loss
    assert ReadOptions.parse(TOPIC).consistency == "channel"


def test_names_are_taken_in_any_case() -> None:
    given = {"WAL": "kafka://b", "collection": "c", "maxrowspertrigger": "5", "FAILONDATALOSS": "False"}
    options = ReadOptions.parse(given)
    assert (options.wal, options.limits.rows, options.fail_on_data_loss) == ("kafka://b", 5, False)


def test_a_log_is_named_by_a_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "node"
    (node / "log").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for where in ("node", "node/log", str(node), str(node / "log"), f"rocksmq://{node}/log"):
        assert ReadOptions.parse({"wal": where, "collection": "c"}).wal == f"rocksmq://{node}/log"
        assert SinkOptions.parse({"wal": where, "topic": "t"}, streaming=True).wal == f"rocksmq://{node}/log"


def test_lists_and_patterns_name_topics() -> None:
    assert ReadOptions.parse(TOPIC).topics == ("orders", "clicks")
    assert ReadOptions.parse(LOG | {"subscribePattern": "or.*"}).pattern == "or.*"
    assert ReadOptions.parse(GOOD | {"columns": "a , _ts"}).columns == ("a", "_ts")


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1357041600000", 1_357_041_600_000),
        ("2013-01-01T12:00:00Z", 1_357_041_600_000),
        ("2013-01-01 12:00", 1_357_041_600_000),
        ("2013-01-01T13:00:00+01:00", 1_357_041_600_000),
        ("2013-01-01T11:59:59.999001", 1_357_041_600_000),  # log time has whole milliseconds: the first one behind it
        ("1970-01-01", 0),
    ],
)
def test_times_are_milliseconds_or_iso(text: str, ms: int) -> None:
    options = ReadOptions.parse(GOOD | {"startingTimestamp": text, "endingTimestamp": text}, streaming=False)
    assert options.starting_time == options.ending_time == compose(ms)


def test_a_state_as_of_a_time_holds_all_of_its_millisecond() -> None:
    at = datetime.datetime(2013, 1, 1, 12, tzinfo=datetime.UTC)
    options = ReadOptions.parse(GOOD | {"timestampAsOf": at.isoformat()}, streaming=False)
    assert options.timestamp_as_of == compose(1_357_041_600_001) - 1
    assert ReadOptions.parse(GOOD | {"history": "/tables", "versionAsOf": "0"}).version_as_of == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250", 0.25), ("250ms", 0.25), ("30s", 30), ("15m", 900), ("2 min", 120), ("1H", 3600), ("1d", 86400)],
)
def test_durations_are_written_as_in_spark(text: str, seconds: float) -> None:
    options = ReadOptions.parse(GOOD | {"minRowsPerTrigger": "9", "maxTriggerDelay": text}, streaming=True)
    assert (options.limits.min_rows, options.limits.max_delay_s) == (9, seconds)
    assert ReadOptions.parse(GOOD | {"minRowsPerTrigger": "9"}).limits.max_delay_s == 900


@pytest.mark.parametrize(
    ("given", "streaming", "key", "text"),
    [
        (GOOD | {"wal": ""}, True, "wal", "empty"),
        ({"collection": "c"}, True, "wal", "required"),
        (LOG, None, "collection", r"required: .*topic.*subscribePattern"),
        (GOOD | {"collection": " "}, None, "collection", "empty"),
        (GOOD | {"topic": "a"}, None, "topic", "collection and topic exclude each other"),
        (TOPIC | {"subscribePattern": "a"}, None, "subscribePattern", "exclude each other"),
        (TOPIC | {"topic": "a,,b"}, None, "topic", "names by comma"),
        (TOPIC | {"topic": "a,a"}, None, "topic", "each once"),
        (LOG | {"subscribePattern": "("}, None, "subscribePattern", "no regular expression"),
        (GOOD | {"startingoffset": "latest"}, None, "startingoffset", "Known are wal, .*startingOffsets"),
        (GOOD | {"maxRowsPerTrigger": "0"}, True, "maxRowsPerTrigger", "1 or more"),
        (GOOD | {"maxRowsPerTrigger": "many"}, True, "maxRowsPerTrigger", "'many'"),
        (GOOD | {"minRowsPerTrigger": "3", "maxRowsPerTrigger": "2"}, True, "minRowsPerTrigger", "more than"),
        (GOOD | {"minRowsPerTrigger": "3", "maxTriggerDelay": "1 week"}, True, "maxTriggerDelay", "like 500ms"),
        (GOOD | {"maxTriggerDelay": "1m"}, True, "maxTriggerDelay", "give that too"),
        (GOOD | {"failOnDataLoss": "no"}, True, "failOnDataLoss", "true or false"),
        (GOOD | {"endingOffsets": "latest"}, True, "endingOffsets", r"spark\.read only"),
        (GOOD | {"pushFilters": "true"}, True, "pushFilters", r"spark\.read only"),
        (GOOD | {"maxRowsPerTrigger": "5"}, False, "maxRowsPerTrigger", r"spark\.readStream only"),
        (GOOD | {"startingOffsets": "latest"}, False, "startingOffsets", "nothing"),
        (GOOD | {"endingOffsets": "earliest"}, False, "endingOffsets", "nothing"),
        (GOOD | {"startingTimestamp": "noon"}, True, "startingTimestamp", "2013-01-01T12:00:00Z"),
        (GOOD | {"startingTimestamp": "1969-12-31"}, True, "startingTimestamp", "since 1970"),
        (GOOD | {"startingTimestamp": "2", "endingTimestamp": "1"}, False, "endingTimestamp", "before"),
        (GOOD | {"consistency": "tick"}, None, "consistency", "goes with topic or subscribePattern"),
        (TOPIC | {"consistency": "cut"}, None, "consistency", "channel or tick"),
        (TOPIC | {"timeticker": "ticks"}, None, "timeticker", "goes with consistency=tick"),
        (TOPIC | {"readChangeFeed": "true"}, None, "readChangeFeed", "goes with collection, not with topic"),
        (TOPIC | {"startingOffsets": "1700"}, True, "startingOffsets", "give it as startingTimestamp"),
        (GOOD | {"versionAsOf": "1"}, False, "versionAsOf", "say with history"),
        (GOOD | {"timestampAsOf": "0", "versionAsOf": "1"}, False, "versionAsOf", "exclude each other"),
        (GOOD | {"timestampAsOf": "0", "startingOffsets": "earliest"}, False, "startingOffsets", "exclude each other"),
        (GOOD | {"timestampAsOf": "0"}, True, "timestampAsOf", r"spark\.read only"),
    ],
)
def test_wrong_options_are_named(given: dict[str, str], streaming: bool | None, key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        ReadOptions.parse(given, streaming=streaming)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "url", ["kafka://", "woodpecker://etcd", "memory://", "rocksmq://data/dir", "rocksmq:", "/data", "rocksmq:///", ""]
)
def test_urls_that_cannot_be_read_name_what_can(url: str) -> None:
    with pytest.raises(ConfigError, match="rocksmq:///absolute/path"):
        open_log(url)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("startingOffset", "startingOffsets"), ("COLECTION", "collection"), ("subscribe_pattern", "subscribePattern")],
)
def test_a_misspelt_name_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{nearest}'") as raised:
        ReadOptions.parse(GOOD | {name: "x"})
    assert (raised.value.key, raised.value.nearest) == (name, nearest)


def test_a_misspelt_name_of_a_write_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="of a write; did you mean 'primaryKey'"):
        SinkOptions.parse(GOOD | {"primary_key": "id"}, streaming=True)
