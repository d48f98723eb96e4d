"""The door: validation, routing and the ownership of channels."""

from .proxy import Proxy

__all__ = ["Proxy"]
