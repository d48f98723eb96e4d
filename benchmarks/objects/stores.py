"""The store that all subjects share, a log in it, and what is put there seen from below the log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import boto3
from obstore.store import S3Store

from tests.brokers.go_programs import build_program, find_program
from tests.brokers.jars import Missing
from tests.brokers.woodpecker import KEY, VersityGateway
from tidewal.adapters.objects.bucket_store import BucketStore
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.objects.wal import ObjectWal
from tidewal.runtime.log.wal import ChannelPolicy

from ..wal.limits import MIB
from .minio_server import Minio

T = TypeVar("T")

BUCKET = "tests"
AT_ONCE = 32  # requests, as the log has them


class Seen(BucketStore):
    """A store that remembers what the log has created: the bodies of blocks, and the number of requests by kind."""

    def __init__(self, url: str, endpoint: str) -> None:
        super().__init__(url, {"endpoint": endpoint})
        self.bodies: list[bytes] = []
        self.requests: dict[str, int] = {"create": 0, "get": 0}

    async def create(self, key: str, body: bytes) -> bool:
        self.requests["create"] += 1
        if key.startswith("l0/"):
            self.bodies.append(body)
        return await super().create(key, body)

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        self.requests["get"] += 1
        return await super().get(key, start, end)


class Bench:
    """A running store with one bucket."""

    def __init__(self, server: Minio | VersityGateway, directory: Path, runner: asyncio.Runner) -> None:
        self.server, self.directory, self._runner = server, directory, runner
        self.name: str = "MinIO" if isinstance(server, Minio) else "versitygw"
        self.endpoint: str = f"http://127.0.0.1:{server.settings['minio']['port']}"

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self._runner.run(work)

    @asynccontextmanager
    async def log(
        self, settings: ObjectsSettings, prefix: str = "", *, new: bool = True
    ) -> AsyncGenerator[tuple[ObjectWal, Seen]]:
        """The log under a prefix, and its store. A new one has a channel `bench`, any other is only read."""
        url = f"s3://{BUCKET}/{prefix or uuid4().hex}"
        store = Seen(url, self.endpoint)
        wal = ObjectWal(url, store, settings)
        await wal.open(must_be=not new)
        try:
            if new:
                await wal.create_channel("bench", ChannelPolicy(max_message_bytes=2 * MIB))
            yield wal, store
        finally:
            await wal.close()

    def bare(self) -> S3Store:
        """The library's own client of the store, as the log has it."""
        return S3Store(BUCKET, prefix=uuid4().hex, endpoint=self.endpoint, client_options={"allow_http": True})


async def put_all(store: S3Store, bodies: Sequence[bytes]) -> None:
    """Create an object for each body, `AT_ONCE` at a time."""
    waiting = iter(enumerate(bodies))

    async def one_after_another() -> None:
        for number, body in waiting:
            await store.put_async(str(number), body, mode="create", use_multipart=False)

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))


@contextmanager
def running(directory: Path, runner: asyncio.Runner) -> Generator[Bench]:
    """A store in `directory`: MinIO where Go builds it, which takes minutes the first time; else versitygw, which does
    not sync."""
    server: Minio | VersityGateway
    try:
        server = Minio(build_program("minio"), directory)
    except Missing:
        server = VersityGateway(find_program("versitygw"), directory)
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY, "AWS_REGION": "us-east-1"}
    server.start()
    try:
        bench = Bench(server, directory, runner)
        boto3.client("s3", endpoint_url=bench.endpoint).create_bucket(Bucket=BUCKET)
        yield bench
    finally:
        server.stop()
