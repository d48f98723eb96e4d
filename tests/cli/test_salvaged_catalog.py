"""A log that has lost records of its catalog: what `verify` and `salvage` say, and what a node says that goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from tests.adapters.rocksmq.damage import flip
from tests.commands import Command
from tidewal.actors.datanode.log_table import LogTable
from tidewal.actors.standalone import standalone
from tidewal.adapters.rocksmq.check.journal_survey import JournalSurvey, ReadOnlyDisk
from tidewal.adapters.rocksmq.journal.frame import JournalFrame
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.rows.schema import CollectionSchema, Field

pytestmark = pytest.mark.slow

SCHEMA = CollectionSchema("cities", (Field("id", "int64"),), "id")
WARNING = "has tables of collections that this log does not have"


async def fill(data: Path) -> None:
    async with standalone(data) as node, node.client() as client:
        await client.create_collection(SCHEMA)
        await client.insert("cities", [{"id": 1}])
        await client.flush("cities")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a node that has stored a row."""
    asyncio.run(fill(tmp_path / "data"))
    return tmp_path / "data"


def damage_frame(log: Path, wanted: Callable[[JournalFrame], bool]) -> None:
    """Damage the first frame that is `wanted`."""
    with closing(JournalSurvey(ReadOnlyDisk(), str(log / "journal"))) as survey:
        (path, frame), *_ = (
            (segment.path, piece)
            for segment in survey.segments
            for piece in survey.walk(segment, None)
            if isinstance(piece, JournalFrame) and wanted(piece)
        )
    flip(Path(path), frame.end - 1)
    flip(Path(path), frame.offset + 40)


def creates_a_collection(frame: JournalFrame) -> bool:
    return b"create" in bytes(frame.bodies) and b"vchannels" in bytes(frame.bodies)


async def restart(data: Path) -> None:
    async with standalone(data) as node, node.client() as client:
        assert await client.list_collections() == []


def test_a_salvage_names_the_collection_that_is_lost_and_the_node_warns_of_its_tables_once(
    command: Command, data: Path, caplog: pytest.LogCaptureFixture
):
    damage_frame(data / "log", creates_a_collection)
    (found,) = json.loads(command("salvage", data / "log", "--json").out)["catalogs"]
    assert (found["channel"], found["collections"], found["refusal"]) == ("by-dev-collection_schema", [], "")
    assert found["tables"] == ["cities"]
    said = command("salvage", data / "log", data / "new", "--accept").out
    assert "collection cities is lost, and its tables are there" in said
    (data / "log").rename(data / "damaged")
    (data / "new").rename(data / "log")
    asyncio.run(restart(data))
    (warning,) = [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    assert f"{data / 'tables'} has tables" in warning
    assert ": cities. " in warning


def test_a_salvage_is_told_where_tables_lie_that_are_not_beside_the_log(command: Command, data: Path, bucket: str):
    (data / "tables").rename(data / "elsewhere")
    LogTable.open(f"{bucket}/tables/cities/log", pa.schema([pa.field("id", pa.int64())]), "id")
    damage_frame(data / "log", creates_a_collection)
    elsewhere, remote = ("--tables", data / "elsewhere"), ("--tables", f"{bucket}/tables")
    for tables, found in ((), []), (elsewhere, ["cities"]), (remote, ["cities"]):
        (catalog,) = json.loads(command("salvage", data / "log", "--json", *tables).out)["catalogs"]
        assert catalog["tables"] == found


def test_where_the_catalog_has_lost_its_beginning_verify_says_that_no_node_starts(command: Command, data: Path):
    damage_frame(data / "log", lambda frame: b"leader" in bytes(frame.bodies))
    assert "no node starts with what is left" in command("salvage", data / "log").out
    command("salvage", data / "log", data / "new", "--accept")
    verified = command("verify", "journal", data / "new", "--json")
    assert verified.status == 1
    verdict = json.loads(verified.out.splitlines()[-1])
    assert not verdict["intact"]
    assert "no snapshot holds what they were" in verdict["refused"]
    (data / "log").rename(data / "damaged")
    (data / "new").rename(data / "log")
    with pytest.raises(CorruptLog, match="no snapshot holds"):
        asyncio.run(restart(data))


def test_a_copy_whose_catalog_readers_may_not_pass_is_not_intact(command: Command, data: Path):
    damage_frame(data / "log", creates_a_collection)
    command("salvage", data / "log", data / "new")
    verified = command("verify", "journal", data / "new")
    assert verified.status == 1
    assert "could not be salvaged" in verified.out


def test_a_log_of_a_node_is_intact(command: Command, data: Path):
    assert command("verify", "journal", data).status == 0
    assert json.loads(command("salvage", data, "--json").out)["catalogs"] == []
