"""A member of a consumer group: reads its channels from the log, whichever process owns that at the moment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias
from uuid import uuid4

from prometheus_client import Counter

from ..arguments import checked
from ..errors import ChannelNotFound, Closed, Fenced, InvalidRequest, PositionLost, TidewalError, Unavailable
from ..log.checks import check_plain
from ..log.payloads import check_payload
from ..log.stamps import stamped
from ..log.wal import Append, Delivered, From, Start, Wal
from .ack_deadlines import AckDeadlines
from .coordinator_client import Ack, CoordinatorClient, GroupAcks, MemberAssignment
from .member_committer import MemberCommitter, Step, has_left
from .member_fetcher import MemberFetcher, epoch_over
from .positions import just_before, resolve
from .progress import check_metadata

if TYPE_CHECKING:
    from ..filters.record_filter import RecordFilter

WAIT_S = 20.0  # for how long one request for a new assignment may wait
FIRST_PAUSE_S = 0.05  # between attempts to join again
LAST_PAUSE_S = 1.0
DECIDED_S = 5.0  # for which what is decided is waited for to be stored, too

OnLost: TypeAlias = Callable[[Delivered, bytes], Awaitable[bool]]
"""Called where retention has removed what comes next in the channel of an (empty) delivery, whose epoch began at a
position. Returns whether it has let the channel be delivered anew from elsewhere. The iteration raises its errors."""

OnJoined: TypeAlias = Callable[[], Awaitable[None]]
"""Called when a member has joined again by itself, before anything is delivered from there. It joins once more where
this raises a retryable error."""


async def start_member(
    wal: Wal,
    coordinator: CoordinatorClient,
    group: str,
    channels: Sequence[str],
    *,
    start: From = From.EARLIEST,
    reset_to: From | None = None,
    session_timeout_s: float = 30.0,
    ack_timeout_s: float | None = None,
    member: str | None = None,
    resets: Counter | None = None,
    ack_timeouts: Counter | None = None,
) -> GroupConsumer:
    """Join and return the member, which knows its channels by then. The parameters are those of `Wal.join`, and
    `coordinator` of the group; `member` is the member's id, random unless given; `resets` counts the positions that
    `reset_to` moved, and `ack_timeouts` how often a channel was held for too long. Raises what `Wal.join` raises."""
    if session_timeout_s <= 0:
        raise InvalidRequest(
            f"session_timeout_s is {session_timeout_s}, and must be over 0", argument="session_timeout_s"
        )
    joining = GroupConsumer(
        wal, coordinator, group, member or uuid4().hex, channels, reset_to, session_timeout_s, resets
    )
    if ack_timeout_s is not None:
        joining.set_ack_timeout(ack_timeout_s, ack_timeouts)
    try:
        await joining.join(start)
    except BaseException:
        await joining.aclose()
        raise
    return joining


class GroupConsumer:
    """`GroupMember` over a log to read from and a client of its group's coordinator.

    When the connection is lost or the session ended the member joins again by itself; what was delivered and not
    acknowledged is delivered again. While joining fails it goes on trying, and the iteration raises `Unavailable` each
    time the session timeout has passed without success; where joining is refused for good it raises why from then on,
    and the session ends. Keeps one batch read ahead per channel, and a few words for
    each batch that is not acknowledged.
    """

    def __init__(
        self,
        wal: Wal,
        coordinator: CoordinatorClient,
        group: str,
        id: str,
        channels: Sequence[str],
        reset_to: From | None,
        session_timeout_s: float,
        resets: Counter | None,
    ) -> None:
        self._wal, self._coordinator, self._group, self._id = wal, coordinator, group, id
        self._subscribed = channels
        self._reset_to = reset_to
        self._session_timeout_s = session_timeout_s
        self._resets = resets
        self.on_lost: OnLost | None = None
        self.on_joined: OnJoined | None = None
        self._where: RecordFilter | None = None
        self._whole: Callable[[str], bool] = lambda channel: False  # whether one is read without it
        self._fetchers: dict[str, MemberFetcher] = {}
        self._ready: deque[MemberFetcher] = deque()
        self._committer = MemberCommitter(coordinator, group, id, self._put_back, self._release_if_done)
        self._deadlines: AckDeadlines | None = None
        self._times_deliveries = True
        self._seen = 0  # version of the assignment
        self._ended_epochs: set[int] = set()  # assignment epochs that the coordinator may still report
        self._transient: TidewalError | None = None  # raised once: a later attempt may succeed
        self._fatal: Exception | None = None
        self._ended = False
        self._leaving: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        return self._id

    @property
    def group(self) -> str:
        return self._group

    @property
    def channels(self) -> frozenset[str]:
        return frozenset(self._fetchers)

    async def join(self, start: From) -> None:
        """Join for the first time, with groups beginning at `start` in channels without a position. `start_member`
        calls it."""
        await self._coordinator.join(self._group, self._id, self._subscribed, start, self._session_timeout_s)
        await self._refresh()
        self._spawn(self._watch())
        if self._deadlines is not None:
            self._spawn(self._deadlines.run(lambda fetcher: self._fetchers.get(fetcher.channel) is fetcher))

    def set_ack_timeout(self, timeout_s: float, given_back: Counter | None) -> None:
        """For `start_member`. Raises `InvalidRequest` for no time."""
        self._deadlines = AckDeadlines(timeout_s, self._put_back, given_back)

    @property
    def ack_timeout_s(self) -> float | None:
        return None if self._deadlines is None else self._deadlines.timeout_s

    def time_by_hand(self) -> None:
        """`ack_timeout_s` counts from `begin_ack_timeout`, and not from each delivery."""
        self._times_deliveries = False

    def begin_ack_timeout(self, delivered: Delivered) -> None:
        """Count from now until all up to the end of `delivered` is acknowledged."""
        fetcher = self._fetchers.get(delivered.channel)
        if self._deadlines is not None and fetcher is not None and fetcher.epoch == delivered.assignment_epoch:
            self._deadlines.begin(fetcher, delivered.entries[-1].id)

    @checked
    def extend_ack_timeout(self, delivered: Delivered, timeout_s: float | None = None) -> None:
        fetcher = self._current(delivered)
        if self._deadlines is not None:
            self._deadlines.extend(fetcher, delivered.entries[-1].id, timeout_s)

    @contextmanager
    def acknowledging(self, delivered: Delivered) -> Generator[None]:
        """The block ends in the acknowledgement of `delivered`: until then its channel is neither taken back for
        `ack_timeout_s`, nor released to another member before its time for that is over. Raises `Fenced`."""
        fetcher = self._current(delivered)
        fetcher.acks_in_flight += 1
        try:
            yield
        finally:
            fetcher.acks_in_flight -= 1
            self._release_if_done(fetcher)

    def read_where(self, where: RecordFilter, whole: Callable[[str], bool] = lambda channel: False) -> None:
        """Read by `Wal.read_where` from now on, behind what was delivered, but for channels that are `whole`."""
        self._where, self._whole = where, whole
        for fetcher in self._fetchers.values():
            fetcher.where = self._where_of(fetcher.channel)
            if not fetcher.revoking:
                fetcher.start_again()

    def _where_of(self, channel: str) -> RecordFilter | None:
        return None if self._whole(channel) else self._where

    def __aiter__(self) -> GroupConsumer:
        return self

    async def __anext__(self) -> Delivered:
        while True:
            self._check_running()
            fetcher = self._next_ready()
            if fetcher is None:
                await self._wait()
            elif fetcher.ended:
                self._end()
            elif fetcher.error is not None:
                await self._handle_error(fetcher, fetcher.error)
            else:
                delivered = self._take(fetcher)
                if delivered is not None:
                    if self._times_deliveries:
                        self.begin_ack_timeout(delivered)
                    return delivered

    def metadata(self, channel: str) -> bytes:
        return self._held(channel).metadata

    def assignment_epoch(self, channel: str) -> int:
        """The epoch in which the member has a channel at present. Raises `Fenced` where it does not have it."""
        return self._held(channel).epoch

    @checked
    async def acknowledge(
        self, delivered: Delivered, ids: Sequence[bytes] | None = None, *, metadata: bytes | None = None
    ) -> None:
        check_metadata(metadata)
        fetcher = self._fetcher_of(delivered)
        plan = fetcher.plan(delivered, ids)
        if plan is not None:
            await self._committer.commit([Step(fetcher, plan, fetcher.ack(plan, metadata))], [])

    @checked
    async def annotate(self, of: str | Delivered, metadata: bytes) -> None:
        check_metadata(metadata)
        fetcher = self._current(of)
        await self._committer.commit([Step(fetcher, None, Ack(fetcher.channel, fetcher.epoch, None, (), metadata))], [])

    @checked
    async def commit(
        self, delivered: Sequence[Delivered], outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]:
        metadata = metadata or {}
        if not self._wal.capabilities.foreign_topics:
            check_plain([output.key for output in outputs], [output.headers for output in outputs])
            for output in outputs:
                check_payload(output.payload)
        for value in metadata.values():
            check_metadata(value)
        if not metadata.keys() <= {each.channel for each in delivered}:
            raise InvalidRequest("a commit has metadata for channels of which it acknowledges nothing")
        return await self._committer.commit_outputs(self._steps(delivered, metadata), stamped(outputs))

    async def commit_with(
        self,
        delivered: Sequence[Delivered],
        metadata: Mapping[str, bytes],
        store: Callable[[GroupAcks], Awaitable[None]],
    ) -> None:
        """`commit`, where `store` has the acknowledgements written by another way, with what belongs to them, together
        or not at all. Raises what `commit` and `store` do, and `InvalidRequest` for a batch of which a part is
        acknowledged: what was made from that would count twice."""
        steps = self._steps(delivered, metadata)
        for each in delivered:
            if self._fetcher_of(each).unacknowledged.is_done(each.entries[0].id):
                raise _acknowledged_before(each)

        async def stored(acks: Sequence[Ack]) -> list[bytes]:
            await store(GroupAcks(self._group, self._id, acks))
            return []

        await self._committer.commit_once(steps, stored)

    async def acknowledge_decided(self, acks: Sequence[Ack]) -> None:
        """Store acknowledgements that are decided elsewhere. Where that fails their channels are given back: whichever
        member has them next asks how it was decided. No later acknowledgement may come that covers these."""
        try:
            async with asyncio.timeout(DECIDED_S):
                await self._coordinator.commit(self._group, self._id, acks, [])
        except (TidewalError, TimeoutError):
            for ack in acks:
                self._give_back(ack.channel, ack.assignment_epoch)

    async def go_on_behind(self, delivered: Delivered, upto: bytes | None, metadata: bytes) -> None:
        """Store that all up to `upto` is done (None: says nothing), also where that lies behind what was delivered,
        with `metadata`; the channel is delivered anew from there. Raises `Fenced`, and what storing raises."""
        with self.acknowledging(delivered):
            ack = Ack(delivered.channel, delivered.assignment_epoch, upto, (), metadata)
            await self._coordinator.commit(self._group, self._id, [ack], [])
        self.redeliver(delivered)

    def report(self, error: TidewalError) -> None:
        """Let the iteration raise `error` once: it goes on then."""
        self._transient = error
        self._wake()

    def _steps(self, delivered: Sequence[Delivered], metadata: Mapping[str, bytes]) -> list[Step]:
        """What a commit of these batches stores, of each channel up to the last one of them."""
        steps: dict[str, Step] = {}
        last: dict[str, bytes] = {}
        for each in delivered:
            fetcher = self._fetcher_of(each)
            plan = fetcher.plan(each, None)
            if plan is None:
                raise _acknowledged_before(each)
            upto = plan.upto or b""
            if any(upto <= other for other in fetcher.committing):
                raise InvalidRequest(f"another commit of this batch of {each.channel} is under way")
            if fetcher.committing:  # it may be refused, and what it was made from would be passed over
                raise InvalidRequest(
                    f"a commit of an earlier batch of {each.channel} is under way: commit them in order"
                )
            if upto > last.get(each.channel, b""):
                last[each.channel] = upto
                steps[each.channel] = Step(fetcher, plan, fetcher.ack(plan, metadata.get(each.channel)))
        return list(steps.values())

    @checked
    def is_acknowledged(self, delivered: Delivered) -> bool:
        """Whether all of a batch is acknowledged, and its assignment epoch is not over."""
        fetcher = self._fetchers.get(delivered.channel)
        if fetcher is None or fetcher.epoch != delivered.assignment_epoch:
            return False
        return fetcher.unacknowledged.is_done(delivered.entries[-1].id)

    @checked
    def redeliver(self, delivered: Delivered) -> None:
        self._give_back(delivered.channel, delivered.assignment_epoch)

    def _give_back(self, channel: str, epoch: int) -> None:
        fetcher = self._fetchers.get(channel)
        if fetcher is not None and fetcher.epoch == epoch:
            self._put_back(fetcher)

    @checked
    def pause(self, of: str | Delivered) -> None:
        self._current(of).paused = True

    @checked
    def resume(self, channel: str) -> None:
        fetcher = self._fetchers.get(channel)
        if fetcher is not None and fetcher.paused:
            fetcher.paused = False
            if fetcher.waiting:
                self._on_ready(fetcher)

    @checked
    async def seek(self, channel: str, start: Start) -> None:
        await self._seek(self._held(channel), await resolve(self._wal, channel, start))

    async def aclose(self) -> None:
        if self._leaving is None:
            self._committer.left = True
            self._end()
            self._leaving = asyncio.create_task(self._leave(), name=f"leave group {self._group}")
        await asyncio.shield(self._leaving)  # cancelled half-way the member would keep its channels

    async def _leave(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_session()

    async def _end_session(self) -> None:
        with suppress(Unavailable, Closed, Fenced):  # then the session is over, or times out
            await self._coordinator.leave(self._group, self._id)

    # ---- delivering -------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self._ended:
            raise StopAsyncIteration
        if self._fatal is not None:
            raise self._fatal
        transient, self._transient = self._transient, None
        if transient is not None:
            raise transient

    def _next_ready(self) -> MemberFetcher | None:
        """The channel whose turn it is."""
        while self._ready:
            fetcher = self._ready.popleft()
            if self._fetchers.get(fetcher.channel) is not fetcher or fetcher.revoking:
                continue
            fetcher.waiting = fetcher.paused
            if not fetcher.paused:
                return fetcher
        return None

    def _take(self, fetcher: MemberFetcher) -> Delivered | None:
        try:
            delivered = fetcher.take()
        except TidewalError:
            self._ready.append(fetcher)
            raise
        if delivered is None and fetcher.unacknowledged.overdue() is not None:
            self._spawn(self._committer.compact(fetcher))
        return delivered

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_ready(self, fetcher: MemberFetcher) -> None:
        self._ready.append(fetcher)
        self._wake()

    async def _handle_error(self, fetcher: MemberFetcher, error: Exception) -> None:
        """Go on after an error of one channel, or raise it: again at each turn of the channel, as long as it lasts."""
        if isinstance(
            error, ChannelNotFound
        ):  # the coordinator takes the channel away; `_report_if_dropped` reports it
            return
        if isinstance(error, Closed):
            self._end()
            return
        if isinstance(error, TidewalError) and error.retryable:
            fetcher.start_again()
            raise error
        self._ready.append(fetcher)
        if not isinstance(error, PositionLost):
            raise error
        with suppress(Fenced):  # another member has the channel now
            here = Delivered(fetcher.channel, (), fetcher.epoch)
            if self.on_lost is not None and await self.on_lost(here, fetcher.begin):
                return
            if self._reset_to is None:
                raise error
            await self._seek(fetcher, await self._after_loss(fetcher, error, self._reset_to))
            if self._resets is not None:
                self._resets.inc()

    async def _after_loss(self, fetcher: MemberFetcher, error: PositionLost, reset_to: From) -> bytes:
        """The position for `reset_to`. The earliest is the first that there is behind what was lost: the channel may
        have entries before that, and reading from them would end at the same loss again."""
        behind = error.fields.get("first_available")
        if reset_to is From.EARLIEST and isinstance(behind, bytes):
            return just_before(behind)
        return await resolve(self._wal, fetcher.channel, reset_to)

    # ---- acknowledging ----------------------------------------------------------------------------------------------

    def _fetcher_of(self, delivered: Delivered) -> MemberFetcher:
        fetcher = self._fetchers.get(delivered.channel)
        if self._ended:
            raise has_left()
        if fetcher is None:
            raise epoch_over(delivered)
        return fetcher

    def _held(self, channel: str) -> MemberFetcher:
        fetcher = self._fetchers.get(channel)
        if fetcher is None:
            raise Fenced(f"this member does not have {channel} (any more)", channel=channel)
        return fetcher

    def _current(self, of: str | Delivered) -> MemberFetcher:
        """The fetcher of a channel, or of a batch whose assignment is not over."""
        if isinstance(of, str):
            return self._held(of)
        fetcher = self._fetcher_of(of)
        if of.assignment_epoch != fetcher.epoch:
            raise epoch_over(of)
        return fetcher

    async def _seek(self, fetcher: MemberFetcher, upto: bytes) -> None:
        await self._coordinator.seek(self._group, self._id, fetcher.channel, fetcher.epoch, upto)
        self._end_epoch(fetcher)
        await self._refresh()

    # ---- assigned channels ------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow what the coordinator decides, until the log is closed."""
        while not self._ended and self._fatal is None:
            try:
                self._apply(await self._coordinator.assignment(self._group, self._id, self._seen, WAIT_S))
            except Closed:
                self._end()
            except (Fenced, Unavailable):
                await self._join_again()
            except Exception as error:  # the iteration raises it, whatever it is
                self._fail(error)
                return

    async def _join_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._drop_all()
        failing_since, pause_s = loop.time(), FIRST_PAUSE_S
        while not self._ended:
            try:
                # A channel without a position of the group was created after it joined: no entry may be missed.
                await self._coordinator.join(
                    self._group, self._id, self._subscribed, From.EARLIEST, self._session_timeout_s
                )
                if self.on_joined is not None:
                    await self.on_joined()
                self._seen = 0  # the group may be another one, made with a clock that is behind
                return
            except Closed:
                self._end()
            except TidewalError as error:
                if not error.retryable:
                    self._fail(error)
                    return
                if loop.time() - failing_since >= self._session_timeout_s:
                    failing_since = loop.time()
                    self.report(error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _refresh(self) -> None:
        self._apply(await self._coordinator.assignment(self._group, self._id, None, 0))

    def _apply(self, assignment: MemberAssignment) -> None:
        if self._ended or assignment.version <= self._seen:
            return
        self._seen = assignment.version
        self._ended_epochs &= {assigned.epoch for assigned in assignment.held.values()}
        for fetcher in list(self._fetchers.values()):
            assigned = assignment.held.get(fetcher.channel)
            if assigned is None or assigned.epoch != fetcher.epoch:
                self._drop(fetcher)
            if assigned is None and fetcher.channel in self._subscribed:
                self._spawn(self._report_if_dropped(fetcher.channel))
        for channel, assigned in assignment.held.items():
            if channel not in self._fetchers and assigned.epoch not in self._ended_epochs:
                where = self._where_of(channel)
                self._fetchers[channel] = MemberFetcher(self._wal, channel, assigned, self._on_ready, where)
        for fetcher in list(self._fetchers.values()):
            fetcher.revoking = fetcher.channel in assignment.revoking
            if fetcher.revoking:
                self._stop(fetcher)
                self._release_if_done(fetcher)
            else:
                fetcher.start()

    def _release_if_done(self, fetcher: MemberFetcher) -> None:
        if not fetcher.revoking or fetcher.unacknowledged or fetcher.acks_in_flight:
            return
        self._put_back(fetcher)

    async def _report_if_dropped(self, channel: str) -> None:
        """Let the iteration raise that a channel which was named, not matched, is gone: the caller may wait for it
        alone."""
        try:
            await self._wal.describe(channel)
        except ChannelNotFound as error:
            self.report(error)
        except TidewalError:  # then the channel is not known to be gone
            return

    def _put_back(self, fetcher: MemberFetcher) -> None:
        """End the assignment epoch here at once, and then at the coordinator. What is not acknowledged is delivered
        again, to this member or to the channel's target."""
        if self._fetchers.get(fetcher.channel) is fetcher:
            self._end_epoch(fetcher)
            self._spawn(self._release(fetcher))

    async def _release(self, fetcher: MemberFetcher) -> None:
        """Tell the coordinator, until it knows: no member gets the channel before that."""
        pause_s = FIRST_PAUSE_S
        while fetcher.epoch in self._ended_epochs and not self._ended:
            try:
                await self._coordinator.release(self._group, self._id, fetcher.channel, fetcher.epoch)
                return
            except (Fenced, Closed):  # the session is over, and with it the epoch: `_watch` sees it
                return
            except TidewalError as error:
                if not error.retryable:
                    self._fail(error)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _end_epoch(self, fetcher: MemberFetcher) -> None:
        self._ended_epochs.add(fetcher.epoch)
        if self._fetchers.get(fetcher.channel) is fetcher:
            self._drop(fetcher)

    def _drop(self, fetcher: MemberFetcher) -> None:
        del self._fetchers[fetcher.channel]
        self._stop(fetcher)

    def _drop_all(self) -> None:
        for fetcher in list(self._fetchers.values()):
            self._drop(fetcher)

    def _stop(self, fetcher: MemberFetcher) -> None:
        task = fetcher.stop()
        if task is not None and not task.done():
            self._track(task)

    def _fail(self, error: Exception) -> None:
        """Raise the error in the iteration from now on, and keep no channel that others may have."""
        self._fatal = error
        self._drop_all()
        self._spawn(self._end_session())
        self._wake()

    def _end(self) -> None:
        self._ended = True
        self._drop_all()
        self._wake()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        self._track(asyncio.create_task(coroutine, name=f"group {self._group}"))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _acknowledged_before(delivered: Delivered) -> InvalidRequest:
    return InvalidRequest(f"this batch of {delivered.channel} is acknowledged: its outputs were committed before")
