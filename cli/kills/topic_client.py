"""A client that sends messages, now and to be due later, and writes rows and messages in transactions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

from ...actors.topics.messages import Message
from ...runtime.testing.histories.history_checks import Content
from .checked_client import NUMBERS, CheckedClient

ODD = "odd"  # the filter of a group: messages with an odd number have a tag that says so
KEYS_PER_TASK = 3  # of messages
LATER_S = 6.0  # how far ahead messages are sent, at most
CANCELLED = 0.4  # of these
CANCELS_S = (0.1, 2.0)  # how long before it is due, at most: as close as that, or well in time

_Entries: TypeAlias = list[dict[str, object]]


def passing(content: Content) -> Content:
    """What of a topic passes the filter `ODD`."""
    return [(id, payload) for id, payload in content if int(payload.rpartition(":")[2]) % 2]


class TopicClient(CheckedClient):
    """A client whose history has, beside rows and keys, the messages that it sends and cancels, and its transactions.
    The keys of its messages, of which each is a producer's, begin with its name."""

    async def send(self, task: int, topic: str) -> None:
        """Messages of a few keys."""
        numbers = itertools.count()
        while not self.stopping.is_set():
            keys = [
                f"{self.name}.sent{task}/{self._rng.randrange(KEYS_PER_TASK)}" for _ in range(self._rng.randrange(1, 4))
            ]
            messages = [_message(key, numbers) for key in keys]

            async def call(messages: Sequence[Message] = messages) -> dict[str, Any]:
                return {"ts": (await self._client.send(topic, messages, deadline_s=self._deadline_s)).ts}

            await self.call("send", call, entries=_entries(topic, messages))

    async def send_later(self, task: int, topic: str) -> None:
        """Messages that are due at a moment; some are cancelled about then, while the task goes on."""
        async with asyncio.TaskGroup() as cancels:
            for number in itertools.count():
                if self.stopping.is_set():
                    return
                payload = f"{self.name}.later{task}:{number}"
                moment = datetime.now(UTC) + timedelta(
                    seconds=self._rng.choice([0, 0.05, LATER_S]) * self._rng.random()
                )
                ids: list[str] = []

                async def call(
                    payload: str = payload, moment: datetime = moment, ids: list[str] = ids
                ) -> dict[str, Any]:
                    deadline_s = self._deadline_s
                    sent = await self._client.send(
                        topic, payload, key=payload, deliver_at=moment, deadline_s=deadline_s
                    )
                    ids += sent.ids
                    return {"ids": ids, "ts": sent.ts}

                await self.call("later", call, payload=payload, due_ms=int(moment.timestamp() * 1000))
                if ids and self._rng.random() < CANCELLED:
                    cancels.create_task(self._cancel(topic, payload, ids[0], moment))

    async def _cancel(self, topic: str, payload: str, id: str, moment: datetime) -> None:
        left_s = (moment - datetime.now(UTC)).total_seconds()
        before_s = self._rng.uniform(-0.02, self._rng.choice(CANCELS_S))
        if await self.stops_within(max(0.0, left_s - before_s)):
            return

        async def call() -> dict[str, Any]:
            return {"cancelled": await self._client.cancel(topic, id, deadline_s=self._deadline_s)}

        await self.call("cancel", call, payload=payload)

    async def transact(self, first: int, topic: str) -> None:
        """Rows that have never been there, ids from `first` on, and as many messages of one key, in transactions."""
        numbers, key = itertools.count(), f"{self.name}.transacted"

        async def commit(ids: Sequence[int], messages: Sequence[Message]) -> dict[str, Any]:
            async with self._client.transaction(deadline_s=self._deadline_s) as t:
                await t.insert(NUMBERS.name, [{"id": id} for id in ids])
                await t.send(topic, messages)
            assert t.result is not None
            return {"ts": t.result.ts}

        while not self.stopping.is_set():
            count = self._rng.randrange(1, 10)
            messages = [_message(key, numbers) for _ in range(count)]
            call = partial(commit, range(first, first + count), messages)
            await self.call("transaction", call, first=first, count=count, entries=_entries(topic, messages))
            first += count


def _message(key: str, numbers: Iterator[int]) -> Message:
    number = next(numbers)
    return Message(f"{key}:{number}", key, {ODD: number % 2 == 1})


def _entries(topic: str, messages: Sequence[Message]) -> _Entries:
    return [{"channel": topic, "payload": message.body} for message in messages]
