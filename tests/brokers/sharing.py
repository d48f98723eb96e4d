"""One broker for all processes of a test run: the first process that needs it starts it, and ends it when no other
process uses it any more."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol


class Stoppable(Protocol):
    def stop(self) -> None: ...


class SharedBroker:
    """This process's use of a broker that other processes of the run may use, too.

    Locks on files in `folder`, which all the processes know, say who uses the broker: the system releases those of a
    process that is killed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._starting = folder / f"{name}.starting"
        self._users = folder / f"{name}.users"
        self._address = folder / f"{name}.address"
        self._failed = folder / f"{name}.failed"
        self._use: IO[str] | None = None
        self._broker: Stoppable | None = None

    def join(self, start: Callable[[], tuple[Stoppable, dict[str, str]]]) -> dict[str, str]:
        """The address of the broker, which `start` starts and gives where no process has started it yet."""
        with _locked(self._starting):
            self._use = self._users.open("w")
            fcntl.flock(self._use, fcntl.LOCK_SH)  # at once: who has it alone has `_starting`, too
            if not self._address.exists():
                self._broker, address = start()
                self._address.write_text(json.dumps(address))
            return dict(json.loads(self._address.read_text()))

    def leave(self, *, failed: bool) -> None:
        """End this process's use; `failed` says whether tests of this process did."""
        if failed:
            self._failed.touch()
        if self._use is not None:
            self._use.close()
            self._use = None

    def end(self) -> bool:
        """Stop the broker, if this process started it, once no process uses it, and return whether tests of any of them
        failed. A process with several brokers first leaves all of them: others may wait for it, as it does for them."""
        if self._broker is not None:
            while not self._withdrawn():
                with _locked(self._users):
                    pass
            self._broker.stop()
            self._broker = None
        return self._failed.exists()

    def _withdrawn(self) -> bool:
        """Whether no process uses the broker, nor will: the next one to join starts another."""
        with _locked(self._starting), self._users.open("w") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._address.unlink()
            return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
