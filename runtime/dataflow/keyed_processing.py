"""Process what a group's member gets, with state by key that is stored in the log, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeAlias

from ..arguments import checked
from ..clock import HybridClock
from ..errors import (
    Fenced,
    InvalidRequest,
    MemoryLimitExceeded,
    MessageTooLarge,
    TidewalError,
    Unsupported,
)
from ..groups.metadata_layers import Layer, unwrap, wrap
from ..groups.retries import Retries
from ..groups.retry_policy import RetryPolicy
from ..groups.work import Left, LogAway, Member, Outage, check_awaitable, has_lost, next_of, of_the_log, outputs_of
from ..log.wal import Append, Delivered, Wal
from ..metrics.metrics import Metrics
from . import commit_size
from .changelog import Codec, MsgpackCodec
from .commit_size import CommitSize
from .keyed_channel import D, KeyedChannel, KeyedCommit, changelog_of, recover
from .keyed_metrics import KeyedMetrics
from .keyed_state import KeyedState

KeyedHandler: TypeAlias = Callable[[Delivered, KeyedState], Awaitable[Sequence[Append] | None]]
_Handler: TypeAlias = Callable[[D, KeyedState], Awaitable[Sequence[Append] | None]]


class KeyedMember(Member[D], Protocol[D]):
    """What `process_keyed` needs of a `GroupMember`, or of what delivers its channels in another form."""

    @property
    def id(self) -> str: ...


COMMIT_INTERVAL_S = 0.1
MAX_STATE_BYTES = 1024 * 1024 * 1024


@checked
async def process_keyed(
    wal: Wal,
    member: KeyedMember[D],
    handle: _Handler[D],
    name: str,
    *,
    commit_interval_s: float = COMMIT_INTERVAL_S,
    codec: Codec | None = None,
    stop: asyncio.Event | None = None,
    retry: RetryPolicy | None = None,
    max_state_bytes: int = MAX_STATE_BYTES,
    metrics: Metrics | None = None,
    clock: HybridClock | None = None,
) -> None:
    """Call `handle` with each batch and the state of its channel, one after the other, until `stop` is set, the member
    leaves or the log is closed. What `handle` returns (None: nothing) is appended, exactly once, in one commit with the
    changes of the state and the group's position; so is what it does to the state, and nothing else that it does.

    Each input channel has a state of its own, which lies in memory here and in the log: the channel
    `NAME-changelog.INPUT` has its changes. The member that gets the input channel next (after a crash, a restart or a
    move) reads the state from there before its first batch. To seek in an input channel, or to drop the group, begins a
    new and empty state. `name` is that of the program: no other one, and no other group, of the log may use it.

    Commits happen every `commit_interval_s` seconds while there is something to commit, 0: behind each batch; earlier
    once entries and outputs have 4 MiB together. What the log refuses as too large for one commit is processed again in
    parts, entry by entry if need be; what a single entry has made must fit into a commit (`MessageTooLarge`). `codec`
    encodes the values of the state; the same one must read them again. Once `stop` is set, what was processed is
    committed, and the call returns; the member stays in its group.

    With `retry` an entry whose handler fails, or ended its process, is tried again and becomes a dead letter of the
    group in the end, as in `process`. What a failed attempt did to the state is forgotten: the state is read from its
    changelog again, and the next 100,000 entries of the channel are committed batch by batch, as are those behind each
    recovery. An entry that ends its process does so up to three times more than the policy has attempts.

    The states of all channels that the member has here may take `max_state_bytes` of memory together, an estimate. What
    would exceed them is not committed: `MemoryLimitExceeded` (`limit` "process_keyed.max_state_bytes") names the group,
    and the channel whose state is the largest; with more, or with fewer channels per member, processing goes on where
    it was. `metrics` shows the states and their windows and counts retries; `clock` stamps dead letters.

    Without `retry` it raises what `handle` raises. Errors of the log that may pass are waited out for 30 s, as in
    `process`. It raises what lasts longer, what else iterating, committing and appending raise, and `CorruptLog` or
    `Unavailable` for a state that cannot be read. What is not committed then goes back and is delivered again, with the
    state of the last commit, so processing may be started again, with this member, or with another one once this has
    left (`aclose`). A batch whose channel another member gets meanwhile (`Fenced`) is left to that one.
    Raises `Unsupported` (`capability`) on a log without `atomic_commits`, and `InvalidRequest` for a name that cannot
    be part of a channel's, and for a `handle` that is not async."""
    if not wal.capabilities.atomic_commits:
        raise Unsupported(f"{wal.name}:// has no commits of outputs with positions", capability="atomic_commits")
    if not name:
        raise InvalidRequest("a program with state needs a name: its changelogs are called after it")
    if max_state_bytes <= 0:
        raise InvalidRequest(f"max_state_bytes is {max_state_bytes}, and must be over 0")
    program = _Program(wal, member, handle, name, commit_interval_s, codec or MsgpackCodec(), stop, max_state_bytes)
    program.show_in(metrics)
    if retry is not None:
        program.retry(retry, metrics, clock or HybridClock())
    await program.run()


