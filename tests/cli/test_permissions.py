"""Commands by a user who may not read the log: they say so at once."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.tables.local_store import LocalTableStore


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a node that has a log."""

    async def fill() -> None:
        await (await RocksMQ.open(str(tmp_path / "data" / "log"), serve=False)).close()

    asyncio.run(fill())
    (tmp_path / "data" / "tables").mkdir()
    return tmp_path / "data"


@pytest.fixture
def forbidden(data: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What another user's process may not look at: tests may run as root, who may look at all."""
    path, stat = str(data / "log" / "FORMAT"), os.stat

    def refusing(asked: Any, **options: Any) -> os.stat_result:
        if asked == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(asked, **options)

    monkeypatch.setattr(os, "stat", refusing)
    return path


@pytest.mark.parametrize(
    "words",
    [("verify", "journal"), ("salvage",), ("status",), ("inspect",), ("list",), ("query", "cities")],
    ids=lambda words: words[0],
)
def test_a_log_that_this_user_may_not_read_is_not_missing(
    command: Command, data: Path, forbidden: str, words: tuple[str, ...]
):
    name, *others = words
    ended = command(name, *((*others, data) if name == "verify" else (data, *others)))
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.endswith(f"permission denied: {forbidden}: run this as the user that owns it")


def test_tables_that_this_user_may_not_read_are_not_damaged(
    command: Command, data: Path, monkeypatch: pytest.MonkeyPatch
):
    def refusing(_: LocalTableStore) -> list[Any]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(data / "tables"))

    monkeypatch.setattr(LocalTableStore, "tables", refusing)
    ended = command("verify", "tables", data)
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    assert line.endswith(f"permission denied: {data / 'tables'}: run this as the user that owns it")
