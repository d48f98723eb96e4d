"""A client of the node and of the log: python -m tests.torture.client URL HISTORY SEED PREFIX OWNERS FIRST_ID

Its name is that of its history. It inserts rows that have never been there, writes keys of its own again and again and
reads those of all, sends messages to topics, some to be due later, of which it cancels some, and appends to the
channels PREFIX-in-*, which it also follows live. It has transactions, too, over a collection and a topic.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tidewal.actors.client import Client
from tidewal.cli.kills.checked_client import RETRY_S
from tidewal.cli.kills.topic_client import TopicClient
from tidewal.runtime.errors import ChannelNotFound, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, FromId, Start, Wal

from .inside import CHANNELS, GROWING, LATER, TOPIC, obey, open_log, tell

ROWS_PER_CLIENT = 1_000_000  # ids
DEADLINE_S = 10.0
SESSIONS = 0.3  # of all reads
IN_TRANSACTIONS = 500_000  # from here on the ids of a client are those of its transactions


class Tormented(TopicClient):
    """A client whose history has, beside rows, keys and messages, what it appends to channels and reads from them."""

    def __init__(self, wal: Wal, client: Client, name: str, history: Path, rng: random.Random, prefix: str) -> None:
        super().__init__(client, name, history, rng, deadline_s=DEADLINE_S)
        self._wal, self._prefix = wal, prefix

    async def append(self, task: int) -> None:
        """To one channel or two."""
        numbers = itertools.count()
        while not self.stopping.is_set():
            chosen = self._rng.sample(range(CHANNELS), self._rng.choice([1, 1, 2]))
            entries = [
                (f"{self._prefix}-in-{channel}", f"{self.name}.{task}:{next(numbers)}")
                for channel in chosen
                for _ in range(self._rng.randrange(1, 4))
            ]

            async def call(entries: list[tuple[str, str]] = entries) -> dict[str, Any]:
                ids = await self._wal.append_many([Append(channel, payload.encode()) for channel, payload in entries])
                return {"ids": [id.hex() for id in ids]}

            about = [{"channel": channel, "payload": payload} for channel, payload in entries]
            await self.call("append", call, entries=about)

    async def doomed(self) -> None:
        """Appends to a channel that may be deleted from outside; then nothing may be acknowledged there any more."""
        channel = f"{self._prefix}-doomed-{self.name}"

        async def create() -> dict[str, Any]:
            await self._wal.create_channel(channel, ChannelPolicy())
            return {}

        while not self.stopping.is_set() and await self.call("create", create, channel=channel) != "ok":
            pass
        for number in itertools.count():
            if self.stopping.is_set():
                return

            async def call(payload: str = f"{self.name}:{number}") -> dict[str, Any]:
                return {"id": (await self._wal.append(channel, payload.encode())).hex()}

            await self.call("doomed", call, channel=channel)

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


async def main(url: str, history: str, seed: str, prefix: str, owners: str, first: str) -> None:
    stopping = obey(asyncio.get_running_loop())
    name = Path(history).stem
    wal = await open_log(url)
    async with Client(wal, name=f"{name}-client") as client:
        work = Tormented(wal, client, name, Path(history), random.Random(seed), prefix)
        watching = asyncio.create_task(work.watch(f"{prefix}-in-{int(first) // ROWS_PER_CLIENT % CHANNELS}"))
        tasks = [
            work.insert(int(first)),
            work.set(),
            work.read(owners.split(","), sessions=SESSIONS),
            work.append(0),
            work.append(1),
            work.send(0, TOPIC),
            work.send(1, TOPIC),
            work.send(2, GROWING),
            work.send_later(0, LATER),
            work.doomed(),
            work.transact(int(first) + IN_TRANSACTIONS, TOPIC),
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
