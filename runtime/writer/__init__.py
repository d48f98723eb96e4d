"""The channel writer: what the owner of pchannels does. `Writer` is the door; the other modules are its parts."""

from .acks import AckManager
from .batch import Appended
from .observer import WriterObserver
from .owned import ChannelPoint, Grant, SyncPoint
from .producers import Outcome, ProducerTable
from .writer import Writer

__all__ = [
    "AckManager",
    "Appended",
    "ChannelPoint",
    "Grant",
    "Outcome",
    "ProducerTable",
    "SyncPoint",
    "Writer",
    "WriterObserver",
]
