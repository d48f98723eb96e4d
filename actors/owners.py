"""Questions to the owners of pchannels: the StreamingNode of this process is called directly, another one gets a
request."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..runtime.catalog.catalog import Collection
from ..runtime.catalog.catalog_log import CatalogLog
from ..runtime.clock import add_ms
from ..runtime.errors import (
    ActorStopped,
    DeadlineExceeded,
    Fenced,
    HandlerFailed,
    Overloaded,
    TidewalError,
    TopicEpochEnded,
    Unavailable,
    Unsupported,
    of_unknown_outcome,
)
from ..runtime.log.record import Record
from ..runtime.log.wal import Payload
from ..runtime.ownership import Appended, ChannelPoint, SyncPoint
from ..runtime.ownership.prepared import TransactionId
from ..runtime.replicated.records import typed
from ..runtime.rpc.client import RpcClient
from ..runtime.rpc.protocol import Params, Reply
from ..runtime.waiting import first_of
from .local_owner import WritePart
from .pchannels import pchannels_of
from .transaction_commits import TransactionCommits, is_prepared
from .write_requests import SUBMITTED, DoorPlace, SendAgain, appended_from, pack_labelled, part_on, write_request

if TYPE_CHECKING:
    from .node import Node

FLUSH_DEADLINE_S = 300.0
SOURCED_DEADLINE_S = 10.0  # of one request with what a source has; it is repeated
AGAIN_S = 0.05  # until an owner that does not own a channel yet, or any more, is asked again
SYNC_AHEAD_MS = 10  # the time at which several owners are asked lies ahead of what they have acknowledged by then
SYNC_ROUNDS = 10

# The owner has not done it, or it is not known to have; the owner then may do it.
_AGAIN = (Unavailable, ActorStopped, HandlerFailed, Fenced)

Result = TypeVar("Result")


class OwnerLost(TidewalError):
    """The channels of a question have another owner by now, or none; whether the one that was asked has done what it
    was asked for is not known."""

    retryable = True


class Owners:
    """Who owns which pchannel now, as far as a role of a process knows, and what is asked of them.

    Where all channels of a question are open at the StreamingNode of this process, nothing passes through the log. Of
    others the catalog says who owns them. `run` ends the questions to an owner that has lost a channel, or is no member
    of the cluster any more.
    """

    def __init__(self, node: Node, catalog: CatalogLog, rpc: RpcClient) -> None:
        self._node, self._catalog, self._rpc = node, catalog, rpc
        self._local = node.local_owner
        self._asking: dict[asyncio.Task[Reply], tuple[str, list[str], Sequence[int]]] = {}  # owner, channels, terms
        self._refusals = Counter[str]()  # by channel: of parts of writes
        self._numbers = itertools.count(1)  # of the parts of writes that are sent
        self._under_way: dict[tuple[str, str], dict[int, None]] = {}  # by producer and owner: numbers, in order
        self._transactions = TransactionCommits(node.cluster, rpc.name, self.append_to, self.settle)

    # ---- who owns what ----------------------------------------------------------------------------------------------

    def terms(self, channels: Iterable[str]) -> Hashable | None:
        """None where not all of `channels` are open now; otherwise a value that is another one whenever one of them has
        got another owner, or another term, or its owner has refused what was sent."""
        wanted = tuple(channels)
        local = self._local.terms(wanted)
        if local is not None:
            return local
        found: list[Hashable] = []
        for channel in wanted:
            terms = self._local.terms((channel,)) or self._remote_terms(channel)
            if terms is None:
                return None
            found.append(terms)
        return tuple(found)

    def _remote_terms(self, channel: str) -> Hashable | None:
        owner = self._remote_owner(channel)
        return (owner, self._catalog.catalog.channels[channel].term, self._refusals[channel]) if owner else None

    def _remote_owner(self, channel: str) -> str:
        """The process elsewhere that owns the channel, and has it open; "" where there is none."""
        state = self._catalog.catalog.channels.get(channel)
        if state is None or state.owner == self._node.incarnation or state.term not in state.fences:
            return ""
        known = channel in self._node.message_bytes and self._node.cluster.has(state.owner)
        return state.owner if known and self._catalog.catalog.topics.has_begun(channel) else ""

    def changed(self) -> Coroutine[Any, Any, None]:
        """Wait until channels may have been opened or closed since this call."""
        return first_of(self._local.changed(), self._catalog.changed(), self._node.cluster.changed())

    async def until_open(self, channels: Iterable[str]) -> None:
        """Wait until all of `channels` are open."""
        wanted = list(channels)
        while self.terms(wanted) is None:
            await self.changed()

    async def until_all_open(self) -> None:
        """Wait until the channels of all collections are open."""
        while self.terms(self._catalog.catalog.pchannels) is None:
            await self.changed()

    async def run(self) -> None:
        """Know of channels that are owned elsewhere, and end questions whose owner has lost what they are about."""
        while True:
            await self._describe_channels()
            for call, (owner, channels, terms) in list(self._asking.items()):
                if self._terms_at(owner, channels) != terms:
                    del self._asking[call]
                    call.cancel()
            await self.changed()

    async def _describe_channels(self) -> None:
        looked_at = set[str]()
        while missing := self._undescribed() - looked_at:
            for channel in missing:
                with suppress(TidewalError):  # it may not be there yet; looked at again with the next change
                    described = await self._node.wal.describe(channel)
                    self._node.message_bytes[channel] = described.max_message_bytes
                    self._local.wake()
            looked_at |= missing

    def _undescribed(self) -> set[str]:
        own, known = self._node.incarnation, self._node.message_bytes
        channels = self._catalog.catalog.channels
        return {name for name, state in channels.items() if state.owner != own and name not in known}

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def _ask(
        self, owner: str, method: str, channels: list[str], params: Params, body: Payload = b"", *, deadline_s: float
    ) -> Reply:
        """The reply of `owner` about `channels`. Raises what it replies, and `OwnerLost`."""
        terms = self._terms_at(owner, channels)
        if not terms:
            raise OwnerLost(f"{owner} does not own {', '.join(channels)} any more")
        named = {"to": owner, **params}
        call = asyncio.create_task(self._rpc.call("streamingnode", method, named, body, deadline_s=deadline_s))
        self._asking[call] = owner, channels, terms
        try:
            return await call
        except asyncio.CancelledError:
            if call in self._asking or not call.cancelled():
                raise
            raise OwnerLost(f"{', '.join(channels)} changed hands before {owner} answered") from None
        finally:
            self._asking.pop(call, None)
            call.cancel()

    def _terms_at(self, owner: str, channels: Iterable[str]) -> Sequence[int]:
        """The terms under which `owner` has the channels; none where it does not have them all, or is gone."""
        states = [self._catalog.catalog.channels.get(channel) for channel in channels]
        there = self._node.cluster.has(owner) and all(state is not None and state.owner == owner for state in states)
        return [state.term for state in states if state is not None] if there else []

    def _owner_of(self, channel: str) -> str:
        return self._node.incarnation if self._local.is_open((channel,)) else self._remote_owner(channel)

    def _by_owner(self, channels: Iterable[str]) -> dict[str, list[str]]:
        """The channels of each owner. Raises `Unavailable` where one is not open."""
        found: dict[str, list[str]] = defaultdict(list)
        for channel in channels:
            owner = self._owner_of(channel)
            if not owner:
                raise Unavailable(f"{channel} has no owner now; retry", channel=channel)
            found[owner].append(channel)
        return found

    def _not_dropped(self, channels: Iterable[str]) -> list[str]:
        """Those of `channels`, which were in the catalog, that still are."""
        return [channel for channel in channels if channel in self._catalog.catalog.channels]

    async def _ask_each(
        self,
        channels: Sequence[str],
        ask: Callable[[str, list[str]], Awaitable[Result]],
        still: Callable[[Iterable[str]], list[str]] = list,
    ) -> list[Result]:
        """Ask each owner about its channels, and again where a channel changes hands, until all have answered. It is
        left at those that are `still` to be asked."""
        results: list[Result] = []
        left = list(channels)
        while left := still(left):
            if self.terms(left) is None:
                await self.changed()
                continue
            owners = self._by_owner(left)
            answers = await asyncio.gather(*(ask(*each) for each in owners.items()), return_exceptions=True)
            left = list[str]()
            for theirs, answer in zip(owners.values(), answers, strict=True):
                if isinstance(answer, (OwnerLost, *_AGAIN)):
                    left += theirs
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    results.append(answer)
            if left:
                await asyncio.sleep(AGAIN_S)
        return results

    # ---- time -------------------------------------------------------------------------------------------------------

    async def sync(self, collection: Collection, *, deadline_s: float) -> SyncPoint:
        """One time, up to which everything is that was acknowledged to `collection` before this call, and the last
        record of each of its channels at or before it. Raises `DeadlineExceeded` where a channel has no owner within
        `deadline_s`, `CollectionNotFound` where it was dropped, and what its owner in this process raises."""
        return await self.sync_channels(pchannels_of(collection), collection.id, deadline_s=deadline_s)

    async def sync_channels(self, channels: Sequence[str], id: int | None = None, *, deadline_s: float) -> SyncPoint:
        """`sync` for these channels, of the collection with this `id`, or of any."""
        if self._local.is_open(channels):
            return await self._local.owner.sync(channels)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._sync_again(id, channels, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded(f"{', '.join(channels)} did not get an owner within {deadline_s:g} s") from None

    async def _sync_again(self, id: int | None, channels: Sequence[str], deadline_s: float) -> SyncPoint:
        while True:
            await self.until_open(channels)
            if self._local.is_open(channels):
                return await self._local.owner.sync(channels)
            try:
                return await self._sync_at_owners(id, self._by_owner(channels), deadline_s)
            except (OwnerLost, *_AGAIN):
                await asyncio.sleep(AGAIN_S)

    async def _sync_at_owners(self, id: int | None, owners: Mapping[str, list[str]], deadline_s: float) -> SyncPoint:
        """Of several owners each says how far it is at one time, the first that none had passed when it was asked. By
        the second round what was acknowledged before the question lies at or before it, however much is written
        meanwhile."""
        at = 0 if len(owners) == 1 else add_ms(self._node.clock.now(), SYNC_AHEAD_MS)
        exact = False
        for _ in range(SYNC_ROUNDS):
            asked = (self._sync_one(id, *each, at, deadline_s, exact=exact) for each in owners.items())
            points = await asyncio.gather(*asked)
            time = max(point.time for point in points)
            if all(point.time == time for point in points):
                return SyncPoint(time, {name: last for point in points for name, last in point.channels.items()})
            at, exact = time, True
        raise Unavailable("the owners of the channels have not agreed on a time; retry")

    async def _sync_one(
        self, id: int | None, owner: str, channels: list[str], at: int, deadline_s: float, *, exact: bool
    ) -> SyncPoint:
        if owner == self._node.incarnation:
            return await self._local.owner.sync(channels, at=at, exact=exact)
        params: Params = {"channels": channels, "at": at, **({} if id is None else {"id": id}), "exact": exact}
        values = (await self._ask(owner, "sync", channels, params, deadline_s=deadline_s)).values
        return SyncPoint(
            values["time"], {channel: ChannelPoint(*point) for channel, point in values["channels"].items()}
        )

    # ---- flushes and collections ------------------------------------------------------------------------------------

    async def flush(self, collection: Collection) -> int:
        """Have all of `collection` stored that was acknowledged before this; returns the time up to which it is."""
        return max(await self._ask_each(pchannels_of(collection), partial(self._flush_one, collection.id)))

    async def _flush_one(self, id: int, owner: str, channels: list[str]) -> int:
        if owner == self._node.incarnation:
            return await self._local.owner.flush(id, channels)
        params = {"id": id, "channels": channels}
        reply = await self._ask(owner, "flush", channels, params, deadline_s=FLUSH_DEADLINE_S)
        return int(reply.values["ts"])

    async def announce(self, what: str, collection: Collection, *, deadline_s: float) -> None:
        """Have each channel of `collection` say that it begins (`what` is "create") or ends ("drop")."""
        params = {"what": what, "collection": collection.to_wire()}

        async def ask(owner: str, channels: list[str]) -> None:
            named = {**params, "channels": channels}
            await self._ask(owner, "announce_collection", channels, named, deadline_s=deadline_s)

        try:
            async with asyncio.timeout(deadline_s):
                await self._ask_each(pchannels_of(collection), ask)
        except TimeoutError:
            raise DeadlineExceeded(f"not all channels of {collection.name} had an owner in {deadline_s:g} s") from None

    # ---- writes -----------------------------------------------------------------------------------------------------

    def message_bytes(self) -> Mapping[str, int]:
        """How large a message of each channel may be that is open."""
        elsewhere = self._node.message_bytes
        return self._local.message_bytes | elsewhere if elsewhere else self._local.message_bytes

    def append(self, part: WritePart, channels: Set[str], *, deadline_s: float) -> asyncio.Future[Appended]:
        """Have a write appended: in this process by a call, elsewhere by a request to each owner; a transaction that
        the log does not take at once is prepared at its owners, and committed. Its `channels` are open, and what is
        appended for one producer comes in order. The result may be `SendAgain`. Raises, having changed nothing, what an
        owner in this process raises."""
        if part.participants and is_prepared(channels, part.acks, self._node.wal.capabilities):
            return self._transactions.commit(part, self._by_owner(channels), deadline_s)
        if self._local.is_open(channels):
            return self._local.owner.append(part)
        # first the owner in this process: where it refuses, nothing is sent to others
        owners = sorted(self._by_owner(channels).items(), key=lambda each: each[0] != self._node.incarnation)
        if part.acks is not None and owners[0][0] != self._node.incarnation:
            raise Unsupported(
                "the position of a group is stored with a transaction by a proxy in the process that owns the log, and "
                "this one is in another: nothing was written; let that node have the role proxy",
                capability="atomic_acks",
            )
        if part.participants and len(owners) > 1:  # the log has one node: another one takes its place
            raise Unavailable("the channels of a transaction go from one node to another; retry")
        appends = [self.append_to(owner, part, set(theirs), deadline_s) for owner, theirs in owners]
        if len(appends) == 1:
            return appends[0]
        return asyncio.ensure_future(_together(appends, [theirs for _, theirs in owners]))

    def append_to(
        self, owner: str, part: WritePart, channels: set[str], deadline_s: float, attempt: str = ""
    ) -> asyncio.Future[Appended]:
        """Have one owner append what of `part` is for its `channels`, or with `attempt` prepare it. Raises, having
        changed nothing, what an owner in this process raises."""
        theirs = part_on(part, channels)
        if owner == self._node.incarnation:
            local = self._local.owner
            return local.prepare_part(theirs, attempt) if attempt else local.append(theirs)
        under_way = self._under_way.setdefault((part.producer, owner), {})
        place = DoorPlace(self._rpc.name, next(self._numbers), next(reversed(under_way), 0))
        under_way[place.number] = None
        sent = asyncio.ensure_future(
            self._append_elsewhere(owner, theirs, sorted(channels), place, deadline_s, attempt)
        )
        sent.add_done_callback(partial(self._end_sending, part.producer, owner, place.number))
        return sent

    def _end_sending(self, producer: str, owner: str, number: int, _: object) -> None:
        under_way = self._under_way[producer, owner]
        del under_way[number]
        if not under_way:
            del self._under_way[producer, owner]

    async def _append_elsewhere(
        self, owner: str, part: WritePart, channels: list[str], place: DoorPlace, deadline_s: float, attempt: str
    ) -> Appended:
        until = add_ms(self._node.clock.now(), int(deadline_s * 1000))
        params, body = write_request(part, place, until, attempt)
        try:
            reply = await self._ask(owner, "append", channels, params, body, deadline_s=deadline_s)
        except DeadlineExceeded as error:
            raise of_unknown_outcome(error) from None
        except OwnerLost as error:
            raise self._again(channels, error, unknown=True) from None
        except Overloaded:  # where another owner takes its part, this one is to be sent again, before those behind it
            self._refusals.update(channels)
            raise
        except _AGAIN as error:
            if error.fields.get(SUBMITTED) and not error.fields.get("outcome_unknown"):
                raise
            unknown = bool(error.fields.get("outcome_unknown")) or not isinstance(error, Unavailable)
            raise self._again(channels, error, unknown=unknown) from None
        return appended_from(reply.values)

    async def append_from(
        self, source: str, channel: str, records: Sequence[tuple[bytes, Record]], *, after: bytes
    ) -> bytes:
        """`PChannelOwner.append_from`, whichever node owns the partition: what it appends has a later timestamp than
        any of this node so far. `Unavailable` says nothing of what was appended: ask again."""
        if self._local.is_open((channel,)):
            return await self._local.owner.append_from(source, channel, records, after=after)
        params = {"source": source, "channel": channel, "after": after, "at": self._node.clock.now()}
        body = pack_labelled(records)
        try:
            owner = self._remote_owner(channel)
            reply = await self._ask(owner, "append_from", [channel], params, body, deadline_s=SOURCED_DEADLINE_S)
        except (OwnerLost, DeadlineExceeded, *_AGAIN) as error:
            raise Unavailable(f"{channel} is not known to have what was sent: {error.message}") from None
        return typed(reply.values["offset"], bytes)

    async def settle(self, transaction: TransactionId, channels: Sequence[str], *, deadline_s: float) -> None:
        """Wait until a transaction that is decided to be committed is written to all these channels, whoever owns them,
        but for those that were dropped with their topic. Raises `DeadlineExceeded` (`outcome_unknown`: it will be), and
        `OutcomeUnknown` where one has lost what was prepared there."""
        named = {"producer": transaction.producer, "pseq": transaction.pseq, "attempt": transaction.attempt}

        async def ask(owner: str, theirs: list[str]) -> None:
            if owner == self._node.incarnation:
                await self._local.owner.settle(theirs, transaction)
                return
            params = {**named, "channels": theirs}
            try:
                await self._ask(owner, "settle", theirs, params, deadline_s=deadline_s)
            except Overloaded as error:  # the owner has too many requests
                raise Unavailable(error.message) from None

        try:
            async with asyncio.timeout(deadline_s):
                await self._ask_each(channels, ask, self._not_dropped)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the transaction is committed, and not all of {', '.join(sorted(channels))} have it within "
                f"{deadline_s:g} s",
                outcome_unknown=True,
            ) from None

    def _again(self, channels: Iterable[str], error: TidewalError, *, unknown: bool) -> SendAgain:
        self._refusals.update(channels)
        return SendAgain(error.message, outcome_unknown=unknown)


async def _together(appends: Sequence[asyncio.Future[Appended]], channels: Sequence[Sequence[str]]) -> Appended:
    """The outcome of a write that several owners have appended a part of, each that for some of the `channels`. One
    that has failed says nothing of the others: to repeat the write asks them all again. What some refuse for now and
    others have taken keeps its place, or it would land behind later writes of its client."""
    results = await asyncio.gather(*appends, return_exceptions=True)
    done = [result for result in results if isinstance(result, Appended)]
    failed = [result for result in results if isinstance(result, BaseException)]
    if not failed:
        first = done[0]
        return Appended(
            max(each.ts for each in done), first.rows, all(each.repeated for each in done), (), first.digest
        )
    if not done and all(isinstance(error, Overloaded) for error in failed):
        raise failed[0]
    again = next((error for error in failed if isinstance(error, SendAgain | Overloaded)), None)
    if again is not None:
        raise SendAgain(again.message, outcome_unknown=True)
    ended = [error for error in failed if isinstance(error, TopicEpochEnded)]
    if len(ended) == len(failed):  # each says for itself what is written: that is known of all
        written = {name for result, theirs in zip(results, channels, strict=True) for name in _written(result, theirs)}
        raise TopicEpochEnded(ended[0].message, topic=ended[0].fields["topic"], written=",".join(sorted(written)))
    if isinstance(failed[0], TidewalError):
        raise of_unknown_outcome(failed[0])
    raise failed[0]


def _written(result: object, channels: Iterable[str]) -> Iterable[str]:
    """Those of `channels` that have their part of a write, of which `result` is known."""
    return result.written_channels if isinstance(result, TopicEpochEnded) else channels
