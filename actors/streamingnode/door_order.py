"""In which order the parts of writes are taken that the doors of other processes send."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager

from ...runtime.errors import Unavailable
from ..write_requests import DoorPlace

DOORS_MAX = 10_000  # doors and producers; of one that is forgotten a part is taken that its door sends as a first


class DoorOrder:
    """The last part that was taken, of each door and producer. Requests between processes may be lost, delayed or
    repeated; and a part may be refused while the next ones are on their way. So a part is taken only directly behind
    the one that its door has sent before it, or as the first of which that does not know the outcome."""

    def __init__(self) -> None:
        self._taken: OrderedDict[tuple[str, str], int] = OrderedDict()

    @contextmanager
    def taking(self, producer: str, place: DoorPlace) -> Generator[None]:
        """Take a part, unless the block raises. Raises `Unavailable` for one that is out of order."""
        key = place.door, producer
        last = self._taken.get(key, 0)
        if place.number < last or (place.number > last and place.after not in (0, last)):
            raise Unavailable("an earlier write of the same client was not taken: they are to be sent again, in order")
        yield
        self._taken[key] = place.number
        self._taken.move_to_end(key)
        if len(self._taken) > DOORS_MAX:
            self._taken.popitem(last=False)
