"""Message ids: where Pulsar stored a message, as bytes that sort in the order of the channel.

Ledger, entry and index in the batch, big-endian. Pulsar numbers the ledgers of a cluster upward and uses no number
twice, so the ids of a channel lie above those of an earlier one of the same name.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_LAYOUT = struct.Struct(">QQI")
ID_BYTES = _LAYOUT.size
pack, unpack = _LAYOUT.pack, _LAYOUT.unpack


class Place(NamedTuple):
    """Where a message is. `entry` -1 is the place before the first entry of the ledger."""

    ledger: int
    entry: int
    batch_index: int = 0  # in its batch; 0 for a message without batch, -1 for the place before the first

    @property
    def just_before(self) -> Place:
        return self._replace(batch_index=self.batch_index - 1)

    @property
    def stored(self) -> Place:
        """This place, or the first behind it that a message can have."""
        return Place(self.ledger, max(self.entry, 0), max(self.batch_index, 0))


BEFORE_ALL = Place(-1, -1)
_NO_ENTRY = 2**64 - 1
_NO_INDEX = 2**32 - 1


def encode(place: Place) -> bytes:
    return _LAYOUT.pack(*place)


def before_ledger(ledger: int) -> bytes:
    """The id just before all that the ledger has, or will have."""
    return _LAYOUT.pack(ledger - 1, _NO_ENTRY, _NO_INDEX)


def ledger_behind(place: Place) -> int | None:
    """The ledger, where the place is `before_ledger`."""
    return place.ledger + 1 if place.entry == _NO_ENTRY else None


def encode_end(place: Place) -> bytes:
    """As an id, the place behind which the next message will be; where there is none yet, before all of its ledger."""
    return before_ledger(place.ledger) if place.entry < 0 else encode(place)


def decode_end(id: bytes) -> Place:
    """What `encode_end` was given."""
    place = Place(*_LAYOUT.unpack(id))
    ledger = ledger_behind(place)
    return place if ledger is None else Place(ledger, -1)


def following(id: bytes) -> bytes:
    """The next id that there could be."""
    return (int.from_bytes(id, "big") + 1).to_bytes(ID_BYTES, "big")


def decode(id: bytes) -> Place | None:
    """None when these bytes are no id of this backend."""
    return Place(*_LAYOUT.unpack(id)) if len(id) == ID_BYTES else None
