"""A member of a group: python -m tests.torture.member URL PREFIX GROUP SEMANTICS SEED

It copies the channels PREFIX-in-* to PREFIX-GROUP-*; in the groups "sent" and "retried" the messages of a topic that
pass their filter. What "retried" fails at, holds for too long, or gives back goes through its retry topic.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from collections.abc import Sequence

from tidewal.actors.client import Client
from tidewal.actors.topics.messages import TopicPack
from tidewal.cli.kills.topic_client import ODD
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.groups.nack import Nack
from tidewal.runtime.groups.processing import Semantics, process
from tidewal.runtime.groups.retry_policy import RetryPolicy
from tidewal.runtime.groups.work import Member
from tidewal.runtime.log.wal import Append, Delivered, Wal

from .inside import TOPIC, obey, open_log, tell

SENT = "sent"  # the group that reads the topic
RETRIED = "retried"  # the one that does so with a retry topic
SESSION_S = 6.0
ACK_TIMEOUT_S = 2.0
ATTEMPTS = 1_000  # so none becomes a dead letter
LATER_S = 1.0  # for how long a message is given back, at most
PAUSE_S = 0.2


class Mishap(Exception):
    """A handler's own error."""


class Copier:
    """Processes with one member or another, and is interrupted again and again."""

    def __init__(
        self, wal: Wal, client: Client, prefix: str, group: str, semantics: Semantics, rng: random.Random
    ) -> None:
        self._wal, self._client, self._rng = wal, client, rng
        self._prefix, self._group, self._semantics = prefix, group, semantics

    async def _join(self) -> Member[Delivered] | Member[TopicPack]:
        group = f"{self._prefix}-{self._group}"
        if self._group in (SENT, RETRIED):
            retry_topic = self._group == RETRIED
            return await self._client.subscribe(
                TOPIC, group, where=ODD, session_timeout_s=SESSION_S, retry_topic=retry_topic
            )
        return await self._wal.join(group, [f"{self._prefix}-in-*"], session_timeout_s=SESSION_S)

    async def _handle(self, delivered: Delivered | TopicPack) -> Sequence[Append]:
        chance = self._rng.random()
        if chance < 0.1:
            await asyncio.sleep(self._rng.uniform(0, 0.3))
        if chance > 0.97:
            raise Mishap
        if self._group == RETRIED:
            await self._misbehave()
        if isinstance(delivered, TopicPack):
            copied = [each for each in delivered.messages if bytes(each.body).startswith(f"{self._prefix}c".encode())]
            target = f"{self._prefix}-{self._group}"
            return [Append(f"{target}-{each.partition}", bytes(each.body)) for each in copied]
        target = delivered.channel.replace("-in-", f"-{self._group}-")
        return [Append(target, bytes(entry.payload)) for entry in delivered.entries]

    async def _misbehave(self) -> None:
        chance = self._rng.random()
        if chance < 0.1:
            raise Mishap
        if chance < 0.2:
            raise Nack("later", delay_s=self._rng.uniform(0, LATER_S))
        if chance < 0.21:
            await asyncio.Event().wait()

    async def run(self) -> None:
        while True:
            try:
                member = await self._join()
            except TidewalError as error:
                tell(f"join: {error!r}")
                await asyncio.sleep(PAUSE_S)
                continue
            try:
                await self._work(member)
            finally:
                await member.aclose()

    async def _work(self, member: Member[Delivered] | Member[TopicPack]) -> None:
        """With one member, again after each error, until by chance it leaves."""
        retry = RetryPolicy(attempts=ATTEMPTS, first_pause_s=0.1, last_pause_s=1.0, ack_timeout_s=ACK_TIMEOUT_S)
        while self._rng.random() > 0.1:
            try:
                async with asyncio.timeout(self._rng.expovariate(0.3)):
                    await process(
                        self._wal,
                        member,
                        self._handle,
                        self._semantics,
                        retry=retry if self._group == RETRIED else None,
                    )
                return
            except (TidewalError, TimeoutError, Mishap) as error:
                tell(f"process: {error!r}")
                await asyncio.sleep(self._rng.uniform(0, PAUSE_S))


async def main(url: str, prefix: str, group: str, semantics: str, seed: str) -> None:
    stopping = obey(asyncio.get_running_loop())
    wal = await open_log(url)
    async with Client(wal) as client:
        copying = Copier(wal, client, prefix, group, Semantics(semantics), random.Random(seed))
        copier = asyncio.create_task(copying.run())
        tell("ready")
        stopped = asyncio.create_task(stopping.wait())
        await asyncio.wait([copier, stopped], return_when=asyncio.FIRST_COMPLETED)
        if copier.done():
            await copier  # raises what ended it
        copier.cancel()
        await asyncio.gather(copier, return_exceptions=True)
    await wal.close()
    tell("ended")


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
