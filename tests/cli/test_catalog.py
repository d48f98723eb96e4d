"""`tidewal catalog`: what was exported is created elsewhere, as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tidewal.actors.sync_standalone import standalone_sync
from tidewal.runtime.rows.schema import CollectionSchema, Field

SCHEMAS = [
    (CollectionSchema("people", (Field("id", "int64"), Field("name", "varchar", nullable=True)), "id"), 3),
    (CollectionSchema("points", (Field("id", "varchar"), Field("at", "float_vector", dim=4)), "id"), 1),
]


@pytest.fixture
def export(command: Command, tmp_path: Path) -> Path:
    """The export of a log that no node runs on any more."""
    with standalone_sync(tmp_path / "one") as node, node.client() as client:
        for schema, shards in SCHEMAS:
            client.create_collection(schema, shards=shards)
        client.create_collection(CollectionSchema("gone", SCHEMAS[0][0].fields, "id"))
        client.drop_collection("gone")
    ended = command("catalog", "export", tmp_path / "one")
    assert ended.status == 0, ended.err
    file = tmp_path / "catalog.json"
    file.write_text(ended.out)
    return file


def test_collections_are_there_as_they_were(command: Command, export: Path, tmp_path: Path) -> None:
    with standalone_sync(tmp_path / "two") as node, node.client() as client:
        client.create_collection(SCHEMAS[1][0], shards=1)
        ended = command("catalog", "import", tmp_path / "two", export, "--json")
        assert ended.status == 0, ended.err
        assert json.loads(ended.out) == {"created": ["people"], "there": 1}
        assert client.list_collections() == ["people", "points"]
        found = [client.describe_collection(schema.name) for schema, _ in SCHEMAS]
        assert [(each.schema, each.shards) for each in found] == SCHEMAS
        client.insert("people", [{"id": 1, "name": None}])
        assert client.count("people", consistency="strong") == 1
        assert command("catalog", "import", tmp_path / "two", export).out == "0 collections created, 2 were there\n"


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "no json",
        '{"tidewal_catalog": 1, "collections": [{"schema": {}, "shards": 1}]}',
        '{"tidewal_catalog": 1, "collections": [{"shards": 1}]}',
        '{"tidewal_catalog": 1, "collections": 5}',
    ],
)
def test_another_file_is_refused_before_a_node_is_asked(command: Command, tmp_path: Path, content: str) -> None:
    file = tmp_path / "catalog.json"
    file.write_text(content)
    ended = command("catalog", "import", tmp_path / "nowhere", file)
    assert ended.status == 2
    assert "is nothing that `tidewal catalog export` printed" in ended.err


def test_a_later_version_says_so_and_a_bad_number_of_shards_too(command: Command, export: Path) -> None:
    told: dict[str, Any] = json.loads(export.read_text())
    export.write_text(json.dumps({**told, "tidewal_catalog": 2}))
    assert "has version 2, this Tidewal reads 1: upgrade" in command("catalog", "import", export.parent, export).err
    told["collections"][0]["shards"] = "3"
    export.write_text(json.dumps(told))
    assert "'3' shards" in command("catalog", "import", export.parent, export).err
