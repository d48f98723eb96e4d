"""From options to a plan."""

from __future__ import annotations

from ..log import open_log
from ..options import CHANNEL, ReadOptions
from .collection import CollectionPlan
from .foreign_topic import ForeignTopics
from .read_plan import ReadPlan
from .topic_by_channel import ByChannel
from .topic_by_tick import ByTick


def open_plan(options: ReadOptions) -> ReadPlan:
    """The plan of what the options name, not connected yet."""
    if options.foreign:
        return ForeignTopics(open_log(options.wal), options)
    kind = CollectionPlan if options.collection else ByChannel if options.consistency == CHANNEL else ByTick
    if options.history:
        from .history import HistoryPlan as kind  # and Delta, which others need not load
    return kind(open_log(options.wal), options)
