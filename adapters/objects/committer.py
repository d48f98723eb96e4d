"""Gather what is submitted into blocks, and answer when they are durable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from ...runtime.errors import Fenced, TidewalError, Unavailable
from .block import Block, BlockHeader, BlockKind
from .block_writer import BlockWriter
from .ephemeral_appends import EphemeralAppends
from .link.log_link import LogLink
from .open_log import OpenLog
from .stored_channel import StoredChannel, encode_id
from .submits import QueuedSubmit, channels_of, make_block
from .undecided_blocks import UndecidedBlocks, unknown_outcome


class Committer:
    """The queue of one open log, on its loop; `add` and `notice` may be called on any thread. A block is closed when it
    is full, or `linger_ms` after the last one: so a lone submit goes at once, and many cost a bounded number of
    requests.

    It owns the log from `start` until it is handed over or another process ends the epoch. While nothing is submitted
    it puts an empty block now and then, by which other processes see that the owner lives.
    """

    def __init__(
        self, log: OpenLog, durable: Callable[[Block], None], wanted: Callable[[], None], lost: Callable[[], None]
    ) -> None:
        """`durable` is called for each block that is durable once the state has it, before its submits are answered;
        `wanted` when there is something to commit and the log is not owned, `lost` when it is owned no more."""
        self._objects, self._state, self._settings, self._time = log.objects, log.state, log.settings, log.time
        self._memory, self._ephemeral = log.memory, EphemeralAppends(log.state, log.memory)
        self._durable, self._wanted, self._lost = durable, wanted, lost
        self.obstacle: str = ""  # why what is queued cannot be written at present, beside a store that does not answer
        self._loop = asyncio.get_running_loop()
        self._added: deque[QueuedSubmit] = deque()  # by any thread; the rest belongs to the loop
        self._queue: deque[QueuedSubmit] = deque()
        self._queued_bytes = 0
        self._inflight: deque[tuple[Block, list[QueuedSubmit]]] = deque()
        self._undecided = UndecidedBlocks(log.state)
        self._last_sent: dict[int, int] = {}  # of this epoch: the number of the last entry, by channel
        self._writer: BlockWriter | None = None
        self._handing_over = False
        self._epoch = self._number = self._seq = 0  # of the next block, and of its first entry
        self._closed_at = float("-inf")  # when the last block was closed
        self._pumping: asyncio.Handle | None = None
        self._expiring: asyncio.TimerHandle | None = None
        self._marking: asyncio.TimerHandle | None = None

    @property
    def owns(self) -> bool:
        """Whether this process owns the log, as far as it knows."""
        return self._writer is not None

    @property
    def epoch(self) -> int:
        """The last epoch that this process has owned, 0 for none."""
        return self._epoch

    @property
    def waiting(self) -> bool:
        """Whether anything waits to be written or sent."""
        return bool(self._queue or self._added)

    def last_sent(self, channel: int) -> bytes:
        """The id of the last entry of the channel with this number that has left for the store in this epoch, b""
        without one."""
        seq = self._last_sent.get(channel)
        return b"" if seq is None else encode_id(self._epoch, seq)

    # ---- owning ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on behind the state, in an epoch that this process has claimed, all earlier ones having ended."""
        self._writer = BlockWriter(self._objects, self._on_durable, self._on_ended)
        self._epoch, self._number, self._seq = self._state.epoch, self._state.number, self._state.seq
        self._last_sent.clear()
        self._memory.begin(self._epoch)
        self._added.extendleft(reversed(self._queue))  # what waits may go into ephemeral channels
        self._queue.clear()
        self._queued_bytes = 0
        self._marking = self._loop.call_later(self._settings.mark_s, self._mark)
        self.obstacle = ""
        self.wake()

    async def hand_over(self) -> None:
        """End the epoch behind what is in flight, so that the next owner need not wait; until that is done this process
        owns the log, and closes no more blocks. Where the store does not answer in time the next owner finds out by
        itself."""
        writer = self._writer
        if writer is None:
            return
        self._handing_over = True
        try:
            async with asyncio.timeout(self._settings.delivery_timeout_s):
                await writer.drained()
                if self._writer is writer:
                    await self._objects.end_epoch(BlockKind.FENCE, self._epoch, self._state.number)
        except TimeoutError:
            writer.abandon()
        finally:
            self._handing_over = False
        if self._writer is writer:
            self._end(unknown_outcome())

    def _on_ended(self, error: TidewalError) -> None:
        """The epoch is over: what is in flight is not in the log, unless the store itself has failed."""
        if isinstance(error, Fenced):
            while self._inflight:
                for submit in self._inflight.popleft()[1]:
                    submit.settle(error)
        self._end(type(error)(str(error), outcome_unknown=True))

    def _end(self, error: TidewalError) -> None:
        """Own the log no more: the next epoch of this process begins without anything of this one. What is in flight is
        undecided, which `error` says."""
        self._writer = None
        if self._marking is not None:
            self._marking.cancel()
        while self._inflight:
            self._undecided.add(*self._inflight.popleft(), error)
        self._refuse_own()
        self._lost()
        self.wake()

    def decide(self) -> None:
        """Settle what was in flight at the end of an epoch, as far as the state tells by now what became of it."""
        self._undecided.decide()

    # ---- queueing ----------------------------------------------------------------------------------------------------

    def add(self, submit: QueuedSubmit) -> None:
        """Queue a submit, behind all that were added before. Follow it with `notice`."""
        self._added.append(submit)

    def notice(self) -> None:
        """Look at what was added. Any thread calls it, without a lock: what is settled at once calls back."""
        if asyncio._get_running_loop() is self._loop:  # pyright: ignore[reportPrivateUsage] -- None on other threads
            self.wake()
        else:
            self._loop.call_soon_threadsafe(self.wake)

    def refuse(self, error: TidewalError) -> None:
        """Answer with `error` what is queued: it can be written nowhere now."""
        self._receive()
        while self._queue:
            self._pop().settle(error)

    def send_over(self, link: LogLink) -> None:
        """Send what is queued to the process that owns the log, as far as the link has room."""
        self.obstacle = ""
        while self._queue and self._writer is None and link.usable and link.room(self._queue[0].size):
            link.submit(self._pop())

    def _refuse_own(self) -> None:
        """Answer what only this process might have written: it does not own the log any more."""
        queued, self._queue = self._queue, deque(submit for submit in self._queue if not submit.here)
        self._queued_bytes = sum(submit.size for submit in self._queue)
        for submit in queued:
            if submit.here:
                submit.settle(_owned_no_more())

    def _receive(self) -> None:
        while self._added:
            submit = self._added.popleft()
            if submit.here and self._writer is None:
                submit.settle(_owned_no_more())
            elif self._writer is None or not self._ephemeral.append(submit):
                self._queue.append(submit)
                self._queued_bytes += submit.size

    def _pop(self) -> QueuedSubmit:
        submit = self._queue.popleft()
        self._queued_bytes -= submit.size
        return submit

    def wake(self) -> None:
        """See to what is queued."""
        self._receive()
        if self._queue and self._expiring is None:
            self._expiring = self._loop.call_at(self._queue[0].deadline, self._expire)
        if self._writer is None:
            if self._queue:
                self._wanted()
        elif self._pumping is None:  # behind what is ready now, so that what comes together goes together
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Close the blocks that may be closed now."""
        self._pumping = None
        self._receive()
        while self._queue and self._writer is not None and self._writer.free and not self._handing_over:
            full = self._queued_bytes >= self._settings.block_bytes
            least_s = self._settings.least_interval_s
            due = self._closed_at + (least_s if full else max(least_s, self._settings.linger_s))
            if self._loop.time() < due:
                self._pumping = self._loop.call_at(due, self._pump)
                return
            submits = self._take()
            if submits:
                self._close_block(submits)

    def _take(self) -> list[tuple[QueuedSubmit, list[StoredChannel]]]:
        """The submits of the next block. Those that cannot go into one are answered."""
        taken: list[tuple[QueuedSubmit, list[StoredChannel]]] = []
        size = 0
        while self._queue and (not taken or size + self._queue[0].size <= self._settings.block_bytes):
            submit = self._pop()
            try:
                taken.append((submit, channels_of(self._state, submit.entries)))
                size += submit.size
            except TidewalError as error:
                submit.settle(error)
        return taken

    def _close_block(self, submits: list[tuple[QueuedSubmit, list[StoredChannel]]]) -> None:
        assert self._writer is not None
        header = BlockHeader(
            BlockKind.DATA,
            self._objects.log,
            self._objects.writer,
            self._epoch,
            self._number,
            self._seq,
            acked_to=self._state.number,
            stored_ms=self._time.now_ms(),
        )
        block = make_block(header, submits)
        self._number, self._seq = self._number + 1, self._seq + block.header.count
        self._last_sent.update({row.channel: row.first_seq + row.entries - 1 for row in block.table})
        self._closed_at = self._loop.time()
        self._inflight.append((block, [submit for submit, _ in submits]))
        self._writer.put(block)

    def _on_durable(self, block: Block) -> None:
        _, submits = self._inflight.popleft()
        self._state.apply(block)
        self._durable(block)
        for submit in submits:
            self._ephemeral.complete(submit)
            submit.settle(submit.ids)
        self.wake()

    # ---- timers ------------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        """Put an empty block where nothing was put for a while, and look again when that may be so next."""
        if self._writer is None:
            return
        now, mark_s = self._loop.time(), self._settings.mark_s
        if now >= self._closed_at + mark_s and self._writer.idle and not self._handing_over:
            self._close_block([])
        due = self._closed_at + mark_s
        self._marking = self._loop.call_at(due if due > now else now + mark_s, self._mark)

    def _expiring_submits(self) -> Iterator[QueuedSubmit]:
        for _, submits in self._inflight:
            yield from (submit for submit in submits if submit.expires)
        yield from self._queue

    def _expire(self) -> None:
        """Answer what has waited too long; what is in flight may be in the log nevertheless, or get there yet."""
        now = self._loop.time()
        for _, submits in self._inflight:
            for submit in submits:
                if submit.deadline <= now:
                    submit.give_up(unknown_outcome())
        while self._queue and self._queue[0].deadline <= now:
            self._pop().settle(Unavailable(f"nothing was written: {self.obstacle or 'the store does not answer'}"))
        following = next(self._expiring_submits(), None)
        self._expiring = None if following is None else self._loop.call_at(following.deadline, self._expire)

    def close(self) -> None:
        """Stop the timers, and settle what is undecided."""
        self._undecided.close()
        for handle in (self._pumping, self._expiring, self._marking):
            if handle is not None:
                handle.cancel()


def _owned_no_more() -> Unavailable:
    return Unavailable("this process does not own the log any more: nothing was written")
