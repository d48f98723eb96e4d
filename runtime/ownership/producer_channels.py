"""Which channel belongs to which named producer: one replicated state for all names of a log, in the channel
`producers.channels`.

A channel belongs to the first name that takes it, whatever retention removes from it, until that name gives it up. Log
order decides between names. Incarnations of a name are numbered, by their claims of the producer's state, so one that a
newer one has replaced gives nothing up. A term that was given up with a channel is remembered, and
the next name begins above it, for readers drop what comes under a lower one.

It is read and written when a producer opens, and then only. An opening adds one small record, or two; it reads those
since the last snapshot, of which there is one per 1,000, and in the snapshot one small entry per channel.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import BadRecord, ChannelNotFound, Closed, Fenced, InvalidRequest, PreconditionFailed
from ..log.record import DECODE_ERRORS, RecordType, decode
from ..log.wal import ChannelPolicy, FromId, Wal
from ..replicated.records import Event, unknown_kind
from ..replicated.replica import Replica
from ..streams.stream_base import reading
from .channel_owner import FENCE_NAME
from .producer_state import ProducedChannel

PRODUCER_CHANNELS = "producers.channels"
TAKE, GIVE_UP = "take", "give up"

_POLICY = ChannelPolicy(retention_s=None)
_log = logging.getLogger("tidewal.producer")


@dataclass(frozen=True, slots=True)
class BelongingChannel:
    """A channel and its producer's name, "" where it was given up. `incarnation` is the number of the one that took
    it last, `term` the highest one of the names before."""

    name: str = ""
    incarnation: int = 0
    term: int = 0


_FREE = BelongingChannel()


class ProducerChannels:
    """Its events: `take` (name, incarnation, channels: list of names), refused where one belongs to another name, and
    `give up` (name, incarnation, channels: name to term), refused unless all belong to the name, and no newer
    incarnation has taken them. A refusal says which `channel` it is, and whose (`name`)."""

    def __init__(self) -> None:
        self._channels: dict[str, BelongingChannel] = {}

    def find(self, channel: str) -> BelongingChannel:
        """What is known of a channel."""
        return self._channels.get(channel, _FREE)

    def of(self, name: str) -> list[str]:
        """The channels of a name, sorted."""
        return sorted(channel for channel, known in self._channels.items() if known.name == name)

    def apply(self, event: Event) -> None:
        """Apply one event. Raises as `StateMachine.apply` says."""
        known = {TAKE: self._take, GIVE_UP: self._give_up}
        apply = known.get(event["kind"])
        if apply is None:
            raise unknown_kind("state of producers' channels", event["kind"])
        try:
            apply(event)
        except DECODE_ERRORS as error:
            raise BadRecord(f"a malformed event of producers' channels: {error!r}", reason="body") from error
        except KeyError as error:
            raise BadRecord(f"an event of producers' channels without {error}", reason="body") from error

    def _take(self, event: Event) -> None:
        name, incarnation = str(event["name"]), int(event["incarnation"])
        channels = [str(each) for each in event["channels"]]
        for channel in channels:
            if self.find(channel).name not in ("", name):
                raise _refusal(channel, self.find(channel))
        for channel in channels:
            self._channels[channel] = BelongingChannel(name, incarnation, self.find(channel).term)

    def _give_up(self, event: Event) -> None:
        name, incarnation, terms = str(event["name"]), int(event["incarnation"]), dict(event["channels"])
        for channel in terms:
            if self.find(channel).name != name or incarnation < self.find(channel).incarnation:
                raise _refusal(channel, self.find(channel))
        for channel, term in terms.items():
            self._channels[channel] = BelongingChannel(term=max(self.find(channel).term, int(term)))

    def snapshot(self) -> object:
        """The whole state, for msgpack."""
        return {channel: (each.name, each.incarnation, each.term) for channel, each in self._channels.items()}

    def restore(self, snapshot: Any) -> None:
        """Become the state of a snapshot. Raises `BadRecord`."""
        try:
            self._channels = {
                str(channel): BelongingChannel(str(name), int(incarnation), int(term))
                for channel, (name, incarnation, term) in dict(snapshot).items()
            }
        except DECODE_ERRORS as error:
            raise BadRecord(f"a malformed snapshot of producers' channels: {error!r}", reason="body") from error


def channels_anew(snapshot: Any) -> object:
    """A snapshot of producers' channels for a log in which no incarnation was open yet, so they are numbered anew."""
    return {channel: (name, 0, term) for channel, (name, _, term) in dict(snapshot).items()}


def _refusal(channel: str, known: BelongingChannel) -> PreconditionFailed:
    return PreconditionFailed(f"{channel} belongs to {known.name or 'no producer'}", channel=channel, name=known.name)


@asynccontextmanager
async def producer_channels(wal: Wal, author: str, now: Callable[[], int]) -> AsyncGenerator[Replica[ProducerChannels]]:
    """The state of the log, which is made where it is not there. `author` must be new, `now` returns timestamps."""
    await wal.create_channel(PRODUCER_CHANNELS, _POLICY)
    replica = Replica(
        wal,
        PRODUCER_CHANNELS,
        ProducerChannels,
        RecordType.PRODUCER,
        led=False,
        author=author,
        now=now,
        holder="producers",
    )
    try:
        await replica.open()
        yield replica
    finally:
        await replica.close()


