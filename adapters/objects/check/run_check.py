"""The runs of a log, against what the log says of them and against the blocks that they replace."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping

from ....runtime.errors import CorruptLog
from ..block import Block, BlockKind, SectionRow, StoredEntry, decode_block, decode_section
from ..garbage_collector import RUNS
from ..log_objects import LogObjects, run_key
from ..stored_channel import StoredSection, encode_id
from .block_check import block_faults
from .findings import PartReport
from .state_check import piece_ids_ascend

BlockRow = tuple[bytes, str, SectionRow]  # the id of its first entry, the key of its block, and the row


class RunCheck:
    """Checks each run. All coroutines raise `FormatTooNew` and `Unavailable`."""

    def __init__(self, objects: LogObjects, rows: Mapping[int, list[BlockRow]]) -> None:
        """`rows` are those of the blocks that are there, by channel, in order."""
        self._objects, self._rows = objects, rows
        self.report: PartReport = PartReport("runs")
        self.tables: dict[str, frozenset[SectionRow]] = {}
        self.gone: set[str] = set()  # deleted since they were listed
        self._sections: dict[str, dict[int, StoredSection]] = defaultdict(dict)  # by key, and offset in the run

    def know(self, sections: Iterable[StoredSection]) -> None:
        """The log says that these sections are there."""
        for section in sections:
            if section.key.startswith(RUNS):
                self._sections[section.key][section.row.offset] = section

    async def check(self, key: str) -> None:
        """Check the run under this key. One that the log does not name is garbage, which only has to be whole."""
        data = await self._objects.store.get(key)
        if data is None:
            self.report.gone += 1
            self.gone.add(key)
            return
        self.report.objects += 1
        self.report.bytes += len(data)
        try:
            run = self._decode(key, data)
        except CorruptLog as error:
            self.report.found(key, error.message)
            return
        self.tables[key] = frozenset(run.table)
        self.report.entries += sum(row.entries for row in run.table)
        faults = list(block_faults(run))
        for fault in faults:
            self.report.found(key, fault)
        if not faults:
            await self._compare(run, key)

    def _decode(self, key: str, data: bytes) -> Block:
        run = decode_block(data, key)
        header = run.header
        here = run_key(header.epoch, header.number) == key
        if header.kind is not BlockKind.RUN or header.log != self._objects.log or not here:
            raise CorruptLog(f"{key} is no run of this log, or one of another place in it", path=key, offset=6)
        return run

    async def _compare(self, run: Block, key: str) -> None:
        """Compare the entries of a run with those of the blocks that it replaces, as far as these are there."""
        of_block: dict[str, list[tuple[SectionRow, bytes, StoredSection]]] = defaultdict(list)
        for section in self._sections[key].values():
            if section.row not in self.tables[key]:
                self.report.found(key, f"the log says that it has other entries of channel {section.row.channel}")
            elif not piece_ids_ascend(section):
                self.report.found(key, f"the log gives the entries of channel {section.row.channel} no order")
            else:
                for first_id, block, row in self._replaced(section):
                    of_block[block].append((row, first_id, section))
        for block, replaced in of_block.items():
            data = await self._objects.store.get(block)
            for row, first_id, section in replaced if data is not None else ():
                entries = decode_section((data or b"")[row.offset : row.offset + row.length], row)
                fault = _difference(entries, first_id, decode_section(run.section(section.row), section.row), section)
                if fault:
                    self.report.found(key, f"{fault} {block}, which it replaces (channel {row.channel})")

    def _replaced(self, section: StoredSection) -> list[BlockRow]:
        """The rows of blocks whose entries are to be in a section."""
        rows = self._rows.get(section.row.channel, [])
        start = bisect_left(rows, section.first_id, key=lambda row: row[0])
        stop = bisect_left(rows, section.last_id + b"\0", key=lambda row: row[0])
        return rows[start:stop]


def _difference(of_block: list[StoredEntry], first_id: bytes, of_run: list[StoredEntry], section: StoredSection) -> str:
    """How a section of a run differs from one of a block that it replaces; "" where it does not."""
    at = bisect_left(range(section.row.entries), first_id, key=section.id)
    last_id = encode_id(section.epoch, int.from_bytes(first_id[8:]) + len(of_block) - 1)
    last = at + len(of_block) - 1
    if last >= section.row.entries or (section.id(at), section.id(last)) != (first_id, last_id):
        return "it lacks entries of"
    return "" if of_run[at : last + 1] == of_block else "its entries differ from those of"
