"""The blocks of one epoch, one after another, and their effect on the state of the log."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ....runtime.errors import CorruptLog
from ..block import CONTROL, Block, BlockKind, SectionRow, decode_section
from ..control import Compacted, decode_control
from ..log_objects import LogObjects, block_key, claim_key
from ..log_state import LogState
from ..stored_channel import encode_id
from .block_check import block_faults
from .checkpoint_check import CheckpointCheck
from .findings import PartReport
from .run_check import BlockRow, RunCheck

AT_ONCE = 32  # blocks that are read together
FIRST = (1, 0)  # the place of a log's first block


@dataclass(slots=True)
class BlockChain:
    """What the blocks of all epochs so far have come to: the `state` after them, as far as none is missing behind the
    last checkpoint, and the rows of those that are there. `place` follows the last block, with entries from `seq` on,
    where that is known; `missing` are ranges of numbers; `unended` are epochs without an end."""

    objects: LogObjects
    state: LogState
    checkpoints: CheckpointCheck
    runs: RunCheck
    rows: defaultdict[int, list[BlockRow]]
    tables: dict[str, frozenset[SectionRow]] = field(default_factory=dict[str, frozenset[SectionRow]])
    gone: set[str] = field(default_factory=set[str])
    place: tuple[int, int] = FIRST
    seq: int | None = 1
    missing: list[tuple[PartReport, int, range]] = field(default_factory=list[tuple[PartReport, int, range]])
    unended: list[tuple[PartReport, int]] = field(default_factory=list[tuple[PartReport, int]])


class EpochCheck:
    """Checks the blocks of one epoch."""

    def __init__(self, epoch: int, writer: bytes | None, chain: BlockChain) -> None:
        """`writer` is the process that has claimed the epoch, None where that is not known."""
        self.report: PartReport = PartReport(f"epoch {epoch}")
        self._epoch, self._writer, self._chain = epoch, writer, chain
        newest = chain.checkpoints.newest
        self._known_end = newest.ends.get(epoch)
        self._needed = newest.number if epoch == newest.epoch else 0  # from here on none is deleted, unless it ended
        self._expected = 0
        self._end: int | None = None
        self._gap: int | None = None  # the first place without a block, in an epoch that may go on
        self._acked_to = self._stored_ms = 0

    async def run(self, numbers: Sequence[int]) -> PartReport:
        """Check the blocks with these numbers, which ascend. Raises `FormatTooNew` and `Unavailable`."""
        for at in range(0, len(numbers), AT_ONCE):
            some = numbers[at : at + AT_ONCE]
            keys = (block_key(self._epoch, number) for number in some)
            for number, data in zip(some, await asyncio.gather(*map(self._chain.objects.store.get, keys)), strict=True):
                self._pass_over(number)
                if data is None:
                    self.report.gone += 1
                    self._chain.gone.add(block_key(self._epoch, number))
                else:
                    await self._take(number, data)
        if self._known_end is not None and self._known_end not in numbers:
            self.report.found(
                block_key(self._epoch, self._known_end), "it is missing, and ended the epoch: a late owner can write on"
            )
        elif self._known_end is None and self._end is None:
            self._chain.unended.append((self.report, self._epoch))
        return self.report

    def _pass_over(self, number: int) -> None:
        """Note the places without a block up to this one."""
        open_from = number if self._known_end is not None else max(self._expected, self._needed)
        if self._end is None and self._gap is None:
            if self._expected < min(open_from, number):
                self._chain.missing.append((self.report, self._epoch, range(self._expected, min(open_from, number))))
            if open_from < number:
                self._gap = open_from
        self._expected = number + 1

    async def _take(self, number: int, data: bytes) -> None:
        key = block_key(self._epoch, number)
        self.report.objects += 1
        self.report.bytes += len(data)
        try:
            block = self._chain.objects.decode(self._epoch, number, data)
        except CorruptLog as error:
            self.report.found(key, error.message)
            return
        faults = list(block_faults(block))
        for fault in faults:
            self.report.found(key, fault)
        if faults:
            return
        if self._end is not None:
            if block.header.acked_to > self._end:
                self.report.found(key, f"it counts on block {self._end}, which ended the epoch")
        elif self._gap is not None:
            if block.header.acked_to > self._gap or block.header.kind is BlockKind.FENCE:
                self.report.found(block_key(self._epoch, self._gap), f"it is missing, and block {number} followed it")
                self._gap = number
        else:
            await self._follow(key, block)

    async def _follow(self, key: str, block: Block) -> None:
        """Check a block that is in the log, and let it take effect."""
        chain, header = self._chain, block.header
        place = header.epoch, header.number
        await chain.checkpoints.upto(place)
        if header.kind is not BlockKind.DATA:
            if self._known_end not in (None, header.number):
                self.report.found(key, f"it ends the epoch, which by the checkpoints ended at block {self._known_end}")
            self._end = header.number
            if chain.state.place == place:
                chain.state.apply(block)
            chain.seq = chain.seq if chain.place == place else None
            chain.place = header.epoch + 1, 0
            return
        if header.number == self._known_end:
            self.report.found(key, "it has entries where the epoch ended")
            return
        self._check_header(key, block)
        if self._check_controls(key, block):
            self._apply(key, block)

    def _check_header(self, key: str, block: Block) -> None:
        header = block.header
        if self._writer not in (None, header.writer):
            self.report.found(key, "it is of another process than the one that claimed the epoch")
        if header.acked_to < self._acked_to:
            self.report.found(key, f"by it blocks are there up to {header.acked_to}, by one before to {self._acked_to}")
        if header.stored_ms < self._stored_ms:
            self.report.found(key, "it was stored earlier than the one before")
        self._acked_to, self._stored_ms = header.acked_to, header.stored_ms
        for report, epoch in self._chain.unended:
            report.found(claim_key(epoch), f"its epoch has no end, though epoch {header.epoch} has blocks")
        self._chain.unended.clear()

    def _check_controls(self, key: str, block: Block) -> bool:
        """Look at the control entries; whether all can be read."""
        for row in block.table:
            if row.channel == CONTROL:
                for entry in decode_section(block.section(row), row):
                    try:
                        control = decode_control(entry.payload)
                    except (ValueError, TypeError, IndexError, struct.error) as error:
                        self.report.found(key, f"it has a malformed control entry: {error}")
                        return False
                    if isinstance(control, Compacted) and control.epoch == block.header.epoch:
                        self._chain.runs.know(control.sections)
        return True

    def _apply(self, key: str, block: Block) -> None:
        chain, header = self._chain, block.header
        place = header.epoch, header.number
        known = chain.state.place == place
        seq = chain.state.seq if known else chain.seq if chain.place == place else None
        self.report.entries += header.count
        if seq not in (None, header.first_seq):
            self.report.found(key, f"its entries count from {header.first_seq}, not from {seq}")
        elif known:
            chain.state.apply(block)
            for channel in {row.channel for row in block.table if row.channel > chain.state.highest}:
                self.report.found(key, f"it has entries of channel {channel}, which was never created")
        chain.place, chain.seq = (header.epoch, header.number + 1), header.first_seq + header.count
        chain.tables[key] = frozenset(block.table)
        for row in block.table:
            chain.rows[row.channel].append((encode_id(header.epoch, row.first_seq), key, row))
