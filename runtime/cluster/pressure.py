"""How much is let in while a limit is near: between its low and its high water mark less and less, at the high one
nothing, and all again only once it is below the low one.

Members measure what they have of each limit, and report it with their renewals (`PRESSURE`): so a report ends with the
lease of its member. What follows from reports is a pure function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

# Limits that members measure, as settings name them.
ROW_MEMORY = "queryNode.memoryLimitBytes"
NODE_MEMORY = "streaming.walRateLimit.nodeMemory"

REPORTED = 0.5  # of a limit: what is used of it less is not reported
LOADED_MAX = 1_000  # collections that a report names


@dataclass(frozen=True, slots=True)
class WaterMarks:
    """The low and the high water mark of a limit, as parts of it."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What is used of a limit, both in its unit: by the member `node`, "" for this process, and of `collection`, "" for
    all, or for those with the ids `collections`, where these are known."""

    limit: str
    value: int
    bound: int
    node: str = ""
    collection: str = ""
    collections: frozenset[int] | None = None

    def concerns(self, collection: int) -> bool:
        """Whether writes to the collection with this id add to what is used."""
        return self.collections is None or collection in self.collections

    @property
    def subject(self) -> Subject:
        """What remembers whether it is refused."""
        return self.limit, self.node, self.collection


Subject: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Throttle:
    """A limit that slows writes down, or refuses them: `factor` of the full rate is let in, 0 for none. The marks are
    in the unit of the limit."""

    usage: Usage
    factor: float
    low: int
    high: int

    @property
    def refuses(self) -> bool:
        """Whether nothing is let in."""
        return self.factor == 0.0

    def to_wire(self) -> dict[str, Any]:
        """The fields as people and reports have them."""
        usage = self.usage
        return {
            "limit": usage.limit,
            "value": usage.value,
            "low": self.low,
            "high": self.high,
            "factor": round(self.factor, 3),
            "node": usage.node,
            "collection": usage.collection,
            "collections": None if usage.collections is None else len(usage.collections),
        }


def throttle_of(usage: Usage, marks: WaterMarks, *, refused: bool) -> Throttle | None:
    """What follows from `usage`, where writes were `refused` for it before: None where all is let in."""
    low, high = int(marks.low * usage.bound), int(marks.high * usage.bound)
    if usage.value < low:
        return None
    if refused or usage.value >= high:
        return Throttle(usage, 0.0, low, high)
    return Throttle(usage, (high - usage.value) / (high - low), low, high)


def throttles_of(
    usages: Iterable[Usage], marks: Mapping[str, WaterMarks], refused: Set[Subject]
) -> dict[Subject, Throttle]:
    """What follows from all `usages`, by their subjects, where those of `refused` were refused before. Limits that have
    no `marks` are those of a later version."""
    found = {
        usage.subject: throttle_of(usage, marks[usage.limit], refused=usage.subject in refused)
        for usage in usages
        if usage.limit in marks
    }
    return {subject: throttle for subject, throttle in found.items() if throttle is not None}


def usages_in(report: object, node: str, loaded: object = None) -> list[Usage]:
    """What the member `node` has reported, of its memory for rows also for which collections (`loaded`, by ids); it may
    be of any version, and of any types."""
    ids = cast("Iterable[object]", loaded) if isinstance(loaded, list | tuple) else None
    collections = None if ids is None else frozenset(id for id in ids if isinstance(id, int))
    if not isinstance(report, dict):
        return []
    usages: list[Usage] = []
    for limit, used in cast("dict[object, object]", report).items():
        match used:
            case (int() as value, int() as bound) | [int() as value, int() as bound] if bound > 0:
                of = collections if limit == ROW_MEMORY else None
                usages.append(Usage(str(limit), value, bound, node, collections=of))
            case _:
                pass
    return usages
