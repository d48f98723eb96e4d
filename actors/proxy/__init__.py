"""Proxy: validation and routing of writes, and the ownership of pchannels."""

from .proxy import Proxy

__all__ = ["Proxy"]
