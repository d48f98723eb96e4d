"""Appending: check, assign ids, and queue with the journal; ephemeral entries go to their readers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter
from typing import TypeAlias

from ....runtime.errors import TidewalError
from ....runtime.log.checks import check_plain, check_size
from ....runtime.log.payloads import check_timestamps, owned
from ....runtime.log.wal import Append, ControlAppend, Durability, OnAppended, Payload
from ....runtime.loop_bridge import LoopNotifier, LoopNotifiers
from ..journal.channels import encode_id
from ..journal.frame import CONTROL, ROW_BYTES
from ..journal.journal import Journal
from ..journal.pending import PendingWrite, Row, settle_first
from ..journal.registry import Registry
from .admission import Admission
from .channel_cache import LiveChannel

STAMPS = 1 << 64  # timestamps that the journal can hold are below
STAMP_BYTES, STAMP_ENTRY_BYTES = 128, 24  # what the record of a stamp may take, and for each entry

Stamp: TypeAlias = Callable[[Sequence[int]], bytes]


class Appender:
    """Appends from any thread. The work done once for each entry decides what small appends cost, so it is little, and
    most of it is done for whole columns at once."""

    def __init__(self, registry: Registry, journal: Journal, admission: Admission, notifiers: LoopNotifiers) -> None:
        self._registry, self._journal, self._admission, self._notifiers = registry, journal, admission, notifiers

    def append(self, channel: str, payload: Payload, timestamp: int = 0) -> asyncio.Future[bytes]:
        """`Wal.append`, from a loop: queued, or refused, when this returns."""
        notifier = self._notifiers.current()
        future: asyncio.Future[bytes] = notifier.loop.create_future()
        count = self._queue_plain(channel, payload, timestamp, notifier, future)
        if count:
            if not notifier.deferring or count >= self._journal.last_waiters:
                self._journal.schedule(notifier, at_once=True)
            return future
        settle = partial(settle_first, notifier, future)
        try:
            self.submit((Append(channel, payload, timestamp),), settle)
        except TidewalError as error:
            settle(error)
        return future

    def _queue_plain(
        self, channel: str, payload: Payload, timestamp: int, notifier: LoopNotifier, future: asyncio.Future[bytes]
    ) -> int:
        """Queue an append that needs no special handling: how many appends wait now, or 0 where it was not queued."""
        registry = self._registry
        with registry.lock:
            found = registry.names.get(channel)
            if found is None or type(payload) is not bytes or len(payload) > found.plain_bytes:
                return 0
            if type(timestamp) is not int or not 0 <= timestamp < STAMPS:
                return 0
            pending = self._journal.pending
            size = pending.size + ROW_BYTES + len(payload)
            if size > self._admission.room:
                return 0
            id = found.next_id
            found.next_id = id + 1
            pending.rows.append((found.number, id, timestamp, payload))
            pending.size = size
            if pending.notifier is notifier:
                pending.waiting.append(future)
            else:
                pending.wait(notifier, future)
            return len(pending.waiting)

    def submit(
        self,
        entries: Sequence[Append],
        done: OnAppended,
        *,
        notifier: LoopNotifier | None = None,
        records: Sequence[bytes] = (),
        stamp: Stamp | None = None,
    ) -> None:
        """`Wal.submit`, with control records that are in the journal with the entries or not at all.

        `done` is called once, from any thread, with the ids or the error. With the `notifier` of the running loop, that
        loop may commit: the caller must let it run until `done` is called. `stamp` makes one more record from the ids
        of the entries; it is called under the registry's lock and may not raise. Each of `records` has taken effect in
        the journal's table when `done` is called. A write with records or a stamp is acknowledged when it is durable,
        whatever the channels ask for.
        """
        names, payloads, timestamps, keys, headers = zip(*entries, strict=True) if entries else ((), (), (), (), ())
        check_plain(keys, headers)
        check_timestamps(timestamps)
        with self._registry.lock:
            self._admission.check_writable()
            channels = self._registry.find_all(names)
            kinds = set(channels)
            payloads = _checked(channels, kinds, payloads)
            recorded = sum([ROW_BYTES + len(record) for record in records])
            if stamp is not None:
                recorded += ROW_BYTES + STAMP_BYTES + STAMP_ENTRY_BYTES * len(channels)
            ephemeral = {channel for channel in kinds if channel.policy.ephemeral}
            size = _size(channels, payloads, ephemeral)
            control = not size or (type(entries[0]) is ControlAppend and set(map(type, entries)) == {ControlAppend})
            if not control:  # records alone are taken when space is short: acknowledgements let retention free some
                self._admission.check_space()
            if size or recorded:
                self._admission.check_room(size + recorded)
            rows = _rows(channels, timestamps, payloads)
            at_once = kinds == ephemeral and not recorded and not any(channel.queued for channel in ephemeral)
            if at_once:
                _publish(channels, rows)
                published = _ids(rows)
            elif not ephemeral and not recorded and all(channel.synced for channel in kinds):
                self._journal.pending.add(PendingWrite(done, rows, size, control=control, notifier=notifier))
                published = None
            else:
                published = self._queue(channels, rows, done, records, stamp, control=control)
        if not at_once and notifier is not None:
            self._journal.schedule(notifier)
        elif not at_once:
            self._journal.wake()
        if published is not None:
            done(published)

    def submit_each(self, entries: Sequence[Append], done: OnAppended, stamp: Stamp) -> bool:
        """Make the entries, of which each could be an append of its own, part of the next commit, with the record that
        `stamp` makes of all their ids. `done` gets one id more than there are entries, at the end: that of the record.

        Returns whether that was possible: only where every append would be acknowledged when it is durable, and none
        refused. To be called on a loop; the journal is not woken: call `Journal.schedule`.
        """
        registry, journal = self._registry, self._journal
        names, payloads, timestamps, _, _ = zip(*entries, strict=True)
        size = ROW_BYTES + STAMP_BYTES + (ROW_BYTES + STAMP_ENTRY_BYTES) * len(entries)
        with registry.lock:
            channels: list[LiveChannel] = []
            for channel in map(registry.names.get, names):
                if channel is None or not channel.synced:
                    return False
                channels.append(channel)
            lengths = list(map(len, payloads))
            size += sum(lengths)
            if max(lengths) > min([channel.policy.max_message_bytes for channel in set(channels)]):
                return False
            if journal.pending.size + size > self._admission.room:
                return False
            rows = _rows(channels, timestamps, payloads)
            record = stamp([row[1] for row in rows])
            rows.append((CONTROL, 0, journal.wall_ms(), record))
            size += len(record) - STAMP_BYTES - STAMP_ENTRY_BYTES * len(entries)
            journal.pending.add(PendingWrite(done, rows, size, notifier=self._notifiers.current()))
        return True

    def _queue(
        self,
        channels: Sequence[LiveChannel],
        rows: list[Row],
        done: OnAppended,
        records: Sequence[bytes],
        stamp: Stamp | None,
        *,
        control: bool,
    ) -> list[bytes] | None:
        """Make the rows part of the next commit; return the ids when they count as appended already."""
        ids = _ids(rows)
        urgent = bool(records)
        if stamp is not None:
            records = (*records, stamp([row[1] for row in rows]))
        durable = [row for row, channel in zip(rows, channels, strict=True) if not channel.policy.ephemeral]
        acks = {channel.policy.acks for channel in channels if not channel.policy.ephemeral}
        early = bool(durable) and not records and Durability.ALL not in acks
        handed_over = early and Durability.ONE not in acks
        wall_ms = self._journal.wall_ms()
        durable += [(CONTROL, 0, wall_ms, record) for record in records]
        loose = [(channel, row) for channel, row in zip(channels, rows, strict=True) if channel.policy.ephemeral]
        for channel, _ in loose:
            channel.queued += 1
        answer = _WriteCallback(self._registry, None if handed_over else done, ids, loose)
        size = sum([ROW_BYTES + len(row[3]) for row in durable])
        written = answer.written if early else None
        self._journal.pending.add(PendingWrite(answer, durable, size, written, urgent=urgent, control=control))
        return ids if handed_over else None


class _WriteCallback:
    """The callback of a write that is more than entries to be synced: it knows the ids, may acknowledge before the
    sync, and delivers the entries of ephemeral channels, which go to their readers with what was committed."""

    __slots__ = ("_done", "_ids", "_loose", "_registry")

    def __init__(
        self, registry: Registry, done: OnAppended | None, ids: list[bytes], loose: list[tuple[LiveChannel, Row]]
    ) -> None:
        self._registry, self._done, self._ids, self._loose = registry, done, ids, loose

    def written(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(self._ids)

    def __call__(self, result: list[bytes] | TidewalError) -> None:
        if self._loose:
            with self._registry.lock:
                for channel, _ in self._loose:
                    channel.queued -= 1
                if not isinstance(result, TidewalError):
                    channels, rows = zip(*self._loose, strict=True)
                    _publish(channels, rows)
        done, self._done = self._done, None
        if done is not None:
            done(result if isinstance(result, TidewalError) else self._ids)


def _checked(
    channels: Sequence[LiveChannel], kinds: set[LiveChannel], payloads: Sequence[Payload]
) -> Sequence[Payload]:
    """The payloads as buffers that no caller changes any more. Raises `MessageTooLarge`."""
    if set(map(type, payloads)) != {bytes}:
        payloads = list(map(owned, payloads))
    largest = max(map(len, payloads), default=0)
    if largest > min([channel.policy.max_message_bytes for channel in kinds], default=0):
        for channel, payload in zip(channels, payloads, strict=True):
            check_size(channel.name, len(payload), channel.policy.max_message_bytes)
    return payloads


def _size(channels: Sequence[LiveChannel], payloads: Sequence[Payload], ephemeral: set[LiveChannel]) -> int:
    """The bytes that go to the disk."""
    if not ephemeral:
        return sum(map(len, payloads)) + ROW_BYTES * len(payloads)
    both = zip(channels, payloads, strict=True)
    return sum([ROW_BYTES + len(payload) for channel, payload in both if channel not in ephemeral])


def _rows(channels: Sequence[LiveChannel], timestamps: Sequence[int], payloads: Sequence[Payload]) -> list[Row]:
    """The rows of the entries, with the next ids of their channels. Under the registry's lock."""
    rows: list[Row] = []
    at = 0
    for channel, run in groupby(channels):
        count = len(list(run))
        first, end = channel.next_id, at + count
        channel.next_id = first + count
        ids = range(first, first + count)
        rows += zip(repeat(channel.number), ids, timestamps[at:end], payloads[at:end])
        at = end
    return rows


def _ids(rows: Sequence[Row]) -> list[bytes]:
    return [encode_id(row[1]) for row in rows]


def _publish(channels: Sequence[LiveChannel], rows: Sequence[Row]) -> None:
    """Deliver entries of ephemeral channels."""
    for channel, run in groupby(zip(channels, rows, strict=True), itemgetter(0)):
        channel.publish([row for _, row in run])
