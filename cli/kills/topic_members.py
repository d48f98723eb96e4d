"""The members of a group that reads a topic beside the faults, and copies what it gets, exactly once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from ...actors.client import Client
from ...actors.topics.messages import TopicPack
from ...runtime.errors import TidewalError, Unsupported
from ...runtime.groups.nack import Nack
from ...runtime.groups.processing import Semantics, process
from ...runtime.groups.retry_policy import RetryPolicy
from ...runtime.log.wal import Append, ChannelPolicy, Wal
from ...runtime.waiting import ended
from .topic_client import ODD

MEMBERS = 2
SESSION_S = 10.0
LIFE_S = 10.0  # until a member leaves and joins again, on average
FAILED, GIVEN_BACK = 0.05, 0.05  # of what a handler gets
GIVEN_BACK_S = 1.0  # for how long, at most
RETRY_S = 0.2
RETRIES = RetryPolicy(attempts=1_000_000, first_pause_s=0.1, last_pause_s=1.0)  # so none becomes a dead letter


class HandlerMishap(Exception):
    """A handler's own error."""


class TopicMembers:
    """Members of the group `group`, from `start` to `stop`, that read `topic` with a filter and with a retry topic, and
    copy each message to the channel `copies`. Handlers fail, and give back what they got; members leave and come again.

    `handled` counts the messages that handlers have made copies of, also of such that were not committed. `last_error`
    says what a member was told last that has begun anew since.
    """

    def __init__(self, wal: Wal, client: Client, topic: str, group: str, copies: str, rng: random.Random) -> None:
        self.handled: int = 0
        self.last_error: str = ""
        self.group: str = group
        self.copies: str = copies
        self._wal, self._client, self._topic, self._rng = wal, client, topic, rng
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Make the channel of copies, and let the members join. Raises `Unsupported` (`capability`) on a log without
        groups, and what `Wal.create_channel` does."""
        if not self._wal.capabilities.atomic_commits:
            raise Unsupported(f"{self._wal.name}:// has no groups that copy exactly once", capability="atomic_commits")
        await self._wal.create_channel(self.copies, ChannelPolicy())
        self._tasks = [asyncio.create_task(self._work(), name=f"member {number}") for number in range(MEMBERS)]

    async def stop(self) -> None:
        """Have all of them leave. Raises what has ended one that was to go on."""
        tasks, self._tasks = self._tasks, []
        failed = [task for task in tasks if task.done()]
        await ended(*tasks)
        for task in failed:
            task.result()

    async def _work(self) -> None:
        while True:
            try:
                async with await self._client.subscribe(
                    self._topic, self.group, where=ODD, session_timeout_s=SESSION_S, retry_topic=True
                ) as member:
                    life_s = self._rng.expovariate(1 / LIFE_S)
                    await process(
                        self._wal, member, self._copy, Semantics.EXACTLY_ONCE, retry=RETRIES, timeout_s=life_s
                    )
            except TidewalError as error:
                self.last_error = repr(error)
                await asyncio.sleep(RETRY_S)

    async def _copy(self, pack: TopicPack) -> Sequence[Append]:
        chance = self._rng.random()
        if chance < FAILED:
            raise HandlerMishap
        if chance < FAILED + GIVEN_BACK:
            raise Nack("later", delay_s=self._rng.uniform(0, GIVEN_BACK_S))
        self.handled += len(pack.messages)
        return [Append(self.copies, bytes(each.body)) for each in pack.messages]
