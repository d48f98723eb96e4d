"""From the log to Delta tables."""

from .datanode import DataNode

__all__ = ["DataNode"]
