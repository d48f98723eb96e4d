"""The data source `tidewal`, by which Spark finds readers and writers. Imported whenever Spark looks for sources, so
what is heavy is imported where it is used.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class TidewalSource(DataSource):
    """`format("tidewal")`: the rows of one collection, with every version of each."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tidewal"

    def schema(self) -> StructType:
        """The collection's columns and the log's, see `columns`."""
        from .columns import spark_schema
        from .options import Options
        from .reading import planner

        options = Options.parse(self.options)
        with closing(planner(options)) as plan:
            return spark_schema(plan.collection().schema, options.columns, change_feed=options.change_feed)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch: the rows between two cuts."""
        from .options import Options
        from .reading import TidewalBatchReader

        return TidewalBatchReader(Options.parse(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream: one micro-batch per cut, or per few."""
        from .options import Options
        from .reading import TidewalStreamReader

        return TidewalStreamReader(Options.parse(self.options, streaming=True), schema)
