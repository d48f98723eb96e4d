"""What clients of a simulated log asked and were answered, in the order of true time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from tidewal.runtime.errors import TidewalError

NEVER = 2**63  # the step of what has not happened


@dataclass
class Appended:
    """One `submit`: its entries are `(channel, payload)`, and no payload is submitted twice. `outcome` is `unknown`
    until it is answered: `acked` with `ids`, or `refused`."""

    writer: str
    entries: Sequence[tuple[str, bytes]]
    asked: int
    answered: int = NEVER
    outcome: str = "unknown"
    ids: Sequence[bytes] = ()
    error: str = ""


@dataclass
class Reading:
    """One iterator over a channel, from its beginning or from behind `behind`, and how it ended, if it did."""

    process: str
    channel: str
    behind: bytes | None
    found: list[tuple[bytes, bytes]] = field(default_factory=list)
    error: TidewalError | None = None
    alive: bool = True

    @property
    def at(self) -> bytes | None:
        """The id up to which it came."""
        return self.found[-1][0] if self.found else self.behind


@dataclass
class StrongRead:
    """A call of `latest_id`, and the greatest id of the channel that was acknowledged before the call."""

    process: str
    channel: str
    acked: bytes | None
    found: bytes | None
    missing: bool = False  # there was no such channel


@dataclass
class Held:
    """A reader began at the entry under a hold, and that could be read: so it stays while the hold does."""

    channel: str
    holder: str
    id: bytes
    error: TidewalError | None = None


class LogHistory:
    """The calls of one run, and in `events` a line for each of them and for each fault."""

    def __init__(self) -> None:
        self.appends: list[Appended] = []
        self.readings: list[Reading] = []
        self.strong_reads: list[StrongRead] = []
        self.held: list[Held] = []
        self.failures: list[str] = []  # errors that no client expects
        self.events: list[str] = []
        self._latest: dict[str, bytes] = {}
        self._steps = count()

    def step(self) -> int:
        """The number of this moment: each is greater than all before."""
        return next(self._steps)

    def note(self, event: str) -> None:
        self.events.append(event)

    def answer(self, append: Appended, result: Sequence[bytes] | TidewalError) -> None:
        """Note what came of an append."""
        append.answered = self.step()
        if isinstance(result, TidewalError):
            append.outcome = "unknown" if result.fields.get("outcome_unknown") else "refused"
            append.error = repr(result)
        else:
            append.outcome, append.ids = "acked", result
            for (channel, _), id in zip(append.entries, result, strict=True):
                self._latest[channel] = max(id, self._latest.get(channel, b""))
        ids = " ".join(id.hex() for id in append.ids)
        self.note(f"{append.writer} {append.entries} {append.outcome} {ids}{append.error}")

    def latest(self, channel: str) -> bytes | None:
        """The greatest id of the channel that was acknowledged so far, over all channels that had the name."""
        return self._latest.get(channel)
