"""Read from a log table the newest version of each key: what compaction merges, and what a QueryNode starts with."""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ...runtime.rows.schema import OPS
from .delta_errors import storage_errors
from .delta_files import CHECKED
from .log_table import LogTable
from .row_versions import ORDER, newest

ROWS_PER_BATCH: Final = 65_536
READ_AHEAD: Final = 2  # batches
FILES_AT_ONCE: Final = 4  # of one scan by a file system in Python: what is read to its end where the scan is given up


@dataclass(frozen=True, slots=True)
class NewestVersions:
    """The newest version per key. `batches` may be taken once; together they have `rows` rows.

    `counts` is the number of versions of each `_op` that were read to find them.
    """

    schema: pa.Schema
    rows: int
    counts: Mapping[str, int]
    batches: Iterator[pa.RecordBatch]

    def to_table(self) -> pa.Table:
        """All batches as one table."""
        return pa.Table.from_batches(list(self.batches), self.schema)


def read_current_at(
    log: LogTable, t: int, *, above: int = 0, vchannels: Collection[str] | None = None
) -> NewestVersions:
    """The rows that are there at time `t`: per key the newest version with `_ts ≤ t`, unless it is a delete. With
    `above`, what makes them of those that are there at that time: only versions behind it, deletes too.

    Rows have the user's columns in the user's types, and the columns of their version. With `vchannels`, only rows of
    those. `t` should not pass the flushed T of any vchannel that is read.

    Reads the log twice: first keys and order alone, which stay in memory until the end (about 70 bytes a version while
    sorting, 1 after), then rows, a few batches at a time.
    """
    return newest_versions(log, above=above, upto=t, vchannels=vchannels, schema=log.schema, deletes=above > 0)


def newest_versions(
    log: LogTable,
    *,
    above: int = 0,
    upto: int,
    vchannels: Collection[str] | None = None,
    schema: pa.Schema,
    deletes: bool,
) -> NewestVersions:
    """Per key the newest version with `above < _ts ≤ upto`, cast to the columns of `schema`; deletes too if asked."""
    dataset, wanted = log.dataset(above=above, upto=upto)
    if vchannels is not None:
        wanted = wanted & pc.field("_vchannel").isin(list(vchannels))
    with storage_errors(log.location):
        keys = _scanner(dataset, wanted, [log.primary_key, "_op", *ORDER]).to_table()
        marks = newest(keys, log.primary_key)
        if not deletes:
            marks &= ~_where(keys, "delete")
        counts = {op: int(_where(keys, op).sum()) for op in OPS}
    batches = _marked(log, _scan(log, dataset, wanted, schema.names), marks, schema)
    return NewestVersions(schema, int(marks.sum()), counts, batches)


def _where(keys: pa.Table, op: str) -> npt.NDArray[np.bool_]:
    return cast("npt.NDArray[np.bool_]", pc.equal(keys["_op"], pa.scalar(op)).to_numpy())


def _scanner(dataset: ds.Dataset, wanted: pc.Expression, columns: list[str]) -> ds.Scanner:
    return dataset.scanner(
        columns=columns,
        filter=wanted,
        batch_size=ROWS_PER_BATCH,
        batch_readahead=READ_AHEAD,
        fragment_readahead=READ_AHEAD,
        fragment_scan_options=CHECKED,
    )


_scans: WeakSet[Generator[pa.RecordBatch]] = WeakSet()


@atexit.register
def _end_scans() -> None:
    """End what is being read before Python does."""
    for scan in list(_scans):
        with suppress(ValueError):  # a daemon thread is in it
            scan.close()


def _scan(log: LogTable, dataset: ds.Dataset, wanted: pc.Expression, columns: list[str]) -> Generator[pa.RecordBatch]:
    """The rows that are wanted, in the order of a scan of the whole dataset.

    Where the file system is in Python (`TableLocation.file_system`), the scan is of a few files at a time, and a caller
    that gives it up waits until these are read: pyarrow's threads read ahead, and the process crashes where they still
    do when Python ends.
    """
    whole = cast(ds.FileSystemDataset, dataset)  # as the Delta library makes it
    files = cast("list[ds.Fragment]", list(cast(Any, whole).get_fragments(wanted)))
    in_python = log.location.file_system() is None
    step = FILES_AT_ONCE if in_python else max(1, len(files))
    for first in range(0, len(files), step):
        part = ds.FileSystemDataset(files[first : first + step], whole.schema, whole.format, whole.filesystem)
        batches = _scanner(part, wanted, columns).to_batches()
        try:
            for batch in batches:  # noqa: UP028 -- it would close `batches`, too
                yield batch
        except GeneratorExit:
            if in_python:
                with suppress(Exception):  # whatever the file system raises: nobody wants these rows any more
                    deque(batches, maxlen=0)
            raise


def _marked(
    log: LogTable, scan: Generator[pa.RecordBatch], marks: npt.NDArray[np.bool_], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The marked rows; a scan of one snapshot and filter gives the same rows in the same order each time."""
    offset = 0
    _scans.add(scan)
    with storage_errors(log.location), closing(scan):
        for batch in scan:
            kept = marks[offset : offset + batch.num_rows]
            offset += batch.num_rows
            if kept.any():
                yield batch.filter(pa.array(kept)).cast(schema)
