"""Commands as a person runs them: in this process, or as one of their own where signals matter."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.backends import log_url
from tidewal.cli.main import main


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run `tidewal` with some arguments in this process."""

    def run(*arguments: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return run


Start = Callable[..., "subprocess.Popen[str]"]

# PySpark's own, of a worker whose Java has ended: nothing of ours is in it, and nothing of ours can catch it.
_BROKEN_PIPE = re.compile(r'Traceback .*\n(?:  File "[^"]*/pyspark/daemon\.py".*\n(?:    .*\n)*)+BrokenPipeError: .*\n')


def tracebacks(output: str) -> bool:
    """Whether a command's output has a traceback."""
    return "Traceback" in _BROKEN_PIPE.sub("", output)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `tidewal` with some arguments as a process, which is gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        program = [sys.executable, "-c", "from tidewal.cli.main import main; main()"]
        process = subprocess.Popen(
            [*program, *(str(argument) for argument in arguments)],
            cwd=tmp_path,
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
        process.stdout.close()


@pytest.fixture(params=["kafka", "pulsar"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of a log of its own on each kind of broker."""
    return log_url(request.param, request.getfixturevalue(request.param))
