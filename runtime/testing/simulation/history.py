"""What happened in a simulated cluster, as a list of events in the order of true time.

An event is one line of the history. The fields that a kind does not have are empty:

    active    a node began to acknowledge in a channel: node, channel, term
    asked     a client asked for an append: channel, producer, pseq, node
    acked     it was acknowledged: channel, producer, pseq, node, term, id; where the owner only recognised a repeated
              one, `term` is 0 and `id` is empty
    failed    it certainly did not happen, or whether it did is unknown: channel, producer, pseq, node, note
    promised  two nodes could acknowledge in a channel at one instant, as a look at all of them found: channel, note
    fault     something was done to the cluster: note

A client counts its appends to one channel with `pseq` from 1, and asks for the next one once one was acknowledged; it
repeats one that was not, under the same number, wherever the owner is by then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One event at a true time, in seconds since the simulation began."""

    at_s: float
    kind: str
    channel: str = ""
    node: str = ""
    term: int = 0
    producer: str = ""
    pseq: int = 0
    id: bytes = b""
    note: str = ""

    def to_json(self) -> str:
        """One line of JSON, without the fields that are empty; the id in hexadecimal digits."""
        fields = {**asdict(self), "id": self.id.hex(), "at_s": round(self.at_s, 6)}
        return json.dumps({name: value for name, value in fields.items() if value or name == "at_s"})


@dataclass(slots=True)
class ClusterHistory:
    """The events of one run."""

    events: list[HistoryEvent] = field(default_factory=list[HistoryEvent])

    def add(self, event: HistoryEvent) -> None:
        """Note that something happened now."""
        self.events.append(event)

    def of(self, *kinds: str) -> Iterable[HistoryEvent]:
        """The events of these kinds."""
        return (event for event in self.events if event.kind in kinds)

    def tail(self, channel: str = "", count: int = 40) -> str:
        """The last events of a channel, and the faults among them, as lines of JSON: for the report of a failure."""
        found = [event for event in self.events if event.channel in ("", channel) or not channel]
        return "\n".join(event.to_json() for event in found[-count:])
