"""What the journal knows of appends from other processes, so that a repeated one is recognised by any later owner.

A client is a process with a random id that numbers its appends 1, 2, 3, …, and sends with each the number up to which
all are answered (`settled`). A record lies in the same frame as the entries of each append, so both are there or
neither. Appends of one entry that come together share a record.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar, cast

import msgpack

from ....runtime.log.wal import Payload

T = TypeVar("T")

CLIENT_EXPIRY_S = 3600.0  # a client that wrote nothing for so long is forgotten, unless it is one of the newest
CLIENTS_KEPT = 256  # the clients that wrote last are not forgotten for their age: clocks may jump
CLIENTS = 4096  # more are not remembered: those that wrote longest ago are forgotten
RESULTS = 131_072  # the same for results over all clients, and for first ids in them
_BEGINNINGS = (b"\x97\xa5wrote", b"\x96\xa4each")  # of the records


class AppendResult(NamedTuple):
    """The result of one append: the first id in each of its channels, in the order in which its entries first name
    them. Ids of one append are without gaps in each channel, so these are enough to know them all."""

    total: int  # count of entries
    firsts: Sequence[int]


@dataclass(slots=True)
class DedupClient:
    """What is known of one client. `wrote` has numbers above `settled`, each with its result, which is just the id for
    one entry; `size` counts the numbers and their first ids."""

    settled: int = 0
    wall_ms: int = 0
    wrote: dict[int, AppendResult | int] = field(default_factory=dict[int, "AppendResult | int"])
    size: int = 0


def wrote(client: bytes, number: int, settled: int, wall_ms: int, result: AppendResult) -> bytes:
    """The control record of an append: `settled` as the client sent it, `wall_ms` from the owner's wall clock."""
    return cast(bytes, msgpack.packb(["wrote", client, number, settled, wall_ms, result.total, result.firsts]))


def each(client: bytes, number: int, settled: int, wall_ms: int, ids: Sequence[int]) -> bytes:
    """The control record of appends of one entry, numbered from `number` on. Ids are stored as runs without gaps: first
    and count, first and count, …"""
    runs: list[int] = []
    end = -1
    for id in ids:
        if id != end:
            runs += (id, 0)
        runs[-1] += 1
        end = id + 1
    return cast(bytes, msgpack.packb(["each", client, number, settled, wall_ms, runs]))


def is_result(record: Payload) -> bool:
    """Whether a control record is of one of these kinds: what it says concerns no channel."""
    return bytes(record[:7]).startswith(_BEGINNINGS)


class DedupTable:
    """All clients as of one point in the journal. One thread at a time changes the table, any thread may read it."""

    def __init__(self) -> None:
        self._clients: OrderedDict[bytes, DedupClient] = OrderedDict()  # the client that wrote last is last
        self._size = 0
        self.applied: Callable[[bytes, int, int], None] = _nothing
        """Called with the client, its first number and the last, when `find` has their results."""

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, client: bytes) -> DedupClient | None:
        """What is known of the client with that id."""
        return self._clients.get(client)

    def apply(self, client: bytes, number: int, settled: int, wall_ms: int, total: int, firsts: Sequence[int]) -> None:
        """Let a record of `wrote` take effect. Expiry follows the records' own times, so it is the same whenever the
        journal is read."""
        self._apply(client, number, settled, wall_ms, {number: AppendResult(total, firsts)}, 1 + len(firsts))

    def apply_each(self, client: bytes, number: int, settled: int, wall_ms: int, runs: Sequence[int]) -> None:
        """Let a record of `each` take effect, as `apply` does for one of `wrote`."""
        ids: list[int] = []
        for first, count in zip(runs[::2], runs[1::2], strict=True):
            ids += range(first, first + count)
        self._apply(client, number, settled, wall_ms, dict(enumerate(ids, number)), 2 * len(ids))

    def _apply(
        self,
        client: bytes,
        number: int,
        settled: int,
        wall_ms: int,
        results: Mapping[int, AppendResult | int],
        size: int,
    ) -> None:
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = DedupClient()
        else:
            self._clients.move_to_end(client)
        before = known.size
        known.wall_ms = wall_ms
        known.wrote.update(results)
        known.size += size
        if settled > known.settled:
            known.settled = settled
            known.size -= _size(take_settled(known.wrote, settled))
        self._size += known.size - before
        self._expire(wall_ms)
        self.applied(client, number, number + len(results) - 1)

    def _expire(self, wall_ms: int) -> None:
        while len(self._clients) > 1:
            oldest = next(iter(self._clients.values()))
            old = wall_ms - oldest.wall_ms > CLIENT_EXPIRY_S * 1000 and len(self._clients) > CLIENTS_KEPT
            if not old and len(self._clients) <= CLIENTS and self._size <= RESULTS:
                return
            self._size -= self._clients.popitem(last=False)[1].size

    def snapshot(self) -> list[object]:
        """The table in the form that a snapshot of the journal keeps."""
        return [
            [
                id,
                known.settled,
                known.wall_ms,
                [
                    [number, *result] if isinstance(result, AppendResult) else [number, 1, [result]]
                    for number, result in known.wrote.items()
                ],
            ]
            for id, known in self._clients.items()
        ]

    def restore(self, snapshot: Sequence[Any]) -> None:
        """Become the table of which `snapshot` was taken."""
        self._clients = OrderedDict()
        for id, settled, wall_ms, results in snapshot:
            wrote: dict[int, AppendResult | int] = {
                number: AppendResult(total, firsts) for number, total, firsts in results
            }
            self._clients[id] = DedupClient(settled, wall_ms, wrote, _size(wrote.values()))
        self._size = sum(known.size for known in self._clients.values())


def _size(results: Iterable[AppendResult | int]) -> int:
    return sum([2 if isinstance(result, int) else 1 + len(result.firsts) for result in results])


def _nothing(client: bytes, first: int, last: int) -> None:
    pass


def take_settled(by_number: dict[int, T], settled: int) -> list[T]:
    """Remove the numbers up to `settled`, which come first: a client numbers its appends in their order."""
    return list(map(by_number.pop, list(takewhile(settled.__ge__, by_number))))
