"""One channel of a group's member: reads one batch ahead, and knows what was delivered and is not acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, cast

from ..errors import Fenced, InvalidRequest, Overloaded
from ..log.wal import Delivered, Entry, From, FromId, Wal
from .coordinator_client import Ack, AssignedChannel
from .unacknowledged import AckPlan, Unacknowledged

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter

MAX_UNACKNOWLEDGED_BATCHES = 10_000  # per channel


class MemberFetcher:
    """Reads `channel` from where its assignment began. `ready` is called when there is a batch, an error, or the end of
    the log."""

    def __init__(
        self,
        wal: Wal,
        channel: str,
        assigned: AssignedChannel,
        ready: Callable[[MemberFetcher], None],
        where: RecordFilter | None = None,
    ) -> None:
        self.channel = channel
        self.where: RecordFilter | None = where  # of the reading that starts next
        self.epoch: int = assigned.epoch
        self.begin: bytes = assigned.acked_to  # the position with which the epoch began
        self.unacknowledged: Unacknowledged = Unacknowledged(assigned.acked_to)
        self.metadata: bytes = assigned.metadata  # of the position, as far as this member knows that it is stored
        self.acks_in_flight = 0
        self.committing: list[bytes] = []  # up to where commits with outputs are under way
        self.error: Exception | None = None
        self.ended: bool = False
        self.revoking = False
        self.paused = False
        self.waiting = False  # has something for the iteration, which is paused
        self._wal = wal
        self._ready = ready
        self._at = assigned.acked_to  # the last id that was taken, or left out
        self._metadata_of = b""  # the position up to which `metadata` was stored
        self._done_before = set(assigned.acked)  # single entries to leave out
        self._batch: Sequence[Entry] = ()
        self._taken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read on behind what was taken last. An error of an earlier task is over: this one meets it again, or not."""
        if self._task is None:
            self.error = None
            self._task = asyncio.create_task(self._read(), name=f"group feed {self.channel}")

    def start_again(self) -> None:
        """Read on after an error that may be transient."""
        self.stop()
        self.start()

    def stop(self) -> asyncio.Task[None] | None:
        """Stop reading and drop what was read ahead. Returns the task that is ending, if there is one."""
        task, self._task = self._task, None
        self._batch = ()
        if task is not None:
            task.cancel()
        return task

    def take(self) -> Delivered | None:
        """The batch that was read ahead, without entries that were acknowledged before; None if none is left. Raises
        `Overloaded` (`limit` "unacknowledged_batches"), and takes nothing then."""
        if len(self.unacknowledged) >= MAX_UNACKNOWLEDGED_BATCHES:
            raise Overloaded(
                f"{MAX_UNACKNOWLEDGED_BATCHES} batches of {self.channel} are not acknowledged; acknowledge them first",
                limit="unacknowledged_batches",
            )
        entries, self._batch = self._batch, ()
        if not entries:
            return None
        self._at = entries[-1].id
        if self._done_before:
            entries = [entry for entry in entries if entry.id not in self._done_before]
            self._done_before = {id for id in self._done_before if id > self._at}
        self.unacknowledged.delivered(entries, self._at)
        self._taken.set()
        return Delivered(self.channel, entries, self.epoch) if entries else None

    def plan(self, delivered: Delivered, ids: Sequence[bytes] | None) -> AckPlan | None:
        """What to store for an acknowledgement; None when nothing is left to store. Raises `Fenced` for what was
        delivered in another assignment epoch, and `InvalidRequest` for `ids` that were not delivered."""
        if delivered.assignment_epoch != self.epoch:
            raise epoch_over(delivered)
        if not delivered.entries:
            raise InvalidRequest("nothing was delivered, so there is nothing to acknowledge")
        return self.unacknowledged.plan(delivered, ids)

    def ack(self, plan: AckPlan, metadata: bytes | None = None) -> Ack:
        """The plan as the coordinator takes it, with the position's metadata (None leaves what is stored)."""
        return Ack(self.channel, self.epoch, plan.upto, plan.ids, metadata)

    def stored(self, plan: AckPlan | None, ack: Ack) -> None:
        """Note that an acknowledgement took effect. Of the metadata of several, that furthest on is left."""
        if plan is not None:
            self.unacknowledged.stored(plan)
        if ack.metadata is not None and (ack.upto is None or ack.upto >= self._metadata_of):
            self.metadata, self._metadata_of = ack.metadata, ack.upto or self._metadata_of

    async def _read(self) -> None:
        start = FromId(self._at) if self._at else From.EARLIEST
        try:
            where = self.where
            read = self._wal.read if where is None else partial(self._wal.read_where, where=where)
            entries = cast("AsyncGenerator[Sequence[Entry], None]", read(self.channel, start))
            async with aclosing(entries):
                async for self._batch in entries:
                    self._taken.clear()
                    self._ready(self)
                    await self._taken.wait()
            self.ended = True
        except Exception as error:  # the member's iteration raises it, whatever it is
            self.error = error
        self._ready(self)


def epoch_over(delivered: Delivered) -> Fenced:
    """The error for an acknowledgement of what another member may have by now."""
    return Fenced(
        f"{delivered.channel} was taken away, or sought in, since this was delivered: it is delivered again",
        channel=delivered.channel,
        term=delivered.assignment_epoch,
    )
