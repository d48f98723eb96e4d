"""What clients asked of a log or of its nodes, when, and how each call ended: two lines of JSON for each call.

    {"op": 7, "kind": "insert", "at": 81520, "about": {"first": 40, "count": 3}}      as it begins
    {"op": 7, "outcome": "ok", "at": 93107, "result": {"ts": 461373440}}              as it ends

`op` numbers the calls of one history, which is one client's and bears its name. `at` is in nanoseconds of the machine's
monotonic clock, so the histories of several processes on one machine can be compared. `outcome` is `ok`, `refused` (it
has certainly not happened) or `unknown`; a call without an end (its process was killed) is `unknown`. What `about` and
`result` have for which kind is in `history_checks.py`, which says whether histories are as they must be.
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

from ...errors import DeadlineExceeded, OutcomeUnknown, TidewalError

CallOutcome = Literal["ok", "refused", "unknown"]


@dataclass(slots=True)
class ClientCall:
    """One call. `about` is what was asked, `result` what came back or the error. Times are in nanoseconds."""

    client: str
    kind: str
    about: dict[str, Any]
    began: int
    ended: int | None = None
    outcome: CallOutcome = "unknown"
    result: dict[str, Any] = field(default_factory=dict[str, Any])


class CallRecorder:
    """Writes the history of one client to a file. Each line is one `write`, so a kill tears at most the last one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count()

    def begin(self, kind: str, **about: Any) -> int:
        """Note that a call begins; returns its number."""
        number = next(self._numbers)
        self._write({"op": number, "kind": kind, "at": time.monotonic_ns(), "about": about})
        return number

    def end(self, number: int, outcome: CallOutcome, **result: Any) -> None:
        """Note how the call with this number ended."""
        self._write({"op": number, "outcome": outcome, "at": time.monotonic_ns(), "result": result})

    def close(self) -> None:
        """Close the file; nothing is noted any more."""
        os.close(self._file)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def load_calls(paths: Iterable[Path]) -> list[ClientCall]:
    """The calls of some histories, in the order in which they began."""
    found: list[ClientCall] = []
    for path in paths:
        begun: dict[int, ClientCall] = {}
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # torn by a kill
            line = json.loads(text)
            if "kind" in line:
                begun[line["op"]] = ClientCall(path.stem, line["kind"], line["about"], line["at"])
            else:
                call = begun[line["op"]]
                call.ended, call.outcome, call.result = line["at"], line["outcome"], line["result"]
        found += begun.values()
    return sorted(found, key=lambda call: call.began)


def outcome_of(error: Exception) -> CallOutcome:
    """What an error says of the call that it ended."""
    if not isinstance(error, TidewalError):
        return "unknown"
    certain = not error.fields.get("outcome_unknown") and not isinstance(error, DeadlineExceeded | OutcomeUnknown)
    return "refused" if certain else "unknown"


def error_result(error: Exception) -> dict[str, object]:
    """The same error as the result of a call; `foreign` where it is not Tidewal's own."""
    foreign = not isinstance(error, TidewalError) or type(error).__name__ == "HandlerFailed"
    return {"error": f"{type(error).__name__}: {error}"[:500], "foreign": foreign}
