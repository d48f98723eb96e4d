"""Bound what a next owner must read: the log itself has the outcomes of producers, and what else that one must know."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock

from ..errors import TidewalError, Unavailable
from ..log.record import Record, RecordType, Tags, stamp
from ..log.wal import ControlAppend, OnAppended, Wal
from ..loop_bridge import promise
from .observer import ChannelOwnerObserver
from .owned_channel import OwnedChannel, Promising


class Snapshots:
    """Stores the producer table of a channel that has had `every_records` or `every_bytes` since its checkpoint. The
    last record of it bears the tags that `tags` returns for the channel; called on any thread, under the lock."""

    def __init__(
        self,
        wal: Wal,
        lock: RLock,
        promising: Promising,
        every_records: int,
        every_bytes: int,
        observer: ChannelOwnerObserver,
        tags: Callable[[str], Tags],
    ) -> None:
        self._wal = wal
        self._lock = lock
        self._promising = promising
        self._every_records = every_records
        self._every_bytes = every_bytes
        self._observer = observer
        self._tags = tags

    def store_due(self) -> None:
        """Store what is due, as far as anything may be promised."""
        with self._lock:
            try:
                promising = self._promising()
            except TidewalError:  # past the lease
                return
            for own, ts in promising:
                due = own.unsaved >= self._every_records or own.unsaved_bytes >= self._every_bytes
                own.prepared.snapshot_due = due and bool(own.prepared)  # its turn comes when these are decided
                if due and not own.prepared:
                    try:
                        self._store(own, ts)
                    except TidewalError as error:
                        self._observer.silent(error)

    async def store_last(self, own: OwnedChannel, ts: int) -> None:
        """Store that of a channel whose owner appends nothing more to it, at the time `ts`. Raises errors of the log,
        and `Unavailable` where that time is above the owner's limit."""
        if ts > own.limit:
            raise Unavailable(f"the limit of {own.channel} is reached")
        stored, done = promise()
        with self._lock:
            self._store(own, own.watermark(ts), done)
        await stored

    def _store(self, own: OwnedChannel, ts: int, then: OnAppended | None = None) -> None:
        """Appends in flight are not in the table yet, so the checkpoint is not the snapshot itself but the last
        record that was acknowledged before it."""
        checkpoint, covered = own.acked.id, (own.unsaved, own.unsaved_bytes)
        if prepared := own.prepared.all:  # the next owner is to find these, and what has become of them
            checkpoint, covered = prepared[0].before or own.checkpoint, (0, 0)
        *before, last = own.producers.pages()
        pages = [Record(RecordType.PRODUCERS, body=page) for page in before]
        pages.append(Record(RecordType.PRODUCERS, tags=self._tags(own.channel), body=last))
        cseqs = [own.next() for _ in pages]
        entries = [
            ControlAppend(own.channel, stamp(page, ts, own.term, cseq), ts)
            for page, cseq in zip(pages, cseqs, strict=True)
        ]
        own.saved(*covered)
        try:
            self._wal.submit(entries, partial(self._stored, own, cseqs, checkpoint, covered, then))
        except BaseException:
            own.unsave(*covered)
            own.take_back(len(pages))
            raise

    def _stored(
        self,
        own: OwnedChannel,
        cseqs: list[int],
        checkpoint: bytes,
        covered: tuple[int, int],
        then: OnAppended | None,
        result: list[bytes] | TidewalError,
    ) -> None:
        """The WAL's result, on any thread."""
        with self._lock:
            if isinstance(result, TidewalError):
                own.unsave(*covered)  # it is due again
                self._observer.silent(result)
            else:
                own.checkpoint = checkpoint
                own.ack_control(cseqs[-1], result[-1])
        if then is not None:
            then(result)
