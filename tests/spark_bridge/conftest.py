"""One Spark session for all tests here, and a RocksMQ owner that Spark's processes read through its socket."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.wal import ChannelPolicy
from tidewal.spark_bridge import session

sys.path.insert(0, str(Path(__file__).parent))
from story import Story

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIB = 1024 * 1024
SEGMENT_BYTES = 4 * MIB


class Owner:
    """The process that has the directory open, as a thread of this one."""

    def __init__(self, directory: Path) -> None:
        self.url = f"rocksmq://{directory}"
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="owner")
        self._thread.start()
        self._channels: set[str] = set()
        self.start()

    def start(self) -> None:
        self._wal = self._run(RocksMQ.open(str(self._directory), segment_bytes=SEGMENT_BYTES))

    def stop(self) -> None:
        """Until `start` nobody has the directory open."""
        self._run(self._wal.close())

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def append(self, channel: str, payload: bytes, timestamp: int) -> bytes:
        if channel not in self._channels:
            self._run(self._wal.create_channel(channel, ChannelPolicy()))
            self._channels.add(channel)
        return self._run(self._wal.append(channel, payload, timestamp))

    def remove_before(self, ids: dict[str, bytes]) -> None:
        """Let the entries before these go, and end the segment they are in so that retention takes it."""
        for channel, id in ids.items():
            self._run(self._wal.truncate(channel, id))
        for _ in range(SEGMENT_BYTES // MIB + 1):
            self.append("filler", bytes(MIB), 0)
        self._run(self._wal.truncate("filler", self._run(self._wal.latest_id("filler"))))
        self._wal.retain_now()

    def first_id(self, channel: str) -> bytes | None:
        return self._run(self._wal.describe(channel)).first_id

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """An open RocksMQ in a directory of its own."""
    made = Owner(tmp_path / "log")
    yield made
    made.close()


@pytest.fixture
def story(owner: Owner) -> Story:
    """What the roles would have written into that RocksMQ."""
    return Story(owner.append)


LOGGING = """
appender.file.type = File
appender.file.name = file
appender.file.fileName = {file}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{HH:mm:ss}} %p %c: %m%n%ex
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
"""


class SharedSpark:
    """The one session: starting Java takes longer than all that is tested. What Spark logs goes to a file: tests of
    failures would bury the report under Java's traces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "spark.log"
        self._session: SparkSession | None = None

    def session(self) -> SparkSession:
        """The session, made anew where Spark has stopped the one before."""
        if self._session is None:
            self._session = self._start()
        return self._session

    def why_stopped(self) -> str | None:
        """What Spark logged last, if it has stopped its session by itself: all later uses would only fail to find the
        source."""
        if self._session is None or not self._session.sparkContext._jsc.sc().isStopped():
            return None
        self.close()
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-200:])

    def close(self) -> None:
        """Stop the session, if there is one."""
        if self._session is not None:
            self._session.stop()
            self._session = None

    def _start(self) -> SparkSession:
        made = session(
            "tests",
            **{
                "spark.local.dir": str(self._folder / "local"),
                "spark.sql.warehouse.dir": str(self._folder / "warehouse"),
                "spark.sql.artifact.isolation.enabled": "false",
            },
        )
        settings = self._folder / "log4j2.properties"
        settings.write_text(LOGGING.format(file=self._log), encoding="utf-8")
        java: Any = made.sparkContext._jvm
        java.org.apache.logging.log4j.core.config.Configurator.reconfigure(java.java.net.URI(settings.as_uri()))
        return made


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedSpark]:
    pytest.importorskip("pyspark")
    shared = SharedSpark(tmp_path_factory.mktemp("spark"))
    yield shared
    shared.close()


@pytest.fixture
def spark(shared_spark: SharedSpark) -> Iterator[SparkSession]:
    """The session all tests share. What a failed test has left running is stopped."""
    made = shared_spark.session()
    yield made
    if (log := shared_spark.why_stopped()) is not None:
        pytest.fail(f"Spark has stopped its session by itself:\n{log}")
    for query in made.streams.active:
        query.stop()


@pytest.fixture
def options(owner: Owner) -> dict[str, str]:
    """The options every read here needs."""
    return {"wal": owner.url, "collection": "flights"}


Collected = list[list[dict[str, object]]]


@pytest.fixture
def collect(tmp_path: Path) -> Callable[..., Collected]:
    """Run a stream to the newest cut and return its micro-batches; the same `checkpoint` goes on where it ended."""

    def run(
        frame: Any, checkpoint: str = "checkpoint", seen: Collected | None = None, failing_batch: int | None = None
    ) -> Collected:
        batches: Collected = [] if seen is None else seen

        def keep(batch: Any, number: int) -> None:
            batches.append([row.asDict() for row in batch.collect()])
            if number == failing_batch:
                raise ValueError("the sink fails")

        query = (
            frame.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(200)
        return batches

    return run
