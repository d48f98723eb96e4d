"""Logging of the command line: what a line looks like, and which lines there are.

Only commands configure logging. A program that embeds Tidewal has its own configuration, which nothing here touches.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from ..runtime.errors import TidewalError
from ..runtime.log.opening import installed_backends
from ..runtime.logging_context import ROLE
from .main import FAILED
from .one_line import one_line

OWN = "tidewal"  # the logger above all of Tidewal's
REPEATED_S = 60.0  # in which a library's line appears once
TEMPLATES_MAX = 1000  # lines of libraries that are remembered


_log = logging.getLogger("tidewal.cli")


class LogLevel(StrEnum):
    """The least grave lines that are written, by the names of milvus.yaml."""

    debug = "debug"
    info = "info"
    warn = "warn"
    error = "error"
    panic = "panic"
    fatal = "fatal"


class LogFormat(StrEnum):
    """How a line is written."""

    text = "text"
    json = "json"


LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "panic": logging.CRITICAL,
    "fatal": logging.CRITICAL,
}
"""The levels of Python for those of `log.level`."""


def _level_option(variable: str | None) -> Any:
    meaning = "Write log lines of this level and above to stderr; of libraries warnings and above."
    return typer.Option("--log-level", case_sensitive=False, envvar=variable, show_envvar=False, help=meaning)


def _format_option(variable: str | None) -> Any:
    meaning = "How log lines are written: for people, or one JSON object each."
    return typer.Option("--log-format", case_sensitive=False, envvar=variable, show_envvar=False, help=meaning)


LogLevelOption = Annotated[LogLevel | None, _level_option("TIDEWAL__LOG__LEVEL")]
LogFormatOption = Annotated[LogFormat | None, _format_option("TIDEWAL__LOG__FORMAT")]

# of commands that show where a setting comes from: the environment is a source of its own there
LogLevelArgument = Annotated[LogLevel | None, _level_option(None)]
LogFormatArgument = Annotated[LogFormat | None, _format_option(None)]


def configure(level: str, form: str, *, node: str = "") -> None:
    """Have all loggers of this process write to stderr: Tidewal's own lines from `level` on, those of libraries from
    WARNING on and each at most once in `REPEATED_S`. `node` stands in every line. A later call replaces an earlier
    one; handlers of others stay as they are."""
    handler = logging.StreamHandler()
    handler.set_name(__name__)
    handler.setFormatter((JsonFormatter if form == LogFormat.json else TextFormatter)(node))
    handler.addFilter(LibraryFilter())
    root = logging.getLogger()
    for before in [each for each in root.handlers if each.get_name() == __name__]:
        root.removeHandler(before)
    root.addHandler(handler)
    root.setLevel(max(logging.WARNING, LEVELS[level]))
    logging.getLogger(OWN).setLevel(LEVELS[level])


def logged(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options --log-level and --log-format, by which logging is configured before it begins."""
    options = {"log_level": LogLevelOption, "log_format": LogFormatOption}

    @wraps(command)
    def configured(*arguments: Any, log_level: str | None, log_format: str | None, **named: Any) -> None:
        level, form = log_level or LogLevel.warn, log_format or LogFormat.text
        configure(level, form)
        with failures_as_lines(form):
            command(*arguments, **named)

    own = signature(command, eval_str=True)
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in options.items()]
    described: Any = configured  # what typer reads
    described.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
    described.__annotations__ = {**command.__annotations__, **options}
    return configured


@contextmanager
def failures_as_lines(form: str) -> Generator[None]:
    """Where lines are JSON, the error that ends the command is one, too: nothing else comes to stderr."""
    try:
        yield
    except TidewalError as error:
        if form != LogFormat.json:
            raise
        _log.critical("the command ends", exc_info=error)
        raise typer.Exit(FAILED) from None


class LibraryFilter(logging.Filter):
    """Keeps libraries quiet: a line of theirs, whatever its values, is written once in `REPEATED_S`, and says then how
    often it was left out. What only repeats what Tidewal says itself (`WalBackend.repeated_log_lines`) is left out
    altogether."""

    def __init__(self) -> None:
        super().__init__()
        self._repeated: dict[str, tuple[str, ...]] = {}
        for backend in installed_backends():
            self._repeated.update(backend.repeated_log_lines)
        self._written: dict[tuple[str, str], float] = {}
        self._left_out: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written. Called under no lock: at worst a line appears twice."""
        library = record.name.partition(".")[0]
        if library == OWN:
            return True
        template = str(record.msg)
        if template.startswith(self._repeated.get(library, ())):
            return False
        key = (record.name, template)
        now_s = time.monotonic()
        if now_s - self._written.get(key, -REPEATED_S) < REPEATED_S:
            self._left_out[key] = self._left_out.get(key, 0) + 1
            return False
        if len(self._written) >= TEMPLATES_MAX:
            self._written.clear()
            self._left_out.clear()
        self._written[key] = now_s
        if left_out := self._left_out.pop(key, 0):
            record.msg, record.args = f"{record.getMessage()} (and {left_out} more such lines)", ()
        return True


class _Formatter(logging.Formatter):
    """What both formats have in common."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def fields(self, record: logging.LogRecord) -> dict[str, str]:
        """Where a line comes from, as far as it is known."""
        found = {
            "node": self._node,
            "role": str(getattr(record, "role", "") or ROLE.get()),
            "channel": str(getattr(record, "channel", "")),
        }
        return {name: value for name, value in found.items() if value}

    def message(self, record: logging.LogRecord) -> str:
        """The message. A typed error says all in one sentence, which is added; any other one has a traceback."""
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        return f"{text}: {type(error).__name__}: {error.message}" if isinstance(error, TidewalError) else text

    def trace(self, record: logging.LogRecord) -> str:
        """The traceback of a defect; "" where there is none. At level debug of typed errors, too."""
        error = record.exc_info[1] if record.exc_info else None
        debugging = logging.getLogger(OWN).isEnabledFor(logging.DEBUG)
        if error is None or (isinstance(error, TidewalError) and not debugging):
            return ""
        return "".join(traceback.format_exception(error)).rstrip()


class TextFormatter(_Formatter):
    """`2026-11-22T09:30:00.250Z WARN  tidewal.proxy node=a-17 role=proxy: the message`, a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        known = "".join(f" {name}={value}" for name, value in self.fields(record).items())
        line = one_line(f"{_time(record)} {_level(record).upper():5} {record.name}{known}: {self.message(record)}")
        trace = self.trace(record)
        return f"{line}\n{trace}" if trace else line


class JsonFormatter(_Formatter):
    """One object in one line: `time`, `level`, `logger`, `message`, and where known `node`, `role`, `channel` and
    `traceback`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {"time": _time(record), "level": _level(record), "logger": record.name, **self.fields(record)}
        line["message"] = self.message(record)
        if trace := self.trace(record):
            line["traceback"] = trace
        return json.dumps(line, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level(record: logging.LogRecord) -> str:
    return {"WARNING": "warn", "CRITICAL": "fatal"}.get(record.levelname, record.levelname.lower())
