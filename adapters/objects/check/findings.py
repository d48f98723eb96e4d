"""What a check of a log on object storage found in its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_FINDINGS = 100  # of one part; what is over that is counted


@dataclass(frozen=True, slots=True)
class ObjectFinding:
    """Something wrong with the object under `key`."""

    key: str
    what: str


@dataclass(slots=True)
class PartReport:
    """What one part of the log holds: its claims, an epoch, its runs, its checkpoints, or its channels. `state` is "ok"
    or "damaged"; `gone` objects were deleted while the log was read."""

    part: str
    state: str = "ok"
    objects: int = 0
    entries: int = 0
    bytes: int = 0
    gone: int = 0
    findings: list[ObjectFinding] = field(default_factory=list[ObjectFinding])
    more_findings: int = 0

    def found(self, key: str, what: str) -> None:
        """Add a finding, up to `MAX_FINDINGS`; the part counts as damaged."""
        self.state = "damaged"
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(ObjectFinding(key, what))
        else:
            self.more_findings += 1
