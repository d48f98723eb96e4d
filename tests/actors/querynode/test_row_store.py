"""The store of rows against a dictionary, and its limits."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.actors.querynode import row_store
from tidewal.actors.querynode.filter import compile_filter
from tidewal.actors.querynode.query import query
from tidewal.actors.querynode.row_store import RowMemory, RowStore
from tidewal.actors.querynode.view import OrderBy
from tidewal.actors.rows import to_batch
from tidewal.runtime.clock import add_ms, compose
from tidewal.runtime.errors import BadRecord, InvalidRequest, MemoryLimitExceeded
from tidewal.runtime.rows.schema import CollectionSchema, Field

FIELDS = (Field("n", "int64", nullable=True), Field("text", "varchar", nullable=True))
SCHEMA = CollectionSchema("things", (Field("id", "varchar"), *FIELDS), "id")
INT_SCHEMA = CollectionSchema("things", (Field("id", "int64"), *FIELDS), "id")
NO_LIMIT = 1 << 40


def rows_of(count: int, start: int = 0, n: int = 0) -> pa.RecordBatch:
    keys = [f"key-{start + i}" for i in range(count)]
    return to_batch({"id": keys, "n": [n + i for i in range(count)], "text": keys}, SCHEMA, op="upsert")


def contents(store: RowStore) -> dict[object, object]:
    rows = query([store.view()], columns=["id", "n"]).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["n"] for row in rows}


operations = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["insert", "upsert", "delete"]), st.integers(0, 12), st.integers(0, 99)), max_size=8
    ),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(operations, st.sampled_from([SCHEMA, INT_SCHEMA]), st.integers(0, 3))
def test_equals_a_dictionary(batches: list[list[tuple[str, int, int]]], schema: CollectionSchema, care: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "CHUNK_ROWS", 16)
        patch.setattr(row_store, "SMALL_ROWS", 8)
        patch.setattr(row_store, "SMALL_CHUNKS", 3)
        store, model = RowStore(schema, RowMemory(NO_LIMIT)), dict[object, int]()
        versions = dict.fromkeys(("insert", "upsert", "delete"), 0)
        key_of = str if schema is SCHEMA else int
        for batch in batches:
            rows = [{"_op": op, "id": key_of(key), "n": n, "text": str(n)} for op, key, n in batch]
            store.apply(to_batch(rows, schema, op=None))
            for row in rows:
                versions[row["_op"]] += 1
                if row["_op"] == "delete":
                    model.pop(row["id"], None)
                else:
                    model[row["id"]] = row["n"]
            for _ in range(care):
                store.maintain()
            assert contents(store) == model
            assert store.row_count == store.view().count() == len(model)
        assert store.versions == versions
        while store.maintain():
            pass
        assert contents(store) == model
        keys = [key_of(key) for key in (3, 99, 1, 3, 12, 0)]
        assert store.get(keys, ["id", "n"]).to_pylist() == [{"id": k, "n": model[k]} for k in keys if k in model]
        assert store.view().count(compile_filter("n < 50", schema)) == sum(n < 50 for n in model.values())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data(), operations, st.sampled_from([SCHEMA, INT_SCHEMA]), st.integers(0, 3), st.integers(1, 6))
def test_is_read_as_it_was_at_each_time_of_its_window(
    data: st.DataObject,
    batches: list[list[tuple[str, int, int]]],
    schema: CollectionSchema,
    care: int,
    window_ms: int,
) -> None:
    """Several batches may have one time; the window moves on with the log, with or without batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_store, "CHUNK_ROWS", 16)
        patch.setattr(row_store, "SMALL_ROWS", 8)
        patch.setattr(row_store, "SMALL_CHUNKS", 3)
        store, model = RowStore(schema, RowMemory(NO_LIMIT), window_ms), dict[object, int]()
        key_of = str if schema is SCHEMA else int
        was, now = {0: dict[object, int]()}, 0  # what there was, by time
        keys = [key_of(key) for key in (3, 99, 1, 3, 12, 0)]
        for batch in batches:
            now = add_ms(now, data.draw(st.integers(0, 3)))
            rows = [{"_op": op, "id": key_of(key), "n": n, "text": str(n)} for op, key, n in batch]
            store.apply(to_batch(rows, schema, op=None), now)
            for row in rows:
                model[row["id"]] = row["n"]
                if row["_op"] == "delete":
                    del model[row["id"]]
            was[now] = dict(model)
            store.advance(now)
            for _ in range(care):
                store.maintain()
            assert store.begins <= max(add_ms(now, -window_ms), 0)
            for time in (now, now + 1, data.draw(st.integers(store.begins, now))):
                expected = was[max(each for each in was if each <= time)]
                view = data.draw(st.sampled_from([store.view, store.snapshot]))(time)
                assert {row["id"]: row["n"] for row in query([view]).to_pylist()} == expected
                got = store.get(keys, ["id", "n"], time).to_pylist()
                assert got == [{"id": k, "n": expected[k]} for k in keys if k in expected]
        store.advance(add_ms(now, window_ms))
        while store.maintain():
            pass
        assert contents(store) == model


