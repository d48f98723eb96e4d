"""What a log can do is declared, and what it cannot do is refused."""

from __future__ import annotations

import pytest

from ...errors import Unsupported
from ...log.wal import From, Wal
from .backend_under_test import BackendUnderTest, ConformanceTests
from .helpers import create


class TestCapabilities(ConformanceTests):
    """What a log can do is declared, and what it cannot do is refused."""

    async def test_an_open_log_can_do_what_its_backend_declares(self, backend: BackendUnderTest, wal: Wal) -> None:
        assert wal.capabilities == backend.capabilities

    async def test_what_is_declared_missing_is_refused_by_name(self, backend: BackendUnderTest, wal: Wal) -> None:
        await create(wal, "a")
        id = await wal.append("a", b"x")
        attempts = {
            "groups": [
                lambda: wal.join("g", ["a"]),
                lambda: wal.groups(),
                lambda: wal.seek_group("g", "a", From.LATEST),
                lambda: wal.drop_group("g"),
            ],
            "truncate": [lambda: wal.truncate("a", id)],
            "seek_by_time": [lambda: wal.id_at("a", 0)],
        }
        missing = [capability for capability in attempts if not getattr(backend.capabilities, capability)]
        if not missing:
            pytest.skip("nothing is missing that is called by itself")
        for capability in missing:
            for attempt in attempts[capability]:
                with pytest.raises(Unsupported) as caught:
                    await attempt()
                assert caught.value.capability == capability
