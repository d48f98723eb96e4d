"""The options of Spark's Kafka source, as those of Tidewal: a query changes `format("kafka")` and goes on.

What means the same keeps its name. The rest is translated here, or refused with what to do instead: an option that is
passed over would be a promise that is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import parse_qsl

from ..runtime.errors import ConfigError
from ..runtime.log.redaction import split_url

SERVERS: Final = "kafka.bootstrap.servers"
ALIASES: Final = (SERVERS, "kafka.isolation.level", "kafka.client.id", "subscribe", "assign", "minOffsetsPerTrigger")

_NO_GROUP = "readers of Tidewal join no consumer group, so nothing has to be named"
_BY_TIME = "give one time for all partitions as startingTimestamp or endingTimestamp, or offsets"
_PATIENCE = "how long brokers are waited for is an option of the wal URL, delivery_timeout_s"
_REFUSED: Final[dict[str, str]] = {
    "groupIdPrefix": _NO_GROUP,
    "kafka.group.id": _NO_GROUP,
    "startingOffsetsByTimestamp": _BY_TIME,
    "endingOffsetsByTimestamp": _BY_TIME,
    "startingOffsetsByTimestampStrategy": "a time behind the last entry begins at the end",
    "kafkaConsumer.pollTimeoutMs": _PATIENCE,
    "fetchOffset.numRetries": _PATIENCE,
    "fetchOffset.retryIntervalMs": _PATIENCE,
    "maxRecordsPerPartition": "minPartitions says into how many tasks a read is divided",
}


def is_foreign(url: str) -> bool:
    """Whether the log at `url` is one of topics that others made."""
    return dict(parse_qsl(split_url(url).query)).get("topics") == "foreign"


def from_aliases(given: Mapping[str, str]) -> dict[str, str]:
    """`given` with Spark's names for the Kafka source replaced by Tidewal's; others stay. Raises `ConfigError`."""
    options = dict(given)
    _refuse(options)
    named = {name.lower(): name for name in options}

    def take(alias: str) -> str | None:
        found = named.get(alias.lower())
        return None if found is None else options.pop(found)

    servers, client_id, isolation = take(SERVERS), take("kafka.client.id"), take("kafka.isolation.level")
    if isolation not in (None, "read_committed"):
        raise ConfigError(
            f"option kafka.isolation.level is {isolation!r}: what an aborted transaction wrote is never read, leave it"
            " out",
            key="kafka.isolation.level",
        )
    if servers is not None:
        if "wal" in named:
            raise ConfigError(f"options wal and {SERVERS} exclude each other: leave one out", key=SERVERS)
        options["wal"] = f"kafka://{servers.replace(' ', '')}?topics=foreign"
        options["wal"] += f"&client_id={client_id}" if client_id else ""
    elif client_id is not None:
        raise ConfigError("option kafka.client.id goes with kafka.bootstrap.servers", key="kafka.client.id")
    for alias, name, value in (
        ("subscribe", "topic", take("subscribe")),
        ("assign", "topic", take("assign")),
        ("minOffsetsPerTrigger", "minRowsPerTrigger", take("minOffsetsPerTrigger")),
    ):
        if value is None:
            continue
        if name in options or name.lower() in named:
            raise ConfigError(f"options {alias} and {name} mean the same: leave one out", key=alias)
        options[name] = ",".join(_assigned(value)) if alias == "assign" else value
    return options


def _refuse(options: Mapping[str, str]) -> None:
    refused = {name.lower(): (name, why) for name, why in _REFUSED.items()}
    known = {alias.lower() for alias in ALIASES}
    for name in options:
        if name.lower() in refused:
            option, why = refused[name.lower()]
            raise ConfigError(f"option {option} is Spark's Kafka source's alone: {why}; leave it out", key=option)
        if name.lower().startswith("kafka.") and name.lower() not in known:
            raise ConfigError(
                f"option {name} is one of Kafka's own consumer, which is not used here: leave it out, or set what it"
                " means in the URL of option wal (kafka://HOST:PORT?topics=foreign&fetch_bytes=…)",
                key=name,
            )


def _assigned(text: str) -> list[str]:
    """The channels of `{"orders": [0, 1]}`."""
    wrong = ConfigError(
        f'option assign is {text!r}; it must be topics with their partitions, like {{"orders":[0,1]}}', key="assign"
    )
    try:
        given: Any = json.loads(text)
    except ValueError as error:
        raise wrong from error
    if not isinstance(given, dict) or not given:
        raise wrong
    found: list[str] = []
    for topic, partitions in cast("dict[str, Any]", given).items():
        if not isinstance(partitions, list) or not all(type(each) is int for each in cast("list[Any]", partitions)):
            raise wrong
        found += [f"{topic}:{number}" for number in cast("list[int]", partitions)]
    return found
