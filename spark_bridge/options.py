"""The options of the data source, checked in one place. Spark hands them over as text, names in any case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..runtime.errors import ConfigError
from ..runtime.names import DEFAULT_PREFIX

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

_NAMES: Final = (
    "wal",
    "collection",
    "prefix",
    "startingOffsets",
    "endingOffsets",
    "maxRowsPerTrigger",
    "failOnDataLoss",
)
_BATCH_ONLY: Final = frozenset({"endingOffsets"})
_STREAM_ONLY: Final = frozenset({"maxRowsPerTrigger"})


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one read. `starting` and `ending` are `earliest`, `latest`, the time of a stored cut, or
    an offset as JSON."""

    wal: str
    collection: str
    prefix: str
    starting: str
    ending: str
    max_rows: int | None
    fail_on_data_loss: bool

    @staticmethod
    def parse(given: Mapping[str, str], *, streaming: bool | None = None) -> Options:
        """Check the options of a stream or a batch (None: it is not known yet which).

        Raises `ConfigError`, whose `key` is the option to correct.
        """
        options = _by_known_name(given)
        _refuse_options_of_other_mode(options, streaming)
        for name in ("wal", "collection"):
            if not options.get(name):
                raise ConfigError(f"option {name} is required", key=name)
        starting = options.get("startingOffsets", LATEST if streaming else EARLIEST)
        ending = options.get("endingOffsets", LATEST)
        if streaming is False and starting == LATEST:
            raise ConfigError("startingOffsets=latest would read nothing in a batch", key="startingOffsets")
        if ending == EARLIEST:
            raise ConfigError("endingOffsets=earliest would read nothing", key="endingOffsets")
        return Options(
            options["wal"],
            options["collection"],
            options.get("prefix", DEFAULT_PREFIX),
            starting,
            ending,
            _positive("maxRowsPerTrigger", options.get("maxRowsPerTrigger")),
            _boolean("failOnDataLoss", options.get("failOnDataLoss", "true")),
        )


def _by_known_name(given: Mapping[str, str]) -> dict[str, str]:
    known = {name.lower(): name for name in _NAMES}
    for name in given:
        if name.lower() not in known:
            raise ConfigError(f"unknown option {name!r}; known are {', '.join(_NAMES)}", key=name)
    return {known[name.lower()]: value for name, value in given.items()}


def _refuse_options_of_other_mode(options: Mapping[str, str], streaming: bool | None) -> None:
    if streaming is None:
        return
    wrong = sorted(set(options) & (_BATCH_ONLY if streaming else _STREAM_ONLY))
    if wrong:
        method = "spark.read" if streaming else "spark.readStream"
        raise ConfigError(f"option {wrong[0]} is for {method} only", key=wrong[0])


def _positive(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"option {name} is {text!r}; it must be a whole number of 1 or more", key=name)
    return int(text)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {name} is {text!r}; it must be true or false", key=name)
    return text.lower() == "true"
