"""A line for each micro-batch, while a pipeline of `tidewal spark` runs."""

from __future__ import annotations

import json
import threading
from typing import Any, cast

import typer
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from .open_log import shown_time


class ProgressPrinter(StreamingQueryListener):
    """Prints a query's progress, which Spark reports from threads of its own."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._rows = 0
        self._batches = 0
        self._ended = threading.Event()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Ignored."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Print a micro-batch that has ended."""
        progress = event.progress
        self._rows += progress.numInputRows
        self._batches += 1
        upto = _time(progress.sources[0].endOffset)
        fields = {"batch": progress.batchId, "rows": progress.numInputRows, "ms": progress.batchDuration, "upto": upto}
        if self._as_json:
            typer.echo(json.dumps(fields))
        else:
            typer.echo(
                f"micro-batch {progress.batchId}: {progress.numInputRows:,} rows in "
                f"{progress.batchDuration / 1000:.2f} s"
                f"{f', read up to {upto}' if upto else ''}"
            )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Note that the query has ended."""
        self._ended.set()

    def sum_up(self, within_s: float) -> None:
        """Print the last line, the totals of this run. Spark may report the last micro-batch up to `within_s` after the
        end of the query."""
        self._ended.wait(within_s)
        if self._as_json:
            typer.echo(json.dumps({"rows": self._rows, "batches": self._batches}))
        else:
            typer.echo(f"{self._rows:,} rows in {self._batches:,} micro-batches")


def _time(offset: str) -> str | None:
    """The time of an offset that is a cut; None for an offset of independent channels."""
    decoded: Any = json.loads(offset)
    time = cast("dict[str, object]", decoded).get("t") if isinstance(decoded, dict) else None
    return shown_time(time) if isinstance(time, int) else None
