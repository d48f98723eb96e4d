"""What any log must do, over a directory, over a bucket, and through the process that owns it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.adapters.objects.conftest import CREDENTIALS
from tests.turns import cases_in_turn
from tidewal.adapters.objects.backend import CAPABILITIES, LINKED
from tidewal.adapters.objects.bucket_store import BucketStore
from tidewal.adapters.objects.directory_store import DirectoryStore
from tidewal.adapters.objects.link.access import link_access
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.config.settings import ClusterSettings
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.testing.conformance import *  # noqa: F403
from tidewal.runtime.testing.conformance import BackendUnderTest

SETTINGS = ObjectsSettings(linger_ms=1, listen="127.0.0.1:0")
SECRET = ClusterSettings.model_validate({"secret": "s"})


class LinkedLog:
    """A directory whose owner lives in the test's process: each opening opens it anew, and returns another process'
    log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._owner: ObjectWal | None = None

    async def open(self) -> Wal:
        await self.close()
        self._owner = await self._opened(own=True)
        return await self._opened(own=False)

    async def _opened(self, *, own: bool) -> ObjectWal:
        access = link_access(SETTINGS, SECRET)
        wal = ObjectWal("linked", DirectoryStore(str(self._directory)), SETTINGS, access=access, may_own=own)
        await wal.open(own=own)
        return wal

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()


ONE_LOOP = {"test_a_member_that_blocks_the_loop_stays": "it blocks the owner, too, which is in the same process"}


# Long, and in turn: what links do is tested in test_links.py, and what a bucket does in test_stores.py.
@pytest.fixture(params=["directory", *cases_in_turn(("linked", "bucket"), pytest.mark.long)])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BackendUnderTest]:
    bucket_url = request.getfixturevalue("bucket_url") if request.param == "bucket" else ""
    linked = LinkedLog(tmp_path / "log")

    async def open_log() -> Wal:
        if bucket_url:
            server = request.getfixturevalue("object_server")
            store = BucketStore(bucket_url, {"endpoint": server, **CREDENTIALS})
        else:
            store = DirectoryStore(str(tmp_path / "log"))
        wal = ObjectWal(request.param, store, SETTINGS)
        await wal.open()
        return wal

    if request.param == "linked":
        yield BackendUnderTest("linked", LINKED, linked.open, skipped=ONE_LOOP)
    else:
        yield BackendUnderTest(request.param, CAPABILITIES, open_log)
    await linked.close()
