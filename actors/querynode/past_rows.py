"""The rows of collections at times that memory does not have any more: loaded from their tables, which keep each
version of a row, and kept for the pages that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from ...runtime.errors import Lagging
from ..collection_reader import PartKey
from .row_store import RowStore

KEPT_S: Final = 30.0  # after they were last asked for, or loaded
EXPIRE_S: Final = 5.0  # between two looks at what is to go

_Key: TypeAlias = tuple[PartKey, tuple[str, ...], int]  # the part, those of its vchannels that it has yet, the time
Load: TypeAlias = Callable[[], Coroutine[object, object, Sequence[RowStore]]]


@dataclass(slots=True)
class _Snapshot:
    loading: asyncio.Task[Sequence[RowStore]]
    asked_s: float


class PastRows:
    """Snapshots by part of a collection and time. Of each time the rows are loaded once, whoever asks meanwhile; they
    count in the node's memory, and go when they were not asked for during `KEPT_S`, or when that memory is needed."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._snapshots: dict[_Key, _Snapshot] = {}

    async def stores(self, part: PartKey, vchannels: Sequence[str], time: int, load: Load) -> Sequence[RowStore]:
        """The rows of these vchannels of `part` as they were at `time`, which never change. Raises what `load`
        raises."""
        self.expire()
        key = part, tuple(vchannels), time
        found = self._snapshots.get(key)
        if found is None:
            found = self._snapshots[key] = _Snapshot(asyncio.create_task(load()), 0.0)
            found.loading.add_done_callback(lambda loaded: self._loaded(key, loaded))
        found.asked_s = self._now_s()
        try:
            return await asyncio.shield(found.loading)
        except asyncio.CancelledError:
            if found.loading.cancelled() and key not in self._snapshots:  # by `forget`; else the caller is cancelled
                raise Lagging("the collection is being loaded again; retry") from None
            raise

    @property
    def bytes(self) -> int:
        """Memory held by what is loaded. From any thread."""
        loaded = [each.loading for each in list(self._snapshots.values()) if each.loading.done()]
        kept = [each.result() for each in loaded if not each.cancelled() and each.exception() is None]
        return sum(store.bytes for stores in kept for store in stores)

    async def run(self) -> None:
        """Let go of what was not asked for lately, again and again."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.expire()

    def expire(self) -> None:
        """Let go of what was not asked for lately."""
        self._drop(self._now_s() - KEPT_S)

    def reclaim(self) -> None:
        """Let go of all that is loaded. Questions that read it have it until they end."""
        self._drop(self._now_s())

    def forget(self, part: PartKey) -> None:
        """End what is being loaded of a part, and let go of what is loaded."""
        for key in [key for key in self._snapshots if key[0] == part]:
            self._let_go(key)

    def _drop(self, asked_before_s: float) -> None:
        for key, snapshot in list(self._snapshots.items()):
            if snapshot.loading.done() and snapshot.asked_s <= asked_before_s:
                self._let_go(key)

    def _let_go(self, key: _Key) -> None:
        loading = self._snapshots.pop(key).loading
        if not loading.cancel() and not loading.cancelled() and loading.exception() is None:
            for store in loading.result():
                store.release()

    def _loaded(self, key: _Key, loading: asyncio.Task[Sequence[RowStore]]) -> None:
        """What has failed is tried again by who asks next; what took long to load is there for the next page, too."""
        if loading.cancelled() or loading.exception() is not None:
            self._snapshots.pop(key, None)
        elif key in self._snapshots:
            self._snapshots[key].asked_s = self._now_s()
