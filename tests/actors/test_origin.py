"""A directory's tables name the log that they came from, and no other log fills them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tidewal.actors.datanode.moved_tables import MovedTables
from tidewal.actors.datanode.wal_identity import wal_of
from tidewal.actors.node import in_thread
from tidewal.actors.standalone import Standalone, log_url, standalone
from tidewal.runtime.config.loading import load_settings
from tidewal.runtime.errors import ConfigError, Moved, PositionMismatch
from tidewal.runtime.log.opening import find_backend
from tidewal.runtime.replication.promotion import promote
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.tables.table_store import open_tables
from tidewal.runtime.testing.clock import until
from tidewal.runtime.testing.memory import MemoryWal

SCHEMA = CollectionSchema("things", (Field("id", "int64"),), "id")


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    """A directory in which a node on the embedded log has stored a row."""
    async with standalone(tmp_path) as node, node.client() as client:
        await client.create_collection(SCHEMA)
        await client.insert("things", [{"id": 1}])
        await client.flush("things")
    return tmp_path


def settings_of(**given: object):
    return load_settings(environment={}, arguments={key.replace("_", "."): value for key, value in given.items()})


async def test_nothing_stored_names_no_log(tmp_path: Path):
    assert wal_of(open_tables(tmp_path / "tables")) is None
    (tmp_path / "tables" / "broken" / "log" / "_delta_log").mkdir(parents=True)
    assert wal_of(open_tables(tmp_path / "tables")) is None


@pytest.mark.slow
async def test_tables_beat_the_type_but_not_a_url(filled: Path, caplog: pytest.LogCaptureFixture):
    assert wal_of(open_tables(filled / "tables")) == "rocksmq"
    kafka = settings_of(mq_type="kafka", kafka_brokerList="localhost:9092")
    with caplog.at_level(logging.WARNING):
        assert await log_url(filled, kafka) == f"rocksmq://{filled}/log"
    assert "kafka" in caplog.text
    for refused in (
        log_url(filled, kafka, wal="kafka://localhost:9092"),
        log_url(filled, settings_of(rocksmq_path="", pulsar_address="", kafka_brokerList="localhost:9092")),
    ):
        with pytest.raises(PositionMismatch) as caught:
            await refused
        assert (caught.value.expected, caught.value.found) == ("kafka", "rocksmq")


@pytest.mark.slow
async def test_a_node_on_a_log_whose_replica_of_another_kind_was_promoted_is_told_where_that_is(filled: Path):
    """The tables name the kind of that log already, and the settings the old one."""
    replica, own = MemoryWal(), {"own": True, "serve": False}
    async with await find_backend(source := f"rocksmq://{filled}/log").open(source, **own) as log:
        async with Replicator(log, replica, source).claimed():
            pass
        tables = MovedTables(open_tables(filled / "tables"), in_thread)
        await promote(log, replica, source, "memory://replica", tables=tables)
    assert wal_of(open_tables(filled / "tables")) == "memory"
    with pytest.raises(Moved, match="set wal to memory://replica"):
        await log_url(filled, settings_of(), wal=source)


@pytest.mark.slow
async def test_tables_without_their_collection_are_told_once(filled: Path, caplog: pytest.LogCaptureFixture):
    async with standalone(filled):
        pass
    assert "does not have" not in caplog.text
    (filled / "log").rename(filled / "elsewhere")
    async with standalone(filled):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if "does not have" in record.getMessage()]
    assert warning.startswith(f"{filled}/tables has tables of collections that this log does not have")
    assert ": things. " in warning


@pytest.mark.slow
async def test_a_node_on_another_log_refuses_the_collection_rather_than_mix_rows(filled: Path):
    away = filled / "tables" / "things"
    wal = MemoryWal()
    async with Standalone(wal, filled / "others") as node, node.client() as client:
        await client.create_collection(SCHEMA)
    shutil.rmtree(filled / "others" / "things", ignore_errors=True)  # the DataNode may not have come to it
    away.rename(filled / "others" / "things")
    async with Standalone(wal, filled / "others") as node, node.client() as client:
        await until(lambda: len(node.health().details["unreadable"]) == 2)
        with pytest.raises(PositionMismatch) as caught:
            await client.insert("things", [{"id": 2}])
        with pytest.raises(PositionMismatch):
            await client.count("things")
    await wal.close()
    assert (caught.value.expected, caught.value.found) == ("memory", "rocksmq")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "rocksmq://{home}/log"),
        ({"mq_type": "kafka", "kafka_brokerList": "a:1,b:2"}, "kafka://a:1,b:2"),
        ({"mq_type": "pulsar"}, "pulsar://localhost:6650"),
        ({"rocksmq_path": "", "pulsar_address": "", "kafka_brokerList": "a:1"}, "kafka://a:1"),
        ({"wal": "memory://"}, "memory://"),
    ],
)
async def test_the_settings_choose_the_log_of_a_new_directory(tmp_path: Path, given, expected: str):
    assert await log_url(tmp_path, settings_of(**given)) == expected.format(home=tmp_path)


async def test_what_a_command_says_beats_the_settings(tmp_path: Path):
    assert await log_url(tmp_path, settings_of(wal="kafka://a:1"), wal="memory://") == "memory://"
    assert await log_url(tmp_path, settings_of(), embedded="/elsewhere") == "rocksmq:///elsewhere"
    with pytest.raises(ConfigError):
        await log_url(tmp_path, settings_of(rocksmq_path="", pulsar_address="", mq_type="kafka"))
