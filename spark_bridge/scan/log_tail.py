"""The tasks' side of a hybrid read: rows that the table did not have when the read was planned come from the log. Rows
that retention has removed from the log since then are in the table now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from ...runtime.errors import PositionLost, Unavailable
from ...runtime.log.blocking_reader import BlockingReader
from ..connection_cache import cached_log
from .collection import ChannelRange, arrow_batches


@dataclass(frozen=True, slots=True)
class UnstoredRange:
    """A range of the log that the table in `folder` did not have when the read was planned. `vchannels` are all of the
    collection."""

    range: ChannelRange
    folder: str
    vchannels: tuple[str, ...]

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows with `columns`, as `unstored_batches` returns and raises."""
        with cached_log(self.range.wal) as log:
            yield from unstored_batches(log, self, columns)


def unstored_batches(log: BlockingReader, task: UnstoredRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a range, in batches as `arrow_batches` makes them.

    Raises `PositionLost` when retention has removed rows that the table does not have either, unless data loss is
    allowed; `Unavailable` when it removed them while they were read: the task must start again, and then begins with
    the table.
    """
    wanted = task.range
    begun = False
    try:
        for batch in arrow_batches(log, replace(wanted, fail_on_data_loss=True), columns):
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

    now = Snapshot(task.folder, wanted.wal, wanted.schema, task.vchannels)
    for stored in now.stored(wanted.begin_ts, wanted.end_ts, wanted.vchannels):
        yield from stored_batches(stored, columns)
    for unstored in now.unstored(wanted):
        yield from arrow_batches(log, unstored, columns)
