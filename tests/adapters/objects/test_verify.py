"""The check of a log finds each fault that is planted in it, and none in a log as its owners leave it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import pytest

from tests.adapters.objects.processes import QUICK, Processes, until_owned
from tests.adapters.objects.simulated_store import Objects, SimulatedStore
from tidewal.adapters.objects import compactor
from tidewal.adapters.objects.block import (
    Block,
    BlockKind,
    Section,
    StoredEntry,
    decode_block,
    decode_section,
    encode_block,
    join_block,
)
from tidewal.adapters.objects.check.findings import PartReport
from tidewal.adapters.objects.check.verify import verify_objects
from tidewal.adapters.objects.checkpoint import decode_checkpoint, encode_checkpoint
from tidewal.adapters.objects.log_objects import block_key, claim_key
from tidewal.adapters.objects.log_state import LogState
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.wal import Append, ChannelPolicy
from tidewal.runtime.testing.clock import elapse, run_virtual

CHANNELS = ("a", "b", "c")
W = b"w" * 16
ROUNDS = 8


@dataclass
class MadeLog:
    """A log whose owner was killed, and that goes on with another one: a dict of objects to plant faults in."""

    objects: Objects

    @property
    def bodies(self) -> dict[str, bytes]:
        return self.objects.bodies

    def keys(self, folder: str) -> list[str]:
        return sorted(key for key in self.bodies if key.startswith(folder))

    def block(self, key: str) -> Block:
        return decode_block(self.bodies[key], key)

    def change_header(self, key: str, **values: Any) -> None:
        """Give a block other values in its header, with right checksums."""
        block = self.block(key)
        sections = [Section(row, block.section(row)) for row in block.table]
        self.bodies[key] = join_block(replace(block.header, **values), sections).data

    def change_rows(self, key: str, **values: Any) -> None:
        """Give the first row of a block's table other values, with right checksums."""
        block = self.block(key)
        (first, *others) = [Section(row, block.section(row)) for row in block.table]
        changed = Section(first.row._replace(**values), first.data)
        self.bodies[key] = join_block(block.header, [changed, *others]).data

    def change_checkpoint(self, key: str, change: Callable[[LogState], None]) -> None:
        """Let a checkpoint say something else, with a right checksum."""
        log = bytes(msgpack.unpackb(self.bodies["format"])["log"])
        state = decode_checkpoint(self.bodies[key], key, log)
        change(state)
        self.bodies[key] = encode_checkpoint(log, W, state)


async def _make(objects: Processes, *, keep: bool) -> MadeLog:
    owner = await objects.owner(*CHANNELS)
    for at in range(60):
        ids = await owner.wal.append_many([Append(each, b"%d" % at, timestamp=at) for each in CHANNELS])
        if at == 20:
            await owner.wal.hold("a", "backup", ids[0])
            await owner.wal.truncate("b", ids[1])
        await elapse(0.5)
    group = await owner.wal.join("workers", ["c"])
    await group.acknowledge(await anext(group))
    objects.kill(owner)
    successor = await objects.open()
    await until_owned(successor, "a")
    for at in range(30):
        await successor.wal.append("a", b"more%d" % at)
    await elapse(2 * QUICK.turn_s)
    if not keep:
        await elapse(3 * QUICK.grace_s)
    await successor.wal.append("a", b"last")
    objects.kill(successor)
    return MadeLog(objects.objects)


def made(*, keep: bool = True) -> MadeLog:
    """A log of two epochs, with checkpoints and runs; all of its blocks are there where they are to be kept."""
    pace = replace(QUICK, grace_s=1e6) if keep else QUICK
    return run_virtual(_make(Processes(pace=pace), keep=keep))


def checked(log: MadeLog) -> list[PartReport]:
    before = dict(log.bodies)

    async def main() -> list[PartReport]:
        return await verify_objects(SimulatedStore(log.objects))

    reports = run_virtual(main())
    assert log.bodies == before
    return reports


def findings(reports: Sequence[PartReport]) -> list[tuple[str, str]]:
    return [(finding.key, finding.what) for report in reports for finding in report.findings]


