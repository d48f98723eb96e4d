"""Bound what a next owner must read: the producers' outcomes are stored in the log itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import RLock

from ..errors import TidewalError
from ..log.record import Record, RecordType, stamp
from ..log.wal import ControlAppend, Wal
from .observer import ChannelOwnerObserver
from .owned_channel import OwnedChannel
from .producers import ProducerTable


class Snapshots:
    """Stores the producer table in a channel that has had `every_records` since its checkpoint."""

    def __init__(
        self,
        wal: Wal,
        lock: RLock,
        owned: Mapping[str, OwnedChannel],
        producers: ProducerTable,
        timestamp: Callable[[], int],
        every_records: int,
        observer: ChannelOwnerObserver,
    ) -> None:
        self._wal = wal
        self._lock = lock
        self._owned = owned
        self._producers = producers
        self._timestamp = timestamp
        self._every_records = every_records
        self._observer = observer

    def store_due(self) -> None:
        """Store what is due. `timestamp` raises while nothing may be stamped."""
        with self._lock:
            for own in self._owned.values():
                if own.open and own.since_checkpoint >= self._every_records:
                    try:
                        self._store(own)
                    except TidewalError as error:
                        self._observer.silent(error)

    def _store(self, own: OwnedChannel) -> None:
        """Appends in flight are not in the table yet, so the checkpoint is not the snapshot itself but the last
        record that was acknowledged before it."""
        ts, checkpoint, covered = self._timestamp(), own.acked.id, own.since_checkpoint
        pages = [Record(RecordType.PRODUCERS, body=page) for page in self._producers.pages()]
        cseqs = [own.next() for _ in pages]
        entries = [
            ControlAppend(own.channel, stamp(page, ts, own.term, cseq), ts)
            for page, cseq in zip(pages, cseqs, strict=True)
        ]
        own.since_checkpoint -= covered
        try:
            self._wal.submit(entries, partial(self._stored, own, cseqs, checkpoint, covered))
        except BaseException:
            own.since_checkpoint += covered
            for _ in pages:
                own.take_back()
            raise

    def _stored(
        self, own: OwnedChannel, cseqs: list[int], checkpoint: bytes, covered: int, result: list[bytes] | TidewalError
    ) -> None:
        """The WAL's result, on any thread."""
        with self._lock:
            if isinstance(result, TidewalError):
                own.since_checkpoint += covered  # it is due again
                self._observer.silent(result)
                return
            own.checkpoint = checkpoint
            own.ack_control(cseqs[-1], result[-1])
