"""The catalog as it changes: every node follows the `collection_schema` channel, the leader also writes it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..clock import HybridClock
from ..errors import BadRecord, Closed, CorruptLog, DeadlineExceeded, Fenced, PositionLost, TidewalError, Unavailable
from ..log.names import Names
from ..log.record import stamp
from ..log.wal import ChannelPolicy, ControlAppend, Entry, From, Wal
from ..streams.channel_reader import Granted, OnBadRecord
from .catalog import Catalog, Event, encode_event

CATALOG_POLICY = ChannelPolicy(retention_s=None)
SNAPSHOT_EVENTS = 1_000
SNAPSHOT_RETRY_EVENTS = 100  # after a snapshot that failed
CLAIMS_MAX = 10
CLAIM_PAUSE_S = 0.1  # after a claim that the log refused; twice as long after each further one
CLAIM_PAUSE_S_MAX = 1.0

_log = logging.getLogger(__name__)

OnChange = Callable[[Event], None]


class CatalogLog:
    """Follows the catalog; `catalog` is its state as far as it was read.

    `claim` makes this node the leader, after which `append` writes events. Only what the log order accepts counts, so
    of two nodes that both believe to lead only one has an effect. Entries that cannot be read are counted (`skipped`),
    given to `on_bad` and skipped; the clock follows the records that count, except a time that lies days ahead. A
    follower that a snapshot has overtaken begins anew with that.
    """

    def __init__(self, wal: Wal, names: Names, clock: HybridClock, *, on_bad: OnBadRecord | None = None) -> None:
        self.catalog = Catalog()
        self.skipped = 0
        self._on_bad = on_bad
        self._wal = wal
        self._channel = names.catalog
        self._clock = clock
        self._applied = b""
        self._counted: dict[bytes, bool] = {}  # what was read while a write is in flight
        self._writing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._term = 0
        self._cseq = 0
        self._since_snapshot = 0

    async def open(self) -> None:
        """Create the channel where it is missing, and read all that is in it."""
        await self._wal.create_channel(self._channel, CATALOG_POLICY)
        self._task = asyncio.create_task(self._follow(), name="catalog")
        await self.catch_up()

    async def _follow(self) -> None:
        try:
            catalog = self.catalog
            while await self._fold_into(catalog):
                _log.warning("%s: a snapshot was faster than this reader, which begins anew with it", self._channel)
                catalog = Catalog()
            self._failure = Closed("the log was closed")
        except Exception as error:  # -- callers that wait for the catalog must learn why it does not come
            self._failure = error
        async with self._changed:
            self._changed.notify_all()

    async def _fold_into(self, catalog: Catalog) -> bool:
        """Fold in all entries that are there and come. Returns whether a snapshot has removed the next ones. A
        `catalog` that begins anew is published from its snapshot on, which holds all that was missed; until then the
        one before it is."""
        try:
            async for entries in self._wal.read(self._channel, From.EARLIEST):
                async with self._changed:
                    for entry in entries:
                        self._fold(catalog, entry)
                    self._since_snapshot += len(entries)
                    self._changed.notify_all()
                if catalog is not self.catalog and entries[-1].id >= (await self._wal.latest_id(self._channel) or b""):
                    raise CorruptLog(
                        f"entries of {self._channel} were removed, and no snapshot holds what they were: restore the"
                        " log from a backup",
                        channel=self._channel,
                    )
        except PositionLost:
            return True
        return False

    def _fold(self, catalog: Catalog, entry: Entry) -> None:
        record = catalog.fold(entry, lambda error: self._bad(entry, error))
        if record is not None and self._clock.believes(record.ts):
            self._clock.observe(record.ts)
        if catalog is self.catalog or catalog.term:
            self.catalog = catalog
            self._applied = entry.id
            if self._writing.locked():
                self._counted[entry.id] = record is not None

    def _bad(self, entry: Entry, error: BadRecord) -> None:
        self.skipped += 1
        if self._on_bad is not None:
            self._on_bad(self._channel, entry, error)

    def granted(self, pchannel: str) -> Granted:
        """The grants of `pchannel`, as far as the catalog was read."""
        return self.catalog.granted(pchannel)

    async def catch_up(self) -> Catalog:
        """The catalog with everything that was in the log when this was called."""
        latest = await self._wal.latest_id(self._channel)
        if latest is not None:
            await self._wait(lambda: self._applied >= latest)
        return self.catalog

    async def wait_for(self, condition: Callable[[Catalog], bool], *, deadline_s: float) -> Catalog:
        """Wait until `condition` holds for the catalog. Raises `DeadlineExceeded` after `deadline_s` seconds."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._wait(lambda: condition(self.catalog))
        except TimeoutError:
            raise DeadlineExceeded(f"the catalog did not become as awaited within {deadline_s:g} s") from None
        return self.catalog

    async def changed(self) -> Catalog:
        """The catalog after the next change."""
        before = self._applied
        await self._wait(lambda: self._applied != before)
        return self.catalog

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            while not condition():
                if self._failure is not None:
                    raise self._failure
                await self._changed.wait()

    # ---- the leader's part ------------------------------------------------------------------------------------------

    async def claim(self, node: str) -> None:
        """Become the leader: name the last winning claim; log order decides between claims that name the same
        one. Raises `Fenced` when other nodes won `CLAIMS_MAX` times; where the log refused the last claim, that
        error."""
        error: TidewalError = Fenced("no election was held")
        pause_s = CLAIM_PAUSE_S
        for _ in range(CLAIMS_MAX):
            try:
                if await self._try_to_claim(node):
                    return
                error = Fenced(f"{node} lost an election to {self.catalog.leader}, the last of {CLAIMS_MAX}")
            except TidewalError as refused:  # whether it won or not, the next claim names what was read after it
                if not refused.retryable:
                    raise
                error = refused
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, CLAIM_PAUSE_S_MAX)
        raise error

    async def _try_to_claim(self, node: str) -> bool:
        catalog = await self.catch_up()
        async with self._writing:
            self._term, self._cseq = catalog.term + 1, 0
            won = False
            try:
                _, won = await self._write({"kind": "leader", "node": node, "previous": catalog.leader_id})
            finally:
                if not won:
                    self._term = 0  # the term may be the winner's, under which no event of this node may count
        return won

    async def append(self, event: Event) -> None:
        """Write an event; when this returns it is durable and in `catalog`. Raises `Fenced` when another node leads.

        Events are written one after another: a snapshot must lie behind all that it holds, and before all that it does
        not. A snapshot that fails does not fail the event before it: it is logged, and tried again
        `SNAPSHOT_RETRY_EVENTS` later."""
        async with self._writing:
            await self._write_as_leader(event)
            if self._since_snapshot >= SNAPSHOT_EVENTS:
                try:
                    await self._snapshot()
                except Exception as error:
                    _log.warning("%s goes on without a new snapshot: %s", self._channel, error)
                    self._since_snapshot = SNAPSHOT_EVENTS - SNAPSHOT_RETRY_EVENTS

    async def _write_as_leader(self, event: Event) -> bytes:
        if not self._term:
            raise Fenced("this node does not lead; claim first", term=self.catalog.term)
        id, counted = await self._write(event)
        if not counted:
            raise Fenced(f"{self.catalog.leader} leads now, with term {self.catalog.term}", term=self.catalog.term)
        return id

    async def _write(self, event: Event) -> tuple[bytes, bool]:
        """Append an event and read it back: its id, and whether it counts."""
        if self.catalog.term == self._term:  # events of this term are numbered on from the last one that counts
            self._cseq = max(self._cseq, self.catalog.cseq)
        self._cseq += 1
        ts = self._clock.now()
        payload = stamp(encode_event(self._term, event), ts, self._term, self._cseq)
        try:
            (id,) = await self._wal.append_many([ControlAppend(self._channel, payload, ts)])
            await self._wait(lambda: self._applied >= id)
            if id not in self._counted:
                raise Unavailable(
                    "another leader's snapshot has removed the event before it was read back: check whether it counts",
                    outcome_unknown=True,
                )
            return id, self._counted[id]
        finally:
            self._counted.clear()

    async def snapshot(self) -> None:
        """Write the whole state and truncate what lies before it."""
        async with self._writing:
            await self._snapshot()

    async def _snapshot(self) -> None:
        id = await self._write_as_leader(self.catalog.snapshot())
        await self._wal.truncate(self._channel, id)
        self._since_snapshot = 0

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
