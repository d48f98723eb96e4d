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

from .reading import shown_time


class Report(StreamingQueryListener):
    """Prints a query's progress, which Spark tells from threads of its own."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._rows = 0
        self._batches = 0
        self._ended = threading.Event()

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing to say."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """A micro-batch has ended."""
        told = event.progress
        self._rows += told.numInputRows
        self._batches += 1
        upto = _time(told.sources[0].endOffset)
        picture = {"batch": told.batchId, "rows": told.numInputRows, "ms": told.batchDuration, "upto": upto}
        if self._as_json:
            typer.echo(json.dumps(picture))
        else:
            typer.echo(
                f"micro-batch {told.batchId}: {told.numInputRows:,} rows in {told.batchDuration / 1000:.2f} s"
                f"{f', read up to {upto}' if upto else ''}"
            )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """The query has ended."""
        self._ended.set()

    def sum_up(self, within_s: float) -> None:
        """Print the last line: what was done in this run. Spark may tell of the last micro-batch behind its end."""
        self._ended.wait(within_s)
        if self._as_json:
            typer.echo(json.dumps({"rows": self._rows, "batches": self._batches}))
        else:
            typer.echo(f"{self._rows:,} rows in {self._batches:,} micro-batches")


def _time(offset: str) -> str | None:
    """The time of an offset that is a cut; those of channels each on its own have none."""
    told: Any = json.loads(offset)
    time = cast("dict[str, object]", told).get("t") if isinstance(told, dict) else None
    return shown_time(time) if isinstance(time, int) else None
