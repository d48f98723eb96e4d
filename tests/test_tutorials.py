"""The tutorials and how-to pages can be typed from the first line to the last one.

Each page is a session in an empty directory. A ```sh block is typed into bash, a ```python block is a program; a
```text block right behind one is what it prints, where `…` stands for what differs from run to run. A block that begins
with `tidewal run` is a terminal of its own: its node runs until the next such block, or the end of the page.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

DOCS = Path(__file__).parents[1] / "docs"
FOLDERS = ("tutorials", "how-to")
TYPED = {
    DOCS / "queues.md": 170
}  # other pages that are typed from the first line to the last one: how long they may be
PAGES = sorted(
    [*TYPED, *(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md") if page.name != "README.md")]
)
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
MAX_LINES = 120
BOUND_S = 150


class Block(NamedTuple):
    language: str
    code: str
    printed: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def _aborted_by_arrow(returncode: int, err: str) -> bool:
    """Whether only the end of the process failed, when all was printed: now and then a thread of Arrow, which reads
    through deltalake's file system in Python, wants the interpreter that is gone (delta-io/delta-rs #2184)."""
    return returncode == -signal.SIGABRT and err.strip() == "terminate called without an active exception"


class Session:
    """A directory, and the nodes that run in it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nodes: list[subprocess.Popen[str]] = []
        programs = directory / ".bin"
        programs.mkdir()
        for name, module in (("tidewal", "-m tidewal"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (programs / name).chmod(0o755)
        self._environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "120"}

    def type(self, block: Block) -> str:
        """What the block prints. A block that fails is an error, with what it printed."""
        if block.code.startswith("tidewal run"):
            return self._start(block.code)
        command = (
            ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-W", "error", "-c"]
        )
        ended = self._popen([*command, block.code], stderr=subprocess.PIPE)
        out, err = ended.communicate(timeout=BOUND_S)
        assert ended.returncode == 0 or _aborted_by_arrow(ended.returncode, err), f"{block.code}\n{out}\n{err}"
        return out

    def _start(self, code: str) -> str:
        self.end()
        node = self._popen(["bash", "-c", f"exec {code}"], stderr=None)
        self._nodes.append(node)
        assert node.stdout is not None
        printed = ""
        while "running; Ctrl-C ends it" not in printed:
            line = node.stdout.readline()
            assert line, f"{code} ended: {printed}"
            printed += line
        return printed

    def _popen(self, command: list[str], stderr: int | None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self._directory, env=self._environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

    def end(self) -> None:
        """Stop all nodes, as Ctrl-C does."""
        for node in self._nodes:
            with suppress(ProcessLookupError):
                node.send_signal(signal.SIGINT)
            node.communicate(timeout=BOUND_S)
        self._nodes.clear()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    directory = tmp_path / "page"
    directory.mkdir()
    session = Session(directory)
    yield session
    session.end()


def is_as_shown(printed: str, shown: str) -> bool:
    pattern = ".*?".join(re.escape(part) for part in re.sub(r"[ \t]+$", "", shown, flags=re.M).split("…"))
    return re.fullmatch(pattern, re.sub(r"[ \t]+$", "", printed, flags=re.M), re.DOTALL) is not None


def ports_are_free(page: Path) -> bool:
    """Whether no other program of this machine has the ports that the page uses."""
    for port in set(re.findall(r"--metrics-port (\d+)", page.read_text(encoding="utf-8"))):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", int(port)))
            except OSError:
                return False
    return True


def cases() -> list[object]:
    marked: list[object] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marks = [pytest.mark.spark] if "spark_bridge" in text else []
        if "--metrics-port" in text:
            marks.append(pytest.mark.xdist_group("metrics-port"))
        marked.append(pytest.param(page, id=f"{page.parent.name}-{page.stem}", marks=marks))
    return marked


@pytest.mark.slow
@pytest.mark.parametrize("page", cases())
def test_the_page_can_be_typed_and_prints_what_it_says(page: Path, session: Session) -> None:
    if not ports_are_free(page):
        pytest.skip("another program of this machine has the port that the page uses")
    for block in blocks_of(page):
        printed = session.type(block)
        assert is_as_shown(printed, block.printed) or (not block.printed and "tidewal run" in block.code), (
            f"{block.code}\nprints\n{printed}\nand the page says\n{block.printed}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_short_and_each_of_its_blocks_is_found(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= TYPED.get(page, MAX_LINES)
    fences = re.findall(r"^```(\w*)", text, re.MULTILINE)
    assert len(blocks_of(page)) == fences.count("sh") + fences.count("python")
    assert fences.count("text") == sum(bool(block.printed) for block in blocks_of(page))


def test_each_kind_of_user_has_a_tutorial() -> None:
    kinds = {"python-developer", "stream-developer", "data-engineer", "operator", "milvus-user", "contributor"}
    assert {page.stem for page in PAGES if page.parent.name == "tutorials"} == kinds


@pytest.mark.parametrize(
    ("shown", "same"), [("a … c\n", True), ("a b c\n", True), ("a b\n", False), ("", False), ("a  … b", False)]
)
def test_what_differs_from_the_page_is_seen(shown: str, same: bool) -> None:
    assert is_as_shown("a b c  \n", shown) is same


def test_a_block_that_fails_is_seen(session: Session) -> None:
    for block in (Block("sh", "false | true\n", ""), Block("python", "assert False\n", "")):
        with pytest.raises(AssertionError):
            session.type(block)
