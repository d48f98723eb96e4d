"""The stores that the log lies on: a directory, a bucket, and the simulated one that the other tests use."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from uuid import uuid4

import pytest

from tests.adapters.objects.simulated_store import Objects, SimulatedStore, StoreRates
from tidewal.adapters.objects.bucket_store import BucketStore
from tidewal.adapters.objects.directory_store import DirectoryStore
from tidewal.adapters.objects.log_objects import LogObjects
from tidewal.adapters.objects.metered_store import MeteredStore
from tidewal.adapters.objects.pace import MaintenancePace
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.store import ObjectStore
from tidewal.adapters.objects.store_probe import probe
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.errors import JournalFailed, Unavailable, Unsupported
from tidewal.runtime.log.wal import ChannelPolicy, Entry, From
from tidewal.runtime.metrics.metrics import Metrics


@pytest.fixture(params=["directory", pytest.param("bucket", marks=pytest.mark.slow), "simulated"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        return DirectoryStore(str(tmp_path / "made" / "by the first object"))
    if request.param == "simulated":
        return SimulatedStore(Objects(), rates=StoreRates(request_s=0.001))
    return request.getfixturevalue("bucket")


async def test_an_object_is_created_once_and_stays_as_it_was(store: ObjectStore) -> None:
    assert await store.get("a/1") is None
    assert await store.create("a/1", b"first")
    assert not await store.create("a/1", b"second")
    assert await store.get("a/1") == b"first"
    assert (await store.get("a/1", 1, 3), await store.get("a/1", 2), await store.get("a/1", 0, 99)) == (
        b"ir",
        b"rst",
        b"first",
    )


async def test_of_many_that_create_one_key_one_succeeds_with_its_body(store: ObjectStore) -> None:
    for key in (f"race/{number}" for number in range(4)):
        bodies = [uuid4().bytes * 100 for _ in range(16)]
        created = await asyncio.gather(*(store.create(key, body) for body in bodies))
        assert created.count(True) == 1
        assert await store.get(key) == bodies[created.index(True)]


async def test_a_store_that_creates_atomically_passes_the_probe_which_leaves_nothing(store: ObjectStore) -> None:
    await probe(store)
    assert [key async for key in store.list("probe/")] == []


class OverwritingStore(SimulatedStore):
    """As S3Mock does: now and then it creates what is there."""

    async def create(self, key: str, body: bytes) -> bool:
        created = await super().create(key, body)
        if not created and body != b"late":
            self.objects.bodies[key] = body
            return True
        return created


class LateOverwritingStore(SimulatedStore):
    """As stores do that do not know the condition."""

    async def create(self, key: str, body: bytes) -> bool:
        created = await super().create(key, body)
        self.objects.bodies[key] = body
        return created or body == b"late"


@pytest.mark.parametrize("unfit", [OverwritingStore, LateOverwritingStore])
async def test_no_log_is_made_on_a_store_that_overwrites(unfit: type[SimulatedStore]) -> None:
    objects = LogObjects(unfit(Objects()), try_store=True)
    with pytest.raises(Unsupported):
        await objects.make()
    assert await objects.store.get("format") is None


async def test_requests_are_counted_with_their_bytes_and_prices() -> None:
    metrics, simulated = Metrics(), SimulatedStore(Objects())
    store = MeteredStore(simulated, metrics)
    assert await store.create("a/1", bytes(100))
    assert await store.get("a/1", 0, 60) == bytes(60)
    assert await store.get("a/2") is None
    assert await store.modified("a/1") is not None
    assert [key async for key in store.list("a/")] == ["a/1"]
    simulated.down = True
    with pytest.raises(Unavailable):
        await store.delete("a/1")
    counts = {labels[0]: value for labels, value in metrics.series("objects_requests_total").items()}
    assert counts == {"create": 1, "get": 2, "head": 1, "list": 1, "delete": 1}
    assert metrics.value("objects_failed_requests_total", kind="delete") == 1
    assert (metrics.value("objects_sent_bytes_total"), metrics.value("objects_received_bytes_total")) == (100, 60)
    assert metrics.value("objects_dollars_total") == pytest.approx(2 * 5e-6 + 3 * 0.4e-6)


async def test_objects_are_deleted_and_listed(store: ObjectStore) -> None:
    await store.create("a/1", b"")
    await store.create("a/2/3", b"")
    assert await store.get("a/1") == b""
    assert sorted([key async for key in store.list("a/")]) == ["a/1", "a/2/3"]
    await store.delete("a/1")
    await store.delete("a/1")
    assert [key async for key in store.list("a/")] == ["a/2/3"]


async def test_objects_have_the_time_of_their_creation_by_one_clock(store: ObjectStore) -> None:
    assert await store.modified("a") is None
    for key in ("a", "b"):
        await store.create(key, b"")
    first, second = await store.modified("a"), await store.modified("b")
    assert first is not None
    assert second is not None
    assert 0 <= second - first <= 60_000


async def test_a_directory_syncs_file_and_folder_before_it_says_that_it_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(str(tmp_path))
    await store.create("l0/0", b"")  # the folders are there now
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(tmp_path)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    assert await store.create("l0/1", b"body")
    assert [os.path.dirname(path) for path in synced] == ["/unfinished", "/"]
    assert synced[1] == "/l0"
    assert not await store.create("l0/1", b"other")
    assert synced[-1] == "/l0"  # whoever finds it there may rest on it
    assert list((tmp_path / "unfinished").iterdir()) == []


async def test_a_directory_takes_nothing_more_after_a_sync_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(str(tmp_path))
    await store.create("a", b"")

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(JournalFailed):
            await store.create("b", b"")
    with pytest.raises(JournalFailed):
        await store.create("c", b"")
    assert (await store.get("a"), await store.get("c")) == (b"", None)


async def test_a_store_that_is_not_there_is_unavailable() -> None:
    config = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    with pytest.raises(Unavailable) as caught:
        await BucketStore("s3://bucket/log", config).create("a", b"")
    assert caught.value.outcome_unknown


async def test_a_log_is_compacted_and_what_is_needed_no_more_is_deleted(store: ObjectStore) -> None:
    pace = MaintenancePace(turn_s=3600, checkpoint_blocks=5, run_blocks=5, section_bytes=200)
    settings = ObjectsSettings(linger_ms=0)
    wal = ObjectWal("log", store, settings, pace=pace)
    wal._maintenance._collector._grace_ms = 0
    await wal.create_channel("a", ChannelPolicy())
    ids = [await wal.append("a", b"%d" % at) for at in range(30)]
    for _ in range(2):  # what the first turn makes garbage, the second deletes
        await wal._maintenance._turn()
    assert len([key async for key in store.list("l0/")]) < 10
    runs = [key async for key in store.list("run/")]
    reader = ObjectWal("log", store, settings)
    await reader.open()
    found: list[Entry] = []
    reading = reader.read("a", From.EARLIEST)
    while len(found) < 30:
        found += await anext(reading)
    assert [(entry.id, bytes(entry.payload)) for entry in found] == [(id, b"%d" % at) for at, id in enumerate(ids)]
    await wal.truncate("a", ids[-1] + b"\0")
    for _ in range(2):
        await wal._maintenance._turn()
    assert runs
    assert [key async for key in store.list("run/")] == []
    for each in (reader, wal):
        await each.close()
