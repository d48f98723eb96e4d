"""The memory of this process, and how much it may have."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The bytes of this process that are in memory; 0 where the system does not say (it is not Linux)."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def memory_limit_bytes(limits: tuple[Path, ...] = CGROUP_LIMITS) -> int:
    """The memory that the processes here may have together, in bytes: of their container (cgroup version 2 or 1) or
    else of the machine; 0 where the system does not say."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        machine = 0
    found = [machine, *map(_read, limits)]
    return min((each for each in found if each > 0), default=0)


def _read(limit: Path) -> int:
    """The limit in a file of cgroups; 0 for none."""
    try:
        return int(limit.read_text())
    except (OSError, ValueError):  # "max"
        return 0
