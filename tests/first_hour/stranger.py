"""A user who has the pages, a wheel and an empty folder, and what the first hour costs: commands typed, lines of pages
read, lines of programs written, seconds waited."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tests.commands import tracebacks

ROOT = Path(__file__).parents[2]
BOUND_S = 300.0  # for one command, on a machine that is busy with everything else
NOT_A_STRANGERS = ("PIP_", "PYTEST_", "PYTHON", "TIDEWAL_", "VIRTUAL_ENV", "UV_")  # of the process that tests


class Failed(AssertionError):
    """A command did not do what the pages say, with all that it printed."""


class Program:
    """One that goes on in the background; its output is in a file."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self._output = process, output

    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def until(self, text: str) -> str:
        """Wait until it has printed `text`; returns all output."""
        deadline = time.monotonic() + BOUND_S
        while text not in (printed := self.printed()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{self.process.args!r} did not print {text!r}:\n{printed}")
            time.sleep(0.02)
        return printed

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal and wait for its end; the exit status."""
        self.process.send_signal(how)
        return self.process.wait(BOUND_S)


class Stranger:
    """One user in one folder. `close` ends what the user has started and removes the environments."""

    def __init__(self, folder: Path, find_links: tuple[Path, ...]) -> None:
        self.folder = folder
        self.commands = self.lines_read = self.lines_written = 0
        self._began, self._cpu_before = time.monotonic(), _cpu_s()
        self._programs: list[Program] = []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_A_STRANGERS)}
        python = Path(getattr(sys, "_base_executable", sys.executable)).parent
        self._environment = {
            **kept,
            "PATH": f"{python}{os.pathsep}{kept['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": " ".join(map(str, find_links)),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def installs(self, requirement: str) -> None:
        """Make an environment, activate it, and install: three commands."""
        self.types("python3 -m venv env")
        self._environment["PATH"] = f"{self.folder / 'env' / 'bin'}{os.pathsep}{self._environment['PATH']}"
        self.commands += 1  # source env/bin/activate
        self.types(f"pip install --quiet {requirement}")

    def reads(self, page: str, *sections: str) -> str:
        """The text of the page, or of the sections with these headings."""
        text = (ROOT / page).read_text(encoding="utf-8")
        if sections:
            parts = re.split(r"^(?=##+ )", text, flags=re.MULTILINE)
            found = {part.partition("\n")[0].lstrip("# "): part for part in parts}
            missing = set(sections) - set(found)
            assert not missing, f"{page} has no section {missing}"
            text = "\n".join(found[section] for section in sections)
        self.lines_read += text.count("\n")
        return text

    def writes(self, name: str, text: str, *, typed: bool = True) -> Path:
        """A file; with `typed=False` one that the user has, or has copied from the page."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.lines_written += text.strip().count("\n") + 1 if typed else 0
        return path

    def types(self, command: str, *, status: int = 0, folder: str = ".") -> str:
        """Run a command in the shell; its output. Raises `Failed` where it ends with another status."""
        self.commands += 1
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder / folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
        if done.returncode != status or tracebacks(done.stdout):
            raise Failed(f"{command} ended with {done.returncode}, not {status}:\n{done.stdout}")
        return done.stdout

    def starts(self, command: str) -> Program:
        """Run a command that goes on, beside the others."""
        self.commands += 1
        output = self.folder / f"output-{len(self._programs)}"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._programs.append(Program(process, output))
        return self._programs[-1]

    def cost(self) -> dict[str, float]:
        """What it has taken so far."""
        return {
            "commands": self.commands,
            "lines read": self.lines_read,
            "lines written": self.lines_written,
            "seconds": round(time.monotonic() - self._began, 1),
            "of the CPU": round(_cpu_s() - self._cpu_before, 1),  # on a busy machine the truer figure
        }

    def close(self) -> None:
        for program in self._programs:
            with suppress(ProcessLookupError):
                program.process.kill()
            program.process.wait(BOUND_S)
        for environment in (self.folder / "env", self.folder / "tidewal" / ".venv"):
            shutil.rmtree(environment, ignore_errors=True)  # up to a GB, which pytest would keep for three runs


def _cpu_s() -> float:
    """What all processes that this one has started and that have ended took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def example(text: str, containing: str = "") -> str:
    """The first Python block of a page that contains the words."""
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if containing in block)
