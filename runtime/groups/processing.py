"""Process what a group's member gets, under delivery semantics that one argument chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Generic

from ..arguments import checked
from ..clock import HybridClock
from ..errors import InvalidRequest, Unsupported
from ..log.wal import Append, Wal
from ..metrics.metrics import Metrics
from .retries import Retries
from .retry_policy import RetryPolicy
from .work import (
    D,
    Left,
    LogAway,
    Member,
    Outage,
    check_awaitable,
    ends_once_closed,
    has_lost,
    is_acknowledged,
    next_of,
    of_the_log,
    outputs_of,
)


class Semantics(Enum):
    """How often the effect of an entry may happen when processes die in the middle of their work."""

    AT_MOST_ONCE = "at_most_once"  # acknowledged before it is processed: what was being processed then is lost
    AT_LEAST_ONCE = "at_least_once"  # acknowledged afterwards: what was being processed then is processed again
    EXACTLY_ONCE = (
        "exactly_once"  # its outputs and the acknowledgement are one commit; a handler's other effects are not
    )


@checked
async def process(
    wal: Wal,
    member: Member[D],
    handle: Callable[[D], Awaitable[Sequence[Append] | None]],
    semantics: Semantics,
    *,
    retry: RetryPolicy | None = None,
    count: int | None = None,
    timeout_s: float | None = None,
    metrics: Metrics | None = None,
    clock: HybridClock | None = None,
) -> None:
    """Call `handle` with each batch, one after the other, and append what it returns (None: nothing), until the member
    leaves or the log is closed; with `count` until so many batches are done, with `timeout_s` for so many seconds: a
    handler that works then is waited for. A batch whose channel another member gets meanwhile (`Fenced`) is left to
    that member.

    Without `retry` it raises what `handle` raises. With a `RetryPolicy` a batch whose handler fails, or ended its
    process, is held back and tried again, entry by entry; its channel waits behind it, the others go on. After the last
    attempt an entry becomes a dead letter of the group, and the channel goes on. A cancellation and `Fenced` are no
    attempts; an attempt whose end no process saw is one. An entry that ends its process does so up to two
    times more than the policy has attempts, in batches with others. The metadata of the channels' positions is
    `process`'s own while it works, `metrics` counts retries and dead letters, and `clock` stamps letters.

    What a handler acknowledges itself, in a transaction, is done, however the handler ends.

    Errors of the log that may pass (`retryable`), as when the process that owned it has died, are waited out for 30 s:
    the batch goes back (`GroupMember.redeliver`), and what of it is not acknowledged is delivered again. What lasts
    longer is raised, and so is what else iterating, acknowledging, committing and appending raise; the member stays in
    its group then, and processing may be started again with it, or after leaving with another one. After an error, and
    when it is cancelled, the batch goes back, too, and nothing that lies behind it passes it. Raises `Unsupported`
    (`capability`) for exactly once on a log without `atomic_commits`, and `InvalidRequest` for retries at most once and
    a `handle` that is not async."""
    if semantics is Semantics.EXACTLY_ONCE and not wal.capabilities.atomic_commits:
        raise Unsupported(f"{wal.name}:// has no commits of outputs with positions", capability="atomic_commits")
    if semantics is Semantics.AT_MOST_ONCE and retry is not None:
        raise InvalidRequest("what is processed at most once is acknowledged before: it cannot be tried again")
    work = _Processing(wal, member, handle, semantics)
    retries = None
    if retry is not None:
        retries = Retries(wal, member, handle, work.complete, retry, metrics, clock or HybridClock())
    until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    try:
        if retries is not None:
            await retries.open()
        await _run(member, work, retries, count, until)
    except Left:
        return
    finally:
        if retries is not None:
            retries.give_back()


async def _run(
    member: Member[D], work: _Processing[D], retries: Retries[D] | None, count: int | None, until: float | None
) -> None:
    done, outage = 0, Outage(member.group)
    while count is None or done < count:
        if until is not None and asyncio.get_running_loop().time() >= until:
            return
        try:
            if await _step(member, work, retries, until):
                done += 1
                outage.over()
        except LogAway as away:
            await outage.wait(away)


async def _step(member: Member[D], work: _Processing[D], retries: Retries[D] | None, until: float | None) -> bool:
    """Process a batch, or make the attempts that are due; until `until`, by the loop's clock, at most. Returns whether
    a batch is done."""
    due = None if retries is None else retries.due
    if retries is not None and due is not None and asyncio.get_running_loop().time() >= due:
        return await retries.go_on()  # first: there may always be more to read
    delivered = await _next(member, min((at for at in (due, until) if at is not None), default=None))
    return delivered is not None and await _first(member, work, retries, delivered)


async def _next(member: Member[D], until: float | None) -> D | None:
    """The next batch; None where `until`, by the loop's clock, comes first. Raises what `next_of` raises."""
    waiting = asyncio.timeout_at(until)
    try:
        async with waiting:
            return await next_of(member)
    except TimeoutError:
        if waiting.expired():
            return None
        raise


async def _first(member: Member[D], work: _Processing[D], retries: Retries[D] | None, delivered: D) -> bool:
    """Process a batch that was delivered now. Returns whether it is done."""
    try:
        if retries is not None:
            return await retries.work(delivered)
        await work.step(delivered)
        return True
    except Left:
        raise
    except BaseException as error:
        member.redeliver(delivered)
        if has_lost(error, delivered.channel):
            return False
        raise


class _Processing(Generic[D]):
    """One batch, from its handler to its acknowledgement."""

    def __init__(
        self,
        wal: Wal,
        member: Member[D],
        handle: Callable[[D], Awaitable[Sequence[Append] | None]],
        semantics: Semantics,
    ) -> None:
        self._wal, self._member, self._handle, self._semantics = wal, member, handle, semantics

    async def step(self, delivered: D) -> None:
        if self._semantics is Semantics.AT_MOST_ONCE:
            with of_the_log():
                await self._member.acknowledge(delivered)
            outputs = await self._handled(delivered)
            with ends_once_closed():
                await self._wal.append_many(outputs)
        else:
            await self.complete(delivered, await self._handled(delivered), None)

    async def _handled(self, delivered: D) -> Sequence[Append]:
        answer = self._handle(delivered)
        check_awaitable(answer, self._handle)
        return outputs_of(await answer)

    async def complete(self, delivered: D, outputs: Sequence[Append], metadata: bytes | None) -> None:
        """Append outputs and acknowledge what they were made from, with metadata (None leaves what is stored)."""
        with of_the_log():
            if is_acknowledged(self._member, delivered):  # by the handler, in a transaction
                await self._wal.append_many(outputs)
            elif self._semantics is Semantics.EXACTLY_ONCE:
                stored = None if metadata is None else {delivered.channel: metadata}
                await self._member.commit([delivered], outputs, metadata=stored)
            else:
                await self._wal.append_many(outputs)
                await self._member.acknowledge(delivered, metadata=metadata)
