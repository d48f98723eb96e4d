"""A message larger than its channel takes, in fragments: parts of one record's body, which the reader puts together."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from ..errors import MessageTooLarge
from .record import BatchPart, Record, encode

FRAGMENT_OVERHEAD_BYTES = 1024  # that a fragment which waits for the others counts beside its body
PART_BYTES = 32  # that a part's numbers may take


def fragments_of(record: Record, limit: int, whole_limit: int, *, sender: int = 0) -> list[bytes]:
    """The bytes of `record`, in as many fragments as a channel with `limit` bytes per message needs. Where several may
    send a record of the same producer and number, each has another number as `sender`. Raises
    `MessageTooLarge` for a record over `whole_limit` bytes, or with a header that takes all of `limit`."""
    whole = encode(record)
    if len(whole) <= min(limit, whole_limit):
        return [whole]
    body = memoryview(record.body)
    room = limit - (len(whole) - len(body)) - PART_BYTES
    if len(whole) > whole_limit or room <= 0:
        most = whole_limit if room > 0 else limit
        raise MessageTooLarge(
            f"a message of {len(whole)} bytes is over the limit of {most}", size=len(whole), limit=most
        )
    starts = range(0, len(body), room)
    rest = replace(record, key=b"", tags={})
    return [
        encode(
            replace(
                record if number == 0 else rest, part=BatchPart(sender, number, len(starts)), body=body[at : at + room]
            )
        )
        for number, at in enumerate(starts)
    ]


class FragmentAssembler:
    """Puts together what `fragments_of` took apart, also when fragments come twice or others come between. Over `limit`
    bytes the messages whose last fragment is longest ago are forgotten: their senders send them again."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._waiting: OrderedDict[tuple[str, int, int, int], dict[int, Record]] = OrderedDict()

    def take(self, record: Record) -> Record | None:
        """The whole record that `record` is, or completes; None while fragments are missing."""
        part = record.part
        if part is None:
            return record
        known = (record.producer, record.pseq, part.batch, part.of)
        fragments = self._waiting.setdefault(known, {})
        self._waiting.move_to_end(known)
        if part.number not in fragments:
            fragments[part.number] = record
            self._bytes += len(record.body) + FRAGMENT_OVERHEAD_BYTES
        if len(fragments) == part.of:
            self._forget(known)
            return replace(fragments[0], part=None, body=b"".join(fragments[number].body for number in range(part.of)))
        while self._bytes > self._limit:
            self._forget(next(iter(self._waiting)))
        return None

    def _forget(self, known: tuple[str, int, int, int]) -> None:
        fragments = self._waiting.pop(known)
        self._bytes -= sum(len(fragment.body) + FRAGMENT_OVERHEAD_BYTES for fragment in fragments.values())
