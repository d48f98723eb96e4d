"""The owner of pchannels. `ChannelOwner` is its interface; the other modules are its parts."""

from .acks import AckManager
from .batch import Appended
from .channel_owner import ChannelOwner
from .observer import ChannelOwnerObserver
from .owned_channel import ChannelGrant, ChannelPoint, ReleasedChannel, SyncPoint
from .producers import BatchOutcome, ProducerTable

__all__ = [
    "AckManager",
    "Appended",
    "BatchOutcome",
    "ChannelGrant",
    "ChannelOwner",
    "ChannelOwnerObserver",
    "ChannelPoint",
    "ProducerTable",
    "ReleasedChannel",
    "SyncPoint",
]
