"""Who may write to the log: claim it where no process owns it, and notice where another one does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from ...runtime.errors import Closed, Unavailable
from .block import BlockKind
from .committer import Committer
from .log_objects import Claimant
from .log_tail import LogTail
from .open_log import OpenLog

if TYPE_CHECKING:
    pass

CAP_BLOCKS: Final = 64  # how far behind its last block an owner gets while another process ends its epoch
LOOKS: Final = 10  # how often a process looks at the log during a lease


class Ownership:
    """The claims of one process on the log.

    Epoch e is owned by the process that created the claim on it. It begins to write once all lower epochs have ended,
    that is once each has a fence in the first place without a block, where its owner has to put the next one. The claim
    comes before the fences, so of two that race the higher claim fences the lower one's epoch too.
    """

    def __init__(
        self,
        log: OpenLog,
        tail: LogTail,
        committer: Committer,
        check: Callable[[], Awaitable[None]],
        listen: Callable[[], Awaitable[str]],
        acquired: Callable[[], None],
    ) -> None:
        """`check` raises where this process may not own the log as it is now. `listen` lets other processes connect to
        this one, and returns where; `acquired` is called when this process has begun to own the log."""
        self._objects, self._state, self._tail = log.objects, log.state, tail
        self._committer, self._time, self._settings = committer, log.time, log.settings
        self._check, self._listen, self._acquired = check, listen, acquired
        self._acquiring: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        self._confirming_next: asyncio.Task[None] | None = None

    @property
    def owns(self) -> bool:
        """Whether this process owns the log, as far as it knows."""
        return self._committer.owns

    # ---- acquiring ---------------------------------------------------------------------------------------------------

    async def acquire(self) -> None:
        """Own the log. Returns at once where this process does. Where another one may, it waits for a lease, and raises
        `Unavailable` when something moves in the log meanwhile, and what `check` does."""
        if self._committer.owns:
            return
        if self._acquiring is None or self._acquiring.done():
            self._acquiring = asyncio.create_task(self._acquire(), name="acquire the log")
            self._acquiring.add_done_callback(_retrieve)
        await outcome(self._acquiring)

    async def _acquire(self) -> None:
        await self._objects.make()
        await self._tail.catch_up()
        _, epoch = await self.newest_claim()
        if self._state.number or epoch > self._state.epoch:
            await self._watch(epoch)
        await self._check()  # before the claim, which would make the next owner wait for a lease
        if not await self._objects.claim(epoch, await self._listen()):
            raise self._owned("has just claimed it")
        self._time.set(await self._objects.claimed_ms(epoch))
        await self._end_lower_epochs(epoch)
        await self._check()  # of what the owner before has written until then
        self._committer.start()
        self._acquired()

    async def newest_claim(self) -> tuple[Claimant | None, int]:
        """The process that owns the log as it is known here, or is about to, None where none does; and the lowest epoch
        that no process has claimed."""
        newest, epoch = None, self._state.epoch
        while (claimant := await self._objects.claimant(epoch)) is not None:
            newest, epoch = claimant, epoch + 1
        return newest, epoch

    async def has_passed(self) -> bool:
        """Whether another process has owned the log since this one did."""
        for epoch in range(self._committer.epoch + 1, self._state.epoch + 1):
            claimant = await self._objects.claimant(epoch)
            if claimant is not None and claimant.writer != self._objects.writer:
                return True
            if claimant is None and epoch < self._state.epoch:  # its claim was removed since it ended
                return True
        return False

    async def _watch(self, epoch: int) -> None:
        """Wait for a lease. Raises `Unavailable` where the log moves, or `epoch` is claimed, meanwhile."""
        for _ in range(LOOKS):
            await asyncio.sleep(self._settings.lease_s / LOOKS)
            if await self._tail.catch_up() or await self._objects.claimant(epoch):
                raise self._owned("writes to it")

    async def _end_lower_epochs(self, epoch: int) -> None:
        """End each epoch below this one. The cap bounds how far an owner gets that is faster than the fence."""
        while self._state.epoch < epoch:
            ending = self._state.epoch
            await self._objects.end_epoch(BlockKind.CAP, ending, self._state.number + CAP_BLOCKS)
            while self._state.epoch == ending:
                if not await self._tail.catch_up():
                    await self._objects.end_epoch(BlockKind.FENCE, ending, self._state.number)
        if self._state.epoch > epoch:
            raise self._owned("has claimed it since")

    def _owned(self, how: str) -> Unavailable:
        return Unavailable(f"another process {how}: one at a time owns a log on object storage")

    # ---- confirming --------------------------------------------------------------------------------------------------

    async def confirm(self) -> None:
        """Return where this process has owned the log at some moment after the call: no other one has acknowledged what
        it does not know. One request answers all that wait. Raises `Unavailable` where another one has claimed it."""
        if self._confirming_next is None:
            earlier = self._confirming
            self._confirming_next = asyncio.create_task(self._confirm(earlier), name="confirm the claim")
            self._confirming_next.add_done_callback(_retrieve)
        await outcome(self._confirming_next)

    async def _confirm(self, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._confirming, self._confirming_next = self._confirming_next, None
        if await self._objects.claimant(self._state.epoch + 1):
            await self._committer.hand_over()

    async def close(self) -> None:
        """Cancel what runs: those that wait for it get `Closed`."""
        for task in (self._acquiring, self._confirming, self._confirming_next):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take the error of a task for which none may wait any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


async def outcome(task: asyncio.Task[None]) -> None:
    """Wait for a task of which others may wait, too. Raises its error, and `Closed` where it was cancelled."""
    await asyncio.wait([task])
    if task.cancelled():
        raise Closed("the log is closed")
    task.result()