async def check_channels(
    wal: Wal, belonging: ProducerChannels, name: str, asked: Sequence[str], known: Mapping[str, ProducedChannel]
) -> None:
    """Raise `InvalidRequest` for a channel that the producer `name` asks for, and that has another owner. `known` are
    the channels as the name has left them."""
    for channel in asked:
        owner = belonging.find(channel).name
        if owner not in ("", name):
            raise _owned_by(channel, owner, name)
        if not (owner and _has_owned(known, channel)):
            await _check_unowned(wal, channel, name)


class TakenChannels(NamedTuple):
    """The channels that an incarnation has, in the order in which they were asked for; what it has owned beside them
    comes last. Of those made `anew` nothing is there that the name has written. The terms of other names before it are
    `terms_before`."""

    channels: tuple[str, ...]
    anew: tuple[str, ...]
    terms_before: dict[str, int]


async def take_channels(
    wal: Wal,
    belonging: Replica[ProducerChannels],
    name: str,
    incarnation: int,
    asked: Sequence[str],
    known: Mapping[str, ProducedChannel],
) -> TakenChannels:
    """Take the channels that are asked for, and keep all that the name has owned: only they together say which of its
    batches are in the log. Of those that are not asked for, what was dropped is given up. Raises `InvalidRequest` where
    another name was faster, `Fenced` where a newer incarnation was."""
    others = [each for each in (await belonging.catch_up()).of(name) if each not in asked]
    latest = {each: await _latest(wal, each) for each in (*asked, *others)}
    dropped = {each: known[each].term if each in known else 0 for each in others if latest[each] is None}
    channels = (*asked, *(each for each in others if each not in dropped and _has_owned(known, each)))
    by: Event = {"name": name, "incarnation": incarnation}
    try:
        await belonging.propose({**by, "kind": TAKE, "channels": channels})
        if dropped:
            _log.warning("the producer %s gives up what was dropped: %s", name, ", ".join(dropped))
            await belonging.propose({**by, "kind": GIVE_UP, "channels": dropped})
    except PreconditionFailed as error:
        channel, owner = str(error.fields["channel"]), str(error.fields["name"])
        if channel in dropped:
            raise Fenced(f"the producer {name} was opened elsewhere meanwhile", channel=channel) from None
        raise _owned_by(channel, owner, name) from None
    await belonging.snapshot_if_due()
    anew = (each for each in channels if (latest[each] or b"") < _last_fence(known, each))
    return TakenChannels(channels, tuple(anew), {each: belonging.fold.state.find(each).term for each in channels})


def _has_owned(known: Mapping[str, ProducedChannel], channel: str) -> bool:
    return channel in known and bool(known[channel].fences)


def _last_fence(known: Mapping[str, ProducedChannel], channel: str) -> bytes:
    """A channel whose last entry lies before it was dropped, and made again: retention removes no entry's id."""
    return max(known[channel].fences.values(), default=b"") if channel in known else b""


async def _latest(wal: Wal, channel: str) -> bytes | None:
    """The id of the channel's last entry, b"" where it never had one, None where it is not there."""
    try:
        return await wal.latest_id(channel) or b""
    except ChannelNotFound:
        return None


async def _check_unowned(wal: Wal, channel: str, name: str) -> None:
    """Raise `InvalidRequest` where the channel has records of an owner, unless they begin with a fence of the producer
    `name`, which may have ended before it knew. What retention has removed of a `ChannelOwner` is not noticed."""
    try:
        ends = await wal.describe(channel)
    except ChannelNotFound:
        return
    if ends.first_id is None or ends.latest_id is None:
        return
    async with reading(wal, channel, FromId(ends.first_id, inclusive=True)) as batches:
        async for entries in batches:
            for entry in entries:
                with suppress(BadRecord):
                    record = decode(entry.payload, entry.id)
                    if record.term:
                        if record.type is RecordType.FENCE and record.tags.get(FENCE_NAME) == name:
                            return
                        raise owned_otherwise(channel)
            if entries[-1].id >= ends.latest_id:
                return
    raise Closed(f"the log was closed while {channel} was read")


def owned_otherwise(channel: str) -> InvalidRequest:
    """The error for a channel that no producer has taken, and that has an owner's records."""
    return InvalidRequest(
        f"{channel} was written to by a ChannelOwner: each channel has one owner, so take another channel",
        channel=channel,
    )


def _owned_by(channel: str, owner: str, name: str) -> InvalidRequest:
    """The error for a channel of the producer `owner` that the producer `name` wants."""
    return InvalidRequest(
        f"{channel} belongs to the producer {owner!r}, which keeps it, even dropped, until it gives it up: open that "
        f"name, or take another channel. To give it to {name!r}, drop the channel, and then open {owner!r} once "
        f"without it: open_producer(wal, {owner!r}, [])",
        channel=channel,
        owner=owner,
    )
