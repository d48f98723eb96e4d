"""Where a group begins in partitions that a topic got while no member of the group was there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ...runtime.catalog.topics import Topic
from ...runtime.errors import InvalidRequest
from ...runtime.log.wal import From, Wal


async def begin_new_partitions(wal: Wal, group: str, topics: Sequence[Topic]) -> None:
    """Let `group`, where it has a position in one of `topics`, begin at the first message of each partition in which it
    has none: what was sent there since is not to be passed over. Raises what `Wal.groups` and `Wal.seek_group` do."""
    found = next((each for each in await wal.groups() if each.name == group), None)
    known = set(found.positions) if found is not None else set[str]()
    for topic in topics:
        if not known.isdisjoint(topic.pchannels):
            later = {channel for channel in topic.pchannels if topic.predecessors(channel)}
            for channel in later - known:
                with suppress(InvalidRequest):  # a member has it by now, from its first entry on
                    await wal.seek_group(group, channel, From.EARLIEST)
