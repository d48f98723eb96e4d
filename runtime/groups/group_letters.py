"""The dead letters of consumer groups: entries that were acknowledged without having been processed.

None is dropped: the letter is appended before, or in one commit with, the acknowledgement.
"""

from __future__ import annotations

from contextlib import suppress

from ..clock import HybridClock
from ..errors import ChannelExists
from ..log.dead_letters import group_letter
from ..log.record import MAX_RECORD_BYTES
from ..log.wal import Append, ChannelPolicy, Entry, Wal

LETTER_OVERHEAD_BYTES = 64 * 1024  # what a letter may have beside the entry's bytes

POLICY = ChannelPolicy(max_message_bytes=MAX_RECORD_BYTES)


class GroupLetters:
    """Makes the letters of one group, for a channel of the log."""

    def __init__(self, wal: Wal, group: str, channel: str, clock: HybridClock) -> None:
        self.channel = channel
        self._wal, self._group, self._clock = wal, group, clock
        self._body_bytes = 0

    async def open(self) -> None:
        """Create the channel where it is missing; one that exists with another policy is fine."""
        with suppress(ChannelExists):
            await self._wal.create_channel(self.channel, POLICY)
        info = await self._wal.describe(self.channel)
        self._body_bytes = max(0, info.max_message_bytes - LETTER_OVERHEAD_BYTES)

    def letter(self, channel: str, entry: Entry, reason: str, message: str, attempts: int) -> Append:
        """The letter of one entry. A body that the channel of letters cannot take is cut: `replay` takes it from the
        channel that it came from."""
        ts = self._clock.now()
        payload = group_letter(channel, entry, self._group, reason, message, attempts, ts, self._body_bytes)
        return Append(self.channel, payload, ts)
