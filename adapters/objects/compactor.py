"""Make runs: objects that have the entries of many blocks, joined by channel, so that the blocks can be deleted.

Else a block would stay as long as any channel needs an entry of it, and reading one channel would cost a request for
each few of its entries. A run is made of what the owner knows of the log, and takes effect by an entry in the log.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Final

from ...runtime.errors import CorruptLog
from .block import HEADER_BYTES, Block, BlockHeader, BlockKind, Section, check_section, join_block, join_sections
from .control import Compacted, Control
from .garbage_collector import BLOCKS
from .log_objects import place_of_block, run_key
from .open_log import OpenLog
from .stored_channel import Piece, StoredChannel, StoredSection

AT_ONCE: Final = 32  # objects that are read together


class Compactor:
    """The runs that one process makes as the log's owner."""

    def __init__(self, log: OpenLog, commit: Callable[[Sequence[Control]], Awaitable[None]]) -> None:
        """`commit` stores control entries."""
        self._objects, self._state, self._cache, self._time = log.objects, log.state, log.cache, log.time
        self._pace, self._commit = log.pace, commit
        self._numbers = count()

    async def compact(self) -> bool:
        """Make a run where one is due; whether it was. Raises `Unavailable` and `CorruptLog`."""
        sources = self._sources()
        if not sources:
            return False
        epoch, number = self._state.epoch, next(self._numbers)
        key = run_key(epoch, number)
        groups = [
            group for channel in self._state.channels() for group in _groups(channel, sources, self._pace.section_bytes)
        ]
        header = BlockHeader(
            BlockKind.RUN, self._objects.log, self._objects.writer, epoch, number, 0, stored_ms=self._time.now_ms()
        )
        run = join_block(header, _joined(groups, await self._read(sorted(sources))))
        if await self._objects.create(key, run.data, HEADER_BYTES) is not None:
            raise CorruptLog(f"{key} is a run of another process in this one's epoch", path=key, offset=24)
        await self._commit([Compacted(epoch, number, list(_sections_of(run, key, groups)))])
        return True

    def _sources(self) -> Collection[str]:
        """The keys of the objects that are to be joined: the oldest blocks with entries, and runs of which little is
        needed, as long as each of these adds no more than what is there by then."""
        live: dict[str, int] = defaultdict(int)
        for channel in self._state.channels():
            for section in channel.sections:
                live[section.key] += section.row.length
        blocks = sorted(key for key in live if key.startswith(BLOCKS))
        pace = self._pace
        if not blocks or (
            sum(live[key] for key in blocks) < pace.run_bytes
            and self._state.blocks_since(place_of_block(blocks[0])) < pace.run_blocks
        ):
            return ()
        taken: list[str] = []
        size = 0
        for key in blocks:
            if size >= pace.run_bytes:
                break
            taken.append(key)
            size += live[key]
        for _, key in sorted((live[key], key) for key in live.keys() - set(blocks)):
            if live[key] > min(size, pace.run_bytes // 2) or size + live[key] > 2 * pace.run_bytes:
                break
            taken.append(key)
            size += live[key]
        return set(taken)

    async def _read(self, keys: Sequence[str]) -> Mapping[str, bytes]:
        """The objects, from the cache as far as it has them."""
        found = {key: self._cache.block(key) for key in keys}
        missing = [key for key in keys if found[key] is None]
        for at in range(0, len(missing), AT_ONCE):
            some = missing[at : at + AT_ONCE]
            found |= zip(some, await asyncio.gather(*map(self._objects.store.get, some)), strict=True)
        for key, data in found.items():
            if data is None:
                raise CorruptLog(f"{key} is not there any more", path=key, offset=0)
        return {key: data for key, data in found.items() if data is not None}


def _groups(channel: StoredChannel, sources: Collection[str], limit: int) -> Iterator[list[StoredSection]]:
    """The sections of a channel in these objects, in groups that become one section each, up to so many bytes."""
    group: list[StoredSection] = []
    size = 0
    for section in channel.sections:
        chosen = section.key in sources
        if group and (not chosen or section.epoch != group[0].epoch or size + section.row.length > limit):
            yield group
            group, size = [], 0
        if chosen:
            group.append(section)
            size += section.row.length
    if group:
        yield group


def _joined(groups: Sequence[Sequence[StoredSection]], data: Mapping[str, bytes]) -> list[Section]:
    joined: list[Section] = []
    for group in groups:
        sections: list[Section] = []
        for key, _, _, row, _ in group:
            section = memoryview(data[key])[row.offset : row.offset + row.length]
            check_section(section, row, key)
            sections.append(Section(row, section))
        joined.append(join_sections(sections))
    return joined


def _sections_of(run: Block, key: str, groups: Sequence[Sequence[StoredSection]]) -> Iterator[StoredSection]:
    """Where the entries of each group are in the run."""
    for row, group in zip(run.table, groups, strict=True):
        stored_ms = max(section.stored_ms for section in group)
        yield StoredSection(key, group[0].epoch, stored_ms, row, _pieces(group))


def _pieces(group: Sequence[StoredSection]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    before = 0
    for section in group:
        for at, first_seq in section.pieces:
            at += before
            if not pieces or first_seq - pieces[-1].first_seq != at - pieces[-1].at:
                pieces.append(Piece(at, first_seq))
        before += section.row.entries
    return tuple(pieces)
