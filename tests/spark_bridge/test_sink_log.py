"""The log as Spark's processes have it open for writing: one per process, and never as its owner."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidewal.runtime.errors import DeadlineExceeded, Unavailable
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.spark_bridge.sink import worker_log as module
from tidewal.spark_bridge.sink.worker_log import close_all, worker_log


@pytest.fixture(autouse=True)
def closed_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test waits for an owner, or leaves a log open."""
    options = module.wal_options
    monkeypatch.setattr(module, "wal_options", lambda *given: options(*given) | {"failover_s": 0.0})
    yield
    close_all()


def test_without_an_owner_it_says_whom_to_start_and_becomes_none(tmp_path: Path) -> None:
    url = f"rocksmq://{tmp_path / 'log'}"
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(Unavailable, match=rf"start one \(tidewal run --data {tmp_path}\), or check option wal"):
            worker_log(url)
    assert not (tmp_path / "log").exists()


def test_a_process_opens_it_once(owner: Any) -> None:
    log = worker_log(owner.url)
    assert worker_log(owner.url) is log
    log.run(log.create("c", ChannelPolicy()))
    log.run(log.create("c", ChannelPolicy()))
    log.run(log.wal.append("c", b"x"))
    rpc_client = log.run(log.rpc_client("by-dev"))
    assert log.run(log.rpc_client("by-dev")) is rpc_client
    log.run(rpc_client.close())
    another = log.run(log.rpc_client("by-dev"))
    assert another is not rpc_client
    assert another.listening
    close_all()
    assert worker_log(owner.url) is not log


@pytest.mark.slow
def test_what_a_task_asks_waits_for_an_owner_up_to_its_deadline(owner: Any) -> None:
    attempts = 0

    async def create() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            owner.start()
        await log.create("c", ChannelPolicy())

    log = worker_log(owner.url)
    owner.stop()
    with pytest.raises(DeadlineExceeded, match=r"batch 7 could not be written .* start the query again"):
        log.retry(create, "batch 7", 0.0)
    log.retry(create, "batch 7", 30.0)
    assert attempts == 3


@pytest.mark.slow
def test_a_task_waits_for_an_owner_to_open_the_log(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def open_wal(*given: Any, **options: Any) -> Wal:
        if attempts.pop(0) == "start":
            owner.start()
        return await real_open(*given, **options)

    real_open, attempts = module.open_wal, ["fail", "fail", "start"]
    monkeypatch.setattr(module, "open_wal", open_wal)
    owner.stop()
    with pytest.raises(Unavailable, match="start one"):
        worker_log(owner.url)
    assert worker_log(owner.url, 30.0).wal.name == "rocksmq"
    assert attempts == []


@pytest.mark.spark
def test_a_batch_is_committed_and_aborted_without_the_log_and_written_with_it(owner: Any) -> None:
    """Spark makes a writer for each of the three, and drops Tidewal's error where it cannot make one to abort."""
    pytest.importorskip("pyspark")
    from pyspark.sql.types import StructType

    from tidewal.spark_bridge.sink.options import SinkOptions
    from tidewal.spark_bridge.writers import TidewalStreamWriter

    owner.stop()
    options = SinkOptions.parse({"wal": owner.url, "topic": "a"}, streaming=True)
    writer = TidewalStreamWriter(options, StructType().add("value", "binary"))
    writer.abort([], 7)
    writer.commit([], 7)
    with pytest.raises(Unavailable, match="start one"):
        pickle.loads(pickle.dumps(writer)).write(iter([]))
    owner.start()
