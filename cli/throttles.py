"""What slows writes down, in words: of a node that is asked, and of what members have reported in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast


def throttles_in_words(reported: object) -> Iterator[str]:
    """A sentence for each limit that slows writes down or refuses them, as `Throttle.to_wire` has them; what is
    `reported` may be of a later version, and of any types."""
    for each in cast("Iterable[object]", reported) if isinstance(reported, list | tuple) else ():
        if isinstance(each, Mapping):
            yield _in_words(cast("Mapping[str, object]", each))


def _in_words(throttle: Mapping[str, object]) -> str:
    of = {
        name: throttle.get(name)
        for name in ("limit", "value", "low", "high", "factor", "node", "collection", "collections")
    }
    some = "all writes" if of["collections"] is None else f"writes to the collections of {of['node']}"
    writes = f"writes to {of['collection']}" if of["collection"] else some
    where = f" at {of['node']}" if of["node"] else ""
    used = f"{of['value']} bytes are used of {of['limit']}{where}"
    if of["factor"] == 0:
        return f"{writes} are refused: {used}, until fewer than {of['low']} are; deletes pass"
    return f"{writes} are slowed down to {of['factor']} of the full rate: {used}, at {of['high']} they are refused"
