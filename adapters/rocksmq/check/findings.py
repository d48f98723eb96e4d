"""What a scrub found in the segments that it read."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..journal.segments import HEADER_BYTES

MAX_FINDINGS = 100  # of one segment; what is over that is counted


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong: `end` is where the damage ends, `lost_frames` how many frames are gone, where that is known."""

    path: str
    offset: int
    what: str
    end: int | None = None
    lost_frames: int | None = None


@dataclass(slots=True)
class SegmentReport:
    """What one segment holds. `state`: "ok"; "in use" (the owner's last one, up to its last good frame); "torn" (an
    unfinished frame at the journal's end, which the next opening cuts off); "spare" (no frame yet); "damaged"; "gone"
    (recycled while it was being read)."""

    epoch: int
    path: str
    state: str = "ok"
    frames: int = 0
    end: int = HEADER_BYTES
    entries: int = 0
    channels: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # last id, payload bytes
    findings: list[Finding] = field(default_factory=list[Finding])
    more_findings: int = 0

    def found(self, offset: int, what: str, *, end: int | None = None, lost_frames: int | None = None) -> None:
        """Add a finding, up to `MAX_FINDINGS`; the segment counts as damaged."""
        self.state = "damaged"
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(self.path, offset, what, end, lost_frames))
        else:
            self.more_findings += 1
