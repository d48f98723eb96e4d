"""Histories: what a client asked of the log, when, and how each call ended; one JSON line for each beginning and end.

Times are nanoseconds of the machine's monotonic clock, so the histories of several processes can be compared. A call
without an end (its process was killed) has the outcome `unknown`.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "refused", "unknown"]


@dataclass(slots=True)
class Operation:
    """One call. `about` is what was asked, `result` what came back or the error."""

    client: str
    kind: str
    about: dict[str, Any]
    began: int
    ended: int | None = None
    outcome: Outcome = "unknown"
    result: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Writes the history of one process. Each line is one `write`, so a kill tears at most the last one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count()

    def begin(self, kind: str, **about: Any) -> int:
        """Note that a call begins; returns its number."""
        number = next(self._numbers)
        self._write({"op": number, "kind": kind, "at": time.monotonic_ns(), "about": about})
        return number

    def end(self, number: int, outcome: Outcome, **result: Any) -> None:
        """Note how the call with this number ended."""
        self._write({"op": number, "outcome": outcome, "at": time.monotonic_ns(), "result": result})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def load(paths: Iterable[Path]) -> list[Operation]:
    """The calls of some histories, in the order in which they began."""
    found: list[Operation] = []
    for path in paths:
        begun: dict[int, Operation] = {}
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # torn by a kill
            line = json.loads(text)
            if "kind" in line:
                begun[line["op"]] = Operation(path.stem, line["kind"], line["about"], line["at"])
            else:
                operation = begun[line["op"]]
                operation.ended, operation.outcome, operation.result = line["at"], line["outcome"], line["result"]
        found += begun.values()
    return sorted(found, key=lambda operation: operation.began)
