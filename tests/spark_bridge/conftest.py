"""A RocksMQ owner that Spark's processes read through its socket."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.log.wal import ChannelPolicy

sys.path.insert(0, str(Path(__file__).parent))
from story import Story

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
        """Until `start` no process has the directory open."""
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
