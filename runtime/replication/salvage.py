"""What a source has that its replica was promoted without.

Where a channel of the replica ends is told by the saved pair of places and the number of entries behind it; digests of
these entries tell whether the source's channel is still the one that was replicated. One that was created again is
salvaged as a whole: an entry too much can be left out by hand.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import xxhash

from ..errors import PositionLost
from ..log.replication_state import ReplicatedChannel, ReplicationState
from ..log.wal import ChannelInfo, Entry, FromId, Wal
from ..migration.channel_copy import entry_at, is_lost
from ..migration.node_log import node_names
from ..streams.stream_base import reading
from .channel_mirror import entries_behind, entry_digest, replicated_digest
from .consistent_line import ConsistentLine, LineEnd, first_above
from .replicated_node import is_written_anew
from .replicator import is_own

_log = logging.getLogger(__name__)


async def counted_place(target: Wal, info: ChannelInfo, place: ReplicatedChannel) -> ReplicatedChannel:
    """`place` of a channel of the replica, with what it has behind it, and the digests of both."""
    at = await entry_at(target, info, place.target)
    digest, behind = xxhash.xxh3_128(), 0
    async for entry in entries_behind(target, info, place.target):
        digest.update(entry_digest(entry))
        behind += 1
    return replace(
        place,
        behind=behind,
        digest=entry_digest(at).hex() if at is not None else "",
        behind_digest=digest.hexdigest() if behind else "",
    )


async def unreplicated_entries(source: Wal, state: ReplicationState) -> AsyncIterator[tuple[str, Entry]]:
    """What `source` has that its promoted replica, whose `state` this is, does not have: the channel and each entry, in
    the order of each channel. All of a channel that was created again at the source. What was removed there before is
    left out, and logged. Nothing of the states of nodes: they were written anew. Where it was promoted without the
    source, of the channels of nodes what lies above its line."""
    node, line = await node_names(source), ConsistentLine.from_wire(state.line)
    for name in await source.channels():
        if is_own(name) or (node is not None and is_written_anew(name, node)):
            continue
        info = await source.describe(name)
        if info.policy.ephemeral:
            continue
        if line is not None and name in line.ends:
            async for entry in entries_above(source, info, line.time_of(name), line.ends_in_source[name]):
                yield name, entry
            continue
        place = state.channels.get(name, ReplicatedChannel())
        if not await _is_same(source, info, place):
            _log.warning("%s was created again at the source, or has lost entries: all of it is salvaged", name)
            place = ReplicatedChannel()
        skipped = place.behind
        async for entry in _remaining(source, info, place.source):
            if skipped:
                skipped -= 1
                continue
            yield name, entry


async def entries_above(wal: Wal, info: ChannelInfo, time: int, end: bytes) -> AsyncIterator[Entry]:
    """What a channel of nodes has above a line at `time`, or behind the entry `end`, the last one that the replica had
    when the line was drawn: what comes late to a channel that has no owner may have an earlier time."""
    if info.latest_id is None:
        return
    first = await first_above(wal, info.name, LineEnd(time, None), info.latest_id)
    if first is None or first > end:
        async for entry in _remaining(wal, info, end):
            yield entry
        return
    async with reading(wal, info.name, FromId(first, inclusive=True)) as batches:
        async for entries in batches:
            for entry in entries:
                if entry.id <= info.latest_id:
                    yield entry
            if entries[-1].id >= info.latest_id:
                return


async def _is_same(source: Wal, info: ChannelInfo, place: ReplicatedChannel) -> bool:
    """Whether the source's channel is, as far as is known, the one whose `place` this is."""
    if place.source > (info.latest_id or b"") or await is_lost(source, info, place.source):
        return False
    at = await entry_at(source, info, place.source)
    if at is not None and place.digest and replicated_digest(info.name, at).hex() != place.digest:
        return False
    digest, missing = xxhash.xxh3_128(), place.behind
    if not missing:
        return True
    async for entry in _remaining(source, info, place.source):
        digest.update(replicated_digest(info.name, entry))
        missing -= 1
        if not missing:
            return digest.hexdigest() == place.behind_digest
    return False


async def _remaining(source: Wal, info: ChannelInfo, id: bytes) -> AsyncIterator[Entry]:
    """The entries behind `id`, but those that are removed meanwhile."""
    while True:
        try:
            async for entry in entries_behind(source, info, id):
                yield entry
                id = entry.id
            return
        except PositionLost:
            _log.warning("entries of %s behind %s were removed before they were salvaged", info.name, id.hex())
            info, id = await source.describe(info.name), b""
