"""Writing into topics that others made: as Spark's own Kafka sink, each task appends its rows, at least once.

What makes a write happen once elsewhere, staged rows and a ledger, would be channels of Tidewal's beside the topics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from ...runtime.errors import ChannelNotFound, ConfigError, InvalidRows, InvalidSchema
from ...runtime.log.blocking_reader import BlockingReader
from ...runtime.log.redaction import shown_url
from ...runtime.log.wal import TOMBSTONE, Append, Headers
from .messages import VALUE, bytes_of, plan_messages, times_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

PARTITION: Final = "partition"
ROWS: Final = 1000  # appended in one commit
BYTES: Final = 4 * 1024 * 1024  # the same, and one row more


@dataclass(frozen=True, slots=True)
class ForeignPlan:
    """The index of each column that a message has, and the topic of all rows, "" where a column has it."""

    places: Mapping[str, int]
    topic: str

    def entries(self, batch: pa.RecordBatch) -> list[Append]:
        """The rows of `batch` as entries. Raises `InvalidRows`."""
        columns: dict[str, Any] = {name: batch.column(place) for name, place in self.places.items()}
        nothing = [None] * batch.num_rows
        values = bytes_of(columns[VALUE])
        keys = bytes_of(columns["key"]) if "key" in columns else nothing
        times = times_of(columns["timestamp"]) if "timestamp" in columns else nothing
        headers = columns["headers"].to_pylist() if "headers" in columns else nothing
        partitions = columns[PARTITION].to_pylist() if PARTITION in columns else nothing
        topics = columns["topic"].to_pylist() if not self.topic else [self.topic] * batch.num_rows
        if None in topics:
            raise InvalidRows("column 'topic' is null: say for each row where it goes", column="topic")
        return [
            Append(
                topic if partition is None else f"{topic}:{partition}",
                TOMBSTONE if value is None else value,
                time or 0,
                key,
                _headers(header),
            )
            for topic, partition, value, time, key, header in zip(
                topics, partitions, values, times, keys, headers, strict=True
            )
        ]


def plan_foreign(given: StructType, topics: Sequence[str]) -> ForeignPlan:
    """Match the columns of a DataFrame with what a message has: those of Spark's Kafka sink, and `timestamp`. Raises
    `InvalidSchema`, `ConfigError`."""
    from pyspark.sql.types import StructType

    if len(topics) > 1:
        raise ConfigError("option topic names one topic that others made, or a column topic does", key="topic")
    kinds = {field.name.lower(): field.dataType.typeName() for field in given.fields}
    if kinds.get(PARTITION) not in (None, "integer"):
        raise InvalidSchema(f"column 'partition' is {kinds[PARTITION]}: it is the number of a partition, an integer")
    others = [field for field in given.fields if field.name.lower() != PARTITION]
    named = plan_messages(StructType(others), tuple(topics)).places
    places = {name: given.fields.index(others[place]) for name, place in named.items()}
    if PARTITION in kinds:
        places[PARTITION] = next(at for at, field in enumerate(given.fields) if field.name.lower() == PARTITION)
    return ForeignPlan(places, topics[0] if topics else "")


def check_there(log: BlockingReader, url: str, topic: str) -> None:
    """Raise `ChannelNotFound` unless there is such a topic."""
    if not any(topic in (name, name.partition(":")[0]) for name in log.channels()):
        raise ChannelNotFound(f"no topic {topic!r} in {shown_url(url)}: check options topic and wal", channel=topic)


def in_commits(entries: Sequence[Append]) -> Iterator[Sequence[Append]]:
    """The entries in parts that are appended together."""
    part: list[Append] = []
    size = 0
    for entry in entries:
        if part and (len(part) == ROWS or size >= BYTES):
            yield part
            part, size = [], 0
        part.append(entry)
        size += len(entry.payload)
    if part:
        yield part


def _headers(given: list[Any] | None) -> Headers:
    """Of an array of structs, or of the pairs of a map; text as UTF-8."""
    pairs = (
        (cast("dict[str, Any]", each)["key"], cast("dict[str, Any]", each)["value"]) if isinstance(each, dict) else each
        for each in given or ()
    )
    found = tuple((name, value.encode() if isinstance(value, str) else value) for name, value in pairs)
    if any(name is None for name, _ in found):
        raise InvalidRows("column 'headers' has a header without a key", column="headers")
    return found
