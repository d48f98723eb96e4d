"""The options of a write, checked in one place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ...runtime.errors import ConfigError
from ...runtime.log.names import DEFAULT_PREFIX
from ...runtime.log.opening import find_backend
from ...runtime.rows.schema import OPS
from ..log import log_url
from ..option_names import by_known_name
from ..source_aliases import SERVERS, from_aliases, is_foreign

DEADLINE_S: Final = 300.0
VERSION_MAX: Final = (1 << 43) - 1  # with 20 bits for a partition's chunks it makes a producer's number

_NAMES: Final = (
    "wal",
    "collection",
    "topic",
    "prefix",
    "operation",
    "primaryKey",
    "deadline",
    "txnAppId",
    "txnVersion",
    "allowOldBatches",
)
_OF_COLLECTIONS: Final = ("operation", "primaryKey")
_ONCE: Final = ("txnAppId", "txnVersion", "allowOldBatches")
_SPARKS_OWN: Final = frozenset({"checkpointlocation"})  # Spark passes its own options, too
_UNIT_S: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Where one write goes: into `collection`, or into `topics`, or (without either) into those in a column `topic`.

    `operation` is empty where a column `_op` may have it. With a `primary_key` the collection is created where it is
    missing. `app` replaces the query in the identity of a write, and `version` the batch. With `allow_old` batches up
    to the last one that is done count as written, without a comparison."""

    wal: str = field(repr=False)  # may say how to log in
    collection: str = ""
    topics: tuple[str, ...] = ()
    prefix: str = DEFAULT_PREFIX
    operation: str = ""
    primary_key: str = ""
    deadline_s: float = DEADLINE_S
    app: str = ""
    version: int | None = None
    allow_old: bool = False

    @staticmethod
    def parse(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
        """Check the options of a stream or a batch. Raises `ConfigError`, whose `key` is the option to correct."""
        ours = {name: value for name, value in given.items() if name.lower() not in _SPARKS_OWN}
        options = by_known_name(from_aliases(ours), (*_NAMES, SERVERS), " of a write")
        if not options.get("wal"):
            raise ConfigError("option wal is required", key="wal")
        if options.get("collection") and options.get("topic"):
            raise ConfigError("options collection and topic exclude each other", key="topic")
        operation = options.get("operation", "").lower()
        if operation and operation not in OPS:
            raise ConfigError(f"option operation is {operation!r}; known are {', '.join(OPS)}", key="operation")
        for name in _OF_COLLECTIONS:
            if options.get(name) and not options.get("collection"):
                raise ConfigError(f"option {name} is for collections only", key=name)
        app, version = options.get("txnAppId", ""), _version(options.get("txnVersion"))
        if streaming and version is not None:
            raise ConfigError("option txnVersion is for df.write only: a stream counts its batches", key="txnVersion")
        if not streaming and bool(app) != (version is not None):
            missing = "txnVersion" if app else "txnAppId"
            raise ConfigError(f"options txnAppId and txnVersion belong together; {missing} is missing", key=missing)
        url = log_url(options["wal"])
        if is_foreign(url):
            _check_foreign(options)
        return SinkOptions(
            find_backend(url).absolute_url(url),  # executors may run in another directory
            options.get("collection", ""),
            tuple(name.strip() for name in options.get("topic", "").split(",") if name.strip()),
            options.get("prefix", DEFAULT_PREFIX),
            operation,
            options.get("primaryKey", ""),
            _seconds("deadline", options.get("deadline")),
            app,
            version,
            _flag("allowOldBatches", options.get("allowOldBatches", "false")),
        )

    @property
    def foreign(self) -> bool:
        """Whether the log is one of topics that others made."""
        return is_foreign(self.wal)


def _check_foreign(options: Mapping[str, str]) -> None:
    for name in ("collection", *_ONCE):
        if name in options:
            raise ConfigError(
                f"option {name} needs channels of Tidewal; into topics that others made each task appends its rows, at"
                " least once: leave it out",
                key=name,
            )


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) > VERSION_MAX:
        raise ConfigError(
            f"option txnVersion is {text!r}; it must be a whole number from 0 to {VERSION_MAX}", key="txnVersion"
        )
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}; write true or false", key=name)
    return text.lower() == "true"


def _seconds(name: str, text: str | None) -> float:
    if text is None:
        return DEADLINE_S
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNIT_S or not int(found[1]):
        raise ConfigError(f"option {name} is {text!r}; write a time like 30s or 5m", key=name)
    return int(found[1]) * _UNIT_S[found[2]]
