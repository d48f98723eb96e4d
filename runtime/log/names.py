"""The names of channels. Physical and virtual channels are named as in Milvus; all carry the cluster's prefix
(`msgChannel.chanNamePrefix.cluster`), so that several clusters may share one broker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..arguments import checked, checked_fields

DEFAULT_PREFIX = "by-dev"

_VIRTUAL_TAIL = re.compile(r"_(\d+)v(\d+)$")


@checked_fields()
@dataclass(frozen=True, slots=True)
class Names:
    """The channel names of one cluster. `timeticker` is the channel of heartbeats where an administrator has made it
    (`common.preCreatedTopic.timeticker`)."""

    prefix: str = DEFAULT_PREFIX
    timeticker: str = ""

    @checked
    def pchannel(self, number: int) -> str:
        """The physical channel `number`."""
        return f"{self.prefix}-rootcoord-dml_{number}"

    @checked
    def vchannel(self, pchannel: str, collection_id: int, shard: int) -> str:
        """The channel of one shard of a collection on `pchannel`."""
        return f"{pchannel}_{collection_id}v{shard}"

    @checked
    def topic_pchannel(self, topic_id: int, partition: int, epoch: int = 1) -> str:
        """The physical channel of one partition of an epoch of a topic; its `vchannel` has the partition's number for a
        shard's."""
        return f"{self.prefix}-topic_{topic_id}_{'' if epoch == 1 else f'e{epoch}_'}{partition}"

    @checked
    def topic_pattern(self, topic_id: int) -> str:
        """What matches the physical channels of all partitions of a topic, of those to come, too."""
        return f"{self.prefix}-topic_{topic_id}_*"

    @property
    def catalog(self) -> str:
        """Collections, assignments and leases; exempt from retention."""
        return f"{self.prefix}-collection_schema"

    @property
    def cluster(self) -> str:
        """The nodes that belong to the cluster, and their leases; exempt from retention."""
        return f"{self.prefix}-cluster"

    @property
    def cuts(self) -> str:
        """Cuts: consistent lines across the channels of a collection."""
        return f"{self.prefix}-cuts"

    @property
    def insert_events(self) -> str:
        """Flush events: what DataNodes have stored in tables."""
        return f"{self.prefix}-insert_events"

    @property
    def query_events(self) -> str:
        """What QueryNodes have answered."""
        return f"{self.prefix}-query_events"

    @property
    def dead_letters(self) -> str:
        """Records that could not be read, with the reason."""
        return f"{self.prefix}-dead_letters"

    @property
    def group_dead_letters(self) -> str:
        """Entries that consumer groups could not process, with the reason."""
        return f"{self.prefix}-group_dead_letters"

    @property
    def heartbeats(self) -> str:
        """Ephemeral: the heartbeats of the channel owners."""
        return self.timeticker or f"{self.prefix}-heartbeats"

    @checked
    def requests(self, role: str) -> str:
        """Ephemeral: the requests to a role."""
        return f"{self.prefix}-requests-{role}"

    @checked
    def replies(self, client: str) -> str:
        """Ephemeral: the replies to a client."""
        return f"{self.prefix}-replies-{client}"

    def may_hold_data(self, channel: str) -> bool:
        """Whether collections may be placed on a channel of that name: it is not one of the cluster's own, which begin
        with its prefix, and it does not look like a virtual one."""
        own = channel.startswith(f"{self.prefix}-") and not channel.startswith(self.pchannel(0)[:-1])
        return not own and pchannel_of(channel) == channel


def delay_channel_of(pchannel: str) -> str:
    """The channel in which messages wait that are due later in `pchannel`, a partition of a topic. `topic_pattern` does
    not match it: groups do not read it."""
    prefix, _, partition = pchannel.rpartition("-topic_")
    return f"{prefix}-delays_{partition}"


def pchannel_of(channel: str) -> str:
    """The physical channel of a virtual one; a physical one stays as it is."""
    return _VIRTUAL_TAIL.sub("", channel)
