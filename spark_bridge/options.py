"""The options of the data source, checked in one place. Spark hands them over as text, names in any case. They have
the names of those of Spark's Kafka source and of Delta where they mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from ..runtime.clock import MAX_TIMESTAMP, compose
from ..runtime.errors import ConfigError
from ..runtime.log.names import DEFAULT_PREFIX
from .log import log_url
from .option_names import by_known_name
from .source_aliases import ALIASES, from_aliases, is_foreign

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
CHANNEL: Final = "channel"
TICK: Final = "tick"

_WHAT: Final = ("collection", "topic", "subscribePattern")
_NAMES: Final = (
    "wal",
    *_WHAT,
    "prefix",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
    "minRowsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "failOnDataLoss",
    "columns",
    "pushFilters",
    "readChangeFeed",
    "history",
    "timestampAsOf",
    "versionAsOf",
    "consistency",
    "includeHeaders",
    "tags",
    "timeticker",
)
_OF_COLLECTIONS: Final = ("readChangeFeed", "history", "timestampAsOf", "versionAsOf")
_OF_TOPICS: Final = ("consistency", "includeHeaders", "tags", "timeticker")
_OF_BATCHES: Final = ("endingOffsets", "endingTimestamp", "pushFilters", "timestampAsOf", "versionAsOf")
_OF_STREAMS: Final = (
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
    "minRowsPerTrigger",
    "maxTriggerDelay",
)
_BOUNDS: Final = ("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp")
_DEFAULT_DELAY: Final = "15m"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNIT_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """How much one micro-batch may hold, and when there is enough for one. `rows`, `bytes` and `entries` of None are no
    limit; with `min_rows` a smaller batch waits for up to `max_delay_s`."""

    rows: int | None = None
    bytes: int | None = None
    entries: int | None = None
    min_rows: int | None = None
    max_delay_s: float = 0.0

    @property
    def bounded(self) -> bool:
        """Whether there is a limit to what a batch may hold."""
        return any(limit is not None for limit in (self.rows, self.bytes, self.entries))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of one read: of `collection`, or (where that is empty) of `topics`, or of what matches `pattern`.

    `starting` and `ending` are `earliest`, `latest`, the time of a stored cut, or an offset as JSON; `starting_time`
    and `ending_time` are timestamps and go before them: rows with a log time ≥ and < them. `timestamp_as_of` is the
    last timestamp that is seen."""

    wal: str = field(repr=False)  # may say how to log in
    collection: str = ""
    topics: tuple[str, ...] = ()
    pattern: str = ""
    prefix: str = DEFAULT_PREFIX
    starting: str = EARLIEST
    ending: str = LATEST
    starting_time: int | None = None
    ending_time: int | None = None
    limits: MicroBatchLimits = MicroBatchLimits()
    min_partitions: int = 1
    fail_on_data_loss: bool = True
    columns: tuple[str, ...] = ()  # all
    push_filters: bool = False
    change_feed: bool = False
    history: str = ""
    timestamp_as_of: int | None = None
    version_as_of: int | None = None
    consistency: str = CHANNEL
    headers: bool = False
    tags: tuple[str, ...] = ()
    timeticker: str = ""  # the channel of heartbeats, where it is not the cluster's usual one

    @staticmethod
    def parse(given: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
        """Check the options of a stream or a batch (None: it is not known yet which).

        Raises `ConfigError`, whose `key` is the option to correct.
        """
        options = by_known_name(from_aliases(given), (*_NAMES, *ALIASES))
        _check_what(options)
        _check_mode(options, streaming)
        _check_time_travel(options)
        parsed = ReadOptions(
            log_url(options["wal"]),
            options.get("collection", ""),
            _list("topic", options.get("topic")),
            _pattern(options.get("subscribePattern", "")),
            options.get("prefix", DEFAULT_PREFIX),
            options.get("startingOffsets", LATEST if streaming else EARLIEST),
            options.get("endingOffsets", LATEST),
            _time("startingTimestamp", options.get("startingTimestamp")),
            _time("endingTimestamp", options.get("endingTimestamp")),
            _limits(options),
            _count("minPartitions", options.get("minPartitions")) or 1,
            _boolean("failOnDataLoss", options.get("failOnDataLoss", "true")),
            _list("columns", options.get("columns")),
            _boolean("pushFilters", options.get("pushFilters", "false")),
            _boolean("readChangeFeed", options.get("readChangeFeed", "false")),
            options.get("history", ""),
            _last_time("timestampAsOf", options.get("timestampAsOf")),
            _count("versionAsOf", options.get("versionAsOf"), least=0),
            _one_of("consistency", options.get("consistency", CHANNEL), (CHANNEL, TICK)),
            _boolean("includeHeaders", options.get("includeHeaders", "false")),
            _list("tags", options.get("tags")),
            options.get("timeticker", ""),
        )
        _check_bounds(parsed, streaming)
        if parsed.foreign:
            _check_foreign(options)
        return parsed

    @property
    def foreign(self) -> bool:
        """Whether the log is one of topics that others made."""
        return is_foreign(self.wal)


# ---- what goes together ---------------------------------------------------------------------------------------------


def _check_what(options: Mapping[str, str]) -> None:
    for name, value in options.items():
        if name in ("wal", *_WHAT, "history") and not value.strip():
            raise ConfigError(f"option {name} is empty", key=name)
    if "wal" not in options:
        raise ConfigError("option wal is required", key="wal")
    named = [name for name in _WHAT if name in options]
    if not named:
        raise ConfigError(
            "option collection is required: the name of a collection (or topic: names of channels by comma, or "
            "subscribePattern: a regular expression of them; Spark's subscribe and assign mean topic)",
            key="collection",
        )
    if len(named) > 1:
        raise ConfigError(f"options {named[0]} and {named[1]} exclude each other: leave one out", key=named[1])
    of_others = _OF_TOPICS if named == ["collection"] else _OF_COLLECTIONS
    for name in of_others:
        if name in options:
            wanted = "topic or subscribePattern" if named == ["collection"] else "collection"
            raise ConfigError(f"option {name} goes with {wanted}, not with {named[0]}: leave it out", key=name)


def _check_mode(options: Mapping[str, str], streaming: bool | None) -> None:
    if streaming is not None:
        for name in _OF_BATCHES if streaming else _OF_STREAMS:
            if name in options:
                method = "spark.read" if streaming else "spark.readStream"
                raise ConfigError(f"option {name} is for {method} only", key=name)
    if "maxTriggerDelay" in options and "minRowsPerTrigger" not in options:
        raise ConfigError(
            "option maxTriggerDelay says how long to wait for minRowsPerTrigger: give that too", key="maxTriggerDelay"
        )
    if "timeticker" in options and options.get("consistency") != TICK:
        raise ConfigError("option timeticker goes with consistency=tick: give that too", key="timeticker")


def _check_time_travel(options: Mapping[str, str]) -> None:
    as_of = [name for name in ("timestampAsOf", "versionAsOf") if name in options]
    if len(as_of) == 2:
        raise ConfigError("options timestampAsOf and versionAsOf exclude each other: leave one out", key="versionAsOf")
    if as_of == ["versionAsOf"] and "history" not in options:
        raise ConfigError("versionAsOf is a version of a Delta table: say with history where it is", key="versionAsOf")
    for name in (*_BOUNDS, "readChangeFeed"):
        if as_of and name in options:
            raise ConfigError(f"options {as_of[0]} and {name} exclude each other: leave one out", key=name)


def _check_bounds(options: ReadOptions, streaming: bool | None) -> None:
    if streaming is False and options.starting == LATEST and options.starting_time is None:
        raise ConfigError("startingOffsets=latest would read nothing in a batch", key="startingOffsets")
    if options.ending == EARLIEST and options.ending_time is None:
        raise ConfigError("endingOffsets=earliest would read nothing", key="endingOffsets")
    if options.ending_time is not None and options.ending_time < (options.starting_time or 0):
        raise ConfigError("endingTimestamp lies before startingTimestamp", key="endingTimestamp")
    if not options.collection and options.consistency == CHANNEL:
        for name, text in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
            if text.isdecimal():
                key = name.replace("Offsets", "Timestamp")
                raise ConfigError(f"{name}={text} is a time: give it as {key}, or set consistency=tick", key=name)


def _check_foreign(options: Mapping[str, str]) -> None:
    for name in ("collection", "consistency", "tags", "timeticker"):
        if name in options:
            raise ConfigError(
                f"option {name} needs records of Tidewal, which topics that others made do not have: leave it out",
                key=name,
            )


def _limits(options: Mapping[str, str]) -> MicroBatchLimits:
    rows, size, entries, least = (
        _count(name, options.get(name))
        for name in ("maxRowsPerTrigger", "maxBytesPerTrigger", "maxOffsetsPerTrigger", "minRowsPerTrigger")
    )
    if rows is not None and least is not None and least > rows:
        raise ConfigError("minRowsPerTrigger is more than maxRowsPerTrigger", key="minRowsPerTrigger")
    delay_s = _duration_s("maxTriggerDelay", options.get("maxTriggerDelay", _DEFAULT_DELAY))
    return MicroBatchLimits(rows, size, entries, least, 0.0 if least is None else delay_s)


# ---- single values --------------------------------------------------------------------------------------------------


def _count(name: str, text: str | None, least: int = 1) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"option {name} is {text!r}; it must be a whole number of {least} or more", key=name)
    return int(text)


