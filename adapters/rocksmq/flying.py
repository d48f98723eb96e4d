"""Appends that a process has sent to the owner and that are not answered yet: kept to be sent again to the next one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ...runtime.clock import Clock
from ...runtime.errors import OutcomeUnknown, Overloaded, TidewalError, Unavailable, of_unknown_outcome
from ...runtime.payloads import owned
from ...runtime.wal import Append, OnAppended
from .clients import CLIENT_EXPIRY_S
from .owner import Owner
from .repeats import CLIENT_ID_BYTES

RETRY_LIMIT_S = CLIENT_EXPIRY_S / 2  # what was sent longer ago is not sent again: owners forget
ENTRY_OVERHEAD_BYTES = 200  # what an entry costs in memory beside its payload

_log = logging.getLogger(__name__)


class Flight:
    """One append under way. `sent_to` is the life of the owner that got it first, 0 while none did."""

    __slots__ = ("done", "entries", "sent_to", "size", "submitted_s")

    def __init__(self, entries: Sequence[Append], done: OnAppended, size: int, submitted_s: float) -> None:
        self.entries, self.done, self.size, self.submitted_s = entries, done, size, submitted_s
        self.sent_to = 0


class Flying:
    """Numbers appends and remembers them until they are answered. Thread-safe; the order of `submit` is the order in
    which the owner gets them, also when it gets them again.

    `lost` is called, on any thread, with the owner that answered that it is not to be had.
    """

    def __init__(self, pending_bytes: int, clock: Clock, lost: Callable[[Owner], None]) -> None:
        self.lock = threading.RLock()
        self._client = os.urandom(CLIENT_ID_BYTES)
        self._pending_bytes, self._clock, self._lost = pending_bytes, clock, lost
        self._owner: Owner | None = None
        self._boot = 0  # of the owner
        self._number = 0
        self._size = 0
        self._flights: dict[int, Flight] = {}
        self._landed: Callable[[], None] | None = None

    @property
    def client(self) -> bytes:
        """The random id of this process."""
        return self._client

    def __len__(self) -> int:
        return len(self._flights)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> bool:
        """Send to the owner, at once or when there is one; whether there is one. Raises `Overloaded`."""
        entries, size = _frozen(entries)
        now = self._clock.monotonic()
        with self.lock:
            if self._size + size > self._pending_bytes:
                raise Overloaded(f"{self._pending_bytes} bytes wait for the log's owner", limit="pending_bytes")
            self._size += size
            number = self._number = self._number + 1
            flight = self._flights[number] = Flight(entries, done, size, now)
            owner = self._owner
            if owner is None:
                return False
            self._send(owner, self._boot, number, flight)
            return True

    def interrupt(self) -> None:
        """The owner is gone: what comes now waits for another."""
        with self.lock:
            self._owner = None

    def resume(self, owner: Owner, ephemeral: set[str]) -> None:
        """Send all that is under way to `owner`, and from now on what comes. Appends to channels in `ephemeral` alone
        are not sent again to another life of the owner than the first that got them: it remembers none."""
        with self.lock:
            for number, flight in list(self._flights.items()):
                if flight.sent_to and flight.sent_to != owner.boot and _all_in(flight.entries, ephemeral):
                    self._land(number, _unknown("the log's owner ended while it had the append"))
                elif flight.sent_to and self._clock.monotonic() - flight.submitted_s > RETRY_LIMIT_S:
                    self._land(number, OutcomeUnknown("the append is too old to be sent again", number=number))
                else:
                    self._send(owner, owner.boot, number, flight)
            self._owner, self._boot = owner, owner.boot

    def sent_before(self, boot: int) -> set[str]:
        """The channels of appends that another life than `boot` has got."""
        with self.lock:
            flights = [flight for flight in self._flights.values() if flight.sent_to not in (0, boot)]
        return {entry[0] for flight in flights for entry in flight.entries}

    def fail(self, error: TidewalError) -> None:
        """End everything that is under way, as of unknown outcome where some owner has got it."""
        with self.lock:
            for number, flight in list(self._flights.items()):
                self._land(number, of_unknown_outcome(error) if flight.sent_to else error)

    def when_landed(self, call: Callable[[], None]) -> None:
        """Call once nothing is under way, on any thread, or at once."""
        with self.lock:
            if self._flights:
                self._landed = call
                return
        call()

    def _send(self, owner: Owner, boot: int, number: int, flight: Flight) -> None:
        flight.sent_to = flight.sent_to or boot
        settled = next(iter(self._flights)) - 1
        owner.submit_from(self._client, number, settled, flight.entries, partial(self._answered, owner, number))

    def _answered(self, owner: Owner, number: int, result: list[bytes] | TidewalError) -> None:
        if isinstance(result, Unavailable):
            self._lost(owner)  # it is closing; the next one will tell
        else:
            self._land(number, result)

    def _land(self, number: int, result: list[bytes] | TidewalError) -> None:
        with self.lock:
            flight = self._flights.pop(number, None)
            if flight is None:
                return
            self._size -= flight.size
            landed = None if self._flights else self._landed
        try:
            flight.done(result)
        except Exception:
            _log.exception("an append's callback failed")
        if landed is not None:
            landed()


def _frozen(entries: Sequence[Append]) -> tuple[Sequence[Append], int]:
    """The entries as nobody else can change them, and what they take in memory."""
    if len(entries) == 1 and type(entries[0][1]) is bytes:
        return (entries[0],), ENTRY_OVERHEAD_BYTES + len(entries[0][1])
    size = ENTRY_OVERHEAD_BYTES * len(entries)
    frozen: list[Append] = []
    for entry in entries:
        channel, payload, timestamp = entry
        content = owned(payload)
        size += len(content)
        frozen.append(entry if content is payload else Append(channel, content, timestamp))
    return frozen, size


def _all_in(entries: Sequence[Append], channels: set[str]) -> bool:
    return all(entry[0] in channels for entry in entries)


def _unknown(message: str) -> Unavailable:
    return Unavailable(message, outcome_unknown=True)
