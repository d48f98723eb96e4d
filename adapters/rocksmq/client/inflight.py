"""Appends that a process has sent to the owner and that are not answered yet, kept to be sent to the next owner."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ....runtime.clock import Clock
from ....runtime.errors import OutcomeUnknown, TidewalError, Unavailable, of_unknown_outcome
from ....runtime.log.admission import PendingBytes
from ....runtime.log.checks import check_plain
from ....runtime.log.payloads import owned
from ....runtime.log.wal import Append, OnAppended
from ..journal.dedup_table import CLIENT_EXPIRY_S
from ..owner.dedup import CLIENT_ID_BYTES
from .owner import Owner

RETRY_LIMIT_S = CLIENT_EXPIRY_S / 2  # an append that was sent longer ago is not sent again: owners forget clients
ENTRY_OVERHEAD_BYTES = 200  # what an entry costs in memory beside its payload


class InflightAppend:
    """One append in flight. `sent_to` is the incarnation (`boot`) of the owner that got it first, 0 while none did."""

    __slots__ = ("done", "entries", "sent_to", "size", "submitted_s")

    def __init__(self, entries: Sequence[Append], done: OnAppended, size: int, submitted_s: float) -> None:
        self.entries: Sequence[Append] = entries
        self.done: OnAppended = done
        self.size: int = size
        self.submitted_s: float = submitted_s
        self.sent_to: int = 0


class InflightAppends:
    """Numbers appends and remembers them until they are answered. Thread-safe; the order of `submit` is the order in
    which the owner gets them, also when it gets them again.

    `pending` bounds the bytes of appends in flight. `lost` is called, on any thread, with an owner that answered
    `Unavailable`.
    """

    def __init__(self, pending: PendingBytes, clock: Clock, lost: Callable[[Owner], None]) -> None:
        self.lock: threading.RLock = pending.lock
        self.client: bytes = os.urandom(CLIENT_ID_BYTES)  # the random id of this process
        self._pending, self._clock, self._lost = pending, clock, lost
        self._owner: Owner | None = None
        self._boot = 0  # of the owner
        self._number = 0
        self._appends: dict[int, InflightAppend] = {}

    def __len__(self) -> int:
        return len(self._appends)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> bool:
        """Send to the owner, at once or when there is one; `done` gets the ids or the error, on any thread. Returns
        whether there is an owner. Raises `Overloaded`, and `Closed` after `close`."""
        entries, size = _frozen(entries)
        now = self._clock.monotonic()
        with self.lock:
            self._pending.admit(size)
            number = self._number = self._number + 1
            append = self._appends[number] = InflightAppend(entries, done, size, now)
            owner = self._owner
            if owner is None:
                return False
            self._send(owner, self._boot, number, append)
            return True

    def interrupt(self) -> None:
        """The owner is gone: appends that come now wait for another."""
        with self.lock:
            self._owner = None

    def resume(self, owner: Owner, ephemeral: set[str]) -> None:
        """Send all appends in flight to `owner`, and from now on those that come. Appends to channels in `ephemeral`
        alone are sent again only to the incarnation of the owner that got them first: no other remembers them."""
        with self.lock:
            for number, append in list(self._appends.items()):
                if append.sent_to and append.sent_to != owner.boot and _all_in(append.entries, ephemeral):
                    self._settle(number, _unknown("the log's owner ended while it had the append"))
                elif append.sent_to and self._clock.monotonic() - append.submitted_s > RETRY_LIMIT_S:
                    self._settle(number, OutcomeUnknown("the append is too old to be sent again", number=number))
                else:
                    self._send(owner, owner.boot, number, append)
            self._owner, self._boot = owner, owner.boot

    def sent_before(self, boot: int) -> set[str]:
        """The channels of appends that another incarnation than `boot` has got."""
        with self.lock:
            appends = [append for append in self._appends.values() if append.sent_to not in (0, boot)]
        return {entry[0] for append in appends for entry in append.entries}

    def fail(self, error: TidewalError) -> None:
        """End all appends in flight with `error`, as of unknown outcome where an owner has got them."""
        with self.lock:
            for number, append in list(self._appends.items()):
                self._settle(number, of_unknown_outcome(error) if append.sent_to else error)

    def close(self, on_drained: Callable[[], None]) -> None:
        """Take no more appends. `on_drained` is called once none is in flight: now, or on any thread."""
        self._pending.close(on_drained)

    def _send(self, owner: Owner, boot: int, number: int, append: InflightAppend) -> None:
        append.sent_to = append.sent_to or boot
        settled = next(iter(self._appends)) - 1
        owner.submit_from(self.client, number, settled, append.entries, partial(self._answered, owner, number))

    def _answered(self, owner: Owner, number: int, result: list[bytes] | TidewalError) -> None:
        if isinstance(result, Unavailable):
            self._lost(owner)  # it is closing; the next owner will answer
        else:
            self._settle(number, result)

    def _settle(self, number: int, result: list[bytes] | TidewalError) -> None:
        with self.lock:
            append = self._appends.pop(number, None)
        if append is not None:
            self._pending.release(append.size, partial(append.done, result))


def _frozen(entries: Sequence[Append]) -> tuple[Sequence[Append], int]:
    """The entries with payloads that the caller cannot change, and the bytes that they take in memory. Raises
    `Unsupported` for a key or headers."""
    check_plain([entry[3] for entry in entries], [entry[4] for entry in entries])
    if len(entries) == 1 and type(entries[0][1]) is bytes:
        return (entries[0],), ENTRY_OVERHEAD_BYTES + len(entries[0][1])
    size = ENTRY_OVERHEAD_BYTES * len(entries)
    frozen: list[Append] = []
    for entry in entries:
        channel, payload, timestamp, _, _ = entry
        content = owned(payload)
        size += len(content)
        frozen.append(entry if content is payload else Append(channel, content, timestamp))
    return frozen, size


def _all_in(entries: Sequence[Append], channels: set[str]) -> bool:
    return all(entry[0] in channels for entry in entries)


def _unknown(message: str) -> Unavailable:
    return Unavailable(message, outcome_unknown=True)
