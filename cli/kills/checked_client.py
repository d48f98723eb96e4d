"""A client that writes, reads and notes how each call ends, so that its history can be checked."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from ...actors.client import Client
from ...runtime.rows.schema import CollectionSchema, Field
from ...runtime.testing.histories.client_history import CallOutcome, CallRecorder, error_result, outcome_of

NUMBERS: CollectionSchema = CollectionSchema("numbers", (Field("id", "int64"),), "id")
THINGS: CollectionSchema = CollectionSchema(
    "things", (Field("id", "varchar"), Field("owner", "varchar"), Field("version", "int64")), "id"
)
ROWS_PER_CLIENT = 1_000_000_000  # ids
TRANSACTED_FROM = ROWS_PER_CLIENT // 2  # of a client's ids: those of its transactions
ROWS_MAX = 60  # of an insert
KEYS = 8  # written at a time by each client
DELETES = 0.2  # of all sets
CALLS_PER_S = 15.0
RETRY_S = 0.2

Versions: TypeAlias = dict[str, int | list[int]]  # by key


class CheckedClient:
    """One client's work, task by task, until `stopping` is set; each task makes `at_once` calls side by side.

    `name` is that of the client in its history, which is written to `history`; it begins its keys. `deadline_s` is the
    deadline of each call, in seconds. `acknowledged` counts the calls of each kind that succeeded.
    """

    def __init__(
        self, client: Client, name: str, history: Path, rng: random.Random, *, deadline_s: float, at_once: int = 1
    ) -> None:
        self.stopping: asyncio.Event = asyncio.Event()
        self.acknowledged: Counter[str] = Counter()
        self.name: str = name
        self._client, self._rng = client, rng
        self._deadline_s, self._at_once = deadline_s, at_once
        self._recorder = CallRecorder(history)

    def close(self) -> None:
        """Close the history, behind the last call."""
        self._recorder.close()

    async def call(self, kind: str, call: Callable[[], Awaitable[dict[str, Any]]], **about: Any) -> CallOutcome:
        """Make a call, note how it ends, pause, and return its outcome."""
        number = self._recorder.begin(kind, **about)
        try:
            result = await call()
        except Exception as error:  # the checker decides which errors are wrong
            ended = outcome_of(error)
            self._recorder.end(number, ended, **error_result(error))
            await asyncio.sleep(RETRY_S)
            return ended
        self._recorder.end(number, "ok", **result)
        self.acknowledged[kind] += 1
        await asyncio.sleep(self._rng.expovariate(CALLS_PER_S))
        return "ok"

    async def insert(self, first: int) -> None:
        """Rows that have never been there: ids from `first` on."""

        async def write(first: int, count: int) -> dict[str, Any]:
            rows = [{"id": id} for id in range(first, first + count)]
            return {"ts": (await self._client.insert(NUMBERS.name, rows, deadline_s=self._deadline_s)).ts}

        while not self.stopping.is_set():
            calls: list[Awaitable[CallOutcome]] = []
            for _ in range(self._at_once):
                count = self._rng.randrange(1, ROWS_MAX)
                calls.append(self.call("insert", partial(write, first, count), first=first, count=count))
                first += count
            await asyncio.gather(*calls)

    async def set(self) -> None:
        """Keys of its own. One whose write is of unknown outcome is not written again: its state stays undecided."""
        fresh, versions = (f"{self.name}/{number}" for number in itertools.count()), itertools.count(1)
        names = [next(fresh) for _ in range(KEYS)]
        while not self.stopping.is_set():
            chosen = self._rng.sample(range(KEYS), self._rng.randrange(1, 4))
            outcomes = await asyncio.gather(
                *(self._set([names[i] for i in chosen], versions) for _ in range(self._at_once))
            )
            if "unknown" in outcomes:
                for i in chosen:
                    names[i] = next(fresh)

    async def _set(self, keys: list[str], versions: Iterable[int]) -> CallOutcome:
        """Delete the keys, or give each the next version."""
        delete = self._rng.random() < DELETES
        values = {key: None if delete else version for key, version in zip(keys, versions, strict=False)}

        async def write() -> dict[str, Any]:
            if delete:
                written = await self._client.delete(THINGS.name, keys, deadline_s=self._deadline_s)
            else:
                rows = [{"id": key, "owner": self.name, "version": value} for key, value in values.items()]
                written = await self._client.upsert(THINGS.name, rows, deadline_s=self._deadline_s)
            return {"ts": written.ts}

        return await self.call("set", write, values=values)

    async def read(self, owners: list[str], *, sessions: float = 0.0) -> None:
        """The keys of any client, strong; or of its own, as fresh as its session, for `sessions` of all reads."""
        while not self.stopping.is_set():
            session = self._rng.random() < sessions
            owner = self.name if session else self._rng.choice(owners)
            consistency = "session" if session else "strong"
            read = partial(read_keys, self._client, owner, consistency, self._deadline_s)

            async def rows(read: Callable[[], Awaitable[Versions]] = read) -> dict[str, Any]:
                return {"rows": await read()}

            await self.call("read", rows, owner=owner, consistency=consistency)

    async def flush(self, pause_s: float) -> None:
        """Flush a collection, or compact it, again and again."""

        async def flush(collection: str) -> dict[str, Any]:
            return {"ts": await self._client.flush(collection, deadline_s=self._deadline_s)}

        async def compact(collection: str) -> dict[str, Any]:
            return dict(await self._client.compact(collection, deadline_s=self._deadline_s))

        while not await self.stops_within(self._rng.expovariate(1 / pause_s)):
            kind, work = self._rng.choice([("flush", flush), ("compact", compact)])
            collection = self._rng.choice([NUMBERS.name, THINGS.name])
            await self.call(kind, partial(work, collection), collection=collection)

    async def define(self, pause_s: float) -> None:
        """Create collections and drop most of them again, again and again. Each is written to."""

        async def create(schema: CollectionSchema) -> dict[str, Any]:
            await self._client.create_collection(schema, shards=2, deadline_s=self._deadline_s)
            return {}

        async def write(name: str) -> dict[str, Any]:
            return {"ts": (await self._client.insert(name, [{"id": 1}], deadline_s=self._deadline_s)).ts}

        async def drop(name: str) -> dict[str, Any]:
            await self._client.drop_collection(name, deadline_s=self._deadline_s)
            return {}

        for number in itertools.count():
            if await self.stops_within(self._rng.expovariate(1 / pause_s)):
                return
            name = f"defined_{self.name.replace('-', '_')}_{number}"
            schema = CollectionSchema(name, NUMBERS.fields, NUMBERS.primary_key)
            if await self.call("create_collection", partial(create, schema), collection=name) != "ok":
                continue
            await self.call("write_defined", partial(write, name), collection=name)
            if number % 3:
                await self.call("drop_collection", partial(drop, name), collection=name)

    async def stops_within(self, pause_s: float) -> bool:
        """Wait so many seconds, or until it is to stop: whether it is."""
        try:
            async with asyncio.timeout(pause_s):
                await self.stopping.wait()
        except TimeoutError:
            return False
        return True


async def read_keys(client: Client, owner: str, consistency: Any, deadline_s: float) -> Versions:
    """The keys of a client, and their versions. A key that is there several times has a list, which no write made."""
    answer = await client.query(THINGS.name, f'owner == "{owner}"', consistency=consistency, deadline_s=deadline_s)
    found: dict[str, list[int]] = {}
    for row in answer.table.to_pylist():
        found.setdefault(row["id"], []).append(row["version"])
    return {key: versions[0] if len(versions) == 1 else versions for key, versions in found.items()}
