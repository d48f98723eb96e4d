"""Check a log on object storage: read every object of it, from the store alone, and report what is wrong.

The blocks are applied in order, as a process that opens the log does with the last of them. So each checkpoint is
compared with what the blocks before it have come to, as far as they are there, and each run with the blocks that it
replaces. An owner may write meanwhile: what it puts later is not looked at, and what it deletes is no damage. Memory is
bounded by the number of sections, as in any process that has the log open.

Meanwhile an owner may move entries into a new run, or make a new checkpoint, and delete what the check was still to
read. The report says then that it is unchecked: where its entries lie now is not looked at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from ....runtime.errors import CorruptLog, Unavailable
from ..garbage_collector import BLOCKS, RUNS
from ..log_objects import LogObjects, block_key, claim_key, place_of_block
from ..log_state import LogState
from ..store import ObjectStore
from .checkpoint_check import CheckpointCheck
from .epoch_check import BlockChain, EpochCheck
from .findings import PartReport
from .run_check import BlockRow, RunCheck
from .state_check import order_faults

CLAIMS = "claim/"
END = (1 << 64, 0)  # a place behind all blocks
_NUMBERED = re.compile(r"claim/[0-9a-f]{16}|(l0|run)/[0-9a-f]{16}/[0-9a-f]{16}")


async def verify_objects(store: ObjectStore) -> list[PartReport]:
    """What the parts of the log in a store hold: claims, each epoch, checkpoints, runs, channels. Raises `CorruptLog`
    where the store does not say which log it is, `FormatTooNew`, and `Unavailable`, also where there is no log."""
    objects = LogObjects(store)
    if not await objects.look():
        raise Unavailable("there is no log")
    return await LogCheck(objects).run()


class LogCheck:
    """One pass over all objects of a log."""

    def __init__(self, objects: LogObjects) -> None:
        self._objects = objects
        self._state = LogState()
        rows: defaultdict[int, list[BlockRow]] = defaultdict(list)
        self._runs = RunCheck(objects, rows)
        self._checkpoints = CheckpointCheck(objects, self._state, self._know)
        self._chain = BlockChain(objects, self._state, self._checkpoints, self._runs, rows)
        self._claims, self._channels = PartReport("claims"), PartReport("channels")

    async def run(self) -> list[PartReport]:
        """The reports of all parts. What names other objects is listed before them, so these are there."""
        await self._checkpoints.look()
        blocks: dict[int, list[int]] = defaultdict(list)
        for epoch, number in await self._places():
            blocks[epoch].append(number)
        runs = await self._listed(RUNS)
        writers = await self._check_claims()
        epochs: list[PartReport] = []
        before = {epoch for epoch in writers if epoch < max(blocks, default=0)}  # each has its end at least
        for epoch in sorted({*blocks, *before, *self._checkpoints.newest.ends}):
            if epoch not in writers:
                self._claims.found(claim_key(epoch), "it is missing, though its epoch has blocks")
            epochs.append(await EpochCheck(epoch, writers.get(epoch), self._chain).run(blocks[epoch]))
        await self._checkpoints.upto(END)
        for key in runs:
            await self._runs.check(key)
        self._check_missing()
        if self._followed:
            self._check_channels()
        else:
            self._channels.missed(block_key(*self._state.place), self._not_followed())
        return [self._claims, *epochs, self._checkpoints.report, self._runs.report, self._channels]

    async def _listed(self, folder: str) -> list[str]:
        return sorted([key async for key in self._objects.store.list(folder) if _NUMBERED.fullmatch(key)])

    async def _places(self) -> list[tuple[int, int]]:
        """The places of blocks. While a store lists them an owner puts more, of which a list may have a later one and
        lack an earlier one: all before a block of one list are in the next one."""
        first, second = [set(map(place_of_block, await self._listed(BLOCKS))) for _ in range(2)]
        last = max(first, default=(0, 0))
        return sorted(place for place in first | second if place <= last)

    def _know(self, state: LogState) -> None:
        for channel in state.channels():
            self._runs.know(channel.sections)

    @property
    def _followed(self) -> bool:
        """Whether the state is that after the last block that was listed."""
        lost = any(place_of_block(key) >= self._state.place for key in self._chain.gone)
        return self._state.place >= self._chain.place and not lost

    async def _check_claims(self) -> Mapping[int, bytes | None]:
        """The process that has claimed each epoch, None where its claim is damaged."""
        writers: dict[int, bytes | None] = {}
        for key in await self._listed(CLAIMS):
            epoch = int(key.removeprefix(CLAIMS), 16)
            for missing in range(max(writers, default=0) + 1, epoch):
                self._claims.found(claim_key(missing), f"it is missing, though epoch {epoch} is claimed")
                writers[missing] = None
            self._claims.objects += 1
            try:
                claimant = await self._objects.claimant(epoch)
                writers[epoch] = None if claimant is None else claimant.writer
            except CorruptLog as error:
                self._claims.found(key, error.message)
                writers[epoch] = None
        return writers

    def _check_missing(self) -> None:
        """Blocks are deleted that are before the newest checkpoint and before the first that has entries."""
        needed = self._checkpoints.newest.place
        if self._followed:
            sections = (section for channel in self._state.channels() for section in channel.sections)
            live = (section.key for section in sections if section.key.startswith(BLOCKS))
            needed = min(needed, place_of_block(min(live, default=block_key(*needed))))
        for report, epoch, numbers in self._chain.missing:
            lacking = [number for number in (numbers.start, numbers.stop - 1) if (epoch, number) >= needed]
            if lacking:
                first = max(numbers.start, needed[1]) if epoch == needed[0] else numbers.start
                report.found(block_key(epoch, first), f"blocks {first} to {lacking[-1]} are missing")

    def _not_followed(self) -> str:
        deleted = block_key(*self._state.place) in self._chain.gone
        how = "it was deleted before it was read" if deleted else "it is missing or damaged"
        return f"{how}: the channels as they are behind it are not checked"

    def _check_channels(self) -> None:
        """Whether all entries are where the state says."""
        tables = self._chain.tables | self._runs.tables
        gone = self._runs.gone | self._chain.gone
        known = {finding.key for finding in self._runs.report.findings} | gone
        for channel in self._state.channels():
            self._channels.objects += 1
            for fault in order_faults(channel):
                self._channels.found(channel.name, fault)
            for section in channel.sections:
                self._channels.entries += section.row.entries
                self._channels.bytes += section.row.length
                table = tables.get(section.key)
                if section.key in gone:
                    entries = f"its {section.row.entries} entries of channel {channel.name} are not checked"
                    self._channels.missed(section.key, f"it was deleted before it was read: {entries}")
                if table is None and section.key not in known:
                    self._channels.found(section.key, f"it is missing, and has entries of channel {channel.name}")
                elif table is not None and section.row not in table:
                    self._channels.found(section.key, f"it has other entries of channel {channel.name} than are known")
