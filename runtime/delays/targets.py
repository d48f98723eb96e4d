"""The channels into which a releaser puts what is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..errors import ChannelNotFound
from ..log.record import Record, RecordType
from ..ownership.channel_owner import ChannelOwner
from ..ownership.producers import ProducerTable
from .delayed import DelayedMessage


class ReleaseTargets(Protocol):
    """Where the messages of one delay channel go. Toward each channel the releaser is a source whose offsets are ids,
    so what a channel has it does not take again. What raises an error that may pass is called again."""

    def reached(self, channel: str) -> bytes:
        """Up to which id all messages for `channel` are known to be released."""
        ...

    async def settle(self) -> None:
        """Wait until it is decided which channels these are. Called before `divided`."""
        ...

    def divided(self, messages: Sequence[DelayedMessage]) -> Mapping[str, list[DelayedMessage]]:
        """The messages that are not known to be released, in their order, by the channels into which they are to be."""
        ...

    async def append(self, target: str, messages: Sequence[DelayedMessage]) -> None:
        """Append what is next for `target`, in the order of ids; returns once it is durable there. What was cancelled
        before may be under way yet. Raises
        `TopicEpochEnded` where other channels are to take what `target` has not, `MessageTooLarge` and
        `ChannelNotFound`."""
        ...

    async def note_reached(self) -> None:
        """Keep how far those channels have come that are known to be further than all is done: retention may take what
        they know of it themselves. Called now and then, also where one holds up the others."""
        ...

    async def nothing_pending(self, time: int) -> None:
        """All that was stored up to `time` is released."""
        ...


class OwnedTargets:
    """The channels that the messages name, of the `owner` that has the delay channel, `source`, too. One that is
    `known` may be opened later. How far a channel has come is noted in the delay channel (`note_offset`) where another
    takes so long, or the owner before was killed, that retention might remove what the channel itself knows of it."""

    def __init__(self, owner: ChannelOwner, source: str, known: Callable[[str], bool]) -> None:
        self._owner, self._source, self._known = owner, source, known

    def reached(self, channel: str) -> bytes:
        """`ReleaseTargets.reached`."""
        noted = self._owner.source_offset(source_in(self._source, channel), self._source)
        return max(noted, self._owner.source_offset(self._source, channel))

    async def settle(self) -> None:
        """`ReleaseTargets.settle`: they are always the same."""

    def divided(self, messages: Sequence[DelayedMessage]) -> Mapping[str, list[DelayedMessage]]:
        """`ReleaseTargets.divided`."""
        found: dict[str, list[DelayedMessage]] = {}
        for message in messages:
            found.setdefault(message.channel, []).append(message)
        return found

    async def append(self, target: str, messages: Sequence[DelayedMessage]) -> None:
        """`ReleaseTargets.append`."""
        if not self._known(target):
            raise ChannelNotFound(f"{target} is no channel of this owner any more", channel=target)
        reached = self.reached(target)
        records = [(each.id, each.record) for each in messages if each.id > reached]
        if records:
            after = self._owner.source_offset(self._source, target)
            await self._owner.append_from(self._source, target, records, after=after)

    async def note_reached(self) -> None:
        """`ReleaseTargets.note_reached`."""
        for target in self._owner.channels:
            if (offset := self._owner.source_offset(self._source, target)) > self._done:
                await note_offset(self._owner, source_in(self._source, target), self._source, offset)

    @property
    def _done(self) -> bytes:
        """Up to which id all is done."""
        return self._owner.source_offset(self._source, self._source)

    async def nothing_pending(self, time: int) -> None:
        """`ReleaseTargets.nothing_pending`: more may come."""


def source_in(delays: str, target: str) -> str:
    """As which source the delay channel `delays` notes how far a target has come."""
    return f"{delays}>{target}"


async def note_offset(owner: ChannelOwner, source: str, channel: str, offset: bytes) -> None:
    """Store in `channel` how far a source has come, which is no less than before, without a message. Raises as
    `ChannelOwner.append_from` does."""
    reached = owner.source_offset(source, channel)
    if offset > reached:
        note = [(offset, Record(RecordType.PRODUCERS, body=ProducerTable().pages()[0]))]
        await owner.append_from(source, channel, note, after=reached)
