"""A channel as a Pulsar topic: its name, the properties with its policy, and its contents as the broker reports
them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from ...runtime.errors import CorruptLog
from ...runtime.log.checks import is_name
from ...runtime.log.policy_codec import stored_numbers
from ...runtime.log.wal import ChannelPolicy, Delivery, Durability
from .ids import MessagePlace, decode, encode

POLICY_PROPERTY = "tidewal.policy"
TRUNCATED_PROPERTY = "tidewal.truncated"
INCARNATION_PROPERTY = "tidewal.made"  # the incarnation: creation time in ms since 1970, and a unique part
LEDGER_PROPERTY = "tidewal.ledger"  # its first ledger: lower ones belong to an earlier channel of the name
QUEUE_PROPERTY = "tidewal.queue"  # the group to which this queue is bound
GROUP_LOG = "tidewal-group~"  # followed by the name of the group: its log, which is not a channel
HOLD_CURSOR = "tidewal-hold."  # followed by the name of the holder

MIB = 1024 * 1024
EPHEMERAL_MINUTES = 1
GROUP_LOG_MESSAGE_BYTES = 5 * MIB + 32 * 1024

_PARTITION = re.compile(r"-partition-(\d+)\Z")
_FOREIGN_NAME = re.compile(r"[A-Za-z0-9._-]{1,250}(:\d{1,9})?")
_MEANS_SOMETHING_TO_PULSAR = re.compile(r"__|-partition-\d+\Z")  # system topics, partitions of a topic


@dataclass(frozen=True, slots=True)
class PulsarTopic:
    """A channel and its policy; the topic is named like the channel, unless the name has a meaning for Pulsar. A name
    with a colon is a partition of a foreign topic, see `foreign_topics.py`."""

    channel: str
    policy: ChannelPolicy = field(default_factory=ChannelPolicy)

    @property
    def name(self) -> str:
        topic, colon, number = self.channel.partition(":")
        if colon:
            return f"{topic}-partition-{number}"
        return f"{self.channel}~" if _MEANS_SOMETHING_TO_PULSAR.search(self.channel) else self.channel

    @property
    def properties(self) -> Mapping[str, str]:
        """The properties with which the topic is created."""
        return {POLICY_PROPERTY: encode_policy(self.policy)}

    @property
    def retention(self) -> dict[str, object]:
        """The retention in Pulsar's units: whole minutes and MiB, rounded up; -1 keeps all."""
        policy = self.policy
        if policy.ephemeral:
            return _retention(EPHEMERAL_MINUTES, math.ceil(policy.ephemeral_bytes / MIB))
        minutes = -1 if policy.retention_s is None else math.ceil(policy.retention_s / 60)
        mebibytes = -1 if policy.retention_bytes is None else math.ceil(policy.retention_bytes / MIB)
        return _retention(minutes, mebibytes)


def _retention(minutes: int, mebibytes: int) -> dict[str, object]:
    # With zero, Pulsar removes at once what no cursor keeps, whatever the other number is.
    return {"retentionTimeInMinutes": minutes or 1, "retentionSizeInMB": mebibytes or 1}


def channel_of(topic: str) -> str:
    """The channel of a topic, by the topic's local name: of a partition of a foreign topic one with a colon."""
    return topic.removesuffix("~") if topic.endswith("~") else _PARTITION.sub(r":\1", topic)


def is_topic_of_ours(channel: str) -> bool:
    """Whether this is the name of a channel, or of the log of a group."""
    return is_name(channel.removeprefix(GROUP_LOG))


def is_foreign(channel: str) -> bool:
    """Whether this can be the name of a foreign topic without partitions, or of a partition of one."""
    topic = channel.partition(":")[0]
    meant = "__" in topic or topic.startswith(GROUP_LOG)
    return _FOREIGN_NAME.fullmatch(channel) is not None and not meant


def group_topic(group: str) -> str:
    """The channel name under which the log of a group is kept."""
    return f"{GROUP_LOG}{group}"


def group_of(topic: str) -> str | None:
    """The group whose log the topic is, by the topic's local name."""
    return channel_of(topic).removeprefix(GROUP_LOG) if topic.startswith(GROUP_LOG) else None


def group_policy() -> ChannelPolicy:
    """The policy of a group's log: keeps what the hold of the latest snapshot keeps, and little more."""
    return ChannelPolicy(retention_s=60, max_message_bytes=GROUP_LOG_MESSAGE_BYTES)


def encode_policy(policy: ChannelPolicy) -> str:
    return json.dumps({**asdict(policy), "acks": policy.acks.value, "delivery": policy.delivery.value})


