"""Who writes a log, as a process of its own. Of a RocksMQ it is the owner, through whose socket Spark reads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Self

from tidewal.runtime.log.opening import open_wal

from .data import Writer

EVERY_S = 0.02


class Owner:
    """A process that has the log at `url` open and writes the collection `kind` into it, when it is told to."""

    def __init__(self, url: str, kind: str) -> None:
        self.options = {"wal": url, "collection": kind}
        spawning = multiprocessing.get_context("spawn")
        self._ours, theirs = spawning.Pipe()
        self._process = spawning.Process(target=_serve, args=(theirs, url, kind), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()  # all rows are written

    @contextmanager
    def trickling(self) -> Generator[None]:
        """Meanwhile a row and a cut are written every `EVERY_S`."""
        self._tell("trickle")
        try:
            yield
        finally:
            self._tell("stop")

    def _tell(self, command: str) -> None:
        self._ours.send(command)
        self._ours.recv()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tell("close")
        self._process.join()


def _serve(commands: Connection, url: str, kind: str) -> None:
    writer = Writer(lambda: open_wal(url))
    writer.fill(kind)
    commands.send("filled")
    command = ""
    while command != "close":
        if command == "trickle" and not commands.poll(EVERY_S):
            writer.write_one_row(kind)
            continue
        command = commands.recv()
        commands.send("done")
    writer.close()
