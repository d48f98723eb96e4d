"""How often the owner of the log does what keeps opening and storage cheap."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaintenancePace:
    """Limits of the log's maintenance, in seconds, blocks and bytes."""

    turn_s: float = 10.0
    checkpoint_blocks: int = 1000  # opening the log reads so many blocks at most, and those of one turn
    checkpoint_bytes: int = 64 * 1024 * 1024  # or so much,
    checkpoint_share: int = 8  # ... and so many times the size of the last checkpoint
    run_blocks: int = 1000  # a run is made of the oldest blocks behind so many
    run_bytes: int = 16 * 1024 * 1024  # or so much
    section_bytes: int = 1024 * 1024  # in a run, sections are joined up to this size
    grace_s: float = 3600.0  # for how long what is needed no more stays in the store, for those that read it

    @property
    def overtaken_s(self) -> float:
        """After so long without looking a process may miss blocks because they were deleted."""
        return self.grace_s / 4


PACE = MaintenancePace()
