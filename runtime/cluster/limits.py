"""How far the owner of a channel may stamp: up to a limit in the catalog, which its successor must pass."""

from __future__ import annotations

from ..clock import add_ms, compose

LIMIT_MS = 10_000  # how far ahead an owner's limit lies


def timestamp_limit(wall_ms: int, last: int, ahead_ms: int) -> int:
    """The limit for an owner that has the wall clock `wall_ms`, and must stamp above `last`.

    It is `ahead_ms` ahead of the wall clock. Timestamps are further ahead than half of that where another node's clock
    is, which they follow, or where the owner began behind the limit of one that used little of it. Then the limit is
    half of `ahead_ms` ahead of them: more than they advance until it is raised the next time; and owners that fail one
    after another carry them no further ahead, unless each lives for less than that."""
    return max(add_ms(compose(wall_ms), ahead_ms), add_ms(last, ahead_ms // 2))
