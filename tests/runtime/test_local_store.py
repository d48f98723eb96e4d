"""The store of tables in a directory, where several nodes use it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tidewal.runtime.errors import DirectoryUnwritable
from tidewal.runtime.tables.table_store import open_tables

NODES = 4
FILES = 300


def test_nodes_that_remove_a_collection_at_once_all_succeed(tmp_path: Path) -> None:
    """A dropped collection is released on every DataNode, and the first one's success is no error of the others."""
    log = tmp_path / "people" / "log"
    log.mkdir(parents=True)
    for number in range(FILES):
        (log / f"{number}.parquet").touch()
    together = Barrier(NODES)

    def remove() -> None:
        store = open_tables(str(tmp_path))
        together.wait()
        store.remove("people")

    with ThreadPoolExecutor(NODES) as nodes:
        for done in [nodes.submit(remove) for _ in range(NODES)]:
            done.result()
    assert not log.parent.exists()


@pytest.mark.parametrize(("name", "escape"), [("100%25", "%25"), ("p%20q", "%20")])
def test_a_path_that_the_delta_library_takes_for_another_is_refused(tmp_path: Path, name: str, escape: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / name)
    for folder in (tmp_path / name / "tables", tmp_path / "link" / "tables"):
        with pytest.raises(DirectoryUnwritable, match=f"takes {escape} in"):
            open_tables(str(folder)).prepare()
    assert not (tmp_path / name / "tables").exists()


@pytest.mark.parametrize("name", ["100%", "a b", "ä#?x"])
def test_other_paths_have_tables(tmp_path: Path, name: str) -> None:
    store = open_tables(str(tmp_path / name / "tables"))
    store.prepare()
    columns = pa.schema([("id", pa.int64())])
    location = store.table("people", "log")
    location.prepare()
    DeltaTable.create(location.uri, columns)
    assert DeltaTable(location.uri).version() == 0
    assert location.exists()
