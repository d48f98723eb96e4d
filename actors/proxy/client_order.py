"""In which order the writes of clients are taken."""

from __future__ import annotations

from collections import OrderedDict

CLIENTS_MAX = 10_000  # of one that is forgotten a write is taken once those before it are done


class ClientOrder:
    """The last write that this door has taken, of each client. Requests may be lost and are repeated, also at a door
    that has had none of the client's before. Each says which write of its client, of unknown outcome, comes before it
    (`after`, 0 for none): until that was taken here, or its outcome is known, it is not taken."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, int] = OrderedDict()

    def take(self, producer: str, pseq: int, after: int) -> bool:
        """Whether the write `pseq` is taken."""
        last = self._taken.get(producer, 0)
        if pseq > last and after > last:
            return False
        self._taken[producer] = max(last, pseq)
        self._taken.move_to_end(producer)
        if len(self._taken) > CLIENTS_MAX:
            self._taken.popitem(last=False)
        return True
