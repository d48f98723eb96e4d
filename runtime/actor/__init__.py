"""Actors: one handler at a time, bounded mailboxes with lanes, supervision and restart. See docs/actors.md."""

from .actor import Actor
from .asking import Deferred
from .cell import ActorState, ActorStatus
from .heart import Beat, Heart
from .observer import LogObserver, Observer
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
    "Beat",
    "Deferred",
    "Escalation",
    "Heart",
    "LogObserver",
    "Observer",
    "Supervision",
    "Timer",
    "Watchdog",
]
