"""What becomes of a DataFrame's columns and rows on their way into a collection or a topic."""

from __future__ import annotations

import datetime
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("pyspark")
import xxhash
from pyspark.sql import types

from tidewal.runtime.clock import HybridClock, compose, physical_ms
from tidewal.runtime.errors import ConfigError, InvalidRows, InvalidSchema, MessageTooLarge
from tidewal.runtime.log.record import Record, decode
from tidewal.runtime.rows.hashing import shard_of
from tidewal.runtime.rows.schema import FIELD_TYPES, OPS, CollectionSchema, Field
from tidewal.spark_bridge.scan.columns import spark_schema
from tidewal.spark_bridge.sink.chunks import WriteChunk, chunks, digest, row_bytes
from tidewal.spark_bridge.sink.messages import MS_MAX, MessageMaker, plan_messages
from tidewal.spark_bridge.sink.options import SinkOptions
from tidewal.spark_bridge.sink.rows import _FIELD_TYPES, log_rows, plan_rows, schema_for

sys.path.insert(0, str(Path(__file__).parent))
from story import FLIGHTS, NOON, batch_of, random_row

# ---- options --------------------------------------------------------------------------------------------------------


def parse(streaming: bool = True, **given: str) -> SinkOptions:
    return SinkOptions.parse({"wal": "rocksmq:///log", **given}, streaming=streaming)


def test_options_are_read_in_any_case() -> None:
    given = {"WAL": "kafka://b", "Topic": "a, b", "txnappid": "x", "DEADLINE": "2m", "checkpointLocation": "/cp"}
    assert SinkOptions.parse(given, streaming=True) == SinkOptions(
        "kafka://b", topics=("a", "b"), app="x", deadline_s=120.0
    )
    options = parse(streaming=False, collection="c", operation="Delete", txnAppId="x", txnVersion="7", prefix="p")
    assert options == SinkOptions(
        "rocksmq:///log", "c", prefix="p", operation="delete", app="x", version=7, deadline_s=300.0
    )


def test_a_relative_directory_is_the_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert SinkOptions.parse({"wal": "rocksmq://./a%20log"}, streaming=True).wal == f"rocksmq://{tmp_path}/a%20log"


