"""StreamingNode: the ownership of pchannels."""

from .streamingnode import StreamingNode

__all__ = ["StreamingNode"]
