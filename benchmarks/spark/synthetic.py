"""A data source in Python that costs nothing: it hands out the same batch again and again. What is left is Spark."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from .data import KINDS, columns_of


@cache
def batch_of(kind: str, rows: int) -> pa.RecordBatch:
    columns = columns_of(kind, rows)
    if "vector" in columns:
        columns["vector"] = columns["vector"].cast(pa.list_(pa.float32()))
    return pa.RecordBatch.from_pydict(columns)


class SyntheticReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._kind = options["kind"]
        self._rows, self._batch_rows, self._tasks = (int(options[name]) for name in ("rows", "batchrows", "tasks"))

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self._rows // self._tasks)] * self._tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = batch_of(self._kind, self._batch_rows)
        for left in range(partition.value, 0, -self._batch_rows):
            yield batch if left >= self._batch_rows else batch.slice(0, left)


class SyntheticStreamReader(DataSourceStreamReader):
    """One row a micro-batch, by one task."""

    def __init__(self, options: dict[str, str]) -> None:
        self._kind = options["kind"]

    def initialOffset(self) -> dict[str, int]:
        return {"at": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"at": start["at"] + 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(1)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield batch_of(self._kind, 1)


class SyntheticSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "synthetic"

    def schema(self) -> str:
        return KINDS[self.options["kind"]].columns

    def reader(self, schema: Any) -> DataSourceReader:
        return SyntheticReader(dict(self.options))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return SyntheticStreamReader(dict(self.options))