@pytest.mark.parametrize(
    ("streaming", "given", "text"),
    [
        (True, {"wal": ""}, "option wal is required"),
        (True, {"colection": "c"}, "unknown option 'colection' of a write; did you mean 'collection'"),
        (True, {"collection": "c", "topic": "t"}, "exclude each other"),
        (True, {"collection": "c", "operation": "merge"}, "'merge'; known are insert, upsert, delete"),
        (True, {"topic": "t", "operation": "upsert"}, "operation is for collections only"),
        (True, {"topic": "t", "primaryKey": "id"}, "primaryKey is for collections only"),
        (True, {"collection": "c", "txnAppId": "x", "txnVersion": "1"}, r"for df\.write only"),
        (False, {"collection": "c", "txnVersion": "1"}, "txnAppId is missing"),
        (False, {"collection": "c", "txnAppId": "x"}, "txnVersion is missing"),
        (False, {"collection": "c", "txnAppId": "x", "txnVersion": "-1"}, "a whole number from 0"),
        (False, {"collection": "c", "txnAppId": "x", "txnVersion": str(1 << 43)}, "a whole number from 0"),
        (True, {"collection": "c", "deadline": "soon"}, "a time like 30s or 5m"),
        (True, {"collection": "c", "deadline": "0"}, "a time like 30s or 5m"),
    ],
)
def test_wrong_options_are_named(streaming: bool, given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SinkOptions.parse({"wal": "rocksmq:///log", **given}, streaming=streaming)


# ---- columns of a collection ----------------------------------------------------------------------------------------

MIXED = CollectionSchema(
    "mixed",
    (
        Field("id", "int64"),
        Field("small", "int8", nullable=True),
        Field("ratio", "float", nullable=True),
        Field("exact", "double", nullable=True),
        Field("at", "timestamp", nullable=True),
        Field("name", "varchar", nullable=True),
        Field("ok", "bool", nullable=True),
        Field("place", "float_vector", dim=2),
    ),
    "id",
)


TYPES: dict[str, types.DataType] = {
    "bigint": types.LongType(),
    "int": types.IntegerType(),
    "float": types.FloatType(),
    "double": types.DoubleType(),
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "date": types.DateType(),
    "timestamp": types.TimestampType(),
    "decimal(5.2)": types.DecimalType(5, 2),
    "map<string.string>": types.MapType(types.StringType(), types.StringType()),
    "array<float>": types.ArrayType(types.FloatType()),
    "array<double>": types.ArrayType(types.DoubleType()),
    "array<string>": types.ArrayType(types.StringType()),
    "headers": types.ArrayType(
        types.StructType([types.StructField("key", types.StringType()), types.StructField("value", types.BinaryType())])
    ),
}


def struct(columns: str) -> types.StructType:
    """ "name type, name type": Spark's own parser needs a JVM."""
    pairs = [column.split(" ") for column in columns.split(", ")]
    return types.StructType([types.StructField(name, TYPES[kind]) for name, kind in pairs])


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def test_what_the_source_gives_the_sink_takes(rng: random.Random) -> None:
    given = spark_schema(FLIGHTS)
    plan = plan_rows(given, FLIGHTS)
    rows = batch_of(FLIGHTS, [random_row(rng) for _ in range(50)])
    as_read = {name: rows.column(name) for name in FLIGHTS.arrow().names}
    as_read["place"] = as_read["place"].cast(pa.list_(pa.float32()))
    as_read["_op"] = pa.array(list(OPS)).take(rows.column("_op"))
    columns = [as_read.get(name, pa.nulls(50)) for name in given.names]
    assert log_rows(pa.RecordBatch.from_arrays(columns, names=given.names), plan).equals(rows)


def test_columns_are_matched_without_case_cast_and_filled() -> None:
    plan = plan_rows(struct("PLACE array<double>, Ratio double, ID int, small bigint, at date, exact int"), MIXED)
    got = log_rows(
        batch(
            PLACE=pa.array([[1, 2], [3, 4]], pa.list_(pa.float64())),
            Ratio=pa.array([0.5, None], pa.float64()),
            ID=pa.array([1, 2], pa.int32()),
            small=pa.array([-128, 127], pa.int64()),
            at=pa.array([datetime.date(2013, 1, 1), None]),
            exact=pa.array([3, 4], pa.int32()),
        ),
        plan,
    )
    assert got.schema.equals(MIXED.row_arrow())
    first = {"id": 1, "small": -128, "ratio": 0.5, "exact": 3.0, "name": None, "ok": None, "place": [1.0, 2.0]}
    assert got.to_pylist()[0] == first | {"at": NOON.replace(hour=0), "_op": OPS["upsert"]}


def test_operations_come_from_the_option_or_the_column() -> None:
    named = struct("id bigint, place array<float>, _op string")
    rows = batch(
        id=[1, 2],
        place=pa.array([[1, 2], None], pa.list_(pa.float32())),
        _op=["insert", "delete"],
    )
    assert log_rows(rows, plan_rows(named, MIXED)).column("_op").to_pylist() == [OPS["insert"], OPS["delete"]]
    forced = log_rows(rows, plan_rows(named, MIXED, "delete"))
    assert forced.column("_op").to_pylist() == [OPS["delete"]] * 2
    assert forced.column("place").null_count == 2
    keys = log_rows(batch(id=[7]), plan_rows(struct("id bigint"), MIXED, "delete"))
    assert keys.to_pylist()[0]["id"] == 7


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("id bigint", "column 'place' is missing: it cannot be null in collection 'mixed' .float_vector.2.."),
        ("place array<float>", "column 'id' is missing"),
        ("id bigint, place array<float>, nme string", "has no field 'nme'; it has id, small"),
        ("id string, place array<float>", "column 'id' is string, which does not convert to int64"),
        ("id bigint, place array<float>, exact decimal(5.2)", r"column 'exact' is decimal\(5,2\).* to double"),
        ("id bigint, place array<float>, small double", "column 'small' is double"),
        ("id bigint, place array<float>, name int", "column 'name' is int"),
        ("id bigint, place array<string>", r"column 'place' is array<string>.* to float_vector\(2\)"),
        ("id bigint, place float", r"column 'place' is float"),
        ("id bigint, Id bigint, place array<float>", "two columns are called 'Id'"),
        ("id bigint, place array<float>, _op int", "column '_op' must be a string"),
    ],
)
def test_columns_that_do_not_fit_are_named(ddl: str, text: str) -> None:
    with pytest.raises(InvalidSchema, match=text):
        plan_rows(struct(ddl), MIXED)


