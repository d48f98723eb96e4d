"""What this process has open, for tests that nothing is left open."""

from __future__ import annotations

import contextlib
import os
from collections import Counter


def open_files() -> Counter[str]:
    """What this process has open, and how often. What earlier tests left may close at any time: compare with `<=`."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found
