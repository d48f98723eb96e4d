"""More tasks than channels: ranges split at stored cuts. A cut has everything that a reader must know there (the
term, the last record), so each part is read as a batch of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ..scan.channel_range import ChannelPlace, ChannelRange
from .offsets import Offset


def split(ranges: Sequence[ChannelRange], points: Sequence[Offset], tasks: int) -> list[ChannelRange]:
    """`ranges` in about `tasks` parts, as far as there are `points` between their ends, with about as many records in
    each. The same rows, each once."""
    ends = [_ends(each, points) for each in ranges]
    records = [sum(map(_records, pairwise(each))) for each in ends]
    total = sum(records)
    return [
        part
        for wanted, places, count in zip(ranges, ends, records, strict=True)
        for part in _parts(wanted, places, -(-tasks * count // total))
    ]


def _ends(wanted: ChannelRange, points: Sequence[Offset]) -> list[ChannelPlace]:
    """The ends at which a range may be split, with its own begin and end."""
    found = [wanted.begin]
    for point in points:
        end = point.ends[wanted.channel]
        if found[-1].id < end.id < wanted.end.id:
            found.append(end)
    return [*found, wanted.end]


def _records(between: tuple[ChannelPlace, ChannelPlace]) -> int:
    """How many records lie between two ends: an owner counts them, each term anew."""
    begin, end = between
    return max(end.cseq - begin.cseq if end.term == begin.term else end.cseq, 1)


def _parts(wanted: ChannelRange, places: Sequence[ChannelPlace], count: int) -> list[ChannelRange]:
    upto = list(accumulate(map(_records, pairwise(places))))
    marks = [bisect_left(upto, upto[-1] * number // count) + 1 for number in range(1, count)]
    chosen = [0, *sorted({mark for mark in marks if mark < len(places) - 1}), len(places) - 1]
    return [replace(wanted, begin=places[begin], end=places[end]) for begin, end in pairwise(chosen)]