@pytest.mark.parametrize("keep", [True, False])
def test_a_log_as_its_owners_leave_it_is_intact(keep: bool) -> None:
    log = made(keep=keep)
    reports = {report.part: report for report in checked(log)}
    assert findings(list(reports.values())) == []
    assert set(reports) == {"claims", "epoch 1", "epoch 2", "checkpoints", "runs", "channels"}
    assert reports["runs"].objects
    assert reports["checkpoints"].objects
    assert (block_key(1, 0) in log.bodies) is keep
    assert reports["channels"].entries >= 60 + 12


def _flip(folder: str, at: int = -1) -> Callable[[MadeLog], str]:
    def plant(log: MadeLog) -> str:
        key = log.keys(folder)[at]
        log.bodies[key] = log.bodies[key][:-1] + bytes([log.bodies[key][-1] ^ 1])
        return key

    return plant


def _remove(folder: str, at: int) -> Callable[[MadeLog], str]:
    def plant(log: MadeLog) -> str:
        key = log.keys(folder)[at]
        del log.bodies[key]
        return key

    return plant


def _header(number: int, **values: Any) -> Callable[[MadeLog], str]:
    def plant(log: MadeLog) -> str:
        log.change_header(block_key(1, number), **values)
        return block_key(1, number)

    return plant


def _row(**values: Any) -> Callable[[MadeLog], str]:
    def plant(log: MadeLog) -> str:
        log.change_rows(block_key(1, 10), **values)
        return block_key(1, 10)

    return plant


def _checkpoint(change: Callable[[LogState], None]) -> Callable[[MadeLog], str]:
    def plant(log: MadeLog) -> str:
        key = log.keys("checkpoint/")[-1]
        log.change_checkpoint(key, change)
        return key

    return plant


def _fence_overwritten(log: MadeLog) -> str:
    fence = next(key for key in log.keys("l0/") if log.block(key).header.kind is BlockKind.FENCE)
    header = log.block(fence).header
    log.bodies[fence] = encode_block(replace(header, kind=BlockKind.DATA), {1: [StoredEntry(0, b"late")]}).data
    return fence


def _fence_removed(log: MadeLog) -> str:
    fence = next(key for key in log.keys("l0/") if log.block(key).header.kind is BlockKind.FENCE)
    del log.bodies[fence]
    return fence


def _fence_removed_before_a_checkpoint(log: MadeLog) -> str:
    for key in log.keys("checkpoint/"):
        del log.bodies[key]
    _fence_removed(log)
    return claim_key(1)


def _other_entries(log: MadeLog) -> str:
    """A block that a run has replaced has had another entry."""
    key = block_key(1, 10)
    block = log.block(key)
    entries = {row.channel: decode_section(block.section(row), row) for row in block.table}
    entries[1] = [StoredEntry(entries[1][0].timestamp, b"other")]
    log.bodies[key] = encode_block(block.header, entries).data
    return log.keys("run/")[0]


def _numbered_anew(log: MadeLog) -> str:
    key = block_key(1, 7)
    block = log.block(key)
    entries = {row.channel: decode_section(block.section(row), row) for row in block.table}
    log.bodies[key] = encode_block(replace(block.header, first_seq=10_000), entries).data
    return key


def _malformed_control(log: MadeLog) -> str:
    key = block_key(1, 0)
    log.bodies[key] = encode_block(log.block(key).header, {0: [StoredEntry(0, b"\xc1")]}).data
    return key


def _old_checkpoint_made_late(log: MadeLog) -> str:
    first, *_, newest = log.keys("checkpoint/")
    late = f"checkpoint/{int(newest[-16:], 16) + 1:016x}"
    log.bodies[late] = log.bodies[first]
    return late


def _claimed_by_another(log: MadeLog) -> str:
    log.bodies[claim_key(1)] = msgpack.packb({"version": 1, "writer": W})
    return block_key(1, 3)


def _moved(log: MadeLog) -> str:
    log.bodies[block_key(1, 5)] = log.bodies[block_key(1, 6)]
    return block_key(1, 5)


def _channel(state: LogState, name: str) -> Any:
    return state.names[name]


def _unknown_channel(log: MadeLog) -> str:
    key = log.keys("l0/")[-1]
    log.change_rows(key, channel=99)
    return key


