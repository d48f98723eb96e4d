"""Read the entries of channels: find the sections that hold them, and get these from the cache or the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from ...runtime.errors import CorruptLog, Unavailable
from ...runtime.log.wal import Entry
from .block import decode_section
from .log_objects import pauses
from .open_log import OpenLog
from .stored_channel import StoredChannel, StoredSection, id_before

READ_BYTES: Final = 2 * 1024 * 1024  # what a reader gets at once, and one section more
READ_SECTIONS: Final = 16


class SectionReader:
    """Reads entries of an open log, however long the store does not answer, until the log is `closed`."""

    def __init__(self, log: OpenLog, catch_up: Callable[[], Awaitable[None]], closed: Callable[[], bool]) -> None:
        """`catch_up` lets the state of the channels be the present one."""
        self._objects, self._cache, self._catch_up, self._closed = log.objects, log.cache, catch_up, closed

    async def following(self, channel: StoredChannel, behind: bytes, most: int = READ_SECTIONS) -> list[Entry]:
        """The next entries behind an id, of so many sections at most; none at the end, and where the log is closed.
        Raises `PositionLost` and `CorruptLog`."""
        for pause_s in pauses():
            wanted = self._wanted(channel, behind, most)
            with suppress(Unavailable):
                parts = await asyncio.gather(*(self._entries(section) for section, _ in wanted))
                gone = [section.key for (section, _), part in zip(wanted, parts, strict=True) if part is None]
                if not gone:
                    return [entry for part, (_, at) in zip(parts, wanted, strict=True) for entry in (part or [])[at:]]
                await self._catch_up()  # it was deleted while this process did not look
                if any(section.key in gone for section, _ in self._wanted(channel, behind, most)):
                    raise CorruptLog(f"{gone[0]} is not there any more", path=gone[0], offset=0)
                continue
            await asyncio.sleep(pause_s)
        raise AssertionError("attempts do not end")

    def _wanted(self, channel: StoredChannel, behind: bytes, most: int) -> Sequence[tuple[StoredSection, int]]:
        """The sections to be read next, each with the place of the first entry that is wanted of it."""
        if self._closed():
            return []
        if behind < channel.removed_to:
            raise channel.lost(behind)
        wanted: list[tuple[StoredSection, int]] = []
        size = 0
        for section, at in islice(channel.behind(behind), most):
            wanted.append((section, at))
            size += section.row.length
            if size >= READ_BYTES:
                break
        return wanted

    async def _entries(self, section: StoredSection) -> list[Entry] | None:
        """The entries of a section, None where its object is gone."""
        data = self._cache.section(section.key, section.row) or await self._objects.section(section.key, section.row)
        if data is None:
            return None
        stored = decode_section(data, section.row)
        return [Entry(section.id(at), entry.timestamp, entry.payload) for at, entry in enumerate(stored)]

    async def first_since(self, channel: StoredChannel, timestamp: int) -> bytes | None:
        """The id of the first entry with this timestamp or a later one."""
        behind = channel.removed_to
        while not self._closed():
            following = (section for section, _ in channel.behind(behind) if section.row.max_timestamp >= timestamp)
            section = next(following, None)
            if section is None:
                break
            behind = max(behind, id_before(section.first_id), channel.removed_to)
            for entry in await self.following(channel, behind, 1):
                if entry.timestamp >= timestamp:
                    return entry.id
                behind = entry.id
        return None
