"""The testing kit: a memory WAL, virtual time, a disk that forgets and a seeded fault plan. Test your own actors with
it (docs/testing.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .clock import (
        MachineClock as MachineClock,
        VirtualClock as VirtualClock,
        elapse as elapse,
        run_virtual as run_virtual,
        until as until,
    )
    from .disk import FaultyDisk as FaultyDisk
    from .faults import Fault as Fault, FaultPlan as FaultPlan, Rates as Rates
    from .memory import MemoryLog as MemoryLog, MemoryWal as MemoryWal
else:
    from ..lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".clock": "MachineClock VirtualClock elapse run_virtual until",
            ".disk": "FaultyDisk",
            ".faults": "Fault FaultPlan Rates",
            ".memory": "MemoryLog MemoryWal",
        },
    )
