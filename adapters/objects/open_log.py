"""What the parts of one open log share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.clock import Clock, SystemClock
from ...runtime.metrics.metrics import Metrics
from .block_cache import BlockCache
from .checkpoints import Checkpoints
from .ephemeral import EphemeralChannels
from .hedging import HedgedCreates
from .log_objects import LogObjects
from .log_state import LogState
from .metered_store import MeteredStore
from .news import News
from .pace import MaintenancePace
from .store import ObjectStore
from .store_clock import StoreClock

if TYPE_CHECKING:
    from .settings import ObjectsSettings


@dataclass(frozen=True, slots=True)
class OpenLog:
    """A log as one process has it open: its `objects` in the store, its `state` after the blocks so far, the newest of
    them in the `cache`, the entries of ephemeral channels in `memory`, and the `news` for which readers wait. `clock`
    is the machine's, `time` the store's. All belongs to one loop."""

    settings: ObjectsSettings
    pace: MaintenancePace
    clock: Clock
    time: StoreClock
    objects: LogObjects
    state: LogState
    checkpoints: Checkpoints
    cache: BlockCache
    memory: EphemeralChannels
    news: News


def open_log(
    store: ObjectStore,
    settings: ObjectsSettings,
    pace: MaintenancePace,
    clock: Clock | None,
    metrics: Metrics | None,
    *,
    try_store: bool,
) -> OpenLog:
    """The log in `store`, of which nothing is read yet."""
    if metrics is not None:
        store = MeteredStore(store, metrics)
    hedged = HedgedCreates(store, settings.hedge_share, metrics)
    objects = LogObjects(store, try_store=try_store, hedged_creates=hedged)
    clock, state, news = clock or SystemClock(), LogState(), News()
    return OpenLog(
        settings=settings,
        pace=pace,
        clock=clock,
        time=StoreClock(clock),
        objects=objects,
        state=state,
        checkpoints=Checkpoints(objects, state),
        cache=BlockCache(settings.cache_bytes),
        memory=EphemeralChannels(news.tell),
        news=news,
    )
