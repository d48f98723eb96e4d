"""Maintenance: a thread that makes segments ready ahead of need, applies retention and watches free space."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

TICK_S = 0.5
SPARE_TIMEOUT_S = 30.0


class Maintenance:
    """Runs `prepare` whenever a spare is wanted, and `tick` twice a second. The argument of `prepare` is whether the
    reserve may be used."""

    def __init__(
        self, wants_spare: Callable[[], bool], prepare: Callable[[bool], None], tick: Callable[[], None]
    ) -> None:
        self._wants_spare, self._prepare, self._tick = wants_spare, prepare, tick
        self._wake = threading.Event()
        self._attempted = threading.Condition()
        self._attempts = 0
        self._attempting = False
        self._from_reserve = False
        self._error: OSError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tidewal-maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Look now whether a spare is wanted."""
        self._wake.set()

    def need_spare(self, from_reserve: bool = False) -> OSError | None:
        """Wait until a spare is ready or an attempt to make one failed; with `from_reserve` the reserve may become the
        spare. Returns the error of the attempt, None where there is a spare."""
        with self._attempted:
            enough = self._attempts + 1 + self._attempting  # one that has begun does not know `from_reserve`
            self._from_reserve = from_reserve
            self._wake.set()
            done = self._attempted.wait_for(
                lambda: not self._wants_spare() or self._attempts >= enough or self._stopping, SPARE_TIMEOUT_S
            )
            self._from_reserve = False
            if not done:
                return TimeoutError(f"not ready within {SPARE_TIMEOUT_S} s")
            return self._error

    def stop(self) -> None:
        """End the thread. Blocks."""
        with self._attempted:
            self._stopping = True
            self._attempted.notify_all()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            if self._wants_spare():
                self._attempt()
            try:
                self._tick()
            except Exception:
                _log.exception("the journal's maintenance failed; it is tried again")
            if not self._stopping:
                self._wake.wait(TICK_S)

    def _attempt(self) -> None:
        error: OSError | None = None
        with self._attempted:
            self._attempting, from_reserve = True, self._from_reserve
        try:
            self._prepare(from_reserve)
        except OSError as failed:
            error = failed
            if self._error is None:  # else it was logged already
                _log.warning("no segment could be made ready: %s", failed)
        with self._attempted:
            self._attempts += 1
            self._attempting = False
            self._error = error
            self._attempted.notify_all()
