"""How often Python looks for cycles of garbage in a process that has many records in memory."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Let Python look for cycles less often, and not among what was imported: call it once, when a process has started.
    A process of `tidewal run` does.

    Records on their way to a table, a reader or their due time are objects that Python would go through at once: half
    a second for 100,000 of them on a busy machine, while leases run out, and a third of what releasing delayed messages
    takes. They have no cycles, and end with their last reference. A program that makes many cycles keeps these longer.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
