"""CPU that this process and all below it have used: Java, Spark's workers, the owner of the log."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of all of them together, ended children that were waited for included."""
    stats = dict(filter(None, map(_stat, Path("/proc").glob("[0-9]*/stat"))))
    tree, added = {os.getpid()}, True
    while added:
        below = {pid for pid, (parent, _) in stats.items() if parent in tree}
        added = not below <= tree
        tree |= below
    return sum(stats[pid][1] for pid in tree if pid in stats) / _TICKS_PER_S


def _stat(path: Path) -> tuple[int, tuple[int, int]] | None:
    """A process, its parent, and its ticks in user and kernel mode with those of its ended children."""
    try:
        fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(path.parent.name), (int(fields[1]), sum(map(int, fields[11:15])))
