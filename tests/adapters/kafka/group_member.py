"""A process with one member of a group: `group_member.py URL GROUP SESSION_S MODE`. It says what it did.

`copy`: copies each entry of in-N to out-N, exactly once, until SIGTERM. `hold`: takes one batch of channel "a", and
when told to acknowledges it, then commits it with an output to "out". `die`: commits such a batch, and is killed just
before the transaction ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from tidewal.adapters.kafka import open_wal
from tidewal.adapters.kafka.groups.transaction import TransactionalProducer
from tidewal.runtime.errors import Fenced, TidewalError, Unavailable
from tidewal.runtime.log.wal import Append, Wal


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def copy(wal: Wal, group: str, session_s: float) -> None:
    """Go on whatever happens, as an application would."""
    while True:
        try:
            member = await wal.join(group, ["in-*"], session_timeout_s=session_s)
        except Unavailable:
            continue
        say("joined")
        try:
            async for delivered in member:
                target = delivered.channel.replace("in-", "out-")
                outputs = [Append(target, bytes(entry.payload).upper()) for entry in delivered.entries]
                try:
                    await member.commit([delivered], outputs)
                except Fenced:
                    continue  # another member has the channel, and gets the entries again
                say("commit", len(outputs))
        except Unavailable:
            continue  # it may have happened or not: the position tells the next member with the channel
        finally:
            await member.aclose()


async def hold(wal: Wal, group: str, session_s: float) -> None:
    member = await wal.join(group, ["a"], session_timeout_s=session_s)
    delivered = await anext(member)
    say("delivered", len(delivered.entries))
    await asyncio.to_thread(sys.stdin.readline)
    for what in (member.acknowledge(delivered), member.commit([delivered], [Append("out", b"late")])):
        try:
            await what
            say("done")
        except TidewalError as error:
            say(type(error).__name__)


async def die(wal: Wal, group: str, session_s: float) -> None:
    async def killed(self: TransactionalProducer, identity: tuple[int, int]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    TransactionalProducer._end = killed
    member = await wal.join(group, ["a"], session_timeout_s=session_s)
    delivered = await anext(member)
    say("delivered", len(delivered.entries))
    await member.commit([delivered], [Append("out", b"first") for _ in delivered.entries])


async def main(url: str, group: str, session_s: str, mode: str) -> None:
    wal = await open_wal(url)
    task = asyncio.create_task({"copy": copy, "hold": hold, "die": die}[mode](wal, group, float(session_s)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    await wal.close()
    if not task.cancelled() and task.exception():
        say("error", repr(task.exception()))


asyncio.run(main(*sys.argv[1:]))
