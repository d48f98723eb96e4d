"""The coordinator."""

from .mixcoord import MixCoord

__all__ = ["MixCoord"]
