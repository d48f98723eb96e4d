"""RocksDB and SQLite as the log would be built on them: a writer thread that commits whatever is pending, synced.

Both get what suits a log. RocksDB: no compression, memtables of 64 MiB, recycled write-ahead logs (confirmed by a
warm-up that goes through all of them), FIFO compaction, an unsynced `write` and then `flush_wal`, which is quicker than
a synced `write` and lets other threads run. SQLite: WAL mode, synchronous=FULL, a table with an integer key.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Sequence
from typing import Protocol

import rocksdict

MIB = 1024 * 1024
MEMTABLE_BYTES = 64 * MIB
WARM_UP_BYTES = 640 * MIB
COMMIT_ENTRIES = 1024

Pending = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]", Sequence[bytes]]


class Store(Protocol):
    """A database that makes entries durable, at once or not at all."""

    def commit(self, payloads: Sequence[bytes]) -> None: ...

    def recycle(self) -> None:
        """Forget what is there."""
        ...

    def close(self) -> None: ...


class Peer:
    """Appends to a store from any number of tasks, committed together by one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def append(self, in_flight: int, payload: bytes, rounds: int) -> None:
        entry = [payload]

        async def one() -> None:
            for _ in range(rounds):
                await self._put(entry)

        await asyncio.gather(*(one() for _ in range(in_flight)))

    async def append_many(self, count: int, payload: bytes, rounds: int) -> None:
        for _ in range(rounds):
            await self._put([payload] * count)

    def recycle(self) -> None:
        self._store.recycle()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._store.close()

    def _put(self, payloads: Sequence[bytes]) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.put((loop, future, payloads))
        return future

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while len(batch) < COMMIT_ENTRIES and not self._queue.empty():
                following = self._queue.get()
                if following is None:
                    self._queue.put(None)
                    break
                batch.append(following)
            self._store.commit([payload for _, _, payloads in batch for payload in payloads])
            first[0].call_soon_threadsafe(_settle, batch)


def _settle(batch: Sequence[Pending]) -> None:
    for _, future, _ in batch:
        future.set_result(None)


class RocksDB(Peer):
    """RocksDB through rocksdict."""

    def __init__(self, path: str) -> None:
        super().__init__(RocksStore(path))


class RocksStore:
    def __init__(self, path: str) -> None:
        options = rocksdict.Options(raw_mode=True)
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_write_buffer_size(MEMTABLE_BYTES)
        options.set_recycle_log_file_num(8)
        options.set_compaction_style(rocksdict.DBCompactionStyle.fifo())
        fifo = rocksdict.FifoCompactOptions()
        fifo.max_table_files_size = 4 * MEMTABLE_BYTES
        options.set_fifo_compaction_options(fifo)
        self._db = rocksdict.Rdict(path, options)
        self._next = 0
        payload = bytes(MIB)
        for _ in range(WARM_UP_BYTES // len(payload)):
            self.commit([payload])

    def commit(self, payloads: Sequence[bytes]) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for payload in payloads:
            self._next += 1
            batch.put(b"bench" + self._next.to_bytes(8, "big"), payload)
        self._db.write(batch)
        self._db.flush_wal(True)

    def recycle(self) -> None:
        """FIFO compaction does it."""

    def close(self) -> None:
        self._db.close()


class SQLite(Peer):
    """SQLite through the standard library."""

    def __init__(self, path: str) -> None:
        super().__init__(SQLiteStore(path))


class SQLiteStore:
    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, payload BLOB)")

    def commit(self, payloads: Sequence[bytes]) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO log (payload) VALUES (?)", [(payload,) for payload in payloads])
        self._connection.execute("COMMIT")

    def recycle(self) -> None:
        self._connection.execute("DELETE FROM log")

    def close(self) -> None:
        self._connection.close()
