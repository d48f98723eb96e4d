"""The messages of a request, on their way to records."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.catalog.topics import Topic
from ...runtime.errors import InvalidRequest, MessageTooLarge
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import Record, RecordType
from ...runtime.log.wal import Payload
from ...runtime.rpc.protocol import Params
from ..local_owner import WritePart
from ..topics.messages import check_header, header_bytes, unpack_messages
from .sharded_rows import RECORD_OVERHEAD_BYTES


class PartitionedMessages:
    """The checked messages of one request to an `epoch` of `topic`, each with its partition. Raises `InvalidRequest`
    for what no client of this version sends."""

    def __init__(self, topic: Topic, epoch: int, body: Payload) -> None:
        self.topic: Topic = topic
        self._epoch = epoch
        partitions = topic.partitions_of(epoch)
        channels = [pchannel_of(vchannel) for vchannel in partitions]
        self.records: list[tuple[str, Record]] = []
        for partition, key, tags, content in unpack_messages(body):
            if not 0 <= partition < len(channels):
                raise InvalidRequest(f"topic {topic.name} has partitions 0 to {len(channels) - 1}, not {partition}")
            check_header(key, tags)
            vchannel = partitions[partition]
            record = Record(RecordType.MESSAGE, vchannel=vchannel, key=key, tags=tags, body=content)
            self.records.append((channels[partition], record))
        self.channels: set[str] = {channel for channel, _ in self.records}

    def part(self, params: Params, message_bytes: Mapping[str, int]) -> WritePart:
        """What its owners are asked to append for a request with `params`. Raises `MessageTooLarge` for a message over
        `message_bytes`, those of a message of each pchannel."""
        for channel, record in self.records:
            limit = message_bytes[channel] - RECORD_OVERHEAD_BYTES
            if (size := len(record.body) + header_bytes(record.key, record.tags)) > limit:
                raise MessageTooLarge(
                    f"a message of {size} bytes for topic {self.topic.name}, which takes up to {limit}: nothing of the "
                    "batch is written",
                    size=size,
                    limit=limit,
                )
        return WritePart(
            self.topic.name,
            self.topic.id,
            self._epoch,
            self.records,
            params["producer"],
            params["pseq"],
            len(self.records),
            channels=len(self.channels),
            kind=RecordType.MESSAGE,
        )
