"""Where a group begins in the partitions of topics: at its `start` in a topic that is new to it, and with the first
message of each partition that a topic got later, also while no member was there."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress

from ...runtime.catalog.topics import Topic
from ...runtime.errors import DeadlineExceeded, InvalidRequest, TidewalError, Unsupported
from ...runtime.log.names import Names, pchannel_of
from ...runtime.log.wal import From, Wal

LOOK_S = 0.05  # between two looks whether a group has begun


async def start_of_group(
    wal: Wal, names: Names, group: str, topics: Sequence[Topic], start: From, deadline_s: float
) -> From:
    """Where a member of `group` that is to read `topics` lets it begin in channels without a position (`Wal.join`). A
    group that has begun in a topic gets what was sent since: its positions are not moved, and those that it lacks are
    of later partitions. Where it has begun in some of `topics`, it begins in the others here, at `start`. Raises
    what `Wal.groups` and `Wal.join` do, and `DeadlineExceeded`."""
    if start is From.EARLIEST:
        return start
    positions = await _positions(wal, group)
    new = [topic for topic in topics if not _has_begun(topic, positions)]
    if len(new) == len(topics):
        return start
    if new:
        await begin_in(wal, names, group, new, start, deadline_s)
    return From.EARLIEST


async def begin_in(wal: Wal, names: Names, group: str, topics: Sequence[Topic], start: From, deadline_s: float) -> None:
    """Let the group have positions in topics that are new to it. A member does that, which reads nothing: it moves no
    position that another member has made meanwhile."""
    member = await wal.join(group, [names.topic_pattern(topic.id) for topic in topics], start=start)
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                positions = await _positions(wal, group)
                if all(_has_begun(topic, positions) for topic in topics):
                    return
                await asyncio.sleep(LOOK_S)
    except TimeoutError as error:
        if isinstance(error, TidewalError):
            raise
        raise DeadlineExceeded(f"group {group} has not begun in all of its topics in time: subscribe again") from None
    finally:
        await member.aclose()


async def carry_groups(wal: Wal, topic: Topic) -> None:
    """Let each group that has begun in the first epoch of `topic`, which is about to be removed with its positions,
    begin the next with the first messages: else one that is away would be new to the topic. Raises what `Wal.groups`
    and `Wal.seek_group` do; on a log without groups it does nothing."""
    try:
        groups = await wal.groups()
    except Unsupported:
        return
    first, following = (_channels(topic, epoch) for epoch in (topic.first_epoch, topic.first_epoch + 1))
    for group in groups:
        if first <= set(group.positions):
            for channel in sorted(following - set(group.positions)):
                with suppress(InvalidRequest):  # a member has it by now, from its first entry on
                    await wal.seek_group(group.name, channel, From.EARLIEST)


def _has_begun(topic: Topic, positions: Collection[str]) -> bool:
    """Whether a group has a position in each partition of an epoch. One that has some of them is about to begin."""
    return any(_channels(topic, epoch) <= set(positions) for epoch in range(topic.first_epoch, topic.epoch + 1))


def _channels(topic: Topic, epoch: int) -> set[str]:
    return {pchannel_of(vchannel) for vchannel in topic.partitions_of(epoch)}


async def _positions(wal: Wal, group: str) -> Collection[str]:
    """The channels in which the group has a position."""
    return next((each.positions for each in await wal.groups() if each.name == group), ())
