"""As of which time a question is answered, by the freshness that it asks for."""

from __future__ import annotations

from collections.abc import Callable

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.clock import HybridClock, add_ms
from ...runtime.errors import InvalidRequest
from ...runtime.log.names import pchannel_of
from ...runtime.ownership import SyncPoint
from ...runtime.rpc.protocol import Params
from ..owners import Owners
from .log_present import LogPresent

AHEAD_MS = 10_000  # so far ahead of the log a time to read at may lie: another node may have told it
RECENT_MS = 500  # before now: the log has been read so far everywhere, while it goes on


class QuestionTime:
    """Finds the time up to which a result must reflect the log. `on_present` is called with each answer of the owners,
    which reach the streams so sooner than with the next tick."""

    def __init__(
        self,
        clock: HybridClock,
        catalog: CatalogLog,
        owners: Owners,
        graceful_ms: int,
        on_present: Callable[[Collection, SyncPoint], None],
    ) -> None:
        """`graceful_ms` is the staleness of `bounded`, where a question does not say it."""
        self._clock, self._catalog, self._owners = clock, catalog, owners
        self._graceful_ms, self._on_present = graceful_ms, on_present
        self._presents: dict[int, LogPresent] = {}  # by collection id

    async def least(self, collection: Collection, params: Params, reached: int) -> tuple[int, SyncPoint | None]:
        """The least time that satisfies the question, and what the owners have said of now where they were asked.
        `reached` is up to when the asker has the rows. Raises `InvalidRequest` for a time that cannot be."""
        at: int | None = params.get("at")
        if at is not None:
            return at, await self._check_past(collection, at, reached)
        consistency = params["consistency"]
        if consistency == "strong":
            point = await self._present(collection)
            return point.time, point
        if consistency == "session":
            written: int = params.get("session_ts", 0)
            if not (self._clock.believes(written) or written <= self._granted_to(collection)):
                raise InvalidRequest(f"session_ts {written} lies days ahead: no write can have had that time")
            return written, await self._present(collection) if written > reached else None
        if consistency == "bounded":
            return add_ms(self._clock.now(), -(params.get("staleness_ms") or self._graceful_ms)), None
        return 1, None  # eventually: at least what the table and the log held when the node started

    async def common(self, collection: Collection, params: Params, reached: int) -> tuple[int, SyncPoint | None]:
        """A time that satisfies the question, at which several nodes can answer it without waiting for long. `reached`
        is up to when this one has rows of the collection, 0 where it has none: where a channel stands still, as after
        its owner was killed, a question waits for it only if it asks for more."""
        recent = add_ms(self._clock.now(), -RECENT_MS)
        time, present = await self.least(collection, params, recent)
        if params.get("at") is None and params["consistency"] != "strong":
            stands_still = params["consistency"] in ("bounded", "eventually") and 0 < reached < recent
            time = max(time, reached if stands_still else recent, collection.created_ts)
        return time, present

    async def _present(self, collection: Collection) -> SyncPoint:
        present = self._presents.get(collection.id)
        if present is None:
            present = self._presents[collection.id] = LogPresent(self._owners, collection, self._on_present)
        return await present.point()

    def forget(self, collection: Collection) -> None:
        """The collection was dropped."""
        self._presents.pop(collection.id, None)

    async def _check_past(self, collection: Collection, at: int, reached: int) -> SyncPoint | None:
        """Raise `InvalidRequest` unless `at` lies between the collection's creation and now."""
        if at < collection.created_ts:
            raise InvalidRequest(
                f"at {at} there was no collection {collection.name}: it was created at {collection.created_ts}"
            )
        if at <= reached:
            return None
        present = await self._present(collection)
        if at > add_ms(present.time, AHEAD_MS):
            raise InvalidRequest(f"at {at} lies ahead of the log: give the time of an answer, of a write, or of a cut")
        return present

    def _granted_to(self, collection: Collection) -> int:
        """The highest timestamp that a write to the collection may have: the clock of a new owner passes it only once
        it acquires the channels."""
        return max(self._catalog.granted(pchannel_of(vchannel)).limit for vchannel in collection.vchannels)