class _Program(Generic[D]):
    """One call of `process_keyed`."""

    def __init__(
        self,
        wal: Wal,
        member: KeyedMember[D],
        handle: _Handler[D],
        name: str,
        commit_interval_s: float,
        codec: Codec,
        stop: asyncio.Event | None,
        max_state_bytes: int,
    ) -> None:
        self._wal, self._member, self._handle = wal, member, handle
        self._name, self._interval_s, self._codec = name, commit_interval_s, codec
        self._max_state_bytes = max_state_bytes
        self._metrics = KeyedMetrics(None, member.group)
        self._retries: Retries[D] | None = None
        self._channels: dict[str, KeyedChannel[D]] = {}
        self._size = CommitSize()
        self._commit_at: float | None = None  # None while there is nothing to commit
        self._next: asyncio.Task[D] | None = None
        self._stop_at = stop or asyncio.Event()
        self._outage = Outage(member.group)

    def show_in(self, metrics: Metrics | None) -> None:
        """Show the states in `metrics`."""
        self._metrics = KeyedMetrics(metrics, self._member.group)

    def retry(self, policy: RetryPolicy, metrics: Metrics | None, clock: HybridClock) -> None:
        """Try again what fails."""
        self._retries = Retries(
            self._wal,
            self._member,
            self._handled,
            self._complete,
            policy,
            metrics,
            clock,
            prepare=self._prepare,
            discard=self._discard,
        )

    async def run(self) -> None:
        self._stop = asyncio.ensure_future(self._stop_at.wait())
        try:
            if self._retries is not None:
                await self._retries.open()
            while await self._step():
                pass
        except Left:
            return
        finally:
            await self._give_back()

    async def _step(self) -> bool:
        """Process a batch; whether that was not the end."""
        try:
            delivered = await self._next_batch()
            if delivered is None:
                return False
            await self._process(delivered)
        except LogAway as away:
            await self._outage.wait(away)
        return True

    async def _next_batch(self) -> D | None:
        """The next batch; None once all is committed and the program is to stop. Commits and makes attempts that are
        due whenever it is time, with or without a batch. Raises what `next_of` raises."""
        now = asyncio.get_running_loop().time
        while True:
            if self._stop.done():
                await self._commit()
                return None
            if self._commit_due:
                await self._commit()
            due = None if self._retries is None else self._retries.due
            if self._retries is not None and due is not None and now() >= due:
                await self._retries.go_on()
                continue
            if self._next is None:
                self._next = asyncio.ensure_future(next_of(self._member))
            until = min((at for at in (self._commit_at, due) if at is not None), default=None)
            left_s = None if until is None else until - now()
            await asyncio.wait({self._next, self._stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if self._next.done() and not self._stop.done():
                task, self._next = self._next, None
                return task.result()

    async def _process(self, delivered: D) -> None:
        try:
            if self._retries is not None:
                await self._retries.work(delivered)
                return
            for number, part in enumerate(self._size.parts(delivered)):
                if number and self._commit_due:
                    await self._commit()
                    if delivered.channel not in self._channels:
                        return  # the rest comes again
                await self._process_part(part)
        except BaseException as error:
            self._member.redeliver(delivered)
            self._channels.pop(delivered.channel, None)
            if has_lost(error, delivered.channel):
                return
            raise

    async def _process_part(self, part: D) -> None:
        await self._prepare(part)
        answer = self._handled(part)
        check_awaitable(answer, self._handle)
        await self._complete(part, outputs_of(await answer), None)

    # ---- one attempt ------------------------------------------------------------------------------------------------

    async def _prepare(self, delivered: D) -> None:
        """Have the state of the batch's channel, as of the batch before."""
        await self._channel(delivered)

    def _handled(self, delivered: D) -> Awaitable[Sequence[Append] | None]:
        return self._handle(delivered, self._channels[delivered.channel].state)

    async def _complete(self, delivered: D, outputs: Sequence[Append], metadata: bytes | None) -> None:
        """Commit the batch with the next commit; or at once, and alone, where the attempt at it has to be known.
        `metadata` has the attempts at what follows."""
        channel = self._channels[delivered.channel]
        channel.add(delivered, outputs)
        if metadata is not None or channel.commit_alone > 0:
            channel.commit_alone -= len(delivered.entries)
            await self._commit_alone(delivered.channel, unwrap(Layer.ATTEMPTS, metadata or b"")[0])
            return
        self._size.add(delivered.entries, outputs)
        if self._commit_at is None:
            self._commit_at = asyncio.get_running_loop().time() + self._interval_s

    def _discard(self, delivered: D) -> bool:
        """Forget the state that a failed attempt has changed. What was processed before it and is not committed has to
        be processed again: then all goes back."""
        channel = self._channels.pop(delivered.channel, None)
        if channel is None or not channel.delivered:
            return True
        self._member.redeliver(delivered)
        return False

    async def _channel(self, delivered: D) -> KeyedChannel[D]:
        """The state of the batch's channel, as of the batch before."""
        known = self._channels.get(delivered.channel)
        if known is not None and known.epoch == delivered.assignment_epoch:
            return known
        self._forget_lost()
        if delivered.channel.startswith(changelog_of(self._name, "")):
            raise InvalidRequest(
                f"the group reads {delivered.channel}, which is a changelog of this very program: join with patterns "
                "that do not match it"
            )
        metadata = self._member.metadata(delivered.channel)
        with of_the_log():
            channel = await recover(self._wal, self._name, self._member.id, delivered, metadata, self._codec)
        channel.commit_alone = 0 if self._retries is None else commit_size.MAX_UNCOMMITTED
        self._channels[delivered.channel] = channel
        self._check_memory()
        self._metrics.show(delivered.channel, channel)
        return channel

    def _forget_lost(self) -> None:
        """Free the states of channels that are with other members now."""
        for name in self._channels.keys() - self._member.channels:
            del self._channels[name]

    # ---- committing -------------------------------------------------------------------------------------------------

    @property
    def _commit_due(self) -> bool:
        """Whether it is time to commit."""
        if self._commit_at is None:
            return False
        return self._size.reached or asyncio.get_running_loop().time() >= self._commit_at

    async def _commit(self) -> None:
        """Commit all that was processed. What the log fails to take goes back, and so does what is too large for one
        commit, to be committed in parts. With retries, whatever cannot be committed is committed batch by batch: so the
        one at fault is found."""
        try:
            await self._commit_all()
        except LogAway:
            self._redeliver_uncommitted()
            raise
        except (InvalidRequest, MessageTooLarge) as error:
            if self._retries is None:
                if not isinstance(error, MessageTooLarge):
                    raise
                self._check_divisible(error)
                self._size.refused()
            self._redeliver_uncommitted()

    def _check_divisible(self, error: MessageTooLarge) -> None:
        """Raise `MessageTooLarge`, saying what to do, where what was processed cannot be committed in parts."""
        waiting = [delivered for channel in self._channels.values() for delivered in channel.delivered]
        if len(waiting) > 1 or len(waiting[0].parts()) > 1:
            return
        raise MessageTooLarge(
            f"what a single entry of {waiting[0].channel} has made does not fit into one commit: {error.message}. "
            "Return less for it and change fewer keys; or pass retry=RetryPolicy(), and it becomes a dead letter",
            **error.fields,
        ) from error

    async def _commit_all(self) -> None:
        """One commit of all channels; without those that are with other members by now."""
        self._commit_at = None
        commits: list[KeyedCommit[D]] = [
            channel.next_commit() for channel in self._channels.values() if channel.delivered
        ]
        self._check_memory()
        while commits:
            try:
                with of_the_log():
                    ids = await self._member.commit(
                        [delivered for commit in commits for delivered in commit.delivered],
                        [output for commit in commits for output in commit.outputs],
                        metadata={commit.channel: commit.metadata for commit in commits},
                    )
            except Fenced as error:
                lost = error.fields.get("channel")
                self._channels.pop(str(lost), None)
                left = [commit for commit in commits if commit.channel != lost]
                if len(left) == len(commits) or error.fields.get("outcome_unknown"):
                    raise
                commits = left
                continue
            for commit in commits:
                await self._committed(commit.channel, ids[: len(commit.outputs)])
                del ids[: len(commit.outputs)]
            break
        self._size.committed()

    async def _commit_alone(self, name: str, attempts: bytes) -> None:
        """Commit what was processed of one channel, with the attempts at what follows. After a failure the state is
        read again."""
        try:
            commit = self._channels[name].next_commit()
            self._check_memory()
            metadata = wrap(Layer.ATTEMPTS, attempts, commit.metadata)
            with of_the_log():
                ids = await self._member.commit(commit.delivered, commit.outputs, metadata={name: metadata})
        except BaseException:
            self._channels.pop(name, None)
            raise
        await self._committed(name, ids)

    async def _committed(self, name: str, ids: list[bytes]) -> None:
        self._outage.over()
        channel = self._channels[name]
        await channel.committed(self._wal, ids)
        self._metrics.show(name, channel)
        self._metrics.keep(self._member.channels)

    def _check_memory(self) -> None:
        """Raise `MemoryLimitExceeded` for states that are too large together."""
        if self._memory_bytes() <= self._max_state_bytes:
            return
        for channel in self._channels.values():
            channel.measure()
        taken = self._memory_bytes()
        if taken <= self._max_state_bytes:
            return
        name, largest = max(self._channels.items(), key=lambda each: each[1].memory_bytes)
        raise MemoryLimitExceeded(
            f"the states of {self._name!r}, which this member of the group {self._member.group!r} has of "
            f"{len(self._channels)} channels, take about {taken:,} bytes, over max_state_bytes "
            f"({self._max_state_bytes:,}); the largest is that of {name}, with {largest.memory_bytes:,}. Nothing is "
            "lost: raise max_state_bytes, run more members, or remove keys, and processing goes on",
            limit="process_keyed.max_state_bytes",
            group=self._member.group,
            channel=name,
            size=taken,
        )

    def _memory_bytes(self) -> int:
        return sum(channel.memory_bytes for channel in self._channels.values())

    async def _give_back(self) -> None:
        """Give back what is not committed, and a batch that has come and was not processed."""
        self._stop.cancel()
        task = self._next
        if task is not None:
            task.cancel()
            with suppress(Left, LogAway, asyncio.CancelledError, TidewalError):
                self._member.redeliver(await task)
        if self._retries is not None:
            self._retries.give_back()
        self._redeliver_uncommitted()
        self._channels.clear()
        self._metrics.keep(())

    def _redeliver_uncommitted(self) -> None:
        self._size.clear()
        for name, channel in list(self._channels.items()):
            if channel.delivered:
                self._member.redeliver(channel.delivered[0])
                del self._channels[name]
