"""What any log must do, over SQLite."""

import os
from pathlib import Path

import pytest
from tidewal_sqlite.wal import SqliteWal

from tidewal.runtime.testing.conformance import *  # noqa: F403
from tidewal.runtime.testing.conformance import BackendUnderTest


async def outside(url: str) -> dict[str, int]:
    """The files at `url`, with their sizes."""
    directory, name = os.path.split(url.removeprefix("sqlite://"))
    return {found.name: found.stat().st_size for found in os.scandir(directory) if found.name.startswith(name)}


@pytest.fixture
def backend(tmp_path: Path) -> BackendUnderTest:
    path = str(tmp_path / "log")
    return BackendUnderTest(
        "sqlite",
        SqliteWal.capabilities,
        lambda: SqliteWal.open(path),
        url=f"sqlite://{path}",
        missing_url=f"sqlite://{tmp_path / 'missing'}",
        outside=outside,
    )
