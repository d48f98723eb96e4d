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
        """Append what is next for `target`, in the order of ids; returns once it is durable there. Raises
        `TopicEpochEnded` where other channels are to take what `target` has not, `MessageTooLarge` and
        `ChannelNotFound`."""
        ...

    async def note_reached(self) -> None:
        """A channel takes long: keep how far the others have come, of which retention may take that."""
        ...

    async def nothing_pending(self, time: int) -> None:
        """All that was stored up to `time` is released."""
        ...


class OwnedTargets:
    """The channels that the messages name, of the `owner` that has the delay channel, too. One that is `known` may be
    opened later."""

    def __init__(self, owner: ChannelOwner, source: str, known: Callable[[str], bool]) -> None:
        self._owner, self._source, self._known = owner, source, known

    def reached(self, channel: str) -> bytes:
        """`ReleaseTargets.reached`."""
        return self._owner.source_offset(self._source, channel)

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
        records = [(each.id, each.record) for each in messages]
        await self._owner.append_from(self._source, target, records, after=self.reached(target))

    async def note_reached(self) -> None:
        """`ReleaseTargets.note_reached`: each channel says it alone."""

    async def nothing_pending(self, time: int) -> None:
        """`ReleaseTargets.nothing_pending`: more may come."""


async def note_offset(owner: ChannelOwner, source: str, channel: str, offset: bytes) -> None:
    """Store in `channel` how far a source has come, which is no less than before, without a message. Raises as
    `ChannelOwner.append_from` does."""
    reached = owner.source_offset(source, channel)
    if offset > reached:
        note = [(offset, Record(RecordType.PRODUCERS, body=ProducerTable().pages()[0]))]
        await owner.append_from(source, channel, note, after=reached)
