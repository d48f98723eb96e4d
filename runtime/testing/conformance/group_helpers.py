"""Steps that tests of consumer groups take."""

from __future__ import annotations

import asyncio

from ...log.wal import Delivered, From, GroupMember, Wal
from .helpers import WITHIN_S, idle, payloads, reading

GROUPS = ("groups", "individual_acks", "atomic_commits")  # the capabilities that these tests need


async def collect(member: GroupMember, count: int, *, acknowledge: bool = True) -> dict[str, list[bytes]]:
    """The ids of the next `count` entries, by channel."""
    found: dict[str, list[bytes]] = {}
    got = 0
    async with asyncio.timeout(WITHIN_S):
        while got < count:
            delivered = await anext(member)
            found.setdefault(delivered.channel, []).extend(entry.id for entry in delivered.entries)
            got += len(delivered.entries)
            if acknowledge:
                await member.acknowledge(delivered)
    assert got == count, f"{got - count} entries more than were written"
    return found


async def one(member: GroupMember, entries: int = 1) -> Delivered:
    """A batch of at least so many entries: one that a broker has handed over in parts is taken again."""
    async with asyncio.timeout(WITHIN_S):
        while len((delivered := await anext(member)).entries) < entries:
            member.redeliver(delivered)
        return delivered


async def batches(member: GroupMember, entries: int) -> list[Delivered]:
    """The next batches, until they hold so many entries: a broker divides them as it likes."""
    taken = [await one(member)]
    while sum(len(each.entries) for each in taken) < entries:
        taken.append(await one(member))
    return taken


async def position(wal: Wal, group: str, channel: str) -> bytes | None:
    """Up to where the group has acknowledged the channel; None where it knows no position there."""
    return {info.name: info.positions for info in await wal.groups()}.get(group, {}).get(channel)


async def having(member: GroupMember, *channels: str) -> None:
    """Wait until the member has just these channels. It acknowledges nothing, so nothing is taken from its feeds."""
    async with asyncio.timeout(WITHIN_S):
        while member.channels != frozenset(channels):  # noqa: ASYNC110 -- the contract has no event for it
            await asyncio.sleep(0)


async def idle_member(member: GroupMember) -> None:
    """Make sure that the member gets nothing."""
    waiting = asyncio.ensure_future(anext(member))
    await idle(waiting)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def outputs_of(wal: Wal) -> list[bytes]:
    """The payloads of all that is in channel `out`; an entry that marks its end is appended."""
    await wal.append("out", b"end")
    found = [b""]
    reader = reading(wal, "out", From.EARLIEST)
    async with asyncio.timeout(WITHIN_S):
        while found[-1] != b"end":
            found += payloads(await anext(reader))
    await reader.aclose()
    return found[1:-1]
