"""What tests of groups on Pulsar do again and again."""

from __future__ import annotations

import asyncio

from tidewal.runtime.log.wal import Append, ChannelPolicy

PLAIN = ChannelPolicy()
BOUND_S = 60


async def create(wal, *channels):
    for channel in channels:
        await wal.create_channel(channel, PLAIN)


async def append(wal, channel, *payloads):
    return await wal.append_many([Append(channel, str(payload).encode()) for payload in payloads])


async def one(member, bound_s=BOUND_S):
    async with asyncio.timeout(bound_s):
        return await anext(member)


def payloads(delivered):
    return [bytes(entry.payload).decode() for entry in delivered.entries]
