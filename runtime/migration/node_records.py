"""What a node's records hold of ids of their log, beside its states: where a releaser may begin to read.

That is an offset of a source in a delay channel. It rises, and is compared, so it cannot be exchanged for the id of
another log; without it the releaser reads its channel from the front, where all that is pending still lies.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from ..delays.releaser import HEAD
from ..errors import BadRecord
from ..log.record import RecordType, Tags, decode, encode, record_type
from ..log.wal import Entry
from ..ownership.batch import SOURCE, SOURCE_OFFSET, recorded_source
from ..ownership.producers import without_sources
from .channel_copy import Rewrite, holds_no_ids, movable_entry

_WITHOUT_IDS = frozenset(  # ids of delayed messages are no ids of the log
    {RecordType.DELAYED, RecordType.CANCELLED, RecordType.DELAYED_PAGE}
)

_WITHOUT_IDS_AT_REST = _WITHOUT_IDS | {RecordType.STATE, RecordType.LEDGER}  # not where channels end at different times


def rewrite_of(node: object | None) -> Rewrite:
    """How entries of a log go over that `node` has used; None for a log without nodes."""
    return movable_entry if node is None else node_entry


def migrated_entry(channel: str, entry: Entry) -> Entry:
    """An entry as a migration brings it to another log: a `Rewrite`. A keyed state names its commits by numbers alone,
    and of Spark's ledgers only a batch that is not done needs the ids in them (`LogStates.read` refuses that), so both
    go along as they are. Raises as `node_entry`."""
    return _rewritten(channel, entry, _WITHOUT_IDS_AT_REST)


def node_entry(channel: str, entry: Entry) -> Entry:
    """An entry of a channel that nodes own, as another log is to have it: a `Rewrite`. Raises `Unsupported` for what
    holds ids and cannot be migrated."""
    return _rewritten(channel, entry, _WITHOUT_IDS)


def _rewritten(channel: str, entry: Entry, without_ids: Set[RecordType]) -> Entry:
    if holds_no_ids(entry.payload):
        return entry
    kind = record_type(entry.payload)
    if kind is RecordType.PRODUCERS:
        return entry._replace(payload=_without_heads(entry.payload))
    return entry if kind in without_ids else movable_entry(channel, entry)


def _without_heads(payload: bytes | memoryview) -> bytes | memoryview:
    """A record of a channel's producers without the offsets of heads; one that no owner can read stays as it is."""
    try:
        record = decode(payload)
        body = without_sources(record.body, _is_head)
    except BadRecord:
        return payload
    source = recorded_source(record)
    of_head = source is not None and _is_head(source[0])
    if body is record.body and not of_head:
        return payload
    return encode(replace(record, body=body, tags=_without_source(record.tags) if of_head else record.tags))


def _without_source(tags: Tags) -> Tags:
    return {name: tag for name, tag in tags.items() if name not in (SOURCE, SOURCE_OFFSET)}


def _is_head(source: str) -> bool:
    return source.endswith(HEAD)
