"""The data source `tidewal`, by which Spark finds readers and writers. Imported whenever Spark looks for sources, so
what is heavy is imported where it is used.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class TidewalSource(DataSource):
    """`format("tidewal")`: reads the rows of one collection, with every version of each, and writes rows."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tidewal"

    def schema(self) -> StructType:
        """The collection's columns and the log's, listed in `columns`; or those of topics, listed in `topic_rows`."""
        from .options import ReadOptions
        from .plan.open_plan import open_plan
        from .scan.columns import some_columns

        options = ReadOptions.parse(self.options)
        with closing(open_plan(options)) as plan:
            return some_columns(plan.schema(), options.columns, plan.what())

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch: what lies between two offsets."""
        from .options import ReadOptions
        from .readers import FilteringBatchReader, TidewalBatchReader

        options = ReadOptions.parse(self.options, streaming=False)
        return (FilteringBatchReader if options.push_filters else TidewalBatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream: one micro-batch after the other."""
        from .options import ReadOptions
        from .readers import TidewalStreamReader

        return TidewalStreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch: all rows of a DataFrame."""
        from .sink.options import SinkOptions
        from .writers import TidewalBatchWriter

        return TidewalBatchWriter(SinkOptions.parse(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A stream: one micro-batch after the other."""
        from .sink.options import SinkOptions
        from .writers import TidewalStreamWriter

        return TidewalStreamWriter(SinkOptions.parse(self.options, streaming=True), schema)
