"""From row versions to rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def latest(versions: DataFrame, key: str | None = None) -> DataFrame:
    """The rows that exist after all upserts and deletes of `versions`: of each key the newest version, no deletes.

    `versions` is a DataFrame of the source, perhaps with fewer columns: the key, `_op`, `_ts`, `_cseq` and `_row` are
    needed and stay. It must hold the versions of its keys from the beginning on. `key` is found by itself unless
    columns were renamed. On a stream this is an aggregation: write it in update or complete mode.

    Raises `InvalidRequest` when a column is missing.
    """
    from pyspark.sql import functions as F

    from ..scan.columns import KEY_METADATA, ORDER

    key = key or next((field.name for field in versions.schema.fields if field.metadata.get(KEY_METADATA)), None)
    if key is None:
        raise InvalidRequest("no column is marked as the primary key; name it: latest(versions, key=...)")
    missing = sorted({key, "_op", *ORDER} - set(versions.columns))
    if missing:
        raise InvalidRequest(f"latest needs the columns {', '.join(missing)} too")
    newest = F.max_by(F.struct(*versions.columns), F.struct(*ORDER)).alias("newest")
    return versions.groupBy(F.col(key)).agg(newest).select("newest.*").where(F.col("_op") != "delete")
