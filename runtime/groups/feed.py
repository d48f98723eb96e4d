"""One channel of a group's member: reads one batch ahead, and knows what was delivered and is not acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

from ..errors import Fenced, InvalidRequest, Overloaded
from ..wal import Delivered, Entry, From, FromId, Wal
from .link import Ack, Share
from .unacknowledged import Plan, Unacknowledged

MAX_UNACKNOWLEDGED_BATCHES = 10_000  # per channel


class Feed:
    """Reads from where the lease began. `ready` is called when there is a batch, an error, or the end of the log."""

    def __init__(self, wal: Wal, channel: str, share: Share, ready: Callable[[Feed], None]) -> None:
        self.channel = channel
        self.lease = share.lease
        self.unacknowledged = Unacknowledged(share.acked_to)
        self.acks_in_flight = 0
        self.committing: list[bytes] = []  # batches whose commit, with outputs, is under way
        self.error: Exception | None = None
        self.ended = False
        self.wanted_back = False
        self._wal = wal
        self._ready = ready
        self._at = share.acked_to  # the last id that was taken, or left out
        self._done_before = set(share.acked)  # single entries to leave out
        self._batch: Sequence[Entry] = ()
        self._taken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read on behind what was taken last."""
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name=f"group feed {self.channel}")

    def start_again(self) -> None:
        """Read on after an error that may pass."""
        self.error, self._task = None, None
        self.start()

    def stop(self) -> asyncio.Task[None] | None:
        """Stop reading and drop what was read ahead. The task that is ending, if there is one."""
        task, self._task = self._task, None
        self._batch = ()
        if task is not None:
            task.cancel()
        return task

    def take(self) -> Delivered | None:
        """The batch that was read ahead, without what was acknowledged before; None if nothing is left of it. Raises
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
        return Delivered(self.channel, entries, self.lease) if entries else None

    def plan(self, delivered: Delivered, ids: Sequence[bytes] | None) -> Plan | None:
        """What to store for an acknowledgement; None when nothing is left to. Raises `Fenced` for another lease."""
        if delivered.lease != self.lease:
            raise lease_over(delivered)
        if not delivered.entries:
            raise InvalidRequest("nothing was delivered, so there is nothing to acknowledge")
        return self.unacknowledged.plan(delivered, ids)

    def ack(self, plan: Plan) -> Ack:
        """The plan as the coordinator wants it."""
        return Ack(self.channel, self.lease, plan.upto, plan.ids)

    async def _read(self) -> None:
        start = FromId(self._at) if self._at else From.EARLIEST
        try:
            entries = cast("AsyncGenerator[Sequence[Entry], None]", self._wal.read(self.channel, start))
            async with aclosing(entries):
                async for self._batch in entries:
                    self._taken.clear()
                    self._ready(self)
                    await self._taken.wait()
            self.ended = True
        except Exception as error:  # whoever iterates gets it, whatever it is
            self.error = error
        self._ready(self)


def lease_over(delivered: Delivered) -> Fenced:
    """The error for an acknowledgement of what another member may have by now."""
    return Fenced(
        f"{delivered.channel} was taken away, or sought in, since this was delivered: it is delivered again",
        channel=delivered.channel,
        term=delivered.lease,
    )