def _boolean(name: str, text: str) -> bool:
    return _one_of(name, text.lower(), ("true", "false")) == "true"


def _one_of(name: str, text: str, known: tuple[str, str]) -> str:
    if text not in known:
        raise ConfigError(f"option {name} is {text!r}; it must be {' or '.join(known)}", key=name)
    return text


def _list(name: str, text: str | None) -> tuple[str, ...]:
    """Names by comma."""
    if text is None:
        return ()
    names = tuple(each.strip() for each in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"option {name} is {text!r}; it must be names by comma, each once", key=name)
    return names


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"option subscribePattern is {text!r}, no regular expression: {error}", key="subscribePattern"
        ) from error
    return text


def _duration_s(name: str, text: str) -> float:
    """As Spark writes durations: a number (of milliseconds), or one with a unit."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or (found[2] or "ms") not in _UNIT_S:
        raise ConfigError(f"option {name} is {text!r}; it must be a duration like 500ms, 30s, 15m or 1h", key=name)
    return int(found[1]) * _UNIT_S[found[2] or "ms"]


def _time(name: str, text: str | None) -> int | None:
    """The first timestamp at or after a time."""
    if text is None:
        return None
    return compose(-(-_microseconds(name, text) // 1000))


def _last_time(name: str, text: str | None) -> int | None:
    """The last timestamp at a time: log time counts milliseconds, and in each a number."""
    if text is None:
        return None
    return compose(_microseconds(name, text) // 1000 + 1) - 1


def _microseconds(name: str, text: str) -> int:
    """Since 1970, of a number of milliseconds or of ISO time, which is UTC where it does not say."""
    text = text.strip()
    try:
        if text.isdecimal():
            found = int(text) * 1000
        else:
            time = datetime.fromisoformat(text)
            found = ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
    except ValueError:
        found = -1
    if not 0 <= found < 1000 * (MAX_TIMESTAMP >> 18):
        raise ConfigError(
            f"option {name} is {text!r}; it must be milliseconds since 1970, or a time like 2013-01-01T12:00:00Z",
            key=name,
        )
    return found
