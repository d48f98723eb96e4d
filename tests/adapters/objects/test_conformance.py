"""What any log must do, over a directory and over a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.objects.conftest import CREDENTIALS
from tidewal.adapters.objects.backend import CAPABILITIES
from tidewal.adapters.objects.bucket_store import BucketStore
from tidewal.adapters.objects.directory_store import DirectoryStore
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.testing.conformance import *  # noqa: F403
from tidewal.runtime.testing.conformance import BackendUnderTest

SETTINGS = ObjectsSettings(linger_ms=1)


@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.long)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> BackendUnderTest:
    bucket_url = request.getfixturevalue("bucket_url") if request.param == "bucket" else ""

    async def open_log() -> Wal:
        if bucket_url:
            server = request.getfixturevalue("object_server")
            store = BucketStore(bucket_url, {"endpoint": server, **CREDENTIALS})
        else:
            store = DirectoryStore(str(tmp_path / "log"))
        wal = ObjectWal(request.param, store, SETTINGS)
        await wal.open()
        return wal

    return BackendUnderTest(request.param, CAPABILITIES, open_log)
