"""Faults that are planted in the log on object storage: the simulation finds each. So what it does not find is worth
something."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.adapters.objects.simulation.driver import LogViolation, simulate_log
from tidewal.adapters.objects.block import Block
from tidewal.adapters.objects.block_writer import BlockWriter
from tidewal.adapters.objects.checkpoints import Checkpoints
from tidewal.adapters.objects.committer import Committer
from tidewal.adapters.objects.garbage_collector import GarbageCollector
from tidewal.adapters.objects.log_objects import LogObjects, block_key
from tidewal.adapters.objects.ownership import Ownership
from tidewal.adapters.objects.pace import MaintenancePace
from tidewal.adapters.objects.submits import channels_of, make_block
from tidewal.runtime.errors import Fenced, TidewalError, Unavailable

SEEDS = 200
FOUND_BY = {  # seeds that have found a fault, and are tried first
    "retry_batched_again": 139,
    "garbage_deleted_before_the_checkpoint": 4,
    "strong_read_not_confirmed": 4,
    "missing_block_always_the_end": 12,
    "checkpoints_counted_by_each_process": 7,
}

Plant = Callable[[pytest.MonkeyPatch], None]


def fence_skipped(patch: pytest.MonkeyPatch) -> None:
    """A new owner begins behind what it has found of the lower epochs, and ends none of them."""

    async def end_none(self: Ownership, epoch: int) -> None:
        state = self._state
        while state.epoch < epoch:
            state.ends[state.epoch] = state.number
            state.epoch, state.number = state.epoch + 1, 0

    patch.setattr(Ownership, "_end_lower_epochs", end_none)


def acknowledged_before_the_put(patch: pytest.MonkeyPatch) -> None:
    """A block counts as durable when its first request has been sent."""
    put = LogObjects.put

    async def put_later(self: LogObjects, block: Block) -> None:
        with suppress(TidewalError):
            await put(self, block)

    async def acknowledge(self: LogObjects, block: Block) -> None:
        asyncio.get_running_loop().create_task(put_later(self, block))

    patch.setattr(LogObjects, "put", acknowledge)


def retry_batched_again(patch: pytest.MonkeyPatch) -> None:
    """A block whose attempt has failed takes along what was submitted since, and what this process has written in its
    place counts as this block."""

    async def put(writer: BlockWriter, committer: Committer, block: Block) -> None:
        objects, header = committer._objects, block.header
        while True:
            with suppress(Unavailable):
                if await objects.store.create(block_key(header.epoch, header.number), block.data):
                    return
            with suppress(Unavailable):
                found = await objects.block(header.epoch, header.number)
                if found is not None and found.header.writer == header.writer:
                    return
                if found is not None:
                    raise Fenced("another process owns the log now")
            block = batched_again(writer, committer, block)
            await asyncio.sleep(0.1)

    def batched_again(writer: BlockWriter, committer: Committer, block: Block) -> Block:
        if not committer._queue or writer._inflight[-1][0] is not block:
            return block
        (_, submits), (_, task) = committer._inflight.pop(), writer._inflight.pop()
        batch = [(submit, channels_of(committer._state, submit.entries)) for submit in submits]
        batch += committer._take()
        again = make_block(block.header, batch)
        committer._seq = block.header.first_seq + again.header.count
        committer._inflight.append((again, [submit for submit, _ in batch]))
        writer._inflight.append((again, task))
        return again

    def begin_to_put(self: BlockWriter, block: Block) -> None:
        committer = self._durable.__self__  # type: ignore[attr-defined]
        task = asyncio.get_running_loop().create_task(put(self, committer, block))
        self._inflight.append((block, task))
        self._idle.clear()
        task.add_done_callback(self._on_done)

    patch.setattr(BlockWriter, "put", begin_to_put)


def garbage_deleted_before_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """Blocks without entries that are needed are garbage, whether a checkpoint has what they have changed or not."""
    note = GarbageCollector.note

    def note_all(self: GarbageCollector) -> None:
        place, self._checkpoints.place = self._checkpoints.place, self._state.place
        note(self)
        self._checkpoints.place = place

    patch.setattr(GarbageCollector, "note", note_all)


def strong_read_not_confirmed(patch: pytest.MonkeyPatch) -> None:
    """An owner answers from its memory, deposed or not."""

    async def confirm(_: Ownership) -> None:
        pass

    patch.setattr(Ownership, "confirm", confirm)


def missing_block_always_the_end(patch: pytest.MonkeyPatch) -> None:
    """A block that is not there was never deleted, however long this process has not looked."""
    patch.setattr(MaintenancePace, "overtaken_s", float("inf"))


def checkpoints_counted_by_each_process(patch: pytest.MonkeyPatch) -> None:
    """An owner does not look for checkpoints that others have made since it opened the log."""

    async def never(_: Checkpoints) -> bool:
        return False

    patch.setattr(Checkpoints, "_overtaken", never)


PLANTED: list[Plant] = [
    fence_skipped,
    acknowledged_before_the_put,
    retry_batched_again,
    garbage_deleted_before_the_checkpoint,
    strong_read_not_confirmed,
    missing_block_always_the_end,
    checkpoints_counted_by_each_process,
]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    logging.getLogger("tidewal").setLevel(logging.CRITICAL)
    plant(monkeypatch)
    for number in [FOUND_BY.get(plant.__name__, seed), *range(seed, seed + SEEDS)]:
        try:
            simulate_log(number)
        except LogViolation:
            return
    raise AssertionError(f"not found in {SEEDS} logs")
