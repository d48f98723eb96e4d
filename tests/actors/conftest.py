"""A standalone node for each test: over the memory log on virtual time, or over RocksMQ in real time.

A test that says nothing runs on both. `pytest.mark.asyncio(loop_factories=["memory"])` (or `["rocksmq"]`) chooses one,
and `pytest.mark.every_log` adds real brokers of Kafka and Pulsar. On virtual time waiting costs nothing and nothing but
the seed decides the order of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.backends import log_url
from tidewal.actors.client import Client
from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.testing.clock import VirtualClock, VirtualLoop, elapse, until
from tidewal.runtime.testing.faults import FaultPlan
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

SEGMENT_BYTES = 1024 * 1024

PEOPLE = CollectionSchema(
    "people",
    (
        Field("id", "int64"),
        Field("name", "varchar", nullable=True),
        Field("height", "double", nullable=True),
    ),
    "id",
)
POINTS = CollectionSchema("points", (Field("id", "int64"), Field("at", "float_vector", dim=4)), "id")


def kafka_loop() -> asyncio.AbstractEventLoop:
    """The usual loop, for a test on Kafka: a test knows its log by its loop."""
    return asyncio.new_event_loop()


def pulsar_loop() -> asyncio.AbstractEventLoop:
    """The usual loop, for a test on Pulsar."""
    return asyncio.new_event_loop()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Function) -> dict[str, object]:
    if "home" not in item.fixturenames:
        return {"asyncio": asyncio.new_event_loop}
    both = {"memory": lambda: VirtualLoop(VirtualClock()), "rocksmq": asyncio.new_event_loop}
    on_brokers = {"kafka": kafka_loop, "pulsar": pulsar_loop}
    return both | on_brokers if item.get_closest_marker("every_log") else both


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if broker := broker_of(item):
            item.add_marker(pytest.mark.broker)
            if "test_standalone" not in item.nodeid:  # its tests show a node on each log
                item.add_marker(pytest.mark.long)
                item.add_marker(pytest.mark.in_turn(("kafka", "pulsar").index(broker), 2))


def broker_of(item: pytest.Item) -> str:
    """The brokers that a test runs on, if any."""
    loop = item.callspec.params.get("_asyncio_loop_factory") if hasattr(item, "callspec") else None
    return {kafka_loop: "kafka", pulsar_loop: "pulsar"}.get(loop, "")


async def in_place(call: Callable[[], object]) -> object:
    """Run a blocking call where it is: on virtual time there are no other threads."""
    return call()


async def error_of(awaitable) -> TidewalError:
    """The typed error that something ends with."""
    try:
        result = await awaitable
    except TidewalError as error:
        return error
    raise AssertionError(f"no error, but {result!r}")


def people(*ids: int, name: str = "") -> list[dict[str, object]]:
    """Rows for `PEOPLE`."""
    return [{"id": id, "name": name or f"n{id}", "height": id / 2} for id in ids]


class Home:
    """Where nodes live one after another: one log and one directory of tables."""

    PEOPLE = PEOPLE
    POINTS = POINTS
    people = staticmethod(people)
    until = staticmethod(until)
    elapse = staticmethod(elapse)
    error_of = staticmethod(error_of)
    in_place = staticmethod(in_place)

    def __init__(self, directory: Path, url: str = "") -> None:
        """`url` is that of the log, where brokers have it."""
        self.directory = directory
        self.log_directory = directory / "log"
        self.url = url
        self.tables = directory / "tables"
        self.log = MemoryLog()
        self.memory = MemoryWal  # the class of the log on virtual time
        self.faults: FaultPlan | None = None
        self.segment_bytes = SEGMENT_BYTES
        self.on_brokers = bool(url)
        self.virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)

    async def wal(self) -> Wal:
        """Open the log."""
        if self.virtual:
            return self.memory(self.log, self.faults)
        if self.url:
            return await open_wal(self.url)
        return await RocksMQ.open(
            str(self.log_directory), segment_bytes=self.segment_bytes, free_space_bytes=0, serve=False
        )

    @asynccontextmanager
    async def node(self, **options) -> AsyncIterator[Standalone]:
        """A running node; leaving it stops the node and closes the log."""
        if isinstance(options.get("settings"), dict):
            options["settings"] = Settings.model_validate(options["settings"])
        if self.virtual:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            options = {"clock": loop.clock, "threads": False, "blocking": in_place, "name": "node", **options}
        wal = await self.wal()
        try:
            async with Standalone(wal, self.tables, **options) as node:
                yield node
        finally:
            await wal.close()

    @asynccontextmanager
    async def client(self, **options) -> AsyncIterator[Client]:
        """A client of a running node."""
        async with self.node(**options) as node, node.client() as client:
            yield client

    @asynccontextmanager
    async def people_client(self, **options) -> AsyncIterator[Client]:
        """The same, with the collection `people`."""
        async with self.client(**options) as client:
            await client.create_collection(PEOPLE)
            yield client


@pytest.fixture
async def home(tmp_path: Path, request: pytest.FixtureRequest) -> Home:
    name = broker_of(request.node)
    return Home(tmp_path, log_url(name, request.getfixturevalue(name)) if name else "")
