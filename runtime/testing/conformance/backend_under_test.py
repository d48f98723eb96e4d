"""What the author of an adapter tells the conformance suite about a backend, and the base of the suite's classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from ...log.opening import open_wal
from ...log.read_only import ReadOnlyWal
from ...log.wal import Capabilities, Wal


async def truncate(wal: Wal, channel: str, id: bytes) -> None:
    """What `BackendUnderTest.remove_before` does unless told otherwise."""
    await wal.truncate(channel, id)


async def do_nothing(_: Wal) -> None:
    """What `BackendUnderTest.end_segment` does unless told otherwise."""


@dataclass
class BackendUnderTest:
    """One log of a backend: how to open it, what it can do, and what the suite needs beyond the `Wal`.

    `open` opens the log: one that has no channels yet, and the same one at each later call. The suite closes what it
    opens before it opens the log again, and at a test's end. Tests that need a capability which `capabilities` lacks
    are skipped, and so are those of `skipped`: a test's name, and the reason that is shown.

    `remove_before(wal, channel, id)` makes the log remove every entry of `channel` before `id` now; unless given it
    calls `truncate`. Where whole segments are removed only, `end_segment(wal)` makes the next entries go into another
    one.

    `url` opens the same log in another process, or a second time in this one, with `options`; tests that need that are
    skipped without one. `missing_url` is where there is no log. `outside(url)` describes all that is stored there
    (files, topics, how long they are) without opening the log, as a value that is false where there is nothing:
    opening a log for reading must change none of it.
    """

    name: str
    capabilities: Capabilities
    open: Callable[[], Awaitable[Wal]]
    remove_before: Callable[[Wal, str, bytes], Awaitable[None]] = truncate
    end_segment: Callable[[Wal], Awaitable[None]] = do_nothing
    url: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    missing_url: str = ""
    outside: Callable[[str], Awaitable[object]] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict[str, str])
    opened: list[Wal] = field(default_factory=list[Wal])

    def needs(self, capability: str) -> None:
        """Skip the test where the backend declares that it lacks this."""
        if not getattr(self.capabilities, capability):
            pytest.skip(f"{self.name} lacks the capability {capability}")

    async def wal(self) -> Wal:
        """Open the log, until the test ends."""
        return self._opened(await self.open())

    async def reader(self, wal: Wal) -> ReadOnlyWal:
        """The log that `wal` is, opened to be read: as another process would where there is a `url`."""
        log = await open_wal(self.url, read_only=True, **self.options) if self.url else ReadOnlyWal(wal)
        assert isinstance(log, ReadOnlyWal)
        self._opened(log)
        return log

    async def elsewhere(self, wal: Wal) -> Wal:
        """The log that `wal` is as another process would open it; `wal` itself without a `url`."""
        return self._opened(await open_wal(self.url, **self.options)) if self.url else wal

    async def stored(self) -> object:
        """What `outside` tells of the log, None where it is not given."""
        return None if self.outside is None else await self.outside(self.url)

    async def close(self) -> None:
        """Close all that was opened."""
        while self.opened:
            await self.opened.pop().close()

    def _opened(self, wal: Wal) -> Wal:
        self.opened.append(wal)
        return wal


class ConformanceTests:
    """The base of the suite's classes: the fixture `wal`, and what is skipped. `needed` are the capabilities without
    which a class has nothing to test."""

    needed: ClassVar[tuple[str, ...]] = ()

    @pytest.fixture(autouse=True)
    async def declared(self, request: pytest.FixtureRequest, backend: BackendUnderTest) -> AsyncIterator[None]:
        """Skip what the backend declares that it lacks, and close the log at the end."""
        for capability in self.needed:
            backend.needs(capability)
        test: str = request.function.__name__
        if test in backend.skipped:
            pytest.skip(backend.skipped[test])
        yield
        await backend.close()

    @pytest.fixture
    async def wal(self, backend: BackendUnderTest) -> Wal:
        """The log, open."""
        return await backend.wal()
