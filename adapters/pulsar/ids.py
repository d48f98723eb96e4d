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


def encode(place: Place) -> bytes:
    return _LAYOUT.pack(*place)


def decode(id: bytes) -> Place | None:
    """None when these bytes are no id of this backend."""
    return Place(*_LAYOUT.unpack(id)) if len(id) == ID_BYTES else None
