"""In which order the writes of clients are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...runtime.clock import Clock
from ...runtime.rpc.server import Request

CLIENTS_MAX = 10_000  # of one that is forgotten a write is taken once those before it are done
HELD_S = 2.0  # then its client has repeated it, or given up


class _Held(NamedTuple):
    request: Request
    after: int
    since_s: float


@dataclass(slots=True)
class _Client:
    last: int = 0  # the last write that was taken
    held: set[int] = field(default_factory=set[int])  # numbers


class ClientOrder:
    """The order of each client's writes at this door. Requests may be lost and are repeated, also at a door that has
    had none of the client's before. Each says which write of its client, of unknown outcome, comes before it (`after`,
    0 for none): until that was taken here, it is held. A repetition takes the place of what is held, for it says anew
    what comes before it: the outcome of that may be known by then, and no door ever gets it again. What is held is
    bounded by `limit_bytes`; the rest is left to be repeated."""

    def __init__(self, clock: Clock, limit_bytes: int) -> None:
        self._clock, self._limit_bytes = clock, limit_bytes
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        self._held: OrderedDict[tuple[str, int], _Held] = OrderedDict()  # by producer and number; the oldest first
        self._held_bytes = 0

    def take(self, request: Request) -> Sequence[Request]:
        """The writes that are to be served now, in order: `request` and those held behind it, or none."""
        match [request.params.get(name) for name in ("producer", "pseq", "after")]:
            case [str() as producer, int() as pseq, int() as after]:
                client = self._client(producer)
                if pseq in client.held:
                    self._let_go(producer, pseq)
                if pseq > client.last and after > client.last:
                    self._hold(producer, pseq, request, after)
                    return ()
                client.last = max(client.last, pseq)
                return [request, *self._released(producer, client)]
            case _:
                return [request]  # not in any order

    def _client(self, producer: str) -> _Client:
        client = self._clients.setdefault(producer, _Client())
        self._clients.move_to_end(producer)
        if len(self._clients) > CLIENTS_MAX:
            forgotten, state = next(iter(self._clients.items()))
            for number in list(state.held):
                self._let_go(forgotten, number)
            del self._clients[forgotten]
        return client

    def _hold(self, producer: str, pseq: int, request: Request, after: int) -> None:
        request.ignore()  # so that a repetition comes here, too
        now_s = self._clock.monotonic()
        while self._held and now_s - next(iter(self._held.values())).since_s > HELD_S:
            self._let_go(*next(iter(self._held)))
        if self._held_bytes + len(request.body) <= self._limit_bytes:
            self._held[producer, pseq] = _Held(request, after, now_s)
            self._clients[producer].held.add(pseq)
            self._held_bytes += len(request.body)

    def _let_go(self, producer: str, pseq: int) -> Request:
        request = self._held.pop((producer, pseq)).request
        self._clients[producer].held.discard(pseq)
        self._held_bytes -= len(request.body)
        return request

    def _released(self, producer: str, client: _Client) -> Iterator[Request]:
        """The writes of which the one before was taken now. One below the last that was taken its client had given up
        by then, or it would have come before that: it must not follow it."""
        while due := [number for number in client.held if self._held[producer, number].after <= client.last]:
            request = self._let_go(producer, min(due))
            if min(due) > client.last:
                client.last = min(due)
                request.serve()
                yield request
