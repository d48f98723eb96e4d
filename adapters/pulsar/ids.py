"""Message ids: where Pulsar stored a message, as bytes that sort in the order of the channel.

Ledger, entry and index in the batch, big-endian. Pulsar numbers the ledgers of a cluster upward and uses no number
twice, so the ids of a channel lie above those of an earlier one of the same name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_LAYOUT = struct.Struct(">QQI")
ID_BYTES = _LAYOUT.size
pack: Callable[..., bytes] = _LAYOUT.pack
unpack: Callable[[bytes], tuple[int, ...]] = _LAYOUT.unpack


class MessagePlace(NamedTuple):
    """The place of a message in its topic. `entry` -1 is the place before the first entry of the ledger."""

    ledger: int
    entry: int
    batch_index: int = 0  # in its batch; 0 for a message without batch, -1 for the place before the first

    @property
    def just_before(self) -> MessagePlace:
        return self._replace(batch_index=self.batch_index - 1)

    @property
    def stored(self) -> MessagePlace:
        """This place, or the first after it that a message can have."""
        return MessagePlace(self.ledger, max(self.entry, 0), max(self.batch_index, 0))


BEFORE_ALL = MessagePlace(-1, -1)
_NO_ENTRY = 2**64 - 1
_NO_INDEX = 2**32 - 1


def encode(place: MessagePlace) -> bytes:
    return _LAYOUT.pack(*place)


def before_ledger(ledger: int) -> bytes:
    """The id just before all messages of the ledger, present and future."""
    return _LAYOUT.pack(ledger - 1, _NO_ENTRY, _NO_INDEX)


def ledger_behind(place: MessagePlace) -> int | None:
    """The ledger, if the place is its `before_ledger`; None otherwise."""
    return place.ledger + 1 if place.entry == _NO_ENTRY else None


def encode_end(place: MessagePlace) -> bytes:
    """The id of a place after which the next message will be; without a message yet, the id before its whole ledger."""
    return before_ledger(place.ledger) if place.entry < 0 else encode(place)


def decode_end(id: bytes) -> MessagePlace:
    """The place from which `encode_end` made the id."""
    place = MessagePlace(*_LAYOUT.unpack(id))
    ledger = ledger_behind(place)
    return place if ledger is None else MessagePlace(ledger, -1)


def next_id(id: bytes) -> bytes:
    """The next possible id."""
    return (int.from_bytes(id, "big") + 1).to_bytes(ID_BYTES, "big")


def decode(id: bytes) -> MessagePlace | None:
    """The place in an id; None when the bytes are not an id of this backend."""
    return MessagePlace(*_LAYOUT.unpack(id)) if len(id) == ID_BYTES else None
