"""The rows of one task as Arrow batches in Spark's types, from a channel or from a table. Imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from ...runtime.errors import PositionLost, Unavailable
from ...runtime.log.blocking_reader import BlockingReader
from ..connection_cache import cached_log
from .batches import arrow_batches
from .channel_range import ChannelRange, HistoryTable, entries_of
from .collection_rows import CollectionRows
from .foreign_rows import ForeignRows
from .topic_rows import TopicRows

if TYPE_CHECKING:
    from .delta import StoredRange

ReadTask: TypeAlias = "ChannelRange | StoredRange"


def scan(task: ReadTask, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of `task` with `columns`. Raises what `scan_channel` and `stored_batches` raise."""
    if isinstance(task, ChannelRange):
        with cached_log(task.wal) as log:
            yield from scan_channel(log, task, columns)
    else:
        from .delta import stored_batches

        yield from stored_batches(task, columns)


def scan_channel(log: BlockingReader, wanted: ChannelRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a range, with `columns`. What cannot be read is skipped with a warning.

    Raises `PositionLost` or `ChannelNotFound` when entries are gone, unless data loss is allowed; `CorruptLog` when a
    record before the end of a cut is later than the cut; `InvalidRequest` for rows of a later schema; `Unavailable`
    when rows have moved from the log to the table while they were read: the task must start again.
    """
    if wanted.history is not None:
        yield from _with_table(log, wanted, wanted.history, columns)
    elif wanted.schema is not None:
        rows = CollectionRows(wanted, columns)
        yield from arrow_batches(rows.pieces(entries_of(log, wanted)), rows.to_arrow)
    elif wanted.foreign:
        foreign = ForeignRows(wanted, columns)
        yield from arrow_batches(foreign.pieces(entries_of(log, wanted)), foreign.to_arrow)
    else:
        messages = TopicRows(wanted, columns)
        yield from arrow_batches(messages.pieces(entries_of(log, wanted)), messages.to_arrow)


def _with_table(
    log: BlockingReader, wanted: ChannelRange, table: HistoryTable, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """As `scan_channel`, of a range whose first rows may be in the table by now."""
    begun = False
    try:
        for batch in scan_channel(log, replace(wanted, fail_on_data_loss=True, history=None), columns):
            begun = True
            yield batch
        return
    except PositionLost as error:
        if begun:
            raise Unavailable(
                f"retention was faster than the reading of {wanted.channel}: read again, the table has the rows now"
            ) from error
    from .delta import stored_batches
    from .history import Snapshot

    assert wanted.schema is not None, "no range of a collection"
    now = Snapshot(table.folder, wanted.wal, wanted.schema, table.vchannels)
    for stored in now.stored(wanted.begin_ts, wanted.end_ts, wanted.vchannels):
        yield from stored_batches(stored, columns)
    for unstored in now.unstored(replace(wanted, history=None)):
        yield from scan_channel(log, unstored, columns)
