"""Actors: one handler at a time, bounded mailboxes, supervision and restart. See docs/actors.md."""

from .actor import Actor
from .cell import ActorState, ActorStatus
from .heartbeat import HeartbeatCallback, HeartbeatThread
from .observer import Observer
from .question import Deferred
from .ref import ActorRef
from .supervision import NEVER_RESTART, Supervision
from .system import ActorSystem, Escalation
from .timers import Timer
from .watchdog import Watchdog

__all__ = [
    "NEVER_RESTART",
    "Actor",
    "ActorRef",
    "ActorState",
    "ActorStatus",
    "ActorSystem",
    "Deferred",
    "Escalation",
    "HeartbeatCallback",
    "HeartbeatThread",
    "Observer",
    "Supervision",
    "Timer",
    "Watchdog",
]