def decode_policy(text: str, channel: str) -> ChannelPolicy:
    try:
        fields = cast("dict[str, Any]", json.loads(text))
        acks, delivery = Durability(fields.pop("acks")), Delivery(fields.pop("delivery"))
        return ChannelPolicy(acks=acks, delivery=delivery, **stored_numbers(fields))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptLog(f"the policy of {channel} cannot be read: {text!r}", path=channel, offset=0) from error


@dataclass(frozen=True, slots=True)
class TopicContents:
    """The contents of a topic. `ledgers` are (number, entries) in order; the last is the one in use."""

    policy: ChannelPolicy | None  # None: a topic that Tidewal did not create
    ledgers: tuple[tuple[int, int], ...]
    last: MessagePlace  # batch index unknown; entry -1 where there is none
    truncated: MessagePlace | None
    holds: Mapping[str, MessagePlace]
    incarnation: str = ""  # "" when it was not recorded
    queue_of: str = ""  # the group to which this queue is bound
    first_ledger: int | None = None  # of the channel; None when it was not recorded
    entry_bytes: int = 0  # of a stored entry, on average

    @property
    def stored_from(self) -> MessagePlace | None:
        """The first entry that is stored; None where there is none."""
        return next((MessagePlace(ledger, 0) for ledger, entries in self.ledgers if entries), None)

    @property
    def first(self) -> MessagePlace | None:
        """The first entry of the channel: entries that are truncated and before all holds do not count."""
        stored = self.stored_from
        if stored is None or self.truncated is None:
            return stored
        return max(stored, min([self.truncated, *self.holds.values()]))

    def is_whole(self, now_ms: int) -> bool:
        """Whether retention has certainly removed nothing."""
        milliseconds = self.incarnation.partition("-")[0]
        if self.policy is None or self.truncated or self.policy.retention_bytes is not None or not milliseconds:
            return False
        kept_s = self.policy.retention_s
        return kept_s is None or now_ms < int(milliseconds) + 1000 * kept_s

    @property
    def end(self) -> MessagePlace:
        """The last entry, or the place before the first entry to come."""
        return max(self.last, MessagePlace(self.ledgers[-1][0], -1)) if self.ledgers else self.last

    def has_between(self, after: MessagePlace, before: MessagePlace, now_ms: int) -> bool:
        """Whether there is, or was, any entry between the two; True also when that is not known."""
        entries = dict(self.ledgers)
        if after.ledger not in entries and not (after.entry < 0 and self.is_whole(now_ms)):  # it may have stayed empty
            return True
        if entries.get(after.ledger, 0) > after.entry + 1 and after.ledger != before.ledger:
            return True
        return any(count for ledger, count in self.ledgers if after.ledger < ledger < before.ledger)


def contents_of(topic: PulsarTopic, stats: Mapping[str, object]) -> TopicContents:
    """The contents of a topic, from the broker's internal statistics."""
    properties = cast("dict[str, str]", stats.get("properties") or {})
    policy = properties.get(POLICY_PROPERTY)
    listed = cast("list[dict[str, int]]", stats["ledgers"])
    ledgers = [(ledger["ledgerId"], ledger["entries"]) for ledger in listed]
    last = _place(str(stats["lastConfirmedEntry"]))
    if (
        ledgers and ledgers[-1][0] == last.ledger
    ):  # the broker counts the entries of the ledger in use only when it ends
        ledgers[-1] = (last.ledger, last.entry + 1)
    cursors = cast("dict[str, dict[str, str]]", stats["cursors"])
    truncated = properties.get(TRUNCATED_PROPERTY)
    return TopicContents(
        policy=None if policy is None else decode_policy(policy, topic.channel),
        ledgers=tuple(ledgers),
        last=last,
        truncated=None if truncated is None else decode(bytes.fromhex(truncated)),
        holds={
            name.removeprefix(HOLD_CURSOR): _place(cursor["readPosition"])
            for name, cursor in cursors.items()
            if name.startswith(HOLD_CURSOR)
        },
        incarnation=properties.get(INCARNATION_PROPERTY, ""),
        queue_of=properties.get(QUEUE_PROPERTY, ""),
        first_ledger=int(properties[LEDGER_PROPERTY]) if LEDGER_PROPERTY in properties else None,
        entry_bytes=cast(int, stats["totalSize"]) // max(cast(int, stats["numberOfEntries"]), 1),
    )


def _place(text: str) -> MessagePlace:
    ledger, _, entry = text.partition(":")
    return MessagePlace(int(ledger), int(entry))


def truncated_property(place: MessagePlace) -> str:
    return encode(place).hex()
