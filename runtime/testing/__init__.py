"""The testing kit: a memory WAL, virtual time, a disk that forgets, a seeded fault plan, a simulated cluster, and the
histories of clients with their checker. Test your own actors with it (docs/testing.md).
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
    from .histories import history_checks as history_checks
    from .histories.client_history import (
        CallRecorder as CallRecorder,
        ClientCall as ClientCall,
        load_calls as load_calls,
    )
    from .memory import MemoryLog as MemoryLog, MemoryWal as MemoryWal
    from .simulation.checker import ClusterViolation as ClusterViolation, check_cluster as check_cluster
    from .simulation.cluster import ClusterPlan as ClusterPlan, SimulatedCluster as SimulatedCluster
    from .simulation.driver import FaultDriver as FaultDriver, simulate_cluster as simulate_cluster
    from .simulation.history import ClusterHistory as ClusterHistory, HistoryEvent as HistoryEvent
else:
    from ..lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".clock": "MachineClock VirtualClock elapse run_virtual until",
            ".disk": "FaultyDisk",
            ".faults": "Fault FaultPlan Rates",
            ".histories": "history_checks",
            ".histories.client_history": "CallRecorder ClientCall load_calls",
            ".memory": "MemoryLog MemoryWal",
            ".simulation.checker": "ClusterViolation check_cluster",
            ".simulation.cluster": "ClusterPlan SimulatedCluster",
            ".simulation.driver": "FaultDriver simulate_cluster",
            ".simulation.history": "ClusterHistory HistoryEvent",
        },
    )
