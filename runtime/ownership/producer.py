"""A named producer: the owner of some channels that keeps its terms and limits in the log itself.

Its state is a replicated one in the channel `producer-NAME`, led by the incarnation that claimed it last:

1. An incarnation claims the state. From then on nothing of the incarnation before counts there, no renewal of its lease
   and no new limit. Unless that one has released its channels, the new one waits for as long as its lease may last.
2. It takes its channels, which no other name may have (`producer_channels`).
3. It has a grant stored: a higher term for each channel, and a limit above all limits before. It writes fences into the
   channels, under that term, and reads each up to its fence.
4. While its lease holds it stamps, announces and acknowledges, never above the limit that is stored.

So whatever is acknowledged was in the log before the next incarnation wrote its fence, and no timestamp of that one is
at or below a time that was announced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Self
from uuid import uuid4

import xxhash

from ..actor.heartbeat import HeartbeatThread
from ..arguments import checked
from ..clock import HybridClock, add_ms
from ..delays.delayed import DelayedId, due_ms
from ..errors import (
    ChannelExists,
    ChannelNotFound,
    Closed,
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    OutcomeUnknown,
    TidewalError,
    of_unknown_outcome,
)
from ..log.checks import check_framed
from ..log.heartbeats import PRODUCER_HEARTBEATS
from ..log.migration_state import check_in_use
from ..log.record import Record, RecordType
from ..log.wal import ChannelPolicy, Payload, Wal
from ..replicated.records import Event
from ..replicated.replica import Replica, SnapshotPacing
from .batch import Appended
from .channel_owner import ChannelOwner
from .lease import LEASE_S, Lease
from .observer import ChannelOwnerObserver
from .producer_channels import check_channels, owned_otherwise, producer_channels, take_channels
from .producer_delays import ProducerDelays
from .producer_state import FENCES, GRANT, PRODUCER_PREFIX, RELEASE, RENEW, ProducerState
from .sequence_window import SequenceWindow

SEND_DEADLINE_S = 30.0
TICK_S = 0.2

RENEWALS_PER_LEASE = 4
DRIFT = 1.01  # how much faster one machine's clock may run than another's
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0

_HEARTBEAT_POLICY = ChannelPolicy(ephemeral=True)
_STATE_POLICY = ChannelPolicy(retention_s=None)
_log = logging.getLogger("tidewal.producer")


@checked
@asynccontextmanager
async def open_producer(
    wal: Wal,
    name: str,
    channels: Sequence[str],
    *,
    policy: ChannelPolicy | None = None,
    lease_s: float = LEASE_S,
    clock: HybridClock | None = None,
    delays: bool = False,
) -> AsyncGenerator[Producer]:
    """Own `channels` under the name `name`: `async with tidewal.open_producer(wal, "shop", ["orders"]) as producer`.

    Channels that are not there are created with `policy`, by default that of `ChannelPolicy()`. Where the name is open
    elsewhere this producer takes over, and the other one's `send` raises `Fenced`; nothing that was acknowledged is
    lost. After an incarnation that did not end in order, because its process was killed or still runs, opening takes as
    many seconds as that one's `lease_s`.

    A channel belongs to the first name that takes it, and the log remembers that whatever retention removes. A name
    keeps the channels that it had before, and gets `channels` as well; with [] it opens those that it has. One that was
    dropped, and is not asked for, the name gives up: only then may another name take it.

    With `delays` the producer takes messages that are due later (`Producer.schedule`), and keeps them in a channel of
    its own, `producer-NAME.delays`. A name that had them once always releases what is due, while it is open.

    Raises `InvalidRequest` for a channel that belongs to another name (`channel`, `owner`), or that a `ChannelOwner`
    has written to, before it disturbs an incarnation that is open; `Fenced` where yet another process opens the name
    meanwhile; `Moved` where the log was migrated since it was opened, `Unavailable` while it is; and what the log
    raises."""
    producer = Producer(wal, name, channels, policy or ChannelPolicy(), lease_s, clock or HybridClock(), delays)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(producer.aclose)
        await producer.open()
        yield producer


class _StallObserver(ChannelOwnerObserver):
    """Wakes the producer when an append's outcome is unknown."""

    def __init__(self, stalled: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stalled = stalled

    def stalled(self, channels: Sequence[str], error: TidewalError) -> None:
        self._loop.call_soon_threadsafe(self._stalled.set)


class Producer:
    """Writes batches of records to its channels. Made by `open_producer`.

    Batches are numbered from 1, one after another, over all incarnations of the name: the log answers a number that it
    has already, and does not write the batch again. Each batch has one timestamp, readers see all of it or nothing on a
    log with atomic batches, and the batches of a channel are read in the order in which they were sent.
    """

    def __init__(
        self,
        wal: Wal,
        name: str,
        channels: Sequence[str],
        policy: ChannelPolicy,
        lease_s: float,
        clock: HybridClock,
        delays: bool = False,
    ) -> None:
        if isinstance(channels, str):
            raise InvalidRequest(f"channels is {channels!r}, and must be a list of names of channels")
        if not name:
            raise InvalidRequest("a producer needs a name: under it the log knows what it has written")
        if lease_s <= 0:
            raise InvalidRequest(f"lease_s is {lease_s}, and must be above 0")
        check_framed(wal, "a named producer")
        self.name = name
        self.channels: tuple[str, ...] = tuple(dict.fromkeys(channels))
        self._owned = self.channels
        self._wal, self._policy, self._clock = wal, policy, clock
        self._lease_s = lease_s
        self._lease = Lease(clock.clock, lease_s)
        self._state: Replica[ProducerState] = Replica(
            wal,
            PRODUCER_PREFIX + name,
            ProducerState,
            RecordType.PRODUCER,
            led=True,
            now=clock.now,
            holder="producer",
            pacing=SnapshotPacing(records=200),
        )
        self._delays = ProducerDelays(wal, name, clock, wanted=delays)
        self._stalled = asyncio.Event()
        self._owner = ChannelOwner(
            wal,
            clock,
            heartbeat_channel=PRODUCER_HEARTBEATS,
            observer=_StallObserver(self._stalled),
            lease_holds=self._lease.holds,
            name=name,
        )
        self._heartbeat = HeartbeatThread(clock.clock, name=f"tidewal-producer-{name}")
        self._renewing: asyncio.Task[None] | None = None
        self._ended: TidewalError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._window = SequenceWindow(lambda: self.last_sequence, self._check_open)
        self._decided_to = 0
        self._granted = False
        self._acquiring = False  # anew, and not through

    async def open(self) -> Self:
        """Own the channels. `open_producer` calls it."""
        await self._check_in_use()
        await self._check_name()
        incarnation = f"{self.name}-{uuid4().hex[:8]}"
        await self._wal.create_channel(PRODUCER_HEARTBEATS, _HEARTBEAT_POLICY)
        await self._wal.create_channel(self._state.channel, _STATE_POLICY)
        await self._state.open()
        name, asked = self.name, (*self.channels, *self._delays.asked)
        async with producer_channels(self._wal, incarnation, self._clock.now) as belonging:
            # before anything is claimed, or waited for
            await check_channels(self._wal, belonging.fold.state, name, asked, self._state.fold.state.channels)
            claim = await self._state.claim(incarnation)
            await self._wait_for_predecessor()
            known = self._state.fold.state.channels
            taken = await take_channels(self._wal, belonging, name, claim.term, asked, known)
        for channel in asked:
            with suppress(ChannelExists):  # it keeps the policy that it has
                await self._wal.create_channel(channel, self._delays.policy_of(channel, self._policy))
        self._owned = taken.channels
        self.channels = tuple(each for each in taken.channels if each != self._delays.channel)
        await self._acquire(self._state.fold.state.limit, taken.anew, taken.terms_before)
        await self._check_in_use()  # behind the grant: either a migration sees that, or this sees the migration
        self._window.last = max(self._owner.highest_sequence(self.name), self._state.fold.state.sequence)
        self._renewing = asyncio.create_task(self._renew_periodically(), name=f"producer {self.name}")
        self._heartbeat.every(TICK_S, self._owner.tick_all, f"ticks of {self.name}")
        self._heartbeat.start(asyncio.get_running_loop())  # as are renewals: a loop that stands still loses the lease
        if self._delays.channel in self._owned:
            self._delays.start(self._owner, self._end)
        return self

    @property
    def last_sequence(self) -> int:
        """All batches of this name up to this number are in the log, and acknowledged or known to be there; 0: none. A
        source that can repeat its batches by number goes on behind it, with `sequence`, and has each in the log once:
        one further on that is there already is not written again. Where batches are sent without `sequence`, one up to
        this number may have been given up instead."""
        known_to = max(self._decided_to, self._state.fold.state.sequence)
        self._decided_to = self._owner.last_sequence(self.name, known_to)
        return self._decided_to

    @checked
    async def send(
        self,
        records: Sequence[tuple[str, Record | Payload]],
        *,
        sequence: int | None = None,
        deadline_s: float = SEND_DEADLINE_S,
    ) -> Appended:
        """Append (channel, record) pairs as one batch, and return its timestamp once it is durable. Bytes become a
        record with that body. Transient errors are waited out: the batch is in the log once, however often it is tried.
        One call at a time keeps the order over errors; at most 128 are in flight, and others wait in order.

        `sequence` is the number of the batch, to send one again whose outcome is not known (`repeated` says that it was
        there); without it the batch gets a number above all that the name has used. A batch waits until all are decided
        whose numbers are 128 below its own, or more. One of those that no call sends any more is given up for a call
        without `sequence`; a call with it waits until that batch is sent, too.

        Raises `InvalidRequest` for a number that is not next, that another batch has, that was given up (`given_up`:
        send the batch anew), or that must wait for one that no call sends (`missing`); `Fenced` once the name was
        opened elsewhere (with `outcome_unknown` where the batch may be there), `DeadlineExceeded` (`sequence`, by which
        to send it again; None for a batch that was not sent yet), `MessageTooLarge`, `Closed` (with `outcome_unknown`,
        too), and `ChannelNotFound` for a channel that was dropped."""
        batch = self._checked(records)
        return await self._send(batch, _digest(batch), sequence, deadline_s)

    @checked
    async def schedule(
        self,
        records: Sequence[tuple[str, Record | Payload]],
        *,
        deliver_at: datetime | None = None,
        deliver_after_s: float | None = None,
        sequence: int | None = None,
        deadline_s: float = SEND_DEADLINE_S,
    ) -> list[bytes]:
        """Take (channel, record) pairs that are to be sent later, and return their ids once they are durable. Each is
        appended to its channel at `deliver_at` (up to 366 days ahead), or `deliver_after_s` seconds from now: never
        before, by the log's time and by the wall clock; in the order of due times, and where these are equal in that of
        calls; once, whatever becomes of this process. What is due while the producer is not open is sent when it is.

        In its channel a message has its id as the tag `tidewal.offset`, and `producer-NAME.delays` as `tidewal.source`.
        One that its channel does not take is kept, with the reason, in `producer-NAME.dead_letters`.

        `sequence` and `deadline_s` are those of `send`, whose numbers they share; to be repeated, a batch needs
        `deliver_at`. Raises what `send` raises, and `InvalidRequest` unless the producer was opened with `delays`, for
        a record that is not of type ROWS, and for a wrong time."""
        batch = self._checked(records)
        if sequence is not None and deliver_at is None:
            raise InvalidRequest("a batch with a sequence needs deliver_at: deliver_after_s is another time each time")
        due = due_ms(deliver_at, deliver_after_s, self._clock.clock.wall_ms())
        delayed = self._delays.records(batch, due)
        appended = await self._send(delayed, _digest(batch, due), sequence, deadline_s)
        return [DelayedId.of(due, appended.ts, number).to_bytes() for number in range(len(batch))]

    @property
    def pending_delays(self) -> int:
        """How many delayed messages this producer has in memory to be sent: all, or those that are due first."""
        return self._delays.pending

    @checked
    async def cancel(self, id: bytes, *, sequence: int | None = None, deadline_s: float = SEND_DEADLINE_S) -> bool:
        """Cancel a message by an id that `schedule` has returned. True: it is not sent, and that is durable. False: it
        was due already. Repeated with the `sequence` of a `DeadlineExceeded` it says what the first call did. Raises
        what `send` raises."""
        due = DelayedId.from_bytes(id).due
        batch = self._delays.cancellations(id)
        return (await self._send(batch, _digest(batch), sequence, deadline_s)).ts < due

    def _checked(self, records: Sequence[tuple[str, Record | Payload]]) -> list[tuple[str, Record]]:
        batch = [(channel, _record(record)) for channel, record in records]
        foreign = {channel for channel, _ in batch} - set(self.channels)
        if not batch or foreign:
            raise InvalidRequest(
                f"{', '.join(sorted(foreign))} is not of this producer" if foreign else "an empty batch"
            )
        return batch

    async def _send(
        self, batch: Sequence[tuple[str, Record]], digest: int, sequence: int | None, deadline_s: float
    ) -> Appended:
        self._check_open()
        number = sequence
        admitted = self._window.admitted(sequence, partial(self._give_up, batch[0][0]))
        try:
            async with asyncio.timeout(deadline_s), admitted as number:
                appended = await self._append(batch, number, digest)
        except TimeoutError:
            raise self._late(number, deadline_s) from None
        if not appended.rows:
            raise InvalidRequest(
                f"batch {number} of {self.name} was given up before it was in the log: send it without sequence",
                sequence=number,
                given_up=True,
            )
        if appended.digest != digest:  # of the one that was there, or that it met in flight
            raise InvalidRequest(f"batch {number} of {self.name} is in the log, and is another one", sequence=number)
        return appended

    async def aclose(self) -> None:
        """Wait for what is in flight, give the channels back, and stop. Batches that still wait end with `Closed`.
        A second call waits for the same."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close producer {self.name}")
        await asyncio.shield(self._closing)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended
        if self._closing is not None:
            raise Closed(f"the producer {self.name} is closed")

    async def _append(self, batch: Sequence[tuple[str, Record]], number: int, digest: int) -> Appended:
        known = self._owner.recorded(self.name, number)
        if known is not None and known.digest != digest:  # of another batch, or given up, in whatever channels
            return Appended(known.ts, known.rows, repeated=True, digest=known.digest)
        append = partial(self._owner.append, batch, producer=self.name, pseq=number, rows=len(batch), digest=digest)
        return await self._decided(number, append)

    async def _give_up(self, channel: str, number: int) -> None:
        """Write into `channel` that the batch `number` is not sent any more, so that another one can be."""
        _log.warning(
            "the producer %s gives up batch %d, which is not in the log and was not sent again", self.name, number
        )
        try:
            await self._decided(number, partial(self._owner.give_up, channel, self.name, number))
        except TidewalError:
            self._check_open()  # no error of that number: the batch that waits for it was not sent
            raise

    async def _decided(self, number: int, submit: Callable[[], asyncio.Future[Appended]]) -> Appended:
        """Submit until the log has taken it. Raises where no further attempt can change that it has not."""
        pause_s = FIRST_PAUSE_S
        sent = False
        while True:
            try:
                future = submit()
                sent = True
                future.add_done_callback(self._note)  # where the call was cancelled meanwhile
                return await asyncio.shield(future)  # a cancelled call ends nothing: the batch is under way
            except TidewalError as error:
                if self._ended is not None:
                    raise (of_unknown_outcome(self._ended) if sent else self._ended) from None
                if isinstance(error, ChannelNotFound):
                    raise _dropped(self.name, error) from None
                if isinstance(error, Closed) and sent:
                    raise Closed(
                        f"the producer {self.name} was closed before it knew whether batch {number} is in the log: "
                        f"send it again with sequence={number}",
                        sequence=number,
                        outcome_unknown=True,
                    ) from None
                if isinstance(error, Closed) or not (error.retryable or _in_part(error)):
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _note(self, future: asyncio.Future[Appended]) -> None:
        """Look at the error of an append that no call waits for any more: the batch may be sent again."""
        if not future.cancelled():
            future.exception()
        self._window.wake()

    def _late(self, number: int | None, deadline_s: float) -> DeadlineExceeded:
        if number is None:
            return DeadlineExceeded(
                f"a batch of {self.name} was not sent within {deadline_s:g} s, for it waited for those before it: "
                "send it again",
                sequence=None,
            )
        return DeadlineExceeded(
            f"batch {number} of {self.name} was not acknowledged within {deadline_s:g} s: whether it is in the log "
            f"is not known; send it again with sequence={number}",
            sequence=number,
            outcome_unknown=True,
        )

    # ---- ownership --------------------------------------------------------------------------------------------------

    async def _wait_for_predecessor(self) -> None:
        """Until the incarnation before acknowledges nothing more. None of its renewals counts since the claim, so its
        lease is over `lease_s` after that; wall clocks are not used."""
        claimed_s = self._clock.clock.monotonic()
        before = self._state.fold.state
        if before.released:
            return
        _log.warning(
            "the producer %s was not closed, or runs elsewhere: its lease is over in %g s", self.name, before.lease_s
        )
        await asyncio.sleep(claimed_s + DRIFT * before.lease_s - self._clock.clock.monotonic())

    async def _acquire(
        self, previous_limit: int, anew: Sequence[str] = (), terms_before: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Own the channels under new terms, above `terms_before`, with timestamps above `previous_limit`. Of those made
        `anew` nothing that is known counts but the term."""
        known = self._state.fold.state.channels
        before = {**dict.fromkeys(self._owned, 0), **terms_before}
        terms = {name: max(known[name].term if name in known else 0, before[name]) + 1 for name in self._owned}
        asked_s = self._clock.clock.monotonic()
        limit = self._next_limit(previous_limit)
        await self._propose(
            {"kind": GRANT, "channels": terms, "anew": list(anew), "limit": limit, "lease_s": self._lease_s}
        )
        self._granted = True
        self._lease.renew(asked_s)
        grants = self._state.fold.state.grants(previous_limit, limit, terms)
        try:
            fences = await self._owner.acquire_all(grants)
        except Fenced as error:
            channel = str(error.fields.get("channel"))
            now = (await self._state.catch_up()).channels.get(channel)
            if now is not None and now.term > terms[channel]:
                raise  # this very name, opened elsewhere meanwhile
            raise owned_otherwise(channel) from None
        await self._propose({"kind": FENCES, "fences": fences})
        # what retention has removed, with its outcome, is not to be written again
        self._owner.note_appended(self.name, self._state.fold.state.sequence)
        for channel, term in terms.items():
            self._owner.activate(channel, term)

    async def _check_in_use(self) -> None:
        """Raise as `check_in_use`: the log may have been migrated since it was opened."""
        await check_in_use(self._wal, f"{self._wal.name}://")

    async def _check_name(self) -> None:
        """Raise `InvalidRequest` where no channel is asked for, and the name is new."""
        if not self.channels:
            try:
                await self._wal.describe(self._state.channel)
            except ChannelNotFound:
                raise InvalidRequest(f"{self.name} has no channel yet: name at least one in channels") from None

    def _next_limit(self, previous: int = 0) -> int:
        return add_ms(max(self._clock.now(), previous), int(self._lease_s * 1000))

    def _progress(self) -> Event:
        return {"sequence": self.last_sequence, "checkpoints": self._owner.checkpoints()}

    async def _propose(self, event: Event) -> None:
        await self._state.propose(event)
        await self._state.snapshot_if_due()

    async def _renew_periodically(self) -> None:
        interval_s = self._lease_s / RENEWALS_PER_LEASE
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._stalled.wait()
            try:
                await self._renew()
            except Fenced:
                await self._end(
                    Fenced(f"the producer {self.name} was opened elsewhere since, and its channels are there")
                )
                return
            except TidewalError as error:
                if not error.retryable:
                    await self._end(_dropped(self.name, error) if isinstance(error, ChannelNotFound) else error)
                    return
                _log.warning("the lease of the producer %s is not renewed: %s", self.name, error)
                await asyncio.sleep(min(LAST_PAUSE_S, interval_s))

    async def _renew(self) -> None:
        """Renew the lease. Where an append's outcome is unknown own the channels anew, which decides it."""
        if self._owner.stalled or self._acquiring:
            self._acquiring = True  # until it is through: its fences decide, and its channels are not open before
            await self._acquire(self._clock.last)
            self._stalled.clear()
            self._acquiring = False
            return
        asked_s, limit = self._clock.clock.monotonic(), self._next_limit()
        await self._propose({"kind": RENEW, "limit": limit, **self._progress()})
        self._lease.renew(asked_s)
        self._owner.renew(limit)

    async def _end(self, error: TidewalError) -> None:
        """Send nothing more. What is in flight is decided, or ends with an error."""
        self._ended = self._ended or error
        self._window.wake()
        if self._renewing is not None and self._renewing is not asyncio.current_task():
            self._renewing.cancel()
        self._heartbeat.stop()
        await self._owner.close()
        await self._delays.stop()

    async def _close(self) -> None:
        self._window.wake()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self._delays.stop()
        self._heartbeat.stop()
        used = await self._owner.close(tick_everywhere=True)
        if self._granted and self._ended is None:
            try:
                await self._state.propose({"kind": RELEASE, "limit": used, **self._progress()})
            except TidewalError as error:  # the next incarnation waits until the lease is over
                _log.warning("the producer %s is closed, and the log does not know it: %s", self.name, error)
        await self._state.close()


def _in_part(error: TidewalError) -> bool:
    """Whether some channels have the batch and others do not: sent again, it comes to the others."""
    return isinstance(error, OutcomeUnknown) and "forgotten" not in error.fields


def _dropped(name: str, error: ChannelNotFound) -> ChannelNotFound:
    return ChannelNotFound(
        f"the channel {error.fields.get('channel')} of the producer {name} was dropped: open the producer again, which "
        "makes the channel anew where it is asked for, and else gives it up",
        **error.fields,
    )


def _record(record: Record | Payload) -> Record:
    return record if isinstance(record, Record) else Record(RecordType.ROWS, body=record)


def _digest(batch: Sequence[tuple[str, Record]], due: int = 0) -> int:
    """Of the batch's content, in 63 bits: by it a repeated number with another batch is noticed. `due`: when it is to
    be sent, where that is later."""
    digest = xxhash.xxh3_64()
    if due:
        digest.update(f"{due} ".encode())
    for channel, record in batch:
        digest.update(f"{channel} {len(record.key)} {len(record.body)} ".encode())
        digest.update(record.key)
        digest.update(record.body)
    return digest.intdigest() >> 1
