"""What the store has of the log that is needed no more."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Garbage:
    """What the owner has noted as garbage, for itself and those after it; times are the store's, in ms. A place is the
    epoch and the number of a block."""

    deleted_to: tuple[int, int] = (1, 0)  # the blocks before this place are deleted, but for the ends of epochs
    blocks: list[tuple[int, tuple[int, int]]] = field(default_factory=list[tuple[int, tuple[int, int]]])
    """Since when the blocks before a place are needed no more, ascending in both."""
    objects: dict[str, int] = field(default_factory=dict[str, int])
    """Since when other objects are needed no more, by key."""
