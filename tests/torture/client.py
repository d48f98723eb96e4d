"""A client of the node and of the log: python -m tests.torture.client URL HISTORY SEED PREFIX OWNERS FIRST_ID

Its name is that of its history. It inserts rows that have never been there, writes keys of its own again and again and
reads those of all, and appends to the channels PREFIX-in-*, which it also follows live.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tidewal.actors.client import Client
from tidewal.runtime.errors import ChannelNotFound, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, FromId, Start, Wal

from .history import Recorder
from .inside import CHANNELS, NUMBERS, THINGS, described, obey, open_log, outcome, tell

ROWS_PER_CLIENT = 1_000_000  # ids
KEYS = 8  # written at a time by each client
PAUSES_PER_S = 15.0
DEADLINE_S = 10.0
RETRY_S = 0.2


class Tormented:
    """One client's work, task by task; each writes one call after another."""

    def __init__(self, wal: Wal, client: Client, name: str, history: Path, rng: random.Random, prefix: str) -> None:
        self._wal, self._client, self._name, self._prefix = wal, client, name, prefix
        self._recorder = Recorder(history)
        self._rng = rng
        self.stopping = asyncio.Event()

    async def _call(self, kind: str, call: Callable[[], Awaitable[dict[str, Any]]], **about: Any) -> str:
        """Make a call, note how it ends, and return its outcome."""
        number = self._recorder.begin(kind, **about)
        try:
            result = await call()
        except Exception as error:  # the checker decides which errors are wrong
            ended = outcome(error)
            self._recorder.end(number, ended, **described(error))
            await asyncio.sleep(RETRY_S)
            return ended
        self._recorder.end(number, "ok", **result)
        await asyncio.sleep(self._rng.expovariate(PAUSES_PER_S))
        return "ok"

    async def insert(self, first: int) -> None:
        """Rows that have never been there: ids from `first` on."""
        while not self.stopping.is_set():
            count = self._rng.randrange(1, 60)
            rows = [{"id": id} for id in range(first, first + count)]

            async def call(rows: list[dict[str, int]] = rows) -> dict[str, Any]:
                return {"ts": (await self._client.insert(NUMBERS.name, rows, deadline_s=DEADLINE_S)).ts}

            await self._call("insert", call, first=first, count=count)
            first += count

    async def set(self) -> None:
        """Keys of its own. One whose write is of unknown outcome is not written again: its state stays undecided."""
        fresh, versions = (f"{self._name}/{number}" for number in itertools.count()), itertools.count(1)
        names = [next(fresh) for _ in range(KEYS)]
        while not self.stopping.is_set():
            chosen = self._rng.sample(range(KEYS), self._rng.randrange(1, 4))
            delete = self._rng.random() < 0.2
            values = {names[i]: None if delete else next(versions) for i in chosen}

            async def call(values: dict[str, int | None] = values, delete: bool = delete) -> dict[str, Any]:
                if delete:
                    written = await self._client.delete(THINGS.name, list(values), deadline_s=DEADLINE_S)
                else:
                    rows = [{"id": key, "owner": self._name, "version": value} for key, value in values.items()]
                    written = await self._client.upsert(THINGS.name, rows, deadline_s=DEADLINE_S)
                return {"ts": written.ts}

            if await self._call("set", call, values=values) == "unknown":
                for i in chosen:
                    names[i] = next(fresh)

    async def read(self, owners: list[str]) -> None:
        """The keys of any client, strong; or of its own, as fresh as its session."""
        while not self.stopping.is_set():
            session = self._rng.random() < 0.3
            owner = self._name if session else self._rng.choice(owners)
            consistency = "session" if session else "strong"

            async def call(owner: str = owner, consistency: Any = consistency) -> dict[str, Any]:
                return {"rows": await read_keys(self._client, owner, consistency)}

            await self._call("read", call, owner=owner, consistency=consistency)

    async def append(self, task: int) -> None:
        """To one channel or two."""
        numbers = itertools.count()
        while not self.stopping.is_set():
            chosen = self._rng.sample(range(CHANNELS), self._rng.choice([1, 1, 2]))
            entries = [
                (f"{self._prefix}-in-{channel}", f"{self._name}.{task}:{next(numbers)}")
                for channel in chosen
                for _ in range(self._rng.randrange(1, 4))
            ]

            async def call(entries: list[tuple[str, str]] = entries) -> dict[str, Any]:
                ids = await self._wal.append_many([Append(channel, payload.encode()) for channel, payload in entries])
                return {"ids": [id.hex() for id in ids]}

            about = [{"channel": channel, "payload": payload} for channel, payload in entries]
            await self._call("append", call, entries=about)

    async def doomed(self) -> None:
        """Appends to a channel that may be deleted from outside; then nothing may be acknowledged there any more."""
        channel = f"{self._prefix}-doomed-{self._name}"

        async def create() -> dict[str, Any]:
            await self._wal.create_channel(channel, ChannelPolicy())
            return {}

        while not self.stopping.is_set() and await self._call("create", create, channel=channel) != "ok":
            pass
        for number in itertools.count():
            if self.stopping.is_set():
                return

            async def call(payload: str = f"{self._name}:{number}") -> dict[str, Any]:
                return {"id": (await self._wal.append(channel, payload.encode())).hex()}

            await self._call("doomed", call, channel=channel)

    async def watch(self, channel: str) -> None:
        """Follow a channel live, from its first entry, reopened behind the last one after errors."""
        start: Start = From.EARLIEST
        while not self.stopping.is_set():
            reader: AsyncIterator[Sequence[Entry]] = self._wal.read(channel, start)
            try:
                async for entries in reader:
                    self._recorder.begin("saw", channel=channel, ids=[entry.id.hex() for entry in entries])
                    start = FromId(entries[-1].id)
            except TidewalError as error:
                tell(f"reader of {channel}: {error!r}")
                if isinstance(error, ChannelNotFound):
                    return
                await asyncio.sleep(RETRY_S)
            finally:
                await reader.aclose()  # pyright: ignore[reportAttributeAccessIssue] -- see `Wal.read`


async def read_keys(client: Client, owner: str, consistency: Any, deadline_s: float = DEADLINE_S) -> dict[str, int]:
    """The keys of a client, and their versions."""
    answer = await client.query(THINGS.name, f'owner == "{owner}"', consistency=consistency, deadline_s=deadline_s)
    return {row["id"]: row["version"] for row in answer.table.to_pylist()}


async def main(url: str, history: str, seed: str, prefix: str, owners: str, first: str) -> None:
    stopping = obey(asyncio.get_running_loop())
    name = Path(history).stem
    wal = await open_log(url, own=False)
    async with Client(wal, name=f"{name}-client") as client:
        work = Tormented(wal, client, name, Path(history), random.Random(seed), prefix)
        watching = asyncio.create_task(work.watch(f"{prefix}-in-{int(first) // ROWS_PER_CLIENT % CHANNELS}"))
        tasks = [
            work.insert(int(first)),
            work.set(),
            work.read(owners.split(",")),
            work.append(0),
            work.append(1),
            work.doomed(),
        ]
        tell("ready")
        ending = asyncio.gather(*tasks)
        await stopping.wait()
        work.stopping.set()
        await ending
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await wal.close()
    tell("ended")


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