def test_a_collection_is_made_for_what_the_source_reads() -> None:
    made = schema_for(spark_schema(FLIGHTS), "flights", "flight")
    assert made == FLIGHTS
    plan_rows(spark_schema(FLIGHTS), made)
    simple = schema_for(struct("id int, at date, name string, _op string"), "s", "id")
    assert simple.fields == (
        Field("id", "int64"),
        Field("at", "timestamp", nullable=True),
        Field("name", "varchar", nullable=True),
    )


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("id bigint, place array<float>", r"'place' is array<float>, and no collection .*vectors need a dimension"),
        ("id bigint, price decimal(5.2)", r"'price' is decimal\(5,2\), and no collection"),
        ("key bigint", "the primary key 'id' is not among the fields"),
        ("id double", "the primary key 'id' is double; it must be int64 or varchar"),
    ],
)
def test_what_no_collection_can_be_made_for_is_named(ddl: str, text: str) -> None:
    with pytest.raises(InvalidSchema, match=text):
        schema_for(struct(ddl), "new", "id")


@pytest.mark.parametrize(
    ("ddl", "change", "text"),
    [
        ("id bigint", {"id": [1, None]}, "the key 'id' of 1 rows is null"),
        ("id bigint", {"place": [[1.0, 2.0], [1.0]]}, "column 'place' of the row with the key 12 has 1 floats, not 2"),
        ("id bigint, small int", {"small": [1, 300]}, "column 'small' is not int8: .*300"),
        ("id bigint, ratio double", {"ratio": [1.0, 1e300]}, "'ratio' of the row with the key 12 is too large"),
        ("id bigint, exact bigint", {"exact": [1, (1 << 60) + 1]}, "column 'exact' is not double"),
        ("id bigint, _op string", {"_op": ["insert", "erase"]}, "_op of the row with the key 12 is 'erase'; known are"),
        ("id bigint, _op string", {"_op": ["insert", None]}, "_op of the row with the key 12 is None"),
    ],
)
def test_rows_that_do_not_fit_are_named_by_their_key(ddl: str, change: dict[str, Any], text: str) -> None:
    given = {"id": [11, 12], "place": [[1.0, 2.0], [3.0, 4.0]]} | change
    plan = plan_rows(struct(f"{ddl}, place array<double>"), MIXED)
    rows = pa.RecordBatch.from_pydict(
        {name.split(" ")[0]: given[name.split(" ")[0]] for name in ddl.split(", ")} | {"place": given["place"]}
    )
    with pytest.raises(InvalidRows, match=text):
        log_rows(rows, plan)


# ---- chunks ---------------------------------------------------------------------------------------------------------

PAIRS = CollectionSchema("pairs", (Field("key", "varchar"), Field("value", "varchar", nullable=True)), "key")


def random_pairs(rng: random.Random, count: int, keys: int) -> list[dict[str, object]]:
    return [
        {"key": f"k{rng.randrange(keys)}", "value": "x" * rng.randrange(100), "_op": int(OPS["upsert"])}
        for _ in range(count)
    ]


def in_batches(rng: random.Random, rows: list[dict[str, object]]) -> list[pa.RecordBatch]:
    batches: list[pa.RecordBatch] = []
    at = 0
    while at < len(rows):
        count = rng.randrange(1, 200)
        batches.append(pa.RecordBatch.from_pylist(rows[at : at + count], schema=PAIRS.row_arrow()))
        at += count
    return batches


