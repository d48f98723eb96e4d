"""The data source `tidewal`, by which Spark finds readers and writers. Imported whenever Spark looks for sources, so
what is heavy is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from ..runtime.errors import TidewalError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

P = ParamSpec("P")
T = TypeVar("T")


def _briefly(
    method: Callable[Concatenate[TidewalSource, P], T],
) -> Callable[Concatenate[TidewalSource, P], T]:
    """`method`, whose Tidewal errors come without the calls and the causes below it: Spark prints all of these before
    the sentence that says what to change."""

    @wraps(method)
    def brief(self: TidewalSource, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return method(self, *arguments, **named)
        except TidewalError as error:
            raise error.with_traceback(None) from None

    return brief


class TidewalSource(DataSource):
    """`format("tidewal")`: reads the rows of one collection, with every version of each, and writes rows."""

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return "tidewal"

    @_briefly
    def schema(self) -> StructType:
        """The collection's columns and the log's, listed in `columns`; or those of topics, listed in `topic_rows`."""
        from .options import ReadOptions
        from .plan.open_plan import open_plan
        from .scan.columns import some_columns

        options = ReadOptions.parse(self.options)
        with closing(open_plan(options)) as plan:
            return some_columns(plan.schema(), options.columns, plan.what())

    @_briefly
    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch: what lies between two offsets."""
        from .options import ReadOptions
        from .readers import FilteringBatchReader, TidewalBatchReader

        options = ReadOptions.parse(self.options, streaming=False)
        return (FilteringBatchReader if options.push_filters else TidewalBatchReader)(options, schema)

    @_briefly
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream: one micro-batch after the other."""
        from .options import ReadOptions
        from .readers import TidewalStreamReader

        return TidewalStreamReader(ReadOptions.parse(self.options, streaming=True), schema)

    @_briefly
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch: all rows of a DataFrame."""
        from .sink.options import SinkOptions
        from .writers import TidewalBatchWriter

        return TidewalBatchWriter(SinkOptions.parse(self.options, streaming=False), schema, overwrite)

    @_briefly
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A stream: one micro-batch after the other."""
        from .sink.options import SinkOptions
        from .writers import TidewalStreamWriter

        return TidewalStreamWriter(SinkOptions.parse(self.options, streaming=True), schema)
