"""Messages that are pending, as a releaser keeps them in memory, and as it writes many of them again at once.

A releaser needs of each message its id and its channel; the rest may wait until it is due. So what is written again is
a page: one record with the bytes of the records that were stored first, which tell the same ids wherever they lie.

    body of a page: 4 bytes count, then for each an id and 4 bytes length, then the records' bytes
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from ..clock import physical_ms
from ..errors import BadRecord
from ..log.record import Record, RecordType, decode, encode
from .delayed import CHANNEL, DelayedId, DelayedMessage, as_stored, delayed_place, message_of, read_delayed

OVERHEAD_BYTES: Final = 1024  # what a message costs beside its body, so that empty ones are bounded, too

_COUNT, _ROW = struct.Struct(">I"), struct.Struct(">20sI")
_log = logging.getLogger(__name__)


class DelayedPlace(NamedTuple):
    """Of a record in the delay channel."""

    id: bytes
    term: int
    cseq: int


class Pending(NamedTuple):
    """A message for `channel`, or with `channel` "" its cancellation, where it was read last: the message, or the bytes
    of the record that says so."""

    id: bytes
    channel: str
    content: DelayedMessage | bytes
    place: DelayedPlace

    @property
    def size(self) -> int:
        """Bytes in memory."""
        content = self.content
        return OVERHEAD_BYTES + len(content if isinstance(content, bytes) else content.record.body)

    @property
    def due_ms(self) -> int:
        """When it is due by the wall clock; a cancellation, when its message would have been."""
        message = self.message()
        return physical_ms(DelayedId.from_bytes(self.id).due) if message is None else message.due_ms

    def message(self) -> DelayedMessage | None:
        """The message; None for a cancellation, and, which is logged, for what cannot be read."""
        content = self.content
        if not isinstance(content, bytes):
            return content
        if not self.channel:
            return None
        try:
            message = read_delayed(decode(content))
        except BadRecord as error:
            _log.error("a delayed message for %s cannot be read: %s", self.channel, error)
            return None
        if message.id != self.id:
            _log.error("a page has a delayed message for %s under another id than its own", self.channel)
            return None
        return message

    def stored(self) -> bytes:
        """The bytes of the record."""
        content = self.content
        return content if isinstance(content, bytes) else encode(as_stored(content))


Stored = tuple[bytes, str, Record | bytes]
"""An id, a channel, as `Pending` has them, and the record that says so, or its bytes."""


def read_stored(record: Record) -> Sequence[Stored]:
    """What a record of a delay channel has: a message, a cancellation, or all those of a page. Raises `BadRecord`."""
    if record.type is RecordType.DELAYED_PAGE:
        return _read_page(record)
    found = delayed_place(record)
    return ((*found, record),) if found is not None else ()


def pending_of(stored: Stored, place: DelayedPlace) -> Pending:
    """What was read, to be kept: without a view of all that was read at once, which would stay in memory as a whole.
    A message that was read alone, which may be due soon, is decoded, and one of a page is not."""
    id, channel, content = stored
    if not isinstance(content, bytes):
        content = message_of(id, channel, content) if channel else encode(content)
    return Pending(id, channel, content, place)


def page_of(batch: Sequence[Pending]) -> Record:
    """The record of a delay channel that says of all of `batch`, which are for one channel, what those before said."""
    contents = [pending.stored() for pending in batch]
    rows = [_ROW.pack(pending.id, len(content)) for pending, content in zip(batch, contents, strict=True)]
    body = b"".join((_COUNT.pack(len(batch)), *rows, *contents))
    return Record(RecordType.DELAYED_PAGE, tags={CHANNEL: batch[0].channel}, body=body)


def _read_page(record: Record) -> list[Stored]:
    body, channel = memoryview(record.body), record.tags.get(CHANNEL)
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else -1
    at = _COUNT.size + max(0, count) * _ROW.size
    rows = list(_ROW.iter_unpack(body[_COUNT.size : at])) if count >= 0 and at <= len(body) else None
    if not isinstance(channel, str) or rows is None or at + sum([length for _, length in rows]) != len(body):
        raise BadRecord("a page of delayed messages without its channel, or of another length", reason="body")
    found: list[Stored] = []
    for id, length in rows:
        found.append((id, channel, bytes(body[at : at + length])))
        at += length
    return found