PLANTED: dict[str, tuple[Callable[[MadeLog], str], str]] = {
    "bit of a block": (_flip("l0/0000000000000001/", 12), "not what was written"),
    "bit of a run": (_flip("run/"), "not what was written"),
    "bit of a checkpoint": (_flip("checkpoint/"), "not what was written"),
    "bit of an old checkpoint": (_flip("checkpoint/", 0), "not what was written"),
    "claim that is none": (lambda log: log.bodies.update({claim_key(1): b"\xc1"}) or claim_key(1), "is no claim"),
    "missing claim": (_remove("claim/", 0), "is missing"),
    "missing newest claim": (_remove("claim/", 1), "is missing"),
    "missing run": (_remove("run/", -1), "is missing"),
    "missing block with entries": (_remove("l0/0000000000000002/", -3), "is missing"),
    "fence removed": (_fence_removed, "ended the epoch"),
    "fence removed, no checkpoint": (_fence_removed_before_a_checkpoint, "has no end"),
    "fence overwritten": (_fence_overwritten, "has entries where the epoch ended"),
    "block in another place": (_moved, "of another place"),
    "block of another process": (_claimed_by_another, "another process"),
    "numbers with a gap": (_numbered_anew, "count from 10000"),
    "header and table": (_header(7, first_seq=10_000), "not from 10000"),
    "count of entries": (_header(7, count=9), "it counts 9 entries, and has 3"),
    "acked_to ahead": (_header(7, acked_to=9), "itself among them"),
    "acked_to back": (_header(9, acked_to=0), "are there up to 0"),
    "time back": (_header(9, stored_ms=1), "earlier than the one before"),
    "number of a section's first entry": (_row(first_seq=10_000), "count from"),
    "timestamps of a section": (_row(max_timestamp=10_000), "is not what its row"),
    "unknown channel": (_unknown_channel, "never created"),
    "malformed control entry": (_malformed_control, "malformed control entry"),
    "entries that a run has otherwise": (_other_entries, "its entries differ from those of"),
    "checkpoint out of order": (_old_checkpoint_made_late, "earlier place"),
    "hold": (_checkpoint(lambda state: _channel(state, "a").holds.clear()), "its holds"),
    "truncation": (_checkpoint(lambda state: setattr(_channel(state, "b"), "removed_to", b"\0" * 16)), "removed up to"),
    "position of a group": (_checkpoint(lambda state: _channel(state, "c").groups.clear()), "positions of its groups"),
    "sections": (_checkpoint(lambda state: _channel(state, "a").sections.pop(0)), "lie elsewhere"),
    "order of sections": (_checkpoint(lambda state: _channel(state, "a").sections.reverse()), "not above the one"),
    "policy": (
        _checkpoint(lambda state: setattr(_channel(state, "a"), "policy", ChannelPolicy(retention_s=1))),
        "name or policy",
    ),
    "next entry": (_checkpoint(lambda state: setattr(state, "seq", state.seq + 1)), "the next entry"),
    "last channel": (_checkpoint(lambda state: setattr(state, "highest", 9)), "was created last"),
    "ends of epochs": (_checkpoint(lambda state: setattr(state, "ends", {})), "ends of epochs"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found_and_named(planted: str) -> None:
    plant, what = PLANTED[planted]
    log = made()
    key = plant(log)
    found = findings(checked(log))
    assert any(at == key and what in said for at, said in found), found


def test_a_run_that_lacks_entries_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(*arguments: Any) -> Any:
        for group in groups(*arguments):
            yield [*group[:1], *group[2:]]

    groups = compactor._groups
    monkeypatch.setattr(compactor, "_groups", lossy)
    log = made()
    monkeypatch.undo()
    assert any(key.startswith("run/") and "lacks entries of" in what for key, what in findings(checked(log)))


def test_a_missing_block_is_found_behind_deleted_ones() -> None:
    log = made(keep=False)
    newest = log.keys("l0/")[-2]
    del log.bodies[newest]
    assert any(key == newest and "missing" in what for key, what in findings(checked(log)))


def test_an_epoch_that_is_gone_is_found() -> None:
    """No process that opens such a log gets behind it."""

    async def make() -> MadeLog:
        processes = Processes()
        for number in range(3):
            owner = await processes.open() if number else await processes.owner("a")
            await until_owned(owner, "a")
            await owner.wal.append("a", b"%d" % number)
            processes.kill(owner)
        return MadeLog(processes.objects)

    log = run_virtual(make())
    assert findings(checked(log)) == []
    for key in log.keys(f"l0/{2:016x}/"):
        del log.bodies[key]
    assert [key for key, _ in findings(checked(log))] == [claim_key(2)]


def test_a_block_that_one_list_lacks_is_no_fault() -> None:
    """A directory may list a new file and lack an older one that is there."""

    class LackingStore(SimulatedStore):
        lists = 0

        async def list(self, prefix: str) -> AsyncIterator[str]:
            self.lists += prefix == "l0/"
            async for key in super().list(prefix):
                if key != lacked or self.lists != 1:
                    yield key

    log = made()
    lacked = log.keys("l0/")[-2]
    assert findings(run_virtual(verify_objects(LackingStore(log.objects)))) == []


class DeletingStore(SimulatedStore):
    """What lies below `folder` is deleted before a read of it, behind so many `reads`."""

    def __init__(self, objects: Objects, folder: str, reads: int = 0) -> None:
        super().__init__(objects)
        self._folder, self._reads = folder, reads

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        if key.startswith(self._folder):
            self._reads -= 1
            if self._reads < 0:
                self.objects.bodies.pop(key, None)
        return await super().get(key, start, end)


def unchecked(reports: Sequence[PartReport]) -> dict[str, set[str]]:
    """The keys of what was not checked, by part."""
    return {report.part: {each.key for each in report.unchecked} for report in reports if report.state == "unchecked"}


def test_entries_of_runs_that_are_deleted_behind_the_list_are_unchecked() -> None:
    log = made(keep=False)
    runs = set(log.keys("run/"))
    reports = run_virtual(verify_objects(DeletingStore(log.objects, "run/")))
    assert findings(reports) == []
    assert runs
    assert unchecked(reports) == {"channels": runs}


def test_channels_behind_blocks_that_are_deleted_before_they_are_read_are_unchecked() -> None:
    log = made()
    last = log.keys("l0/")[-1]
    reports = run_virtual(verify_objects(DeletingStore(log.objects, last)))
    assert findings(reports) == []
    assert unchecked(reports) == {"channels": {last}}


def test_garbage_that_is_deleted_before_it_is_read_leaves_nothing_unchecked() -> None:
    log = made()
    reports = run_virtual(verify_objects(DeletingStore(log.objects, f"l0/{1:016x}/{0:016x}")))
    assert [(report.part, report.gone) for report in reports if report.gone] == [("epoch 1", 1)]
    assert (findings(reports), unchecked(reports)) == ([], {})


def test_the_newest_checkpoint_is_read_once_and_counts_when_it_is_deleted_then() -> None:
    log = made()
    newest = log.keys("checkpoint/")[-1]
    header_and_whole = 2
    reports = run_virtual(verify_objects(DeletingStore(log.objects, newest, header_and_whole)))
    assert newest in log.bodies
    assert (findings(reports), unchecked(reports)) == ([], {})


def test_keys_of_another_form_are_not_of_the_log() -> None:
    log = made()
    log.bodies[f"l0/{9:016x}"] = b"a stranger's"
    assert findings(checked(log)) == []


def test_a_log_is_intact_while_its_owner_works() -> None:
    """Blocks are on their way, and behind a gap; objects are deleted while they are read."""

    async def main() -> list[list[PartReport]]:
        processes = Processes(pace=QUICK)
        owner = await processes.owner(*CHANNELS)
        found: list[list[PartReport]] = []

        async def write() -> None:
            while len(found) < ROUNDS:
                some = [owner.wal.append(each, b"x" * 100) for each in CHANNELS for _ in range(5)]
                ids = await asyncio.gather(*some)
                await owner.wal.truncate("b", ids[5])
                await asyncio.sleep(0.5)

        writing = asyncio.ensure_future(write())
        while len(found) < ROUNDS:
            await elapse(3)
            found.append(await verify_objects(SimulatedStore(processes.objects, len(found))))
        await writing
        await processes.close()
        return found

    found = run_virtual(main())
    assert [findings(reports) for reports in found] == [[]] * ROUNDS


def test_a_prefix_without_a_log_is_no_intact_one() -> None:
    with pytest.raises(Unavailable, match="there is no log"):
        run_virtual(verify_objects(SimulatedStore(Objects())))
