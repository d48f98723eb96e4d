"""Spark's micro-batch loop as far as a source sees it, without Spark: an offset log and a commit log that outlive the
driver, and readers that travel as pickles. What Spark does was taken from its MicroBatchExecution and from
python_streaming_source_runner.py.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

from tidewal.spark_bridge.source import TidewalSource


class Query:
    """One checkpoint. `start` makes the driver's reader anew, as each start and restart does; between two starts there
    may be a crash anywhere. `committed` holds the rows of each committed batch."""

    def __init__(self) -> None:
        self._offsets: list[str] = []  # the end of each batch, written before it runs
        self.committed: list[list[dict[str, Any]]] = []
        self.begin = 0  # the time at which the first batch began when it was planned first
        self._reader: Any = None
        self._shipped = b""  # the reader that tasks get: made apart, and never asked anything by the driver

    def start(self, options: Mapping[str, str], *, available_now: bool = False) -> None:
        """A new driver process."""
        self.crash()
        source = TidewalSource(dict(options))
        schema = source.schema()
        self._shipped = pickle.dumps(source.streamReader(schema))
        self._reader = source.streamReader(schema)
        if available_now:
            self._reader.prepareForTriggerAvailableNow()

    def crash(self) -> None:
        """The driver is gone, but for what its logs hold."""
        if self._reader is not None:
            self._reader.stop()
        self._reader = None

    @property
    def stopped(self) -> bool:
        """Whether there is no driver."""
        return self._reader is None

    @property
    def unfinished(self) -> bool:
        """Whether a batch was planned and not committed: what a restart begins with."""
        return len(self._offsets) > len(self.committed)

    def ends(self) -> list[int]:
        """The time of each planned batch's end."""
        return [json.loads(text)["t"] for text in self._offsets]

    def plan(self) -> bool:
        """Write the end of the next batch into the offset log; False when there is nothing new."""
        start = self._start()
        limit = self._reader.getDefaultReadLimit()
        end = json.dumps(self._reader.latestOffset(json.loads(start), limit))
        if not self._offsets:  # Spark runs a first batch even when it is empty
            self.begin = json.loads(start)["t"]
        elif end == start:
            return False
        self._offsets.append(end)
        return True

    def read(self) -> list[dict[str, Any]]:
        """The rows of the planned batch, read by tasks in other processes."""
        start, end = self._start(), self._offsets[len(self.committed)]
        partitions = pickle.loads(pickle.dumps(self._reader.partitions(json.loads(start), json.loads(end))))
        tasks = pickle.loads(self._shipped)
        return [row for each in partitions for batch in tasks.read(each) for row in batch.to_pylist()]

    def commit(self, rows: list[dict[str, Any]]) -> None:
        """The sink has the rows: the batch is in the commit log."""
        self.committed.append(rows)

    def _start(self) -> str:
        """Where the first batch that is not committed begins. Spark keeps no start of the first one: it asks again."""
        if self.committed:
            return self._offsets[len(self.committed) - 1]
        return json.dumps(self._reader.initialOffset())
