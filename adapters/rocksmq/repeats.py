"""Appends of other processes, each written once however often it is sent.

What is durable is in the journal's `ClientTable`; here is what this life of the owner knows beside it: appends that are
on their way, those of ephemeral channels alone, which leave no record, and refusals.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from ...runtime.clock import Clock
from ...runtime.errors import InvalidRequest, OutcomeUnknown, Overloaded, TidewalError
from ...runtime.wal import Append, OnAppended
from .appending import Stamp
from .channels import decode_id, encode_id
from .clients import CLIENTS, RESULTS, ClientTable, Wrote, take_settled, wrote
from .registry import Registry

CLIENT_ID_BYTES = 16
CLIENT_NUMBERS = 65_536  # appends of one client that it may leave unsettled


class Submit(Protocol):
    """`Appender.submit`."""

    def __call__(self, entries: Sequence[Append], done: OnAppended, *, stamp: Stamp | None = None) -> None: ...


class Attempt:
    """The first time that a number came. `result` is None until it is known."""

    __slots__ = ("_client", "_entries", "_known", "_number", "_repeats", "result", "waiting")

    def __init__(
        self, repeats: Repeats, known: Known, client: bytes, number: int, entries: Sequence[Append], done: OnAppended
    ) -> None:
        self._repeats, self._known, self._client, self._number = repeats, known, client, number
        self._entries: Sequence[Append] = entries
        self.result: list[bytes] | TidewalError | None = None
        self.waiting = [done]

    def stamp(self, ids: list[bytes]) -> bytes:
        """The record that goes into the frame of the entries."""
        wall_ms = self._repeats.clock.wall_ms()
        return wrote(self._client, self._number, self._known.settled, wall_ms, _result(self._entries, ids))

    def settle(self, result: list[bytes] | TidewalError) -> None:
        """Answer all who wait, and all who come later."""
        self._end(result, kept=True)

    def recorded(self, result: list[bytes] | TidewalError) -> None:
        """`settle` for an append with a record: what is in the table need not be kept here."""
        self._end(result, kept=isinstance(result, TidewalError))

    def _end(self, result: list[bytes] | TidewalError, *, kept: bool) -> None:
        with self._repeats.lock:
            self.result = result
            waiting, self.waiting = self.waiting, []
            if not kept and self._known.attempts.pop(self._number, None) is not None:
                self._repeats.count -= 1
        self._entries = ()
        for done in waiting:
            done(result)


class Known:
    """One client in this life of the owner."""

    __slots__ = ("attempts", "settled")

    def __init__(self) -> None:
        self.settled = 0
        self.attempts: dict[int, Attempt] = {}


class Repeats:
    """Stands before the `Appender` for all who number their appends. Thread-safe."""

    def __init__(self, table: ClientTable, registry: Registry, submit: Submit, clock: Clock) -> None:
        self.lock = threading.Lock()
        self.clock = clock
        self._table, self._registry, self._submit = table, registry, submit
        self._clients: OrderedDict[bytes, Known] = OrderedDict()  # who asked last is last
        self.count = 0  # of all attempts

    def submit(self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended) -> None:
        """Append once. `done` gets what the first attempt with that number got or gets, and everything that
        `Wal.submit` raises. `OutcomeUnknown`: the number is settled. `InvalidRequest`: it was another append's."""
        try:
            attempt = self._attempt(client, number, settled, entries, done)
        except TidewalError as error:
            done(error)
            return
        if attempt is None:
            return
        durable = self._durable(entries)
        settle = attempt.recorded if durable else attempt.settle
        try:
            self._submit(entries, settle, stamp=attempt.stamp if durable else None)
        except TidewalError as error:
            attempt.settle(error)

    def _attempt(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> Attempt | None:
        """A first attempt to make; None where `done` waits for an earlier one, or has got its result."""
        with self.lock:
            known = self._known(client)
            if settled > known.settled:
                known.settled = settled
                self.count -= len(take_settled(known.attempts, settled))
            earlier = known.attempts.get(number)
            if earlier is not None and earlier.result is None:
                earlier.waiting.append(done)
                return None
            result = earlier.result if earlier is not None else self._recorded(client, number, entries)
            if result is None:
                if number <= known.settled:
                    raise _settled(number)
                return self._begin(known, client, number, entries, done)
        done(result)
        return None

    def _begin(self, known: Known, client: bytes, number: int, entries: Sequence[Append], done: OnAppended) -> Attempt:
        durable = self._table.find(client)
        if len(known.attempts) + (len(durable.wrote) if durable is not None else 0) >= CLIENT_NUMBERS:
            raise Overloaded(f"{CLIENT_NUMBERS} appends of one client are not settled", limit="client_numbers")
        attempt = known.attempts[number] = Attempt(self, known, client, number, entries, done)
        self.count += 1
        while len(self._clients) > CLIENTS or (self.count > RESULTS and len(self._clients) > 1):
            _, oldest = self._clients.popitem(last=False)
            self.count -= len(oldest.attempts)
            oldest.attempts = {}
        return attempt

    def _known(self, client: bytes) -> Known:
        known = self._clients.get(client)
        if known is None:
            if len(client) != CLIENT_ID_BYTES:
                raise InvalidRequest(f"a client id has {CLIENT_ID_BYTES} bytes, not {len(client)}")
            known = self._clients[client] = Known()
        else:
            self._clients.move_to_end(client)
        return known

    def _recorded(self, client: bytes, number: int, entries: Sequence[Append]) -> list[bytes] | None:
        """The ids that the table has, looked for after the attempts: a result goes into the table first and leaves
        them then."""
        durable = self._table.find(client)
        if durable is None:
            return None
        result = durable.wrote.get(number)
        if result is not None:
            return _ids(entries, result)
        if number <= durable.settled:
            raise _settled(number)
        return None

    def _durable(self, entries: Sequence[Append]) -> bool:
        """Whether any of the entries goes to the disk. A channel that is not there decides nothing: it is refused."""
        names = self._registry.names
        for entry in entries:
            channel = names.get(entry[0])
            if channel is not None and not channel.policy.ephemeral:
                return True
        return False


def _result(entries: Sequence[Append], ids: Sequence[bytes]) -> Wrote:
    if len(ids) == 1:
        return Wrote(1, (decode_id(ids[0]),))
    firsts: dict[str, int] = {}
    for entry, id in zip(entries, ids, strict=True):
        if entry[0] not in firsts:
            firsts[entry[0]] = decode_id(id)
    return Wrote(len(ids), list(firsts.values()))


def _ids(entries: Sequence[Append], result: Wrote) -> list[bytes]:
    """The ids of the entries' first time. Raises `InvalidRequest` when they are others."""
    names = dict.fromkeys(entry[0] for entry in entries)
    if len(entries) != result.total or len(names) != len(result.firsts):
        raise InvalidRequest("the number of this append was another append's")
    following = dict(zip(names, result.firsts, strict=True))
    ids: list[bytes] = []
    for entry in entries:
        id = following[entry[0]]
        following[entry[0]] = id + 1
        ids.append(encode_id(id))
    return ids


def _settled(number: int) -> OutcomeUnknown:
    return OutcomeUnknown(f"append {number} was answered before, and its result is not kept any more", number=number)
