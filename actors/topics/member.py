"""A member of a group that reads topics."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import NamedTuple

from ...runtime.arguments import checked
from ...runtime.catalog.topics import Topic
from ...runtime.errors import (
    ChannelNotFound,
    Closed,
    Fenced,
    InvalidRequest,
    Moved,
    TidewalError,
    TopicNotFound,
    Unavailable,
    Unsupported,
    of_unknown_outcome,
)
from ...runtime.groups.coordinator_client import GroupAcks
from ...runtime.groups.group_consumer import FIRST_PAUSE_S, LAST_PAUSE_S, GroupConsumer
from ...runtime.groups.record_member import RecordMember
from ...runtime.groups.record_pack import RecordPack
from ...runtime.log.following import moves_of
from ...runtime.log.names import Names
from ...runtime.log.record import TagValue
from ...runtime.log.wal import Append, Delivered, GroupMember, Wal
from ...runtime.waiting import ended
from ..followed_log import has_left
from .decided_positions import FencePosition, MemberPositions
from .member_gate import CHECK_MAX_S, CHECK_S, MemberGate
from .messages import TopicMessage, TopicPack, bytes_of
from .replies import TopicReplies
from .requests import TopicRequest
from .retry_topics import CopyId, RetryTopics

LOOK_S = 5.0  # between two looks whether the topics are still there
REJOIN_S = 30.0  # for which failures to join in a log that has just come into use are waited out

_log = logging.getLogger("tidewal.client")

Describe = Callable[[str], Awaitable[tuple[Topic, Mapping[str, Mapping[int, bytes]]]]]
"""Returns a topic, and by pchannel the fences that are known. Raises `TopicNotFound`."""


class JoinedTopics(NamedTuple):
    """A group's member in the log that is in use, the topics as that log describes them, by pchannel the fences that
    are known, and how often the log had moved before."""

    member: GroupMember
    topics: Sequence[Topic]
    fences: Mapping[str, Mapping[int, bytes]]
    moves: int


Join = Callable[[], Awaitable[JoinedTopics]]
"""Becomes a member. Raises as `Client.subscribe`."""


class TopicMember(RecordMember):
    """A `RecordMember` over the partitions of topics: each is with one member of its group at a time, in its order, and
    what is not acknowledged is delivered again. Made by `Client.subscribe`; leave it with `aclose`, or `async with`.

    It delivers `TopicPack`s, each of one partition. Where a topic gets another number of partitions, it goes on with
    these by itself: each once the group has acknowledged all that its predecessors have. Where one of the topics is
    dropped, iterating raises `TopicNotFound`, within `LOOK_S` seconds. Where the log is migrated it joins again there;
    what was delivered before cannot be acknowledged any more (`Fenced`), and is delivered again; where that error has
    `outcome_unknown`, the acknowledgement may have been stored before. `process` takes it as it takes any member.
    Outputs of `commit` go to channels without an owner: `InvalidRequest` for those of collections and topics, whose
    order their owners make.

    With `retries` it reads its group's retry topics, too, which are among `topics`: what fails in `process`, and what
    is given back by `nack`, is tried again from there, and its partition goes on."""

    def __init__(
        self,
        wal: Wal,
        joined: JoinedTopics,
        names: Names,
        join: Join,
        describe: Describe,
        fence_position: FencePosition,
        where: str | None = None,
        retries: RetryTopics | None = None,
    ) -> None:
        # what is in a retry topic has passed the filter: only its copy has not
        whole: Callable[[str], bool] = (lambda channel: False) if retries is None else retries.has
        letters, fences = names.group_dead_letters, dict(joined.fences)
        self._positions = MemberPositions(fence_position)
        self._decides = False  # whether nodes decide positions, though the log could store them in the commit
        super().__init__(wal, joined.member, dead_letters=letters, fences=fences, where=where, whole=whole)
        self._follow_member()
        self._names, self._known_fences, self._describe = names, fences, describe
        self._join, self._moves = join, joined.moves
        self._topics = {topic.name: topic for topic in joined.topics}
        self._places: dict[str, tuple[str, int]] = {}  # by pchannel: its topic, and its number in its epoch
        self._gate = MemberGate(wal, joined.member.group)
        self._holding: dict[str, asyncio.Task[None]] = {}  # by pchannel
        self._reading = ""  # the pchannel from which it has taken entries last
        for topic in joined.topics:
            self._place(topic)
        self._looked_s: float | None = None  # when it has asked for topics because of a channel
        self._looking = asyncio.Lock()
        self._replies = TopicReplies(wal, names)
        self._retries, self._copies = retries, itertools.count(1)
        self._giving_back: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by pchannel
        self._closed = False
        self._dropped: TopicNotFound | None = None
        self._failed: Exception | None = None  # what has ended it
        self._watching = asyncio.create_task(self._watch())

    async def __aenter__(self) -> TopicMember:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> TopicPack:
        """The next messages of one of the partitions. Raises and ends as `RecordMember` does, and raises
        `TopicNotFound` where a topic was dropped, and what kept a partition from being read."""
        while True:
            try:
                pack = await super().__anext__()
                break
            except (StopAsyncIteration, ChannelNotFound, Moved) as error:
                if self._failed is not None and not self._closed:
                    raise self._failed from None
                if self._closed or self._dropped is not None or not self._has_moved(error):
                    await self._check_there()
                    raise
                await self._join_again()
        topic, partition = self._places[pack.channel]
        records = {each.name: getattr(pack, each.name) for each in _FIELDS}
        retries = self._whole(pack.channel)
        where = self._filter_of(pack.channel)
        return TopicPack(**records, topic=topic, partition=partition, where=where, retries=retries, moves=self._moves)

    async def _check_there(self) -> None:
        """Raise `TopicNotFound` where a topic was dropped."""
        if not self._closed:
            await self._look()
        if self._dropped is not None:
            raise self._dropped from None

    # ---- a log that moves -------------------------------------------------------------------------------------------

    def _has_moved(self, error: Exception) -> bool:
        """Whether an error says no more than that the log has moved since this member has joined."""
        return isinstance(error, Moved) or moves_of(self._wal) != self._moves

    async def _join_again(self) -> None:
        """Become a member in the log that is in use now. All ids are others there, those of fences and ends too."""
        left = self._member
        joined = await self._joined_again()
        holding, self._holding = list(self._holding.values()), {}
        await ended(*holding)
        self._moves, self._gate = joined.moves, MemberGate(self._wal, joined.member.group)
        self._known_fences.clear()
        self._known_fences.update(joined.fences)
        self._read_from(joined.member)
        self._positions.forget()
        self._follow_member()
        for topic in joined.topics:
            self._topics[topic.name] = topic
            self._place(topic)
        with suppress(TidewalError):
            await left.aclose()

    async def _joined_again(self) -> JoinedTopics:
        """Join, and try that again where it fails for a moment: the new log, and its nodes, have just begun. Raises
        what lasts for `REJOIN_S`, and `StopAsyncIteration` where this member is closed meanwhile."""
        now = asyncio.get_running_loop().time
        until_s, pause_s = now() + REJOIN_S, FIRST_PAUSE_S
        while not self._closed:
            try:
                joined = await self._join()
                if not self._closed:
                    return joined
                await joined.member.aclose()
            except TidewalError as error:
                if not error.retryable or now() >= until_s:
                    raise
                _log.debug("group %s is joined again later: %s", self.group, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        raise StopAsyncIteration

    def _delivered(self, pack: RecordPack) -> Delivered:
        if moves_of(self._wal) != self._moves or (isinstance(pack, TopicPack) and pack.moves != self._moves):
            raise _moved_since(pack.channel)
        return pack.delivered

    @contextmanager
    def _fenced_by_moves(self, channel: str) -> Generator[None]:
        """What the block finds of the log that it had before, closed, moved, or cut off in the midst of a call, is that
        the delivery is over."""
        try:
            yield
        except (Closed, Moved, Unavailable) as error:
            if self._closed or not self._has_moved(error):
                raise
            over = _moved_since(channel)
            raise (of_unknown_outcome(over) if error.outcome_unknown else over) from error

    async def _store(
        self,
        packs: Sequence[RecordPack],
        outputs: Sequence[Append],
        metadata: Mapping[str, bytes],
        *,
        commit: bool = False,
        store: Callable[[GroupAcks], Awaitable[None]] | None = None,
    ) -> list[bytes]:
        with self._fenced_by_moves(packs[0].channel if packs else ""):
            return await super()._store(packs, outputs, metadata, commit=commit, store=store)

    @checked
    async def annotate(self, of: str | RecordPack, metadata: bytes) -> None:
        """`GroupMember.annotate`."""
        with self._fenced_by_moves(of if isinstance(of, str) else of.channel):
            await super().annotate(of, metadata)

    async def _admit(self, delivered: Delivered) -> bool:
        """Hold what is in a partition while its predecessors are not read to their ends. Whether they are is looked up
        aside, so that other partitions go on while no node and no log answers."""
        self._reading = delivered.channel
        topic = self._topic_of(delivered.channel)
        is_open = self._positions.is_open(delivered, self._member.metadata(delivered.channel))
        if topic is not None and self._gate.has_passed(topic, delivered.channel) and not is_open:
            return True
        with suppress(Fenced):  # it has gone to another member
            self._member.pause(delivered)
        before = self._holding.pop(delivered.channel, None)
        if before is not None:
            before.cancel()
        self._holding[delivered.channel] = asyncio.create_task(self._hold(delivered))
        return False

    async def _hold(self, delivered: Delivered) -> None:
        """Give a partition back once it may be read: it is delivered anew then. Where that fails the iteration ends and
        raises the error: the partition would be paused for ever."""
        try:
            pause_s = CHECK_S
            while delivered.channel in self._member.channels and not await self._may_be_read(delivered):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, CHECK_MAX_S)
            self._holding.pop(delivered.channel, None)
            self._member.redeliver(delivered)
        except Fenced:  # it has gone to another member
            pass
        except Exception as error:
            if not (self._closed or self._has_moved(error)):
                self._failed = error
                await super().aclose()

    async def _may_be_read(self, delivered: Delivered) -> bool:
        return await self._passes(delivered.channel) and await self._positions.settle(self._member, delivered)

    async def _passes(self, channel: str) -> bool:
        topic = self._topic_of(channel)
        try:
            if topic is None or not all(each in topic.ends for each in topic.predecessors(channel)):
                topic = await self._looked_up(channel)
            return topic is not None and await self._gate.passes(topic, channel)
        except TidewalError as error:
            _log.debug("the positions before %s are looked at later: %s", channel, error)
            return False

    async def _looked_up(self, channel: str) -> Topic | None:
        """The topic of a channel, as a node describes it now or has just now."""
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if self._looked_s is None or self._looked_s + CHECK_S <= now_s:
                self._looked_s = now_s
                await self._look()
        return self._topic_of(channel)

    def _follow_member(self) -> None:
        """Have it looked up what transactions have done before anything is taken for lost, and whether the log is still
        in use where the member has lost its session, and joins again by itself."""
        if isinstance(self._member, GroupConsumer):
            self._member.on_lost = partial(self._positions.settle_lost, self._member)
            self._member.on_joined = self._check_in_use

    async def _check_in_use(self) -> None:
        if await has_left(self._wal):
            raise Unavailable("the log is migrated at this moment: this client goes on with the next one soon")

    def _topic_of(self, channel: str) -> Topic | None:
        return self._topics[self._places[channel][0]] if channel in self._places else None

    def _not_passed(self, silent: RecordPack) -> None:
        """The end of a partition may be in it, behind which no acknowledgement comes."""
        self._member.redeliver(silent.delivered)

    # ---- acknowledging ----------------------------------------------------------------------------------------------

    def check_atomic_acks(self) -> None:
        """Where the log does not store positions in the commit of a transaction the nodes decide both together."""
        if not isinstance(self._member, GroupConsumer):
            super().check_atomic_acks()

    @checked
    async def commit_with(self, delivered: Sequence[RecordPack], store: Callable[[GroupAcks], Awaitable[None]]) -> None:
        """`RecordMember.commit_with`. Where the log, or the door that is asked, does not store positions in the commit
        of a transaction, they have tokens, and are decided with it."""
        if self._wal.capabilities.atomic_acks and not self._decides:
            try:
                await super().commit_with(delivered, store)
                return
            except Unsupported:  # nothing is written: the door is in another process than the owner of the log
                self._decides = True
        tokens = {pack.channel: await self._token_of(pack) for pack in delivered}

        async def decide(acks: GroupAcks) -> None:
            try:
                await store(acks._replace(tokens=tokens))
            except Fenced as error:  # the member may have the channel yet: what was decided there is asked then
                for pack in delivered:
                    if pack.channel == error.fields.get("channel"):
                        self.redeliver(pack)
                raise
            await self._positions.store(self._member, acks.acks)

        await self._store(delivered, [], {}, store=decide)

    async def _token_of(self, pack: RecordPack) -> int:
        """The token under which transactions move the position in the channel of a pack."""
        with self._fenced_by_moves(pack.channel), self._acknowledging(pack):
            return await self._positions.token(self._member, self._delivered(pack), partial(self._mark, pack))

    async def _mark(self, pack: RecordPack, token: int) -> None:
        with self._acknowledging(pack):  # of an assignment that is over, the mark would be another one's
            await self._marks.set(self._assignment(pack), token)
            await self._member.annotate(self._delivered(pack), self._state(pack).to_metadata())

    @checked
    async def commit(
        self, delivered: Sequence[RecordPack], outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]:
        """`RecordMember.commit`. Raises `InvalidRequest` for an output to a channel of the cluster's."""
        for output in outputs:
            self._check_output(output.channel)
        return await super().commit(delivered, outputs, metadata=metadata)

    def _check_output(self, channel: str) -> None:
        if channel.startswith(f"{self._names.prefix}-") and channel != self._names.group_dead_letters:
            raise InvalidRequest(
                f"{channel} is the cluster's, and its owner alone appends there: `send` results to a topic before the "
                "acknowledgement, or commit them to a channel of another prefix",
                channel=channel,
            )

    @property
    def wal(self) -> Wal:
        """The log that it reads."""
        return self._wal

    @checked
    async def reply(
        self, message: TopicMessage, body: bytes | str = b"", *, tags: Mapping[str, TagValue] | None = None
    ) -> None:
        """Send the reply to a message that waits for one (`Client.ask`): before it is acknowledged, so that it comes
        again where this member dies in between. A client that waits no more gets nothing. Raises `InvalidRequest` for
        a message that waits for none, and for tags that cannot be sent, `MessageTooLarge` over 64 MiB, and what the log
        raises."""
        await self._replies.reply(_request_of(message), bytes_of(body), dict(tags or {}))

    @checked
    async def refuse(self, message: TopicMessage, error: TidewalError) -> None:
        """Send an error as the reply: `ask` raises it. Raises as `reply` does."""
        await self._replies.refuse(_request_of(message), error)

    @checked
    async def repeat_reply(self, message: TopicMessage) -> bool:
        """Send the reply again that this member has sent to an earlier repetition of the same request. Returns whether
        it did: it remembers the last 16,384 replies of up to 16 KiB, of 16 MiB together. Raises as `reply` does."""
        return await self._replies.repeat(_request_of(message))

    @property
    def has_retry_topic(self) -> bool:
        """Whether its group has a retry topic (`Client.subscribe`)."""
        return self._retries is not None

    @checked
    async def nack(self, delivered: TopicPack, *, reason: str = "", delay_s: float = 0.0) -> None:
        """Give back a pack, or a part of one, to be tried again `delay_s` seconds from now, and acknowledge it: a copy
        of each of its messages goes to the group's retry topic, with one attempt more and the `reason`
        (`TopicMessage.attempts`), and comes from there to any member. What lies before it in its partition is
        acknowledged, too. Where the member dies in the middle both the copy and the original may come. Of several calls
        at once for one partition, one comes after the other, and `ack_timeout_s` is not over meanwhile. Raises
        `InvalidRequest` for a member without a retry topic and for what is acknowledged, in part or by another call,
        `Fenced` where another member has the partition by now, having sent nothing, `MessageTooLarge` for a message
        that has no room for this, and as `Client.send` and `acknowledge` do."""
        async with self._giving_back[delivered.channel]:
            with self._acknowledging(delivered):
                if self.has_retry_topic:
                    await self.check_held(delivered)
                await self.send_to_retry_topic(delivered, failed=1, reason=reason, delay_s=delay_s)
                await self.acknowledge(delivered)

    @checked
    def attempts_of(self, unit: TopicPack) -> int:
        """How often a handler has failed at what is in `unit`, or gave it back, before it came from the retry topic; 0
        for what did not come from there."""
        return max((message.attempts for message in unit.messages), default=0)

    @checked
    def next_copy_id(self, unit: TopicPack) -> bytes:
        """The id of a copy of `unit` that is about to be sent: of no other one, of any member."""
        epoch = 0 if self._retries is None else self._retries.epoch_of(unit.topic)
        return CopyId(self.id, next(self._copies), epoch).to_bytes()

    @checked
    async def send_to_retry_topic(
        self, unit: TopicPack, *, failed: int, reason: str, delay_s: float, copy_id: bytes | None = None
    ) -> None:
        """Send a copy of each message of `unit` to the group's retry topic, each with `failed` attempts more, to be due
        in `delay_s` seconds, without an acknowledgement: with a `copy_id` once, however often that is repeated, by any
        member. `process` uses it, and sends those of a partition in the order of `next_copy_id`. Raises as `nack` does,
        and `OutcomeUnknown` where a later copy is there and this one is not."""
        if self._retries is None:
            raise InvalidRequest("the group has no retry topic: subscribe with retry_topic=True")
        id = None if copy_id is None else CopyId.from_bytes(copy_id)
        await self._retries.send(self.group, unit, failed, reason, delay_s, id)

    async def aclose(self) -> None:
        """`GroupMember.aclose`."""
        self._closed = True
        await ended(self._watching, *self._holding.values())
        await super().aclose()

    async def _watch(self) -> None:
        while self._dropped is None:
            await asyncio.sleep(LOOK_S)
            await self._look()
        await super().aclose()  # ends the iteration

    async def _look(self) -> None:
        """Whether all topics are still there, as far as a node answers; and the fences of owners that have come."""
        for topic in list(self._topics.values()):
            try:
                found, fences = await self._describe(topic.name)
            except TopicNotFound:
                self._dropped = _dropped(topic)
            except TidewalError as error:
                _log.debug("topic %s is looked at later: %s", topic.name, error)
            else:
                self._known_fences.update(fences)
                if found.id != topic.id:
                    self._dropped = _dropped(topic)
                else:
                    self._topics[found.name] = found
                    self._place(found)

    def _place(self, topic: Topic) -> None:
        """Know the partitions of a topic, and forget those that are removed and of which it delivers nothing more."""
        of_topic = [channel for channel, (name, _) in self._places.items() if name == topic.name]
        for channel in set(of_topic) - topic.places.keys() - self._member.channels - {self._reading}:
            del self._places[channel]
            self._known_fences.pop(channel, None)
            self._channels.pop(channel, None)
            self._gate.forget(channel)
        self._places.update({channel: (topic.name, number) for channel, (_, number) in topic.places.items()})


def _request_of(message: TopicMessage) -> TopicRequest:
    if message.request is None:
        raise InvalidRequest(
            f"nobody waits for a reply to this message of {message.topic}: it was sent, and not asked with `ask`",
            argument="message",
        )
    return message.request


def _moved_since(channel: str) -> Fenced:
    return Fenced(
        f"the log of {channel} has moved since this was delivered: what the group has not done is delivered again",
        channel=channel,
    )


def _dropped(topic: Topic) -> TopicNotFound:
    return TopicNotFound(f"topic {topic.name} was dropped", topic=topic.name)


_FIELDS = fields(RecordPack)
