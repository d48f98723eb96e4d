"""A member of a consumer group: reads its share of the channels from the log, whoever owns that at the moment."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from uuid import uuid4

from prometheus_client import Counter

from ..errors import ChannelNotFound, Closed, Fenced, InvalidRequest, PositionLost, TidewalError, Unavailable
from ..payloads import check_payload
from ..wal import Append, Delivered, From, Start, Wal
from .feed import Feed, lease_over
from .link import GroupLink, Shares
from .positions import just_before, resolve
from .unacknowledged import Plan

WAIT_S = 20.0  # how long one question for changes may stay open
FIRST_PAUSE_S = 0.05  # between attempts to join again
LAST_PAUSE_S = 1.0


async def start_member(
    wal: Wal,
    link: GroupLink,
    group: str,
    channels: Sequence[str],
    *,
    start: From = From.EARLIEST,
    reset_to: From | None = None,
    session_timeout_s: float = 30.0,
    member: str | None = None,
    resets: Counter | None = None,
) -> Member:
    """Join and return the member, which knows its channels by then. `member` is its id, made up unless given; `resets`
    counts what `reset_to` moved. Raises what `Wal.join` does."""
    joining = Member(wal, link, group, member or uuid4().hex, channels, reset_to, session_timeout_s, resets)
    try:
        await joining.join(start)
    except BaseException:
        await joining.aclose()
        raise
    return joining


class Member:
    """`GroupMember` over a log to read from and a link to its group's coordinator.

    When the link is lost or the session ended it joins again by itself; what was delivered and not acknowledged is
    delivered again. While that fails it goes on trying, and the iteration raises `Unavailable` each time the session
    timeout has passed without success. Holds one batch read ahead per channel, and a few words for each batch that is
    not acknowledged.
    """

    def __init__(
        self,
        wal: Wal,
        link: GroupLink,
        group: str,
        id: str,
        channels: Sequence[str],
        reset_to: From | None,
        session_timeout_s: float,
        resets: Counter | None,
    ) -> None:
        self._wal, self._link, self._group, self._id = wal, link, group, id
        self._subscribed = channels
        self._reset_to = reset_to
        self._session_timeout_s = session_timeout_s
        self._resets = resets
        self._feeds: dict[str, Feed] = {}
        self._ready: deque[Feed] = deque()
        self._seen = 0  # version of the shares
        self._given_up: set[int] = set()  # leases that the coordinator may still tell of
        self._passing: TidewalError | None = None  # raised once: it may succeed later
        self._fatal: Exception | None = None
        self._ended = False
        self._leaving: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def id(self) -> str:
        return self._id

    @property
    def channels(self) -> frozenset[str]:
        return frozenset(self._feeds)

    async def join(self, start: From) -> None:
        """Join for the first time. `start_member` calls it."""
        await self._link.join(self._group, self._id, self._subscribed, start, self._session_timeout_s)
        await self._refresh()
        self._spawn(self._watch())

    def __aiter__(self) -> Member:
        return self

    async def __anext__(self) -> Delivered:
        while True:
            self._check_running()
            feed = self._next_ready()
            if feed is None:
                await self._wait()
            elif feed.ended:
                self._end()
            elif feed.error is not None:
                await self._cope(feed, feed.error)
            else:
                delivered = self._take(feed)
                if delivered is not None:
                    return delivered

    async def acknowledge(self, delivered: Delivered, ids: Sequence[bytes] | None = None) -> None:
        feed = self._feed_of(delivered)
        plan = feed.plan(delivered, ids)
        if plan is not None:
            await self._commit([(feed, plan)], [])

    async def commit(self, delivered: Sequence[Delivered], outputs: Sequence[Append]) -> list[bytes]:
        for output in outputs:
            check_payload(output.payload)
        steps: dict[str, tuple[Feed, Plan]] = {}
        for each in delivered:
            feed = self._feed_of(each)
            plan = feed.plan(each, None)
            if plan is None:
                raise InvalidRequest(f"this batch of {each.channel} is acknowledged: its outputs were committed before")
            if any(plan.batch <= batch for batch in feed.committing):
                raise InvalidRequest(f"another commit of this batch of {each.channel} is under way")
            known = steps.get(each.channel)
            if known is None or plan.batch > known[1].batch:
                steps[each.channel] = feed, plan
        return await self._commit_outputs(list(steps.values()), outputs)

    def redeliver(self, delivered: Delivered) -> None:
        feed = self._feeds.get(delivered.channel)
        if feed is not None and feed.lease == delivered.lease:
            self._put_back(feed)

    async def seek(self, channel: str, start: Start) -> None:
        feed = self._feeds.get(channel)
        if feed is None:
            raise Fenced(f"this member does not have {channel} (any more)", channel=channel)
        await self._seek(feed, await resolve(self._wal, channel, start))

    async def aclose(self) -> None:
        if self._leaving is None:
            self._end()
            self._leaving = asyncio.create_task(self._leave(), name=f"leave group {self._group}")
        await asyncio.shield(self._leaving)  # cancelled half-way it would keep its channels

    async def _leave(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Unavailable, Closed, Fenced):  # then the session is over, or ends by itself
            await self._link.leave(self._group, self._id)

    # ---- delivering -------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self._ended:
            raise StopAsyncIteration
        if self._fatal is not None:
            raise self._fatal
        passing, self._passing = self._passing, None
        if passing is not None:
            raise passing

    def _next_ready(self) -> Feed | None:
        """The channel whose turn it is."""
        while self._ready:
            feed = self._ready.popleft()
            if self._feeds.get(feed.channel) is feed and not feed.wanted_back:
                return feed
        return None

    def _take(self, feed: Feed) -> Delivered | None:
        try:
            delivered = feed.take()
        except TidewalError:
            self._ready.append(feed)
            raise
        if delivered is None and feed.unacknowledged.overdue() is not None:
            self._spawn(self._tidy(feed))
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

    def _on_ready(self, feed: Feed) -> None:
        self._ready.append(feed)
        self._wake()

    async def _cope(self, feed: Feed, error: Exception) -> None:
        """Go on after an error of one channel, or raise it: again at each turn of the channel, as long as it lasts."""
        if isinstance(error, ChannelNotFound):  # the coordinator takes it away; `_report_if_dropped` tells of it
            return
        if isinstance(error, Closed):
            self._end()
            return
        if isinstance(error, TidewalError) and error.retryable:
            feed.start_again()
            raise error
        self._ready.append(feed)
        if not isinstance(error, PositionLost) or self._reset_to is None:
            raise error
        with suppress(Fenced):  # another member has the channel now
            await self._seek(feed, await self._after_loss(feed, error, self._reset_to))
            if self._resets is not None:
                self._resets.inc()

    async def _after_loss(self, feed: Feed, error: PositionLost, reset_to: From) -> bytes:
        """The position for `reset_to`. The earliest is the first that there is behind what was lost: the channel may
        have entries before that, and reading from them would end at the same loss again."""
        behind = error.fields.get("first_available")
        if reset_to is From.EARLIEST and isinstance(behind, bytes):
            return just_before(behind)
        return await resolve(self._wal, feed.channel, reset_to)

    # ---- acknowledging ----------------------------------------------------------------------------------------------

    def _feed_of(self, delivered: Delivered) -> Feed:
        feed = self._feeds.get(delivered.channel)
        if self._ended:
            raise _ended()
        if feed is None:
            raise lease_over(delivered)
        return feed

    async def _commit_outputs(self, steps: Sequence[tuple[Feed, Plan]], outputs: Sequence[Append]) -> list[bytes]:
        for feed, plan in steps:
            feed.committing.append(plan.batch)
        try:
            return await self._commit(steps, outputs)
        except BaseException as error:
            if not isinstance(error, TidewalError) or error.fields.get("outcome_unknown"):
                for feed, _ in steps:  # to commit it again might double the outputs: the position tells what happened
                    self._put_back(feed)
            raise
        finally:
            for feed, plan in steps:
                feed.committing.remove(plan.batch)

    async def _commit(self, steps: Sequence[tuple[Feed, Plan]], outputs: Sequence[Append]) -> list[bytes]:
        for feed, _ in steps:
            feed.acks_in_flight += 1
        try:
            ids = await self._link.commit(self._group, self._id, [feed.ack(plan) for feed, plan in steps], outputs)
            for feed, plan in steps:
                feed.unacknowledged.stored(plan)
        except Fenced as error:
            if self._leaving is not None:
                raise _ended() from None
            raise Fenced(error.message, **{"channel": steps[0][0].channel, **error.fields}) from None  # or the session
        finally:
            for feed, _ in steps:
                feed.acks_in_flight -= 1
        for feed, _ in steps:
            if feed.unacknowledged.overdue() is not None and not feed.acks_in_flight:
                await self._tidy(feed)
            self._let_go_if_done(feed)
        return ids

    async def _tidy(self, feed: Feed) -> None:
        """Say cumulatively what was said of single entries."""
        upto = feed.unacknowledged.overdue()
        if upto is not None:
            with suppress(TidewalError):  # each entry's own acknowledgement is stored: this only shortens the list
                plan = Plan(upto, upto, ())
                await self._link.commit(self._group, self._id, [feed.ack(plan)], [])
                feed.unacknowledged.stored(plan)

    async def _seek(self, feed: Feed, upto: bytes) -> None:
        await self._link.seek(self._group, self._id, feed.channel, feed.lease, upto)
        self._give_up(feed)
        await self._refresh()

    # ---- having channels --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow what the coordinator decides, until the log is closed."""
        while not self._ended and self._fatal is None:
            try:
                self._apply(await self._link.shares(self._group, self._id, self._seen, WAIT_S))
            except Closed:
                self._end()
            except (Fenced, Unavailable):
                await self._join_again()
            except Exception as error:  # whoever iterates gets it, whatever it is
                self._fail(error)
                return

    async def _join_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._drop_all()
        failing_since, pause_s = loop.time(), FIRST_PAUSE_S
        while not self._ended:
            try:
                # What the group has no position in was created after it joined: nothing of it may be missed.
                await self._link.join(self._group, self._id, self._subscribed, From.EARLIEST, self._session_timeout_s)
                return
            except Closed:
                self._end()
            except TidewalError as error:
                if not error.retryable:
                    self._fail(error)
                    return
                if loop.time() - failing_since >= self._session_timeout_s:
                    self._passing, failing_since = error, loop.time()
                    self._wake()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _refresh(self) -> None:
        self._apply(await self._link.shares(self._group, self._id, None, 0))

    def _apply(self, shares: Shares) -> None:
        if self._ended or shares.version <= self._seen:
            return
        self._seen = shares.version
        self._given_up &= {share.lease for share in shares.held.values()}
        for feed in list(self._feeds.values()):
            share = shares.held.get(feed.channel)
            if share is None or share.lease != feed.lease:
                self._drop(feed)
            if share is None and feed.channel in self._subscribed:
                self._spawn(self._report_if_dropped(feed.channel))
        for channel, share in shares.held.items():
            if channel not in self._feeds and share.lease not in self._given_up:
                self._feeds[channel] = Feed(self._wal, channel, share, self._on_ready)
        for feed in list(self._feeds.values()):
            feed.wanted_back = feed.channel in shares.wanted_back
            if feed.wanted_back:
                self._stop(feed)
                self._let_go_if_done(feed)
            else:
                feed.start()

    def _let_go_if_done(self, feed: Feed) -> None:
        if not feed.wanted_back or feed.unacknowledged or feed.acks_in_flight:
            return
        self._put_back(feed)

    async def _report_if_dropped(self, channel: str) -> None:
        """Tell whoever iterates that a channel which was named, not matched, is gone: it may wait for it alone."""
        try:
            await self._wal.describe(channel)
        except ChannelNotFound as error:
            self._passing = error
            self._wake()
        except TidewalError:  # then it is not known to be gone
            return

    def _put_back(self, feed: Feed) -> None:
        """End the lease here and now, and then at the coordinator. What is not acknowledged comes again, to this member
        or to the one that the channel is meant for."""
        if self._feeds.get(feed.channel) is feed:
            self._give_up(feed)
            self._spawn(self._release(feed))

    async def _release(self, feed: Feed) -> None:
        """Nobody gets the channel before the coordinator knows, so this goes on until it does."""
        pause_s = FIRST_PAUSE_S
        while feed.lease in self._given_up and not self._ended:
            try:
                await self._link.release(self._group, self._id, feed.channel, feed.lease)
                return
            except (Fenced, Closed):  # the session is over, and with it the lease: `_watch` hears of it
                return
            except TidewalError as error:
                if not error.retryable:
                    self._fail(error)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _give_up(self, feed: Feed) -> None:
        self._given_up.add(feed.lease)
        if self._feeds.get(feed.channel) is feed:
            self._drop(feed)

    def _drop(self, feed: Feed) -> None:
        del self._feeds[feed.channel]
        self._stop(feed)

    def _drop_all(self) -> None:
        for feed in list(self._feeds.values()):
            self._drop(feed)

    def _stop(self, feed: Feed) -> None:
        task = feed.stop()
        if task is not None and not task.done():
            self._track(task)

    def _fail(self, error: Exception) -> None:
        self._fatal = error
        self._drop_all()
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


def _ended() -> Closed:
    return Closed("the member has left its group, or the log is closed")
