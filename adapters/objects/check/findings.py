"""What a check of a log on object storage found in its parts."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_FINDINGS = 100  # of one part; what is over that is counted


@dataclass(frozen=True, slots=True)
class ObjectFinding:
    """Something wrong with the object under `key`, or something of it that was not checked."""

    key: str
    what: str


@dataclass(slots=True)
class PartReport:
    """What one part of the log holds: its claims, an epoch, its runs, its checkpoints, or its channels. `state` is
    "ok", "damaged", or else "unchecked" where the check missed some of it. `gone` objects were deleted while the log
    was read, which leaves nothing unchecked where they were garbage when it began."""

    part: str
    state: str = "ok"
    objects: int = 0
    entries: int = 0
    bytes: int = 0
    gone: int = 0
    findings: list[ObjectFinding] = field(default_factory=list[ObjectFinding])
    more_findings: int = 0
    unchecked: list[ObjectFinding] = field(default_factory=list[ObjectFinding])
    more_unchecked: int = 0

    def found(self, key: str, what: str) -> None:
        """Add a finding, up to `MAX_FINDINGS`; the part counts as damaged."""
        self.state = "damaged"
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(ObjectFinding(key, what))
        else:
            self.more_findings += 1

    def missed(self, key: str, what: str) -> None:
        """Add something that was not checked, up to `MAX_FINDINGS`."""
        if self.state == "ok":
            self.state = "unchecked"
        if len(self.unchecked) < MAX_FINDINGS:
            self.unchecked.append(ObjectFinding(key, what))
        else:
            self.more_unchecked += 1
