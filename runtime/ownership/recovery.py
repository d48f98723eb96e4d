"""Read what a channel holds below the fence of a new term: what happened before, as the new owner must know it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ..errors import Closed, Fenced
from ..log.record import Record
from ..log.wal import From, FromId, Wal
from ..streams.channel_reader import ChannelReader, Granted, Grants, OnBadRecord
from ..streams.stream_base import reading
from .owned_channel import ChannelGrant


async def records_below(
    wal: Wal,
    grant: ChannelGrant,
    fence: bytes,
    grants: Grants | None,
    on_bad: OnBadRecord,
) -> AsyncIterator[list[Record]]:
    """The records of the channel that stand below the fence of `grant`, whose id is `fence`, from its checkpoint on.

    Raises `Fenced` at the end where its term is not above all others: readers drop what comes under a lower one, so
    nothing may be acknowledged under it. `Closed` where the log is closed meanwhile."""
    channel = grant.channel
    reader = _reader(grant, fence, grants, on_bad)
    async with reading(wal, channel, await _start(wal, grant, fence)) as batches:
        async for entries in batches:
            yield reader.accept([entry for entry in entries if entry.id < fence])
            if entries[-1].id >= fence:
                before = reader.term if grants is None else max(reader.term, grants.granted(channel).term - 1)
                if before >= grant.term:
                    raise Fenced(
                        f"{channel} was owned under term {before} already, and readers would drop all that is written "
                        f"under term {grant.term}: acquire it under a higher term than {before}",
                        channel=channel,
                        term=before,
                    )
                return
    raise Closed(f"the log was closed while {channel} was being recovered")


async def _start(wal: Wal, grant: ChannelGrant, fence: bytes) -> FromId | From:
    """A checkpoint that retention has passed is older than any producer that is still known; one behind the fence is of
    a channel that was dropped, and made again."""
    first = (await wal.describe(grant.channel)).first_id or b""
    there = grant.checkpoint and first <= grant.checkpoint < fence
    return FromId(grant.checkpoint, inclusive=True) if there else From.EARLIEST


def _reader(grant: ChannelGrant, fence: bytes, grants: Grants | None, on_bad: OnBadRecord) -> ChannelReader:
    granted = None
    if grants is not None:
        limit = max(grant.limit, grant.previous_limit)
        granted = Granted(grant.term, limit, {**grant.fences, grant.term: fence})
    return ChannelReader(grant.channel, fences=grant.fences, on_bad=on_bad, granted=granted)
