"""StreamingNode: owns pchannels. What is appended to them is stamped, numbered and acknowledged here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial

from ...runtime.actor.heartbeat import HeartbeatCallback
from ...runtime.catalog.catalog import CREATING, DROPPING, Collection
from ...runtime.catalog.flush_events import FlushEvent
from ...runtime.catalog.topics import READY, Topic
from ...runtime.cluster.state import RATES, THROTTLED
from ...runtime.errors import (
    ActorStopped,
    BadRecord,
    CollectionNotFound,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PositionLost,
    TidewalError,
    TopicEpochEnded,
    TopicNotFound,
    Unavailable,
    of_unknown_outcome,
)
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import DECODE_ERRORS, Record, RecordType, decode
from ...runtime.log.wal import Entry, From
from ...runtime.ownership import Appended, ChannelOwner, SyncPoint
from ...runtime.ownership.metrics import ChannelOwnerMetrics
from ...runtime.ownership.prepared import TransactionId
from ...runtime.rpc.server import Request
from ..collection_reader import TABLE_ERRORS
from ..local_owner import WritePart
from ..metrics import lag_ms
from ..node import Node
from ..requests import Answer, Method
from ..role import Role
from ..write_requests import SUBMITTED, appended_values, part_of, unpack_sourced
from .door_order import DoorOrder
from .granted_channels import GrantedChannels
from .held_back import held_back
from .metrics import StreamingNodeMetrics
from .requests import AnnounceParams, AppendFromParams, AppendParams, FlushParams, SettleParams, SyncParams
from .topic_delays import TopicDelays, takes
from .transactions import TransactionParticipant
from .unflushed import Unflushed
from .vchannels import VChannels
from .write_pressure import Pace, WritePressure
from .write_rates import WriteRates

EXTEND_S = 3.0  # the limit lies `LIMIT_MS` ahead
EXTEND_AGAIN_S = 0.2
IDLE_TICK_S = 600.0
CHECK_FIRST_S = 1.0  # until the DataNode is asked why a flush is not done; doubled each time
CHECK_MAX_S = 30.0

UNFLUSHED = "unflushed"  # tag of a snapshot in a pchannel: what of it is not in the tables yet (`unflushed.py`)

_log = logging.getLogger("tidewal.streamingnode")


class StreamingNode(Role):
    """Owner of the pchannels that MixCoord grants it.

    The doors of its process hand it their batches (`append`): each goes to its shards under one timestamp, in one
    commit of the log, and is acknowledged when it is durable. They find it, and which channels are open, in
    `Node.local_owner`.
    """

    role = "streamingnode"

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._local = node.local_owner
        self._owner: ChannelOwner
        self._beat: HeartbeatCallback
        self._metrics: StreamingNodeMetrics
        self._unflushed = Unflushed()
        self._vchannels = VChannels()
        self._order = DoorOrder()
        self._grants: GrantedChannels
        self._pressure: WritePressure
        self._transactions: TransactionParticipant

    def handlers(self) -> dict[str, Method]:
        return {
            "append": Method(self._append, AppendParams),
            "append_from": Method(self._append_from, AppendFromParams),
            "flush": Method(self._flush, FlushParams),
            "settle": Method(self._settle_transaction, SettleParams),
            "sync": Method(self._sync, SyncParams),
            "announce_collection": Method(self._announce_collection, AnnounceParams),
        }

    def answers(self, request: Request) -> bool:
        """What is asked of an owner names it."""
        return request.method == "status" and super().answers(request)

    async def prepare(self) -> None:
        node = self.node
        await node.make_heartbeats()
        await node.make_event_channel(node.names.insert_events)
        self._owner = ChannelOwner(
            node.wal,
            node.clock,
            heartbeat_channel=node.names.heartbeats,
            inflight_bytes=node.settings.streaming_node.max_inflight_bytes,
            limit_name="streamingNode.maxInflightBytes",
            observer=_Observer(self),
            grants=self.catalog,
            lease_holds=node.cluster.holds,
            snapshot_tags=lambda channel: {UNFLUSHED: self._unflushed.carried(channel, self._vchannels.is_open)},
        )
        self._grants = GrantedChannels(node, self.catalog, self._owner, self._vchannels, self._unflushed, self._spawn)
        self._pressure = WritePressure(
            node.settings, self._unflushed, self._vchannels, node.cluster.usages, node.clock.clock, node.metrics
        )
        self._transactions = TransactionParticipant(node, self.catalog, self._owner, self._count_rows)
        self._metrics = StreamingNodeMetrics(node.metrics, lambda: self._owner.inflight_bytes)
        for collection in self.catalog.catalog.collections.values():
            self._watch(collection)
        interval_s = node.settings.proxy.time_tick_interval / 1000
        self._beat = self.system.heartbeat.every(interval_s, self._owner.tick_all, f"ticks of {self.name}")
        self.spawn_task(self._follow_flushes(), name="flushes")
        self.spawn_task(self._grants.follow(), name="grants")
        self.spawn_task(self._extend_limits(), name="limits")
        self.spawn_task(self._pressure.run(), name="pressure")
        self.spawn_task(self._transactions.run(), name="transactions")
        delays = TopicDelays(node, self.catalog, self._owner, self.owners, self._grants.propose)
        self.spawn_task(delays.run(), name="delays")
        self.spawn_task(self.owners.run(), name="owners")
        if node.wal.capabilities.shared_segments:
            self.spawn_task(self._tick_idle_channels(), name="idle channels")
        node.cluster.on_confirmed(self._on_confirmed)
        node.cluster.reports[RATES] = WriteRates(self._owner.written_bytes, node.clock.clock)
        node.cluster.reports[THROTTLED] = self._pressure.described
        self._local.join(self)

    # ---- ownership --------------------------------------------------------------------------------------------------

    def stalled(self, channels: Sequence[str]) -> None:
        """The outcome of an append to `channels` is unknown: they need new terms, and doors hold what is for them."""
        if channels and self._local.belongs_to(self):  # not the next life's, after the end of this one
            self._grants.stalled(channels)

    def _spawn(self, task: Coroutine[object, object, None], name: str) -> None:
        with suppress(ActorStopped):  # the end of this life gives up all channels
            self.spawn_task(task, name=name)

    def _on_confirmed(self, _: float) -> None:
        """The lease holds anew: acknowledge what was answered after the last one."""
        if self._local.belongs_to(self) and self.node.cluster.holds():
            self._owner.renew()

    async def _extend_limits(self) -> None:
        """Say in the catalog, again and again, up to which time this node stamps and promises, before it does; soon
        where the time has passed that, with the wall clock or with that of a node which is far ahead."""
        extended = True
        while True:
            for _ in range(max(1, round(EXTEND_S / EXTEND_AGAIN_S))):
                await asyncio.sleep(min(EXTEND_S, EXTEND_AGAIN_S))
                if not extended or self._owner.is_over_limit:
                    break
            extended = await self._grants.extend()

    async def _tick_idle_channels(self) -> None:
        """While some channels are written, store ticks in the others: the last entry of an idle channel is held for its
        collections, and keeps all that lies behind it in the segments."""
        written: object = None
        while True:
            await asyncio.sleep(IDLE_TICK_S)
            with suppress(TidewalError):  # the next turn tries again
                if (await self._owner.sync()).channels != written:
                    await self._owner.tick_now(everywhere=True)
                    written = (await self._owner.sync()).channels

    # ---- collections ------------------------------------------------------------------------------------------------

    async def _announce_collection(self, request: Request) -> Answer:
        """Append to every vchannel the record that its collection begins or ends. Rows can follow the one, and not the
        other."""
        begins, channels = request.params["what"] == "create", request.params["channels"]
        collection = (await self.catalog.catch_up()).by_id(request.params["collection"].id)
        if collection is None or collection.state != (CREATING if begins else DROPPING):
            raise InvalidRequest(f"no collection of this id is to be {request.params['what']}d")
        self._check_open(channels)
        vchannels = _vchannels_on(collection, channels)
        if begins:
            await self._append_to_all(vchannels, RecordType.CREATE_COLLECTION)
            self._vchannels.begin(collection, vchannels)
            self._watch(collection)
        else:
            self._vchannels.end(vchannels)
            await self._append_to_all(vchannels, RecordType.DROP_COLLECTION)
            self._unflushed.forget(vchannels)
            self._metrics.forget(collection)
        return None

    def _watch(self, collection: Collection) -> None:
        self._metrics.watch(
            collection,
            unflushed_bytes=lambda: self._unflushed.bytes(collection.vchannels),
            unflushed_age_s=lambda: lag_ms(self.node.clock, self._unflushed.oldest(collection.vchannels)) / 1000,
        )

    def _append_to_all(self, vchannels: Iterable[str], kind: RecordType) -> asyncio.Future[Appended]:
        records = [(pchannel_of(vchannel), Record(kind, vchannel=vchannel)) for vchannel in vchannels]
        return self._owner.append(records)

    # ---- appends ----------------------------------------------------------------------------------------------------

    def append(self, part: WritePart) -> asyncio.Future[Appended]:
        """`PChannelOwner.append`."""
        participants = part.participants or (part,)
        for each in participants:
            if each.kind is RecordType.MESSAGE and self._is_over(each):
                return asyncio.ensure_future(self._settle(part, each))
        paces = [self._admit(each) for each in participants]
        appended = self._owner.append(
            part.records,
            producer=part.producer,
            pseq=part.pseq,
            rows=part.rows,
            digest=part.digest,
            channels=part.channels,
            in_order=True,
            acks=part.acks,
        )
        for each in participants:
            if each.kind is RecordType.ROWS:
                appended.add_done_callback(partial(self._count, each.records))
        if not any(paces):
            return appended
        charges = [
            self._pressure.charge(theirs, each.records) for theirs, each in zip(paces, participants, strict=True)
        ]
        return held_back(appended, max(charges))

    def prepare_part(self, part: WritePart, attempt: str) -> asyncio.Future[Appended]:
        """`PChannelOwner.prepare_part`."""
        if any(
            each.id[:2] == (part.producer, part.pseq) for there in self._owner.prepared().values() for each in there
        ):
            raise Unavailable("an earlier attempt of the transaction is not decided yet; retry")
        self._transactions.check_not_lost((channel for channel, _ in part.records), part.producer, part.pseq)
        for each in part.participants:
            if each.kind is RecordType.MESSAGE and self._is_over(each):
                return asyncio.ensure_future(self._settle(part, each))
        paces = [self._admit(each) for each in part.participants]
        prepared = self._owner.prepare(
            part.records,
            producer=part.producer,
            pseq=part.pseq,
            attempt=attempt,
            rows=part.rows,
            channels=part.channels,
        )
        self._transactions.wake()
        for theirs, each in zip(paces, part.participants, strict=True):
            self._pressure.charge(theirs, each.records)  # its client waits no longer: others would, too
        return prepared

    async def settle(self, channels: Sequence[str], transaction: TransactionId) -> Appended:
        """`PChannelOwner.settle`."""
        return await self._transactions.settled(channels, transaction)

    async def _settle_transaction(self, request: Request) -> Answer:
        params = request.params
        if not params["channels"]:
            raise InvalidRequest("no channels are named to which a transaction is to be written")
        self._check_open(params["channels"])
        id = TransactionId(params["producer"], params["pseq"], params["attempt"])
        return appended_values(await self.settle(params["channels"], id))

    def _admit(self, part: WritePart) -> list[Pace]:
        """By which paces the rows of one collection go, or the messages of one topic. Raises where it does not take
        them."""
        if part.kind is RecordType.MESSAGE:
            return self._paces_of(part, lambda: self._pressure.check_messages(part.collection_id, part.collection))
        collection = self._vchannels.check(part)
        return self._paces_of(part, lambda: self._pressure.check(collection, part.records)) if collection else []

    def _check_topic(self, part: WritePart) -> Topic:
        """The topic of messages. Raises `TopicNotFound` unless they are all for partitions of it, of its present epoch
        or one before. The catalog read here has the topic and the epoch of each channel that is open here, for it was
        granted behind that, until they are removed."""
        topic = self.catalog.catalog.topics.by_id(part.collection_id)
        vchannels = () if topic is None or topic.state != READY else topic.partitions_of(part.schema_version)
        if topic is None or not vchannels:
            raise TopicNotFound(
                f"the topic {part.collection} that these messages are for was dropped or changed; describe it again",
                topic=part.collection,
            )
        placed = {(channel, record.vchannel, record.type) for channel, record in part.records}
        if not all(vchannel in vchannels and takes(channel, vchannel, kind) for channel, vchannel, kind in placed):
            raise InvalidRequest(f"messages for {part.collection} that are in none of its partitions")
        return topic

    def _is_over(self, part: WritePart) -> bool:
        """Whether messages are for an epoch that takes none any more. What was delayed there can be cancelled still.
        Raises as `_check_topic` does."""
        over = part.schema_version < self._check_topic(part).epoch
        return over and not all(record.type is RecordType.CANCELLED for _, record in part.records)

    async def append_from(
        self, source: str, channel: str, records: Sequence[tuple[bytes, Record]], *, after: bytes
    ) -> bytes:
        """`PChannelOwner.append_from`."""
        topic = self.catalog.catalog.topics.of_channel(channel)
        if topic is None or topic.state != READY or channel not in topic.places:
            raise Unavailable(f"{channel} is a partition of no topic that takes messages; retry", channel=channel)
        if not records:
            await self._owner.sync([channel])  # its lease holds
        elif topic.places[channel][0] < topic.epoch:
            raise TopicEpochEnded(f"topic {topic.name} has other partitions by now", topic=topic.name, written="")
        else:
            await self._owner.append_from(source, channel, records, after=after)
        return self._owner.source_offset(source, channel)

    async def _append_from(self, request: Request) -> Answer:
        params = request.params
        try:
            records = unpack_sourced(request.body)
        except DECODE_ERRORS as error:
            raise InvalidRequest(f"malformed messages of a source: {error}") from error
        self._check_time(params["at"])
        self._check_open([params["channel"]])
        self.node.clock.observe(params["at"])
        return {"offset": await self.append_from(params["source"], params["channel"], records, after=params["after"])}

    async def _settle(self, part: WritePart, late: WritePart) -> Appended:
        """What became of a write whose messages `late` are for an epoch that is over: an earlier attempt may have
        written them. Raises `TopicEpochEnded` where some were not, and never will be; of a transaction nothing is
        written then."""
        channels = sorted({channel for channel, _ in late.records})
        try:
            known = await self._owner.settled(channels, part.producer, part.pseq)
        except Unavailable as error:  # the door asks again
            raise of_unknown_outcome(error) from None
        if len(known) < len(channels):
            advice = "describe it, and send the rest to these"
            if part.participants:
                advice = "nothing of the transaction is written, begin it again"
            raise TopicEpochEnded(
                f"topic {late.collection} has other partitions by now: {advice}",
                topic=late.collection,
                written=",".join(sorted(known)),
            )
        last = max(known.values())
        return Appended(last.ts, part.rows, repeated=True, digest=last.digest)

    def _paces_of(self, part: WritePart, check: Callable[[], list[Pace]]) -> list[Pace]:
        """What `check` says of the limits; what was let in before is not refused when it comes again."""
        try:
            return check()
        except Overloaded:
            if self._owner.knows(part.producer, part.pseq):
                return []
            raise

    async def _append(self, request: Request) -> Answer:
        """Append what a door of another process sends, in the order in which it does."""
        params = request.params
        if self.node.clock.now() > params["until"]:
            raise DeadlineExceeded("the part of a write came after its deadline", outcome_unknown=False)
        try:
            part = part_of(params, request.body)
        except (*DECODE_ERRORS, LookupError) as error:
            raise InvalidRequest(f"malformed part of a write: {error}") from error
        if "attempt" in params and not part.participants:
            raise InvalidRequest("only a transaction is prepared")
        self._check_open(channel for channel, _ in part.records)
        with self._order.taking(part.producer, params["place"]):
            attempt = params.get("attempt")
            appended = self.append(part) if attempt is None else self.prepare_part(part, attempt)
        try:
            return appended_values(await appended)
        except Unavailable as error:  # of the log
            raise Unavailable(error.message, **{**error.fields, SUBMITTED: True}) from None

    def _check_open(self, channels: Iterable[str]) -> None:
        """Raise `Unavailable` unless all of `channels` are open: before that it is not known which collections they
        have, and others may have read earlier than this owner that it has fenced them."""
        if not self._local.is_open(channels):
            raise Unavailable("this node does not own the channels yet, or any more; retry")

    def _check_time(self, at: int) -> None:
        """Raise `InvalidRequest` for a time of another node that nothing here may be later than."""
        if not self.node.clock.believes(at):
            raise InvalidRequest(f"the time {at} lies days ahead")

    def _count(self, records: Sequence[tuple[str, Record]], appended: asyncio.Future[Appended]) -> None:
        """Count records as unflushed once they are in the log. Of a door that has crashed meanwhile it is not known: to
        count them until the next flush is safe."""
        if appended.cancelled():
            ts = self.node.clock.last
        elif appended.exception() is not None or appended.result().repeated:
            return
        else:
            ts = appended.result().ts
        self._count_rows([record for _, record in records], ts)

    def _count_rows(self, records: Sequence[Record], ts: int) -> None:
        """Count the rows of records in the log that were written at `ts`."""
        for record in records:
            if record.type is RecordType.ROWS:
                self._unflushed.add(record.vchannel, ts, len(record.body))

    async def sync(self, channels: Iterable[str], *, at: int = 0, exact: bool = False) -> SyncPoint:
        """`PChannelOwner.sync`."""
        return await self._owner.sync(channels, at=at, exact=exact)

    async def _sync(self, request: Request) -> Answer:
        params = request.params
        channels, at, id = params["channels"], params.get("at", 0), params.get("id")
        self._check_time(at)
        self._check_open(channels)
        if id is not None:
            self._vchannels.check_open(self.catalog.catalog.by_id(id), channels)
        point = await self.sync(channels, at=at, exact=params.get("exact", False))
        return {"time": point.time, "channels": point.channels}

    # ---- flushes ----------------------------------------------------------------------------------------------------

    async def flush(self, collection_id: int, channels: Sequence[str]) -> int:
        """`PChannelOwner.flush`."""
        collection = await self._to_be_flushed(collection_id)
        vchannels = _vchannels_on(collection, channels)
        appended = await self._append_to_all(vchannels, RecordType.FLUSH)
        await self._owner.tick_now(channels)
        await self._stored(collection, vchannels, appended.ts)
        return appended.ts

    async def _to_be_flushed(self, id: int) -> Collection:
        collection = self.catalog.catalog.by_id(id) or (await self.catalog.catch_up()).by_id(id)
        if collection is None or collection.state == DROPPING:
            raise CollectionNotFound("the collection that is to be flushed was dropped")
        return collection

    async def _flush(self, request: Request) -> Answer:
        return {"ts": await self.flush(request.params["id"], request.params["channels"])}

    async def _stored(self, collection: Collection, vchannels: Sequence[str], ts: int) -> None:
        """Wait until the tables have all up to `ts`. While that lasts, ask the DataNode with growing pauses whether it
        can store them: raises what is wrong with the tables, `PositionLost` where the log has lost rows for them."""
        pause_s = CHECK_FIRST_S
        while True:
            # The catalog has a drop before `Unflushed` ends the flushes that wait; a flush that comes later learns of
            # the drop from the catalog alone.
            current = self.catalog.catalog.by_id(collection.id)
            if current is None or current.state == DROPPING:
                raise CollectionNotFound(
                    f"collection {collection.name} was dropped before all of it was stored", collection=collection.name
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    return await self._unflushed.stored(vchannels, ts)
            pause_s = min(2 * pause_s, CHECK_MAX_S)
            try:
                await self.rpc.call("datanode", "check", {"collection": collection.name})
            except (PositionLost, *TABLE_ERRORS):
                raise
            except TidewalError as error:  # the DataNode restarts or is busy: it stores all later
                _log.info("waiting for the DataNode to store %s: %s", collection.name, error)

    async def _follow_flushes(self) -> None:
        async for entries in self.node.wal.read(self.node.names.insert_events, From.EARLIEST):
            for entry in entries:
                try:
                    self._unflushed.store(FlushEvent.from_record(decode(entry.payload)))
                except BadRecord as error:  # the next flush event of that collection covers it
                    self.dead_letters.bad(self.node.names.insert_events, entry, error)

    def recovered(self, channel: str, record: Record) -> None:
        """Count a record that was found in the log while its channel was acquired, and what its last owner counted."""
        if record.type is RecordType.ROWS:
            self._unflushed.recover(record.vchannel, record.ts, len(record.body))
        elif isinstance(carried := record.tags.get(UNFLUSHED), bytes):
            try:
                self._unflushed.take_over(channel, carried)
            except BadRecord as error:  # what was read of the log stays counted
                _log.warning("what of %s is not in its tables yet is counted anew: %s", channel, error)

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def on_stop(self) -> None:
        self._local.leave(self)
        self._unflushed.end()
        self._beat.cancel()
        await self._grants.release(await self._owner.close())
        await super().on_stop()


def _vchannels_on(collection: Collection, channels: Iterable[str]) -> list[str]:
    """The vchannels of `collection` on these pchannels."""
    wanted = set(channels)
    return [vchannel for vchannel in collection.vchannels if pchannel_of(vchannel) in wanted]


class _Observer(ChannelOwnerMetrics):
    """Passes what the channel owner observes to the StreamingNode."""

    def __init__(self, role: StreamingNode) -> None:
        super().__init__(role.node.metrics, role.node.clock)
        self._role = role
        self._loop = asyncio.get_running_loop()

    def recovered(self, channel: str, record: Record) -> None:
        self._role.recovered(channel, record)

    def bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        self._role.dead_letters.bad(channel, entry, error)

    def stalled(self, channels: Sequence[str], error: TidewalError) -> None:
        super().stalled(channels, error)
        self._loop.call_soon_threadsafe(self._role.stalled, channels)
