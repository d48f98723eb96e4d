"""The messages of a request, and what cancels one, on their way to records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...runtime.catalog.topics import Topic
from ...runtime.delays.delayed import DelayedId, cancellation, check_due, delayed_record, later_ms
from ...runtime.errors import InvalidRequest, MessageTooLarge
from ...runtime.log.names import pchannel_of
from ...runtime.log.record import Record, RecordType, Tags, make_record
from ...runtime.log.wal import Payload
from ...runtime.rpc.protocol import Params
from ..local_owner import WritePart
from ..topics.messages import check_header, header_bytes, unpack_messages
from .sharded_rows import RECORD_OVERHEAD_BYTES


class PartitionedMessages:
    """The checked messages of one request to an `epoch` of `topic`, each with its partition. Those that are due later,
    at `due_ms`, go to the partition's delay channel. Raises `InvalidRequest` for what no client of this version
    sends."""

    def __init__(self, topic: Topic, epoch: int, body: Payload, due_ms: int = 0) -> None:
        self.topic: Topic = topic
        self._epoch = epoch
        partitions = topic.partitions_of(epoch)
        channels = [pchannel_of(vchannel) for vchannel in partitions]
        self.records: list[tuple[str, Record]] = []
        self._largest: dict[str, int] = {}  # bytes of the largest message of each channel
        for partition, key, tags, content in unpack_messages(body):
            if not 0 <= partition < len(channels):
                raise InvalidRequest(f"topic {topic.name} has partitions 0 to {len(channels) - 1}, not {partition}")
            size, channel = check_header(key, tags) + len(content), channels[partition]
            self.records.append((channel, _message(partitions[partition], key, tags, content)))
            if size > self._largest.get(channel, -1):
                self._largest[channel] = size
        self._due_ms = due_ms
        if due_ms:
            self.records = _delayed(topic, self.records, due_ms)
            sizes = [len(each.body) + header_bytes(each.key, each.tags) for _, each in self.records]
            self._largest = {self.records[0][0]: max(sizes)}
        self.channels: set[str] = set(self._largest)

    def part(self, params: Params, message_bytes: Mapping[str, int]) -> WritePart:
        """What its owners are asked to append for a request with `params`. Raises `MessageTooLarge` for a message over
        `message_bytes`, those of a message of each pchannel."""
        for channel, size in self._largest.items():
            if size > (limit := message_bytes[channel] - RECORD_OVERHEAD_BYTES):
                raise MessageTooLarge(
                    f"a message of {size} bytes for topic {self.topic.name}, which takes up to {limit}: nothing of the "
                    "batch is written",
                    size=size,
                    limit=limit,
                )
        records, channels = self.records, len(self.channels)
        return _part(self.topic, self._epoch, records, params, channels, digest=self._due_ms)


class Cancellation:
    """What cancels the delayed message of a request to `topic`. Raises `InvalidRequest` for one that the topic cannot
    have."""

    def __init__(self, topic: Topic, params: Params) -> None:
        partition: str = params["channel"]
        if not topic.delays or partition not in topic.delay_channels:
            raise InvalidRequest(f"topic {topic.name} has no delayed message of this id", argument="id")
        DelayedId.from_bytes(params["message"])
        self._epoch, number = topic.places[partition]
        vchannel, channel = topic.partitions_of(self._epoch)[number], topic.delay_channels[partition]
        self.topic: Topic = topic
        self.records: list[tuple[str, Record]] = [
            (channel, replace(cancellation(params["message"]), vchannel=vchannel))
        ]
        self.channels: set[str] = {channel}

    def part(self, params: Params, _: Mapping[str, int]) -> WritePart:
        """As for `PartitionedMessages`."""
        return _part(self.topic, self._epoch, self.records, params, 1)


def due_ms_of(params: Params, now_ms: int) -> int:
    """When the messages of a request are due, which came at the wall clock's `now_ms`; 0 for those that are not due
    later. Raises `InvalidRequest` for what is too far ahead."""
    if "due_ms" not in params and "after_ms" not in params:
        return 0
    due_ms = params["due_ms"] if "due_ms" in params else later_ms(now_ms, params["after_ms"])
    check_due(due_ms, now_ms)
    return max(1, due_ms)


def _message(vchannel: str, key: bytes, tags: Tags, body: bytes) -> Record:
    return make_record(RecordType.MESSAGE, 0, 0, 0, "", 0, None, vchannel, key, tags, "", 0, body)


def _delayed(topic: Topic, records: Sequence[tuple[str, Record]], due_ms: int) -> list[tuple[str, Record]]:
    channels = {channel for channel, _ in records}
    if len(channels) > 1 or not topic.delays or not channels <= topic.delay_channels.keys():
        raise InvalidRequest("messages that are due later are sent to one partition each time, which takes such")
    (channel,) = channels
    delays = topic.delay_channels[channel]
    return [(delays, delayed_record(channel, record, due_ms)) for _, record in records]


def _part(
    topic: Topic, epoch: int, records: Sequence[tuple[str, Record]], params: Params, channels: int, digest: int = 0
) -> WritePart:
    """`digest` is when the messages are due: a repeated request learns when they were due as they were written."""
    return WritePart(
        topic.name,
        topic.id,
        epoch,
        records,
        params["producer"],
        params["pseq"],
        len(records),
        digest,
        channels,
        kind=RecordType.MESSAGE,
    )