def contents(found: list[WriteChunk]) -> list[tuple[int, Counter[tuple[object, ...]]]]:
    return [(each.digest, Counter(tuple(row.values()) for row in each.rows.to_pylist())) for each in found]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("keys", [5, 100_000])
def test_chunks_are_the_same_in_whatever_order_rows_come(rng: random.Random, shards: int, keys: int) -> None:
    rows = random_pairs(rng, 3000, keys)
    limit = 10_000 if keys > 5 else 200_000 // shards
    options: dict[str, Any] = {"shards": shards, "chunk_bytes": limit}
    first = list(chunks(in_batches(rng, rows), PAIRS, **options))
    assert len(first) > shards if keys > 5 else len(first) >= shards
    for _ in range(5):
        again = list(chunks(in_batches(rng, rng.sample(rows, len(rows))), PAIRS, **options))
        assert contents(again) == contents(first)
    everything = Counter(tuple(row.values()) for each in first for row in each.rows.to_pylist())
    assert everything == Counter(tuple(row.values()) for row in rows)
    for each in first:
        each.rows.validate(full=True)
        numbers = set(shard_of(each.rows.column("key"), shards).tolist())
        assert shards == 1 or len(numbers) == 1
        assert row_bytes(each.rows).sum() <= limit or len(set(each.rows.column("key").to_pylist())) == 1


def test_versions_of_a_key_keep_their_order(rng: random.Random) -> None:
    rows: list[dict[str, object]] = [
        {"key": f"k{rng.randrange(50)}", "value": f"{number:09}", "_op": 1} for number in range(2000)
    ]
    found: dict[str, list[str]] = {}
    for each in chunks(in_batches(rng, rows), PAIRS, chunk_bytes=5000):
        for row in each.rows.to_pylist():
            found.setdefault(row["key"], []).append(row["value"])
    assert sum(map(len, found.values())) == 2000
    assert all(versions == sorted(versions) for versions in found.values())