def test_many_rows_that_ended_are_kept_for_a_second_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "WINDOW_BYTES", 200_000)
    store = RowStore(SCHEMA, RowMemory(NO_LIMIT), window_ms=10_000)
    for turn in range(1, 101):
        store.apply(rows_of(1000, n=turn), add_ms(0, 100 * turn))
        store.advance(add_ms(0, 100 * turn))
        store.maintain()
        assert store.begins <= add_ms(0, max(0, 100 * turn - 1_000))
    assert store.begins >= add_ms(0, 8_000)
    assert {row["n"] for row in query([store.view(store.begins)], columns=["n"]).to_pylist()}
    assert contents(store) == {f"key-{i}": 100 + i for i in range(1000)}


def test_rows_that_ended_give_way_where_memory_is_short() -> None:
    one = RowStore(SCHEMA, RowMemory(NO_LIMIT))
    one.apply(rows_of(1000))
    reclaimed: list[bool] = []
    memory = RowMemory(one.bytes * 5 // 2, lambda: reclaimed.append(True))
    store = RowStore(SCHEMA, memory, window_ms=1000)
    for turn in range(1, 6):
        store.apply(rows_of(1000, n=turn), add_ms(0, turn))
    assert contents(store) == {f"key-{i}": 5 + i for i in range(1000)}
    assert add_ms(0, 4) <= store.begins <= add_ms(0, 5)  # earlier times are not shown wrong, but not at all
    assert reclaimed
    assert memory.used == store.bytes <= memory.limit_bytes


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.sampled_from("abc")), max_size=30),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(0, 12),
)
def test_order_and_limit(values: list[tuple[int | None, str | None]], up: bool, down: bool, limit: int | None) -> None:
    store = RowStore(INT_SCHEMA, RowMemory(NO_LIMIT))
    rows = [{"id": i, "n": n, "text": text} for i, (n, text) in enumerate(values)]
    for start in range(0, len(rows), 7):
        store.apply(to_batch(rows[start : start + 7], INT_SCHEMA, op="insert"))
    found = query([store.view()], columns=["id"], order_by=[OrderBy("n", up), OrderBy("text", down)], limit=limit)
    expected = sorted(rows, key=lambda row: row["id"] or 0)
    for name, ascending in (("text", down), ("n", up)):
        known = [row for row in expected if row[name] is not None]
        known.sort(key=lambda row: row[name], reverse=not ascending)
        expected = known + [row for row in expected if row[name] is None]
    assert found.column("id").to_pylist() == [row["id"] for row in expected[:limit]]


def test_rows_are_seen_at_once_and_the_last_of_a_batch_wins() -> None:
    store = RowStore(SCHEMA, RowMemory(NO_LIMIT))
    rows = [
        {"_op": "insert", "id": "a", "n": 1},
        {"_op": "delete", "id": "a"},
        {"_op": "upsert", "id": "a", "n": 2},
        {"_op": "insert", "id": "b", "n": 3},
        {"_op": "delete", "id": "b"},
    ]
    store.apply(to_batch(rows, SCHEMA, op=None))
    assert contents(store) == {"a": 2}
    assert store.versions == {"insert": 2, "upsert": 1, "delete": 2}


def test_a_snapshot_never_changes() -> None:
    store = RowStore(SCHEMA, RowMemory(NO_LIMIT))
    store.apply(rows_of(10))
    before = store.snapshot()
    store.apply(rows_of(5, start=5, n=100))
    store.apply(to_batch({"id": ["key-0"]}, SCHEMA, op="delete"))
    while store.maintain():
        pass
    assert sorted(query([before], columns=["n"]).column("n").to_pylist()) == list(range(10))
    assert store.row_count == 9


def test_maintenance_bounds_chunks_and_dead_rows() -> None:
    store = RowStore(SCHEMA, RowMemory(NO_LIMIT))
    for turn in range(400):
        store.apply(rows_of(100, start=turn % 7 * 50, n=turn))
        store.maintain()
    while store.maintain():
        pass
    chunks = store.view().chunks
    assert len(chunks) < row_store.SMALL_CHUNKS
    assert sum(len(chunk.alive) for chunk in chunks) <= 2 * store.row_count
    assert store.row_count == 400


