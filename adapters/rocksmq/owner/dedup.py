"""Appends of other processes, each written once however often it is sent.

What is durable is in the journal's `DedupTable`; here is what this incarnation of the owner knows beside it: appends
that are in flight or not in the table yet, those of ephemeral channels alone, which leave no record, and refusals.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from ....runtime.clock import Clock
from ....runtime.errors import InvalidRequest, OutcomeUnknown, Overloaded, TidewalError
from ....runtime.log.wal import Append, OnAppended
from ..journal.channels import encode_id
from ..journal.dedup_table import CLIENTS, RESULTS, AppendResult, DedupTable, each, take_settled, wrote
from ..journal.registry import Registry
from .appending import Appender

CLIENT_ID_BYTES = 16
CLIENT_NUMBERS = 65_536  # that a client may be ahead of what it has settled

Shape: TypeAlias = tuple[int, int]  # of an append: how many entries, in how many channels
ONE: Shape = (1, 1)


class KnownClient:
    """One client in this incarnation of the owner."""

    __slots__ = ("attempts", "newest", "settled", "unrecorded")

    def __init__(self) -> None:
        self.settled: int = 0
        self.newest: int = 0  # the highest number that ever came
        self.unrecorded: int = 0  # attempts that are in flight, or not in the table yet but will be
        self.attempts: dict[int, FirstAttempt] = {}


class FirstAttempt:
    """The first time that some numbers came: an append, or several of one entry each (`several`). `result` is None
    until it is known; then it has the ids of all."""

    __slots__ = ("_lock", "done", "first", "known", "recorded", "result", "several", "shape", "waiting")

    def __init__(
        self,
        lock: threading.Lock,
        known: KnownClient,
        first: int,
        done: OnAppended,
        shape: Shape,
        *,
        recorded: bool,
        several: bool = False,
    ) -> None:
        self._lock = lock
        self.known: KnownClient = known
        self.first: int = first
        self.shape: Shape = shape
        self.recorded: bool = recorded  # the table will have its result
        self.several: bool = several
        self.result: list[bytes] | TidewalError | None = None
        self.done: OnAppended | None = done
        self.waiting: list[tuple[int, OnAppended]] = []  # the number, and the callback of the append that came again

    def settle(self, result: list[bytes] | TidewalError) -> None:
        """Answer the appends that wait for this attempt; those that come later get the same result."""
        failed = isinstance(result, TidewalError)
        if self.several and not failed:
            result.pop()  # the id of the record
        with self._lock:
            self.result = result
            done, self.done = self.done, None
            waiting, self.waiting = self.waiting, []
            if failed or not self.recorded:
                self.known.unrecorded -= 1
        if done is not None:
            done(result)
        for number, again in waiting:
            again(self.of(number, result))

    def of(self, number: int, result: list[bytes] | TidewalError) -> list[bytes] | TidewalError:
        """The result for one of the numbers, out of the result of all."""
        if not self.several or isinstance(result, TidewalError):
            return result
        return [result[number - self.first]]


class Deduplicator:
    """Appends for all processes that number their appends, through the `Appender`. Thread-safe."""

    def __init__(self, table: DedupTable, registry: Registry, appender: Appender, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._table, self._registry, self._appender, self._clock = table, registry, appender, clock
        self._clients: OrderedDict[bytes, KnownClient] = OrderedDict()  # the client that asked last is last
        self.count: int = 0  # of all numbers that are kept here
        table.applied = self._recorded

    def submit(self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended) -> None:
        """Append once. `client` is the process's random id; `number` counts its appends from 1, and all up to `settled`
        are answered. `done` gets what the first attempt with that number got or gets, and everything that `Wal.submit`
        raises. `OutcomeUnknown`: the number is settled. `InvalidRequest`: the number was another append's."""
        try:
            attempt = self._attempt(client, number, settled, entries, done)
            if attempt is None:
                return
        except TidewalError as error:
            done(error)
            return

        def stamp(ids: Sequence[int]) -> bytes:
            return wrote(client, number, attempt.known.settled, self._clock.wall_ms(), _result(entries, ids))

        try:
            self._appender.submit(entries, attempt.settle, stamp=stamp if attempt.recorded else None)
        except TidewalError as error:
            attempt.settle(error)

    def submit_each(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> bool:
        """Append each entry by itself, numbered from `number` on, with one record for all; `done` gets all ids, or the
        error that all got.

        Returns whether that was possible: not when a number came before, nor when `submit` would refuse one or
        acknowledge it before it is durable; then nothing has been done. The journal is not woken.
        """
        with self._lock:
            known = self._known(client, settled)
            last = number + len(entries) - 1
            if number <= max(known.newest, known.settled) or last - known.settled > CLIENT_NUMBERS:
                return False
            attempt = FirstAttempt(self._lock, known, number, done, ONE, recorded=True, several=True)

            def stamp(ids: Sequence[int]) -> bytes:
                return each(client, number, known.settled, self._clock.wall_ms(), ids)

            if not self._appender.submit_each(entries, attempt.settle, stamp):
                return False
            self._begin(known, attempt, range(number, last + 1))
            return True

    def _attempt(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> FirstAttempt | None:
        """The first attempt of a number; None where `done` waits for an earlier attempt, or has got its result."""
        with self._lock:
            known = self._known(client, settled)
            if number <= known.settled:
                raise _settled(number)
            earlier = known.attempts.get(number)
            if earlier is not None and earlier.shape != _shape(entries):
                raise _others()
            if earlier is None:
                result = self._known_ids(client, number, entries)
            elif earlier.result is None:
                earlier.waiting.append((number, done))
                return None
            else:
                result = earlier.of(number, earlier.result)
            if result is None:
                if number - known.settled > CLIENT_NUMBERS:
                    message = f"{CLIENT_NUMBERS} appends of one client are not settled"
                    raise Overloaded(message, limit="client_numbers")
                attempt = FirstAttempt(
                    self._lock, known, number, done, _shape(entries), recorded=self._durable(entries)
                )
                self._begin(known, attempt, range(number, number + 1))
                return attempt
        done(result)
        return None

    def _begin(self, known: KnownClient, attempt: FirstAttempt, numbers: range) -> None:
        known.attempts.update(dict.fromkeys(numbers, attempt))
        known.newest = max(known.newest, numbers[-1])
        known.unrecorded += 1
        self.count += len(numbers)
        if len(self._clients) > CLIENTS or self.count > RESULTS:
            self._forget()

    def _forget(self) -> None:
        """Forget the clients that asked longest ago, but none with attempts that are yet to be recorded."""
        for client, known in list(self._clients.items())[:-1]:
            if len(self._clients) <= CLIENTS and self.count <= RESULTS:
                return
            if not known.unrecorded:
                self.count -= len(known.attempts)
                del self._clients[client]

    def _known(self, client: bytes, settled: int) -> KnownClient:
        known = self._clients.get(client)
        if known is None:
            if len(client) != CLIENT_ID_BYTES:
                raise InvalidRequest(f"a client id has {CLIENT_ID_BYTES} bytes, not {len(client)}")
            durable = self._table.find(client)
            known = self._clients[client] = KnownClient()
            if durable is not None:
                known.settled, known.newest = durable.settled, max(durable.wrote, default=0)
        else:
            self._clients.move_to_end(client)
        if settled > known.settled:
            known.settled = settled
            self.count -= len(take_settled(known.attempts, settled))
        return known

    def _known_ids(self, client: bytes, number: int, entries: Sequence[Append]) -> list[bytes] | None:
        """The ids that the table has. To be called after a look at the attempts: a result goes into the table before it
        leaves them."""
        durable = self._table.find(client)
        result = durable.wrote.get(number) if durable is not None else None
        return _ids(entries, result) if result is not None else None

    def _recorded(self, client: bytes, first: int, last: int) -> None:
        """The table has the results of the numbers from `first` to `last` from now on."""
        with self._lock:
            known = self._clients.get(client)
            if known is None:
                return
            known.unrecorded -= 1
            for number in range(max(first, known.settled + 1), last + 1):
                if known.attempts.pop(number, None) is not None:
                    self.count -= 1

    def _durable(self, entries: Sequence[Append]) -> bool:
        """Whether any of the entries may go to the disk. A channel that does not exist may be created in a moment."""
        names = self._registry.names
        for entry in entries:
            channel = names.get(entry[0])
            if channel is None or not channel.policy.ephemeral:
                return True
        return False


def _shape(entries: Sequence[Append]) -> Shape:
    return ONE if len(entries) == 1 else (len(entries), len({entry[0] for entry in entries}))


def _result(entries: Sequence[Append], ids: Sequence[int]) -> AppendResult:
    firsts: dict[str, int] = {}
    for entry, id in zip(entries, ids, strict=True):
        if entry[0] not in firsts:
            firsts[entry[0]] = id
    return AppendResult(len(ids), list(firsts.values()))


def _ids(entries: Sequence[Append], result: AppendResult | int) -> list[bytes]:
    """The ids that the entries got when they first came. Raises `InvalidRequest` where the result is not theirs."""
    total, firsts = result if isinstance(result, AppendResult) else (1, (result,))
    names = dict.fromkeys(entry[0] for entry in entries)
    if len(entries) != total or len(names) != len(firsts):
        raise _others()
    following = dict(zip(names, firsts, strict=True))
    ids: list[bytes] = []
    for entry in entries:
        id = following[entry[0]]
        following[entry[0]] = id + 1
        ids.append(encode_id(id))
    return ids


def _others() -> InvalidRequest:
    return InvalidRequest("the number of this append was another append's")


def _settled(number: int) -> OutcomeUnknown:
    return OutcomeUnknown(f"append {number} was answered before, and its result is not kept any more", number=number)
