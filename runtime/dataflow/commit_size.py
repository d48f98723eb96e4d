"""How much one commit of a program with state holds."""

from __future__ import annotations

from collections.abc import Sequence

from ..log.wal import Append, Entry
from .keyed_channel import D

MAX_UNCOMMITTED = 100_000  # entries and outputs, of all channels: a commit has to hold what they have changed
MAX_UNCOMMITTED_BYTES = 4 * 1024 * 1024  # of their payloads; a RocksMQ takes 28 MiB in one commit, changes included


class CommitSize:
    """Counts what was processed and is not committed. A commit that the log has refused as too large (how much entries
    change in the state is not known before) is made in parts: half as many entries, and again half, down to one; then
    an eighth more with each commit that is done."""

    def __init__(self) -> None:
        self._entries = self._outputs = self._bytes = 0
        self._most: int | None = None  # entries of a commit; None: as many as the constants say

    def add(self, entries: Sequence[Entry], outputs: Sequence[Append]) -> None:
        """Count entries that were processed, and what they have made."""
        self._entries += len(entries)
        self._outputs += len(outputs)
        self._bytes += sum([len(entry.payload) for entry in entries]) + sum([len(output.payload) for output in outputs])

    @property
    def reached(self) -> bool:
        """Whether a commit has to be made now."""
        return (
            self._entries + self._outputs >= MAX_UNCOMMITTED
            or self._bytes >= MAX_UNCOMMITTED_BYTES
            or (self._most is not None and self._entries >= self._most)
        )

    def parts(self, delivered: D) -> Sequence[D]:
        """The batch, in parts between which a commit may be made."""
        return (delivered,) if self._most is None else delivered.parts()

    def clear(self) -> None:
        """What was counted has gone back."""
        self._entries = self._outputs = self._bytes = 0

    def committed(self) -> None:
        """What was counted is committed."""
        if self._most is not None and self._entries:
            more = self._most + max(1, self._most // 8)
            self._most = more if more < MAX_UNCOMMITTED else None
        self.clear()

    def refused(self) -> None:
        """What was counted is too large for one commit, and goes back."""
        self._most = max(1, self._entries // 2)
        self.clear()