def test_memory_is_given_back() -> None:
    store = RowStore(SCHEMA, RowMemory(NO_LIMIT))
    store.apply(rows_of(1000))
    held = store.bytes
    for turn in range(50):
        store.apply(rows_of(1000, n=turn))
        while store.maintain():
            pass
        assert store.bytes <= 3 * held
    store.apply(to_batch({"id": [f"key-{i}" for i in range(1000)]}, SCHEMA, op="delete"))
    while store.maintain():
        pass
    assert (store.bytes, store.row_count) == (0, 0)


def test_the_stores_of_a_node_share_its_memory() -> None:
    memory = RowMemory(NO_LIMIT)
    one, other = RowStore(SCHEMA, memory), RowStore(SCHEMA, memory)
    one.apply(rows_of(1000))
    other.apply(rows_of(500))
    assert memory.used == one.bytes + other.bytes
    memory.limit_bytes = memory.used + one.bytes // 2
    with pytest.raises(MemoryLimitExceeded):
        other.apply(rows_of(1000, start=500))
    one.apply(to_batch({"id": [f"key-{i}" for i in range(900)]}, SCHEMA, op="delete"))
    while one.maintain():
        pass
    assert memory.used == one.bytes + other.bytes
    other.apply(rows_of(1000, start=500))
    one.release()
    one.release()
    assert memory.used == other.bytes


def test_the_memory_limit_applies_nothing_and_lets_deletes_through() -> None:
    store = RowStore(SCHEMA, RowMemory(400_000))
    store.apply(rows_of(1000))
    before, versions = contents(store), dict(store.versions)
    with pytest.raises(MemoryLimitExceeded) as caught:
        store.apply(rows_of(2000, start=500, n=7))
    assert caught.value.limit == "queryNode.memoryLimitBytes"
    assert (contents(store), store.versions) == (before, versions)
    store.apply(to_batch({"id": [f"key-{i}" for i in range(900)]}, SCHEMA, op="delete"))
    store.apply(rows_of(1000, start=5000))  # fits, because dead rows make room
    assert store.row_count == 1100
    assert store.bytes <= 400_000


@pytest.mark.slow
def test_a_hot_key_never_runs_out_of_room() -> None:
    store = RowStore(SCHEMA, RowMemory(20_000))
    for turn in range(2000):
        store.apply(rows_of(10, n=turn))
    assert contents(store)["key-0"] == 1999


def test_wrong_columns_and_requests() -> None:
    store = RowStore(SCHEMA, RowMemory(NO_LIMIT))
    with pytest.raises(BadRecord):
        store.apply(to_batch({"id": [1]}, INT_SCHEMA, op="insert"))
    store.apply(rows_of(0))
    assert query([store.view()]).num_rows == 0
    assert store.get(["a"]).num_rows == 0
    with pytest.raises(InvalidRequest, match="no column"):
        query([store.view()], columns=["wings"])
    with pytest.raises(InvalidRequest, match="no column"):
        query([store.view()], order_by=[OrderBy("wings")])
    with pytest.raises(InvalidRequest, match="negative"):
        query([store.view()], limit=-1)
    assert query([store.view()], limit=0).num_rows == 0


@pytest.mark.parametrize("tight", [False, True])
def test_deleted_rows_leave_memory_sooner_where_that_is_tight(tight: bool) -> None:
    memory = RowMemory(NO_LIMIT)
    store = RowStore(SCHEMA, memory)
    store.apply(rows_of(1000))
    gone = [f"key-{i}" for i in range(200)]
    store.apply(to_batch({"id": gone, "n": [0] * 200, "text": gone}, SCHEMA, op="delete"))
    before, rows_left = memory.used, contents(store)
    memory.limit_bytes = int(before / 0.9) if tight else NO_LIMIT
    assert store.maintain() == tight
    assert (memory.used < before) == tight
    assert contents(store) == rows_left
    assert not store.maintain()


@pytest.mark.parametrize("tight", [False, True])
def test_less_of_the_past_is_kept_where_memory_is_tight(tight: bool) -> None:
    memory = RowMemory(NO_LIMIT)
    store, now = RowStore(SCHEMA, memory, window_ms=10_000), compose(1_000_000)
    store.apply(rows_of(1000), now)
    store.apply(to_batch({"id": ["key-1"], "n": [0], "text": [""]}, SCHEMA, op="delete"), add_ms(now, 1))
    memory.limit_bytes = int(memory.used / 0.9) if tight else NO_LIMIT
    store.advance(add_ms(now, 2_000))
    assert store.begins == add_ms(now, 1_000 if tight else -8_000)
