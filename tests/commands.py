"""Commands as a person runs them: in this process, or as one of their own where signals matter."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import pytest
import typer

from tests.logging_restored import logging_restored
from tidewal.cli.main import main


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


Command = Callable[..., Ended]
Start = Callable[..., "subprocess.Popen[str]"]

# PySpark's own, of a worker whose Java has ended: nothing of ours is in it, and nothing of ours can catch it. Spark may
# end the worker behind the first line.
_BROKEN_PIPE = re.compile(
    r'Traceback .*\n(?:(?!  File)|(?:  File "[^"]*/pyspark/daemon\.py".*\n(?:    .*\n)*)+BrokenPipeError: .*\n)'
)


def in_this_process(application: typer.Typer, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of `application` with the arguments it is called with."""

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended, logging_restored():
            main([str(argument) for argument in arguments], application)
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a command that was started with --json says next; on a busy machine warnings come before it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return cast("dict[str, Any]", json.loads(line))
    raise AssertionError("the command has ended")


@contextmanager
def as_processes(*program: str, cwd: Path) -> Iterator[Start]:
    """Starts Python on `program` with the arguments it is called with; all processes are gone after the context."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *program, *(str(argument) for argument in arguments)],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        if not process.stdout.closed:
            _show_unread(process.stdout)
            process.stdout.close()


def _show_unread(output: IO[str]) -> None:
    """Print what a process printed and nobody has read: pytest shows it where a test fails. Not to its end, which does
    not come while a process that was started by it lives."""
    os.set_blocking(output.fileno(), False)
    unread = cast("io.TextIOWrapper", output).buffer.read() or b""
    print(unread.decode(errors="replace"), end="")


def tracebacks(output: str) -> bool:
    """Whether a command's output has a traceback."""
    return "Traceback" in _BROKEN_PIPE.sub("", output)


def wait_until_read(pipe: int, bound_s: float = 60.0) -> None:
    """Return once the process at the other end has read all that was written to `pipe`."""
    ends = time.monotonic() + bound_s
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]:
        assert time.monotonic() < ends, "nothing read the pipe"
        time.sleep(0.01)
