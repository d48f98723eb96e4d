"""The store of tables in a directory, where several nodes use it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

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