def test_what_is_held_is_bounded(rng: random.Random) -> None:
    """A chunk comes before the next rows are asked for, once a run is full."""
    asked = 0

    def batches() -> Any:
        nonlocal asked
        for _ in range(100):
            asked += 1
            yield pa.RecordBatch.from_pylist(random_pairs(rng, 50, 9), schema=PAIRS.row_arrow())

    found = chunks(batches(), PAIRS, chunk_bytes=2000, run_bytes=10_000)
    rows = 0
    for each in found:
        rows += each.rows.num_rows
        assert asked * 50 - rows < 50 * (10_000 // 1000 + 10)
    assert rows == 5000


def test_digests_tell_other_rows(rng: random.Random) -> None:
    rows = pa.RecordBatch.from_pylist(random_pairs(rng, 1000, 100_000), schema=PAIRS.row_arrow())
    plain = digest(rows)
    shuffled = rows.take(pa.array(np.random.default_rng(rng.randrange(2**32)).permutation(1000)))
    assert digest(shuffled) == plain > 0
    assert digest(rows.slice(1)) != plain
    doubled = pa.Table.from_batches([rows.slice(0, 999), rows.slice(0, 1)]).combine_chunks().to_batches()[0]
    assert digest(doubled) != plain
    at = rng.randrange(1000)
    assert (digest(rows.slice(0, at)) + digest(rows.slice(at))) % 2**63 in (plain, plain + 1)  # an empty part counts 1


def test_digests_tell_other_values_and_operations_of_the_same_keys(rng: random.Random) -> None:
    """Each value of a row is changed alone, whichever type it has, also to a null and to the other zero."""
    names = [field.name for field in FLIGHTS.fields if field.name != FLIGHTS.primary_key] + ["_op"]
    for _ in range(50):
        row, other = ({**dict.fromkeys(names), **random_row(rng)} for _ in range(2))
        plain = digest(batch_of(FLIGHTS, [row]))
        for name in names:
            changed = digest(batch_of(FLIGHTS, [row | {name: other[name]}]))
            assert (changed == plain) == (other[name] == row[name])
    zeros = [pa.array([value], pa.float64()) for value in (0.0, -0.0, None)]
    assert len({digest(pa.RecordBatch.from_arrays([zero], ["x"])) for zero in zeros}) == 3


def test_digests_are_of_the_rows_alone_wherever_they_lie_in_memory(rng: random.Random) -> None:
    values = np.array([rng.random() for _ in range(33)], np.float32)
    whole = pa.FixedSizeListArray.from_arrays(pa.array(values).slice(3), 3)
    batch = pa.RecordBatch.from_arrays(
        [whole, pa.array([None, *range(9)]), pa.array([*list("abcdefghi"), None])], list("xyz")
    )
    for at in range(10):
        part = batch.slice(at, 10 - at)
        copied = pa.RecordBatch.from_pylist(part.to_pylist(), schema=batch.schema)
        assert digest(part) == digest(copied)


def test_sizes_of_rows_are_no_less_than_what_they_take(rng: random.Random) -> None:
    rows = batch_of(FLIGHTS, [random_row(rng) for _ in range(1000)])
    assert rows.nbytes <= row_bytes(rows).sum() <= 2 * rows.nbytes


# ---- messages -------------------------------------------------------------------------------------------------------


def made(ddl: str, topics: tuple[str, ...], limit: int = 1000, **columns: Any) -> list[tuple[str, int, Record]]:
    plan = plan_messages(struct(ddl), topics)
    rows = pa.RecordBatch.from_pydict(columns)
    limits = dict.fromkeys(plan.targets(rows), limit)
    maker = MessageMaker(plan, "p", HybridClock(), limits)
    return [(channel, ts, decode(payload)) for channel, ts, payload, _ in maker.messages(rows)]


def test_a_row_becomes_a_message() -> None:
    [(topic, ts, record)] = made(
        "key string, value binary, headers headers, timestamp timestamp",
        ("t",),
        key=["k"],
        value=[b"v"],
        headers=[[{"key": "a", "value": b"1"}, {"key": "b", "value": None}]],
        timestamp=pa.array([NOON], pa.timestamp("us", tz="UTC")),
    )
    assert (topic, ts) == ("t", compose(int(NOON.timestamp() * 1000)))
    assert (record.key, bytes(record.body), dict(record.tags)) == (b"k", b"v", {"a": b"1", "b": None})
    assert (record.ts, record.producer, record.pseq, record.term) == (ts, "p", 0, 0)
    headers = pa.array([[("x", "y")], None], pa.map_(pa.string(), pa.string()))
    pairs = made("value string, headers map<string.string>", ("t",), value=["v", "w"], headers=headers)
    assert [dict(each.tags) for _, _, each in pairs] == [{"x": "y"}, {}]
    assert [each.pseq for _, _, each in pairs] == [0, 1]
    assert pairs[0][1] < pairs[1][1]


def test_messages_go_where_their_key_says_or_in_turn() -> None:
    topics = ("a", "b", "c")
    keys = [f"k{number}" for number in range(50)]
    by_key = made("key string, value string", topics, key=keys, value=keys)
    assert [topic for topic, _, _ in by_key] == [
        topics[xxhash.xxh3_64_intdigest(key.encode()) % 3] for key in keys
    ]  # as `runtime.stream.by_key` does it
    without = made("value string", topics, value=["v"] * 7)
    assert [topic for topic, _, _ in without] == ["a", "b", "c", "a", "b", "c", "a"]
    named = made("value string, topic string", (), value=["1", "2"], topic=["x", "y"])
    assert [topic for topic, _, _ in named] == ["x", "y"]
    option_wins = made("value string, topic string", ("z",), value=["1"], topic=["x"])
    assert [topic for topic, _, _ in option_wins] == ["z"]


def test_messages_that_do_not_fit_are_named() -> None:
    for ddl, text in [
        ("key string", "column 'value' is missing"),
        ("value int", "column 'value' is int: key and value are string or binary"),
        ("value string, kee string", "column 'kee' is nothing that a message has: a topic takes key, value"),
        ("value string, VALUE string", "column 'VALUE' appears twice"),
        ("value string, headers string", "column 'headers' is string"),
    ]:
        with pytest.raises(InvalidSchema, match=text):
            plan_messages(struct(ddl), ("t",))
    with pytest.raises(ConfigError, match="nothing says where to write"):
        plan_messages(struct("value string"), ())
    with pytest.raises(InvalidRows, match="'value' is null in row 1"):
        made("value string", ("t",), value=["v", None])
    with pytest.raises(InvalidRows, match="'topic' is null in 1 rows"):
        made("value string, topic string", (), value=["v", "w"], topic=["t", None])
    nameless = [None, [{"key": None, "value": b"1"}]]
    with pytest.raises(InvalidRows, match="'headers' has a header without a key in row 1"):
        made("value string, headers headers", ("t",), value=["v", "w"], headers=nameless)
    twice = [[{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}, {"key": "a", "value": b"3"}]]
    with pytest.raises(InvalidRows, match=r"'headers' has two headers of one name in row 0 \(a, b, a\)"):
        made("value string, headers headers", ("t",), value=["v"], headers=twice)
    with pytest.raises(InvalidRows, match="'key' is empty in row 1: a record has a key or none, write null"):
        made("key string, value string", ("t",), key=[None, ""], value=["v", "w"])
    with pytest.raises(MessageTooLarge, match=r"key b'k' takes \d+ bytes; t takes 200"):
        made("key string, value string", ("t",), limit=200, key=["k"], value=["v" * 200])


@pytest.mark.parametrize(
    "us", [-1, -(10**15), 0, 999, (MS_MAX + 1) * 1000, 253402214400_000_000], ids=str
)  # 1969, 1938, 1970 itself, and behind the year 3084; the last is the year 9999
def test_times_that_a_log_does_not_know_are_refused_by_column_and_row(us: int) -> None:
    times = pa.array([None, 1_000_000, us], pa.timestamp("us", tz="UTC"))
    with pytest.raises(InvalidRows, match=r"column 'timestamp' is .* in row 2: the times of a log") as raised:
        made("value string, timestamp timestamp", ("t",), value=["a", "b", "c"], timestamp=times)
    assert raised.value.fields == {"column": "timestamp", "row": 2}


def test_times_of_a_log_are_kept_to_the_millisecond(rng: random.Random) -> None:
    given = [1, MS_MAX, *(rng.randrange(1, MS_MAX + 1) for _ in range(100))]
    times = pa.array([ms * 1000 + rng.randrange(1000) for ms in given], pa.timestamp("us", tz="UTC"))
    found = made("value string, timestamp timestamp", ("t",), value=["v"] * len(given), timestamp=times)
    assert [physical_ms(ts) for _, ts, _ in found] == given


def test_digests_of_messages_tell_what_the_rows_say_and_nothing_of_their_order() -> None:
    ddl = "key string, value string, headers headers, timestamp timestamp"
    second = NOON
    row = {"key": "k", "value": "v", "headers": [{"key": "a", "value": b"1"}], "timestamp": second}
    others = {"key": None, "value": "w", "headers": None, "timestamp": second + datetime.timedelta(seconds=1)}

    def told(*rows: dict[str, Any]) -> int:
        headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        kinds = {"headers": headers, "timestamp": pa.timestamp("us", tz="UTC")}
        columns = {name: pa.array([each[name] for each in rows], kinds.get(name, pa.string())) for name in row}
        batch = pa.RecordBatch.from_pydict(columns)
        maker = MessageMaker(plan_messages(struct(ddl), ("t", "u")), "p", HybridClock(), {"t": 9000, "u": 9000})
        return sum(message.digest for message in maker.messages(batch))

    assert len({told(row), *(told(row | {name: other}) for name, other in others.items())}) == 5
    keyless = [row | {"key": None, "value": value} for value in "xyz"]
    assert told(*keyless) == told(*reversed(keyless))


def test_each_type_of_columns_is_made_of_a_type_of_spark():
    assert {*_FIELD_TYPES.values(), "float_vector"} == FIELD_TYPES
