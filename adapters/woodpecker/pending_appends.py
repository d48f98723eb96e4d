"""Appends that are not answered yet: those that wait for a sidecar, and those that one has got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...runtime.errors import TidewalError, of_unknown_outcome
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_plain
from ...runtime.log.payloads import check_timestamps, owned
from ...runtime.log.wal import Append, OnAppended
from ..rocksmq.client.owner_connection import OwnerConnection

ENTRY_OVERHEAD_BYTES = 200  # what an entry costs in memory beside its payload


class PendingAppend:
    """One call of `submit` that is not answered."""

    __slots__ = ("done", "entries", "sent", "size")

    def __init__(self, entries: Sequence[Append], done: OnAppended, size: int) -> None:
        self.entries: Sequence[Append] = entries
        self.done: OnAppended = done
        self.size: int = size
        self.sent: bool = False


class PendingAppends:
    """Sends appends in the order of the calls of `submit`, as soon as there is a connection, and each once: whether a
    sidecar that was lost has stored what it got is not known. Thread-safe."""

    def __init__(self, limit_bytes: int, shown: str) -> None:
        """At most `limit_bytes` are not answered; `shown` names the log in errors."""
        self._pending = PendingBytes(limit_bytes, shown)
        self._connection: OwnerConnection | None = None
        self._number = 0
        self._appends: dict[int, PendingAppend] = {}

    def __len__(self) -> int:
        return len(self._appends)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> bool:
        """Send, now or when there is a connection; `done` gets the ids or the error, on any thread. Whether there is a
        connection. Raises `Overloaded`, `Closed`, `InvalidRequest` and `Unsupported` for what no log could take."""
        check_plain([entry.key for entry in entries], [entry.headers for entry in entries])
        check_timestamps([entry.timestamp for entry in entries])
        taken = [
            entry if type(entry.payload) is bytes else Append(entry.channel, owned(entry.payload), entry.timestamp)
            for entry in entries
        ]
        size = sum([ENTRY_OVERHEAD_BYTES + len(entry.payload) for entry in taken])
        with self._pending.lock:
            self._pending.admit(size)
            number = self._number = self._number + 1
            append = self._appends[number] = PendingAppend(taken, done, size)
            if self._connection is None:
                return False
            self._send(self._connection, number, append)
            return True

    def resume(self, connection: OwnerConnection) -> None:
        """Send what waits, and from now on what comes."""
        with self._pending.lock:
            self._connection = connection
            for number, append in list(self._appends.items()):
                self._send(connection, number, append)

    def interrupt(self, error: TidewalError) -> None:
        """The connection is lost because of `error`: what was sent by it has an unknown outcome."""
        with self._pending.lock:
            self._connection = None
            lost = [number for number, append in self._appends.items() if append.sent]
        for number in lost:
            self._settle(number, of_unknown_outcome(error))

    def fail(self, error: TidewalError) -> None:
        """End what waits for a connection: nothing of it was sent."""
        with self._pending.lock:
            waiting = [number for number, append in self._appends.items() if not append.sent]
        for number in waiting:
            self._settle(number, error)

    def close(self, on_drained: Callable[[], None]) -> None:
        """Take no more appends. `on_drained` is called once all are answered: now, or on any thread."""
        self._pending.close(on_drained)

    def _send(self, connection: OwnerConnection, number: int, append: PendingAppend) -> None:
        append.sent = True
        connection.append(number, 0, append.entries, partial(self._settle, number))

    def _settle(self, number: int, result: list[bytes] | TidewalError) -> None:
        with self._pending.lock:
            append = self._appends.pop(number, None)
        if append is not None:
            self._pending.release(append.size, partial(append.done, result))
