"""What a run has beside collections where it is to have topics: a topic, one of messages that are due later, the group
that copies the first, and what all of it comes to in the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain

from ...actors.client import Client
from ...runtime.delays.delayed import due_of
from ...runtime.log.record import Record, RecordType
from ...runtime.log.wal import Wal
from ...runtime.streams.channel_reader import ChannelReader
from ...runtime.testing.histories import history_checks as checks
from ...runtime.testing.histories.client_history import ClientCall
from ..open_log import opened, stored
from .topic_client import passing
from .topic_members import TopicMembers

MESSAGES, LATER = "messages", "later"  # topics
PARTITIONS = 4
KINDS = (("send",), ("later",), ("transaction",))  # of calls of each client, all of which must go on
LOOK_S = 0.5
CALL_S = 60.0


class TopicWork:
    """Topics and a group in the cluster whose channels begin with `prefix`, in the log `wal`."""

    def __init__(self, wal: Wal, client: Client, prefix: str, rng: random.Random) -> None:
        self._wal, self._client = wal, client
        self.members: TopicMembers = TopicMembers(wal, client, MESSAGES, f"{prefix}-copiers", f"{prefix}_copies", rng)

    async def copied(self) -> int:
        """How many messages the group has copied."""
        return len(await self._copies())

    async def prepare(self) -> None:
        """Create the topics, and let the group join. Raises `Unsupported` on a log without groups."""
        for topic in (MESSAGES, LATER):
            await self._client.create_topic(topic, PARTITIONS, deadline_s=CALL_S)
        await self.members.start()

    async def check(
        self, calls: Sequence[ClientCall], ids: Sequence[int], row_ts: Mapping[int, int], settled_s: float
    ) -> list[str]:
        """What is wrong, once all that was sent is copied and due, for which this waits up to `settled_s` seconds.
        `ids` are the numbers in a strong read, `row_ts` their timestamps in the table."""
        deadline = time.monotonic() + settled_s
        sent = await self._records(MESSAGES)
        contents = list(map(_content, sent))
        everything = list(chain(*contents))
        message_ts = {bytes(each.body).decode(): each.ts for each in chain(*sent)}

        async def copied() -> list[str]:
            given = [pair for content in contents for pair in passing(content)]
            return checks.copies(self.members.copies, given, await self._copies(), exactly_once=True, ordered=False)

        async def released() -> list[str]:
            return checks.delayed(calls, [list(map(_released, records)) for records in await self._records(LATER)])

        await _once_settled(copied, deadline)
        await self.members.stop()  # what is copied once more by now is found
        return [
            *checks.appends(calls, {MESSAGES: everything}),
            *checks.transactions(calls, ids, {MESSAGES: everything}),
            *checks.transaction_times(calls, row_ts, message_ts),
            *await copied(),
            *await _once_settled(released, deadline),
        ]

    async def _records(self, topic: str) -> list[list[Record]]:
        """The messages of a topic as they lie in each partition."""
        there = await self._client.describe_topic(topic, deadline_s=CALL_S)
        return [await _messages(self._wal, channel) for channel in there.pchannels]

    async def _copies(self) -> checks.Content:
        return [
            (entry.id.hex(), bytes(entry.payload).decode()) async for entry in stored(self._wal, self.members.copies)
        ]


@asynccontextmanager
async def topic_work(url: str, prefix: str, rng: random.Random) -> AsyncGenerator[TopicWork]:
    """Topics at work while the block runs, over a connection of their own."""
    async with opened(url, read_only=False) as wal, Client(wal, prefix=prefix) as client:
        work = TopicWork(wal, client, prefix, rng)
        await work.prepare()
        try:
            yield work
        finally:
            await work.members.stop()


async def _once_settled(check: Callable[[], Awaitable[list[str]]], deadline: float) -> list[str]:
    """What a check finds once it finds nothing, or at the deadline."""
    while (found := await check()) and time.monotonic() < deadline:  # noqa: ASYNC110 -- other processes go on
        await asyncio.sleep(LOOK_S)
    return found


async def _messages(wal: Wal, channel: str) -> list[Record]:
    reader = ChannelReader(channel)
    records = [record async for entry in stored(wal, channel) for record in reader.accept([entry])]
    return [record for record in records if record.type is RecordType.MESSAGE]


def _content(records: Sequence[Record]) -> checks.Content:
    return [(each.id.hex(), bytes(each.body).decode()) for each in records]


def _released(record: Record) -> checks.ReleasedMessage:
    return checks.ReleasedMessage(bytes(record.body).decode(), due_of(record), record.ts)
