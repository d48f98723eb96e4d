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
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tidewal.actors.client import Client
from tidewal.actors.topics.messages import Message
from tidewal.cli.kills.checked_client import NUMBERS, RETRY_S, CheckedClient
from tidewal.runtime.errors import ChannelNotFound, TidewalError
from tidewal.runtime.log.wal import Append, ChannelPolicy, Entry, From, FromId, Start, Wal

from .inside import CHANNELS, GROWING, LATER, TOPIC, obey, open_log, tell

ROWS_PER_CLIENT = 1_000_000  # ids
DEADLINE_S = 10.0
KEYS_PER_TASK = 3  # of messages
SESSIONS = 0.3  # of all reads
LATER_S = 6.0  # how far ahead messages are sent, at most
CANCELLED = 0.4  # of these
IN_TRANSACTIONS = 500_000  # from here on the ids of a client are those of its transactions


class Tormented(CheckedClient):
    """A client whose history has, beside rows and keys, the messages that it sends, and what it appends to channels
    and reads from them."""

    def __init__(self, wal: Wal, client: Client, name: str, history: Path, rng: random.Random, prefix: str) -> None:
        super().__init__(client, name, history, rng, deadline_s=DEADLINE_S)
        self._wal, self._prefix = wal, prefix

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
            await self.call("append", call, entries=about)

    async def send(self, task: int, topic: str) -> None:
        """Messages of a few keys, which are their producers; those with an odd number have a tag that says so."""
        numbers = itertools.count()
        while not self.stopping.is_set():
            keys = [
                f"{self._name}.sent{task}/{self._rng.randrange(KEYS_PER_TASK)}"
                for _ in range(self._rng.randrange(1, 4))
            ]
            numbered = [(key, next(numbers)) for key in keys]
            messages = [Message(f"{key}:{number}", key, {"odd": number % 2 == 1}) for key, number in numbered]

            async def call(messages: Sequence[Message] = messages) -> dict[str, Any]:
                return {"ts": (await self._client.send(topic, messages, deadline_s=self._deadline_s)).ts}

            about = [{"channel": topic, "payload": message.body} for message in messages]
            await self.call("send", call, entries=about)

    async def send_later(self, task: int) -> None:
        """Messages that are due at a moment; some are cancelled about then, while the task goes on."""
        async with asyncio.TaskGroup() as cancels:
            for number in itertools.count():
                if self.stopping.is_set():
                    return
                payload = f"{self._name}.later{task}:{number}"
                moment = datetime.now(UTC) + timedelta(
                    seconds=self._rng.choice([0, 0.05, LATER_S]) * self._rng.random()
                )
                ids: list[str] = []

                async def call(
                    payload: str = payload, moment: datetime = moment, ids: list[str] = ids
                ) -> dict[str, Any]:
                    deadline_s = self._deadline_s
                    sent = await self._client.send(
                        LATER, payload, key=payload, deliver_at=moment, deadline_s=deadline_s
                    )
                    ids += sent.ids
                    return {"ids": ids}

                await self.call("later", call, payload=payload, due_ms=int(moment.timestamp() * 1000))
                if ids and self._rng.random() < CANCELLED:
                    cancels.create_task(self._cancel(payload, ids[0], moment))

    async def _cancel(self, payload: str, id: str, moment: datetime) -> None:
        left_s = (moment - datetime.now(UTC)).total_seconds()
        if await self.stops_within(max(0.0, left_s + self._rng.uniform(-0.1, 0.02))):
            return

        async def call() -> dict[str, Any]:
            return {"cancelled": await self._client.cancel(LATER, id, deadline_s=self._deadline_s)}

        await self.call("cancel", call, payload=payload)

    async def transact(self, first: int) -> None:
        """Rows that have never been there, and as many messages of one key, in transactions."""
        numbers, key = itertools.count(), f"{self._name}.transacted"

        async def commit(ids: Sequence[int], messages: Sequence[Message]) -> dict[str, Any]:
            async with self._client.transaction(deadline_s=self._deadline_s) as t:
                await t.insert(NUMBERS.name, [{"id": id} for id in ids])
                await t.send(TOPIC, messages)
            return {"ts": t.result.ts}

        while not self.stopping.is_set():
            count = self._rng.randrange(1, 10)
            numbered = [next(numbers) for _ in range(count)]
            messages = [Message(f"{key}:{number}", key, {"odd": number % 2 == 1}) for number in numbered]
            about = [{"channel": TOPIC, "payload": message.body} for message in messages]
            call = partial(commit, range(first, first + count), messages)
            await self.call("transaction", call, first=first, count=count, entries=about)
            first += count

    async def doomed(self) -> None:
        """Appends to a channel that may be deleted from outside; then nothing may be acknowledged there any more."""
        channel = f"{self._prefix}-doomed-{self._name}"

        async def create() -> dict[str, Any]:
            await self._wal.create_channel(channel, ChannelPolicy())
            return {}

        while not self.stopping.is_set() and await self.call("create", create, channel=channel) != "ok":
            pass
        for number in itertools.count():
            if self.stopping.is_set():
                return

            async def call(payload: str = f"{self._name}:{number}") -> dict[str, Any]:
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
            work.send_later(0),
            work.doomed(),
            work.transact(int(first) + IN_TRANSACTIONS),
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
