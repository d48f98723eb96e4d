"""A member of a group that delivers records, as streams wrote them, in the place of entries."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import cast

import msgpack

from ..arguments import checked
from ..clock import HybridClock
from ..errors import BadRecord, Fenced, GroupFilterMismatch, InvalidRequest, Overloaded, TidewalError, Unsupported
from ..filters.record_filter import RecordFilter
from ..filters.subscription import filter_of
from ..log.record import DECODE_ERRORS, TIME_TYPES, TIMELESS_TYPES
from ..log.wal import Append, Delivered, Entry, GroupMember, Start, Wal
from ..metrics.metrics import Metrics
from ..streams.channel_reader import ChannelReader, Grants, LeftOutRecord, OnBadRecord
from .coordinator_client import GroupAcks
from .group_consumer import GroupConsumer
from .group_filter import GroupFilter, RecordState, check_group_filter, mismatch
from .group_letters import GroupLetters
from .position_marks import Assignment, PositionMarks
from .record_pack import RecordPack
from .retry_policy import GROUP_DEAD_LETTERS

MAX_BAD_BYTES = 8 * 1024 * 1024  # of a channel's bad records that wait for an acknowledgement
BAD_BYTES = 256  # what a bad record takes beside its bytes


@dataclass(slots=True, eq=False)
class _Channel:
    """The reading state of one channel in one assignment epoch."""

    epoch: int
    reader: ChannelReader
    time: int  # the highest timestamp that was delivered
    filter: GroupFilter
    known: tuple[int, int]  # the highest term and number of an owner that was delivered
    paused: bool = False  # by the caller
    full: RecordPack | None = None  # paused behind it, until an acknowledgement takes the bad records before its end
    held: list[Entry] = field(default_factory=list[Entry])  # of a batch whose last part is not here yet
    bad: list[tuple[Entry, BadRecord]] = field(default_factory=list[tuple[Entry, BadRecord]])
    bad_bytes: int = 0
    done: bytes = b""  # all up to this id is acknowledged; b"": nothing of this epoch
    ends: dict[bytes, RecordPack] = field(default_factory=dict[bytes, RecordPack])
    """By the last entry of each pack that is not acknowledged: what acknowledging it covers, with all behind it that
    has no record."""


class RecordMember(AsyncIterator[RecordPack]):
    """Reads the channels of a group's `member` as a stream does, and delivers `RecordPack`s.

    Ticks, fences, duplicates, records of superseded owners and incomplete batches are left out, and how far that came
    is stored in the metadata of the group's position: the next member with the channel goes on without repeating any.
    Use `RecordMember` alone then: what the caller stores lies inside its metadata, of which it takes up to 64 bytes,
    and the length of its filter.

    With the filter `where`, an expression over tags and header fields, records that do not pass it are left out, before
    they are sent where the log's owner can do that; the group's position goes on over them. It is the group's filter
    then: each position is stored with it, and where a position was moved under another one (of a member without a
    filter, too) iterating raises `GroupFilterMismatch`; from then on this member acknowledges nothing.
    `change_group_filter` says from where a new one begins; so does `seek` of a member that has it. Of the
    channels that are `whole` it leaves out nothing.

    What is no record, or a damaged one, goes to `on_bad`; without it, it becomes a dead letter of the group (reason
    "record") in the channel `dead_letters`, with the acknowledgement that passes it. The channel goes on in either
    case. Where over 8 MiB of bad records wait for an acknowledgement of what was delivered before them, iterating
    raises `Overloaded` (`limit` "bad_record_bytes", `channel`) once, and the channel waits for that. Only a hundred
    intact records in a row that cannot be read are an error, for then the reader is wrong.
    `fences` are the known fences of channels, `grants` those that are looked up (see `ChannelReader`); without them the
    records of the highest term count. `metrics` counts letters, and `clock` stamps them.
    """

    @checked
    def __init__(
        self,
        wal: Wal,
        member: GroupMember,
        *,
        on_bad: OnBadRecord | None = None,
        dead_letters: str = GROUP_DEAD_LETTERS,
        fences: Mapping[str, Mapping[int, bytes]] | None = None,
        grants: Grants | None = None,
        metrics: Metrics | None = None,
        clock: HybridClock | None = None,
        where: str | None = None,
        whole: Callable[[str], bool] = lambda channel: False,
    ) -> None:
        """Raises `InvalidFilter`, also for a filter of over `MAX_GROUP_FILTER_BYTES`."""
        check_group_filter(where)
        self._where, self._filter, self._whole = where, filter_of(where), whole
        self._wal, self._on_bad = wal, on_bad
        self._fences, self._grants = fences or {}, grants
        self._letters = GroupLetters(wal, member.group, dead_letters, clock or HybridClock())
        self._read_from(member)
        self._lettering = asyncio.Lock()
        self._lettered = (
            None
            if metrics is None
            else metrics.counter("wal_group_dead_letter_total", group=member.group, reason="record")
        )
        self._filtered = (
            None
            if metrics is None or where is None
            else metrics.counter("wal_group_filtered_total", group=member.group)
        )

    def _read_from(self, member: GroupMember) -> None:
        """Read the channels of `member` from now on, and forget all that was delivered before."""
        if isinstance(member, GroupConsumer):
            member.time_by_hand()  # what is given to the caller: not what waits here for the rest of its batch
            if self._filter is not None:
                member.read_where(self._filter, self._whole)
        self._member = member
        self._marks = PositionMarks()
        self._channels: dict[str, _Channel] = {}
        self._mismatch: GroupFilterMismatch | None = None

    @property
    def id(self) -> str:
        return self._member.id

    @property
    def group(self) -> str:
        return self._member.group

    @property
    def dead_letters(self) -> str:
        """The channel of its group's dead letters."""
        return self._letters.channel

    @property
    def channels(self) -> frozenset[str]:
        """The channels this member has now."""
        return self._member.channels

    async def __anext__(self) -> RecordPack:
        """The next records of one of the channels. Raises and ends as `GroupMember` does, and raises
        `GroupFilterMismatch`."""
        while True:
            self._check_filter()
            delivered = await anext(self._member)
            try:
                pack = await self._read(delivered) if await self._admit(delivered) else None
            except BaseException:
                self._member.redeliver(delivered)
                raise
            if pack is not None and pack.records:
                if isinstance(self._member, GroupConsumer):
                    self._member.begin_ack_timeout(pack.delivered)
                return pack
            if pack is not None:
                await self._pass(pack)

    @checked
    async def acknowledge(self, delivered: RecordPack, *, metadata: bytes | None = None) -> None:
        """`GroupMember.acknowledge`, of a pack or a part of one.

        Cancelled in the midst, it may be stored or not: what has no record waits for the next acknowledgement then.
        """
        await self._store([delivered], [], {} if metadata is None else {delivered.channel: metadata})

    @checked
    async def commit(
        self, delivered: Sequence[RecordPack], outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]:
        """`GroupMember.commit`, of packs or parts of them."""
        ids = await self._store(delivered, outputs, metadata or {}, commit=True)
        return ids[: len(outputs)]

    def check_atomic_acks(self) -> None:
        """Raise `Unsupported` where the log cannot store this member's acknowledgements in the commit of a write."""
        if not (self._wal.capabilities.atomic_acks and isinstance(self._member, GroupConsumer)):
            raise Unsupported(
                f"{self._wal.name}:// stores no position of this group in the commit of a write (docs/backends.md says "
                "which logs do): `Client.subscribe` to a topic has it decided with a transaction, or acknowledge after "
                "it, with keys that let you repeat it",
                capability="atomic_acks",
            )

    @checked
    async def commit_with(self, delivered: Sequence[RecordPack], store: Callable[[GroupAcks], Awaitable[None]]) -> None:
        """`commit`, where `store` has the acknowledgements written in the commit of something else: a transaction.
        Letters of bad records among them are written before. Raises what `GroupConsumer.commit_with` and
        `check_atomic_acks` do."""
        self.check_atomic_acks()
        await self._store(delivered, [], {}, store=store)

    @checked
    async def check_held(self, delivered: RecordPack) -> None:
        """Raise `InvalidRequest` for a pack, or a part of one, of which anything is acknowledged, and `Fenced` where
        another member has its channel now: the group's coordinator is asked. Raises as `annotate` does, too."""
        channel = self._channel_of(delivered)
        if channel is not None and delivered.first <= channel.done:
            raise InvalidRequest(
                f"this pack of {delivered.channel} is acknowledged, or the beginning of it is: what is cannot be given "
                "back any more, and the rest can by `parts()`"
            )
        await self.annotate(delivered, self.metadata(delivered.channel))

    def _acknowledging(self, delivered: RecordPack) -> AbstractContextManager[None]:
        """`GroupConsumer.acknowledging`."""
        member = self._member
        return member.acknowledging(self._delivered(delivered)) if isinstance(member, GroupConsumer) else nullcontext()

    def _delivered(self, pack: RecordPack) -> Delivered:
        """What the member under this one has delivered of a pack. A class that reads from one after another raises
        `Fenced` for what an earlier one has."""
        return pack.delivered

    @checked
    def is_acknowledged(self, delivered: RecordPack) -> bool:
        """Whether all of a pack, or a part of one, is acknowledged, and may not be delivered again."""
        with suppress(Fenced):
            return isinstance(self._member, GroupConsumer) and self._member.is_acknowledged(self._delivered(delivered))
        return False

    @checked
    def redeliver(self, delivered: RecordPack) -> None:
        """`GroupMember.redeliver`."""
        with suppress(Fenced):
            self._member.redeliver(self._delivered(delivered))

    @property
    def ack_timeout_s(self) -> float | None:
        """For how long it may hold a pack without acknowledging it: that of `Wal.join`."""
        return self._member.ack_timeout_s

    @checked
    def extend_ack_timeout(self, delivered: RecordPack, timeout_s: float | None = None) -> None:
        """`GroupMember.extend_ack_timeout`."""
        self._member.extend_ack_timeout(self._delivered(delivered), timeout_s)

    @checked
    async def annotate(self, of: str | RecordPack, metadata: bytes) -> None:
        """`GroupMember.annotate`."""
        async with self._marks.storing([self._assignment(of)]):
            state = self._state(of)._replace(own=metadata)
            await self._member.annotate(of if isinstance(of, str) else self._delivered(of), state.to_metadata())

    @checked
    def metadata(self, channel: str) -> bytes:
        """`GroupMember.metadata`."""
        return RecordState.of(self._member.metadata(channel)).own

    @checked
    def pause(self, of: str | RecordPack) -> None:
        """`GroupMember.pause`."""
        self._member.pause(of if isinstance(of, str) else self._delivered(of))
        self._set_paused(of if isinstance(of, str) else of.channel, True)

    @checked
    def resume(self, channel: str) -> None:
        """`GroupMember.resume`."""
        self._set_paused(channel, False)
        self._member.resume(channel)
        if channel in self._channels:
            self._pause_if_full(self._channels[channel])

    def _state(self, of: str | RecordPack) -> RecordState:
        """What is stored with the position in a channel, with the mark that is to be."""
        assignment = self._assignment(of)
        state = RecordState.of(self._member.metadata(assignment[0]))
        return state._replace(token=self._marks.of(assignment, state.token))

    def _assignment(self, of: str | RecordPack) -> Assignment:
        """That of a pack, or the present one of a channel. Raises `Fenced` where there is none."""
        if isinstance(of, str):
            return of, self._member.assignment_epoch(of) if isinstance(self._member, GroupConsumer) else 0
        return of.channel, of.assignment_epoch

    def _set_paused(self, name: str, paused: bool) -> None:
        if name in self._channels:
            self._channels[name].paused = paused

    @checked
    async def seek(self, channel: str, start: Start) -> None:
        """`GroupMember.seek`: the group begins anew there, with this member's filter."""
        await self._member.seek(channel, start)
        self._mismatch = None

    async def aclose(self) -> None:
        """`GroupMember.aclose`."""
        await self._member.aclose()

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def _admit(self, delivered: Delivered) -> bool:
        """Whether to read it now; a class that says no gives it back later."""
        return True

    def _not_passed(self, silent: RecordPack) -> None:
        """What has no record could not be acknowledged, and waits for the next acknowledgement."""

    async def _read(self, delivered: Delivered) -> RecordPack | None:
        """What the entries bring to an end, perhaps without a record; None while a batch of several is not whole."""
        channel = self._channels.get(delivered.channel)
        if channel is None or channel.epoch != delivered.assignment_epoch:
            channel = self._channels[delivered.channel] = self._begin(delivered)
        reader, filtered_before = channel.reader, channel.reader.counts.filtered
        accepted, doubtful = reader.accept_granted(delivered.entries)
        if doubtful:
            await reader.learn_grants()
            accepted += reader.accept(doubtful)
        if self._filtered is not None:
            self._filtered.inc(reader.counts.filtered - filtered_before)
        entries = [*channel.held, *delivered.entries]
        end = bisect_right(entries, reader.position[0], key=lambda entry: entry.id)
        channel.held = entries[end:]
        if not end:
            return None
        begin_ts, owned_before = channel.time, channel.known
        channel.time = max([begin_ts, *(each.ts for each in accepted if each.type not in TIMELESS_TYPES)])
        channel.known = max([channel.known, *((record.term, record.cseq) for record in accepted)])
        pack = RecordPack(
            delivered.channel,
            [record for record in accepted if record.type not in TIME_TYPES and not isinstance(record, LeftOutRecord)],
            begin_ts,
            channel.time,
            entries[:end],
            delivered.assignment_epoch,
            owned_before,
            channel.known,
        )
        if pack.records:
            channel.ends[entries[end - 1].id] = pack
        return pack

    def _begin(self, delivered: Delivered) -> _Channel:
        state = RecordState.of(self._member.metadata(delivered.channel))
        if state.read and state.filter.where != self._where:
            self._mismatch = mismatch(self._member.group, delivered.channel, state.filter, self._where)
            raise self._mismatch
        if state.token:
            raise InvalidRequest(
                f"transactions move the position of group {self._member.group} in {delivered.channel}, which a node "
                "knows: read the topic with `Client.subscribe`",
                channel=delivered.channel,
            )
        term, cseq, time = _state_of(state.read)
        channel = _Channel(
            delivered.assignment_epoch,
            ChannelReader(
                delivered.channel,
                fences=self._fences.get(delivered.channel),
                after=(term, cseq),
                on_bad=lambda name, entry, error: self._bad(channel, name, entry, error),
                grants=self._grants,
                where=self._filter_of(delivered.channel),
            ),
            time,
            GroupFilter(self._where, state.filter.version or int(self._where is not None)),
            (term, cseq),
        )
        return channel

    def _filter_of(self, channel: str) -> RecordFilter | None:
        return None if self._whole(channel) else self._filter

    def _bad(self, channel: _Channel, name: str, entry: Entry, error: BadRecord) -> None:
        if self._on_bad is not None:
            self._on_bad(name, entry, error)
        elif name != self._letters.channel:  # a letter stays where it is
            channel.bad.append((entry, error))
            channel.bad_bytes += len(entry.payload) + BAD_BYTES

    async def _pass(self, silent: RecordPack) -> None:
        """Acknowledge what has no record: at once, or with the pack before it."""
        channel = self._channels[silent.channel]
        if channel.ends:
            last = next(reversed(channel.ends))
            channel.ends[last] = silent
            if channel.full is None and channel.bad_bytes > MAX_BAD_BYTES:
                channel.full = silent
                self._pause_if_full(channel)
                raise Overloaded(
                    f"{MAX_BAD_BYTES} bytes of bad records of {silent.channel} wait for an acknowledgement of what was "
                    "delivered before them; the channel goes on then",
                    limit="bad_record_bytes",
                    channel=silent.channel,
                )
            return
        try:
            await self._store([silent], [], {})
        except TidewalError as error:
            if not isinstance(error, Fenced) and not error.retryable:
                raise  # of a passing trouble the next acknowledgement takes care
            self._not_passed(silent)

    def _pause_if_full(self, channel: _Channel) -> None:
        if channel.full is not None:
            with suppress(Fenced):  # the next assignment begins with nothing
                self._member.pause(channel.full.delivered)

    # ---- acknowledging ----------------------------------------------------------------------------------------------

    async def _store(
        self,
        packs: Sequence[RecordPack],
        outputs: Sequence[Append],
        metadata: Mapping[str, bytes],
        *,
        commit: bool = False,
        store: Callable[[GroupAcks], Awaitable[None]] | None = None,
    ) -> list[bytes]:
        self._check_filter()
        bad = any(channel is not None and channel.bad for channel in map(self._channel_of, packs))
        lettering = self._lettering if bad else nullcontext()  # of two that pass a bad record one has its letter
        async with self._marks.storing({self._assignment(pack) for pack in packs}), lettering:
            covered = {
                pack.channel: self._covered(pack) for pack in sorted(packs, key=lambda pack: pack.entries[-1].id)
            }
            stored = {name: self._metadata(pack, metadata.get(name)) for name, pack in covered.items()}
            letters = [letter for pack in covered.values() for letter in await self._letters_of(pack)]
            # all of them, so that each is checked, and what the last ones cover beside
            delivered = [self._delivered(pack) for pack in packs]
            delivered += [pack.delivered for pack in covered.values() if not any(pack is each for each in packs)]
            ids: list[bytes] = []
            if store is None and (commit or (letters and self._wal.capabilities.atomic_commits)):
                ids = await self._member.commit(delivered, [*outputs, *letters], metadata=stored)
            else:
                if letters:
                    await self._wal.append_many(letters)
                if store is not None:
                    await cast(GroupConsumer, self._member).commit_with(delivered, stored, store)
                else:
                    for name, pack in covered.items():
                        await self._member.acknowledge(pack.delivered, metadata=stored[name])
            left = [silent for pack in covered.values() if (silent := self._done(pack)) is not None]
            if self._lettered is not None:
                self._lettered.inc(len(letters))
        for silent in left:
            await self._pass_left(silent)
        return ids

    async def _pass_left(self, silent: RecordPack) -> None:
        """Acknowledge what has no record and was to go with what is stored now, but came while that was under way."""
        channel = self._channel_of(silent)
        if channel is not None and not channel.ends:
            try:
                await self._store([silent], [], {})
            except TidewalError:  # what was asked for is stored: the next acknowledgement takes care of this
                self._not_passed(silent)

    def _covered(self, pack: RecordPack) -> RecordPack:
        """The pack, or what has no record behind it."""
        channel, last = self._channel_of(pack), pack.entries[-1].id
        covers = pack if channel is None else channel.ends.get(last, pack)
        return covers if covers.entries[-1].id > last else pack

    async def _letters_of(self, pack: RecordPack) -> list[Append]:
        """Letters of the bad records that acknowledging the pack passes."""
        channel = self._channel_of(pack)
        bad = [] if channel is None else [each for each in channel.bad if each[0].id <= pack.entries[-1].id]
        if bad:
            await self._letters.open()
        return [self._letters.letter(pack.channel, entry, "record", error.message, 0) for entry, error in bad]

    def _done(self, pack: RecordPack) -> RecordPack | None:
        """Forget what is stored. Returns what was to go with it and did not, where nothing behind it will take it."""
        channel, left = self._channel_of(pack), None
        if channel is not None:
            upto = pack.entries[-1].id
            channel.done = max(channel.done, upto)
            left = next((covers for last, covers in channel.ends.items() if last <= upto < covers.entries[-1].id), None)
            if channel.bad:
                channel.bad = [bad for bad in channel.bad if bad[0].id > upto]
                channel.bad_bytes = sum(len(entry.payload) + BAD_BYTES for entry, _ in channel.bad)
            channel.ends = {last: covers for last, covers in channel.ends.items() if last > upto}
            if channel.full is not None and (channel.bad_bytes <= MAX_BAD_BYTES or not channel.ends):
                channel.full = None
                if not channel.paused:
                    self._member.resume(pack.channel)
        return left

    def _metadata(self, pack: RecordPack, own: bytes | None) -> bytes:
        state, channel = self._state(pack), self._channel_of(pack)
        return RecordState(
            cast(bytes, msgpack.packb((*pack.owned, pack.end_ts))),
            state.filter if channel is None else channel.filter,
            state.own if own is None else own,
            state.token,
        ).to_metadata()

    def _check_filter(self) -> None:
        if self._mismatch is not None:
            raise self._mismatch

    def _channel_of(self, pack: RecordPack) -> _Channel | None:
        channel = self._channels.get(pack.channel)
        return channel if channel is not None and channel.epoch == pack.assignment_epoch else None


def _state_of(part: bytes) -> tuple[int, int, int]:
    """The term and number of the last record of an owner, and the time, as the member before stored them."""
    try:
        values = cast("list[object]", msgpack.unpackb(part)) if part else []
    except DECODE_ERRORS:
        values = []
    match values:
        case [int(term), int(cseq), int(time)]:
            return term, cseq, time
        case _:
            return 0, 0, 0
