"""A process with a member of a group, which the tests kill, stop and watch. The arguments: what it does, and the URL.

It says on a line of output what it has, and what it has done.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from tidewal.adapters.pulsar import open_wal
from tidewal.adapters.pulsar.groups.outputs import OutputPublisher
from tidewal.runtime.errors import Fenced, Unavailable
from tidewal.runtime.log.wal import Append, GroupMember, Wal

SESSION_TIMEOUT_S = 3.0


def say(*words: object) -> None:
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


async def copy(wal: Wal) -> None:
    """Copy each entry of a channel cN to out-cN, exactly once, for ever."""
    while True:
        member = await wal.join("copiers", ["c*"])
        try:
            async for delivered in member:
                outputs = [Append(f"out-{delivered.channel}", bytes(entry.payload)) for entry in delivered.entries]
                try:
                    await member.commit([delivered], outputs)
                except Fenced:
                    continue  # another member has the channel, and gets the entries again
                say("commit", len(outputs))
        except Unavailable as error:
            say("unavailable", type(error).__name__)
        finally:
            await member.aclose()


async def join_and_take(wal: Wal, session_timeout_s: float = 30.0) -> tuple[GroupMember, object]:
    member = await wal.join("g", ["c*"], session_timeout_s=session_timeout_s)
    delivered = await anext(member)
    say("has", *(bytes(entry.payload).decode() for entry in delivered.entries))
    return member, delivered


async def take(wal: Wal) -> None:
    """Take a batch, acknowledge nothing, and stay."""
    await join_and_take(wal)
    await asyncio.Event().wait()


async def late(wal: Wal) -> None:
    """Take a batch, and acknowledge it when told to by SIGUSR1."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    member, delivered = await join_and_take(wal, SESSION_TIMEOUT_S)
    await told.wait()
    try:
        await member.acknowledge(delivered)
        say("acknowledged")
    except Fenced:
        say("fenced")


async def busy(wal: Wal) -> None:
    """Take a batch, compute for longer than the session lasts, and acknowledge it."""
    member, delivered = await join_and_take(wal, SESSION_TIMEOUT_S)
    until = time.monotonic() + 3 * SESSION_TIMEOUT_S
    while time.monotonic() < until:
        pass
    await member.acknowledge(delivered)
    say("acknowledged")
    await asyncio.Event().wait()


async def half(wal: Wal) -> None:
    """Die when a commit is decided and half of its outputs are appended."""
    send = OutputPublisher._send

    def send_half(self: OutputPublisher, commits: list) -> None:
        (commit,) = commits
        del commit.outputs[len(commit.outputs) // 2 :]
        send(self, commits)
        os.kill(os.getpid(), signal.SIGKILL)

    OutputPublisher._send = send_half
    await copy(wal)


async def main(what: str, url: str) -> None:
    wal = await open_wal(url)
    await {"copy": copy, "take": take, "late": late, "busy": busy, "half": half}[what](wal)
    await wal.close()


asyncio.run(main(*sys.argv[1:]))
