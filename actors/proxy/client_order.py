"""In which order the writes of clients are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.clock import Clock
from ...runtime.rpc.server import Request

CLIENTS_MAX = 10_000  # of one that is forgotten a write is taken once those before it are done
HELD_S = 2.0  # then its client has repeated it, and says anew what comes before it


class _Held(NamedTuple):
    request: Request
    after: int
    since_s: float


@dataclass(slots=True)
class _Client:
    last: int = 0  # the last write that was taken
    held: dict[int, _Held] = field(default_factory=dict[int, _Held])  # by number


class ClientOrder:
    """The order of each client's writes at this door. Requests may be lost and are repeated, also at a door that has
    had none of the client's before. Each says which write of its client, of unknown outcome, comes before it (`after`,
    0 for none): until that was taken here, or its outcome is known, it is held. What is held is bounded by
    `limit_bytes`; the rest is ignored, and repeated by its client."""

    def __init__(self, clock: Clock, limit_bytes: int) -> None:
        self._clock, self._limit_bytes = clock, limit_bytes
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._held_bytes = 0

    def take(self, request: Request) -> Sequence[Request]:
        """The writes that are to be served now, in order: `request` and those held behind it, or none."""
        match [request.params.get(name) for name in ("producer", "pseq", "after")]:
            case [str() as producer, int() as pseq, int() as after]:
                client = self._client(producer)
                if pseq > client.last and after > client.last:
                    self._hold(client, pseq, request, after)
                    return ()
                client.last = max(client.last, pseq)
                return [request, *self._released(client)]
            case _:
                return [request]  # not in any order

    def _client(self, producer: str) -> _Client:
        client = self._clients.setdefault(producer, _Client())
        self._clients.move_to_end(producer)
        if len(self._clients) > CLIENTS_MAX:
            _, forgotten = self._clients.popitem(last=False)
            for number in list(forgotten.held):
                self._give_back(forgotten, number)
        return client

    def _hold(self, client: _Client, pseq: int, request: Request, after: int) -> None:
        now_s = self._clock.monotonic()
        for number in [number for number, held in client.held.items() if now_s - held.since_s > HELD_S]:
            self._give_back(client, number)
        if pseq in client.held or self._held_bytes + len(request.body) > self._limit_bytes:
            request.ignore()
            return
        client.held[pseq] = _Held(request, after, now_s)
        self._held_bytes += len(request.body)

    def _give_back(self, client: _Client, number: int) -> None:
        held = client.held.pop(number)
        self._held_bytes -= len(held.request.body)
        held.request.ignore()

    def _released(self, client: _Client) -> Iterator[Request]:
        """The writes of which the one before was taken now."""
        while due := [number for number, held in client.held.items() if held.after <= client.last]:
            number = min(due)
            request = client.held.pop(number).request
            self._held_bytes -= len(request.body)
            client.last = max(client.last, number)
            yield request
