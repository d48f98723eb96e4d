"""What any log must do, over a sidecar of Woodpecker with its segments in a folder, or in an object store."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.brokers.woodpecker import Sidecar
from tests.turns import cases_in_turn
from tidewal.adapters.woodpecker import open_wal
from tidewal.adapters.woodpecker.backend import BACKEND
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.testing.conformance import *  # noqa: F403
from tidewal.runtime.testing.conformance import BackendUnderTest

pytestmark = [pytest.mark.broker, pytest.mark.long]  # each test starts a sidecar


async def outside(url: str) -> list[str]:
    """The files of the log's folder, and of its segments."""
    directory = Path(url.removeprefix("woodpecker://"))
    return sorted(str(each) for root in (directory, directory.parent / "segments") for each in root.rglob("*.log"))


@pytest.fixture(params=cases_in_turn(("local", "s3")))
def backend(request: pytest.FixtureRequest, new_sidecar: Callable[..., Sidecar]) -> BackendUnderTest:
    on_s3 = request.param == "s3"
    sidecar = new_sidecar(settings=request.getfixturevalue("object_store").settings if on_s3 else None)

    async def opened() -> Wal:
        if not sidecar.process.running:  # a test that is skipped needs none
            sidecar.start()
        return await open_wal(sidecar.url)

    return BackendUnderTest(
        "woodpecker",
        BACKEND.capabilities(),
        opened,
        url=sidecar.url,
        missing_url=f"{sidecar.url}0",
        outside=outside,
    )
