"""The channel writer: what the owner of pchannels does. `Writer` is the door; the other modules are its parts."""

from .acks import AckManager
from .producers import Outcome, ProducerTable
from .writer import Appended, Grant, SyncPoint, Writer

__all__ = ["AckManager", "Appended", "Grant", "Outcome", "ProducerTable", "SyncPoint", "Writer"]
