"""The channels that a member subscribes to: names, and patterns with `*`.

The partitions of a foreign topic are channels named `TOPIC:NUMBER`; the name of the topic, or a pattern that it
matches, means all of them. The channels that a migration has made are no pattern's: their entries are not programs'.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from ..errors import InvalidRequest, Overloaded
from ..log.migration_state import is_migration_channel

MAX_SUBSCRIPTIONS = 10_000  # names and patterns of one member
MAX_PATTERNS = 100  # of them with `*`: each is matched against each channel

_SUBSCRIPTION = re.compile(r"[A-Za-z0-9._-]{1,250}(:[0-9]{1,9})?|[A-Za-z0-9._*-]{1,250}")


class Subscription:
    """What one member subscribes to. Raises `InvalidRequest` for strings that can name no channel, `Overloaded`
    (`limit` "subscriptions" or "patterns") for too many of them."""

    def __init__(self, channels: Sequence[str]) -> None:
        if isinstance(channels, str) or not channels:
            raise InvalidRequest("a member subscribes to a list of at least one channel name or pattern")
        if len(channels) > MAX_SUBSCRIPTIONS:
            raise Overloaded(f"a member may name {MAX_SUBSCRIPTIONS} channels; use a pattern", limit="subscriptions")
        for channel in channels:
            if not _SUBSCRIPTION.fullmatch(channel):
                raise InvalidRequest(f"channel {channel!r} is not 1-250 characters of A-Z a-z 0-9 . _ - *")
        self.names: frozenset[str] = frozenset(channel for channel in channels if "*" not in channel)
        patterns = sorted({channel for channel in channels if "*" in channel})
        if len(patterns) > MAX_PATTERNS:
            raise Overloaded(f"a member may use {MAX_PATTERNS} patterns", limit="patterns")
        self._patterns = [re.compile(fnmatch.translate(pattern)) for pattern in patterns]

    def takes(self, channel: str) -> bool:
        """Whether the member subscribes to the channel."""
        topic = channel.partition(":")[0]
        if not self.names.isdisjoint((channel, topic)):
            return True
        return any(pattern.match(topic) for pattern in self._patterns) and not is_migration_channel(channel)
