"""Appending: check, give out ids, and queue with the journal; ephemeral entries go to their readers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...runtime.errors import MessageTooLarge, TidewalError
from ...runtime.wal import Durability, Entry, OnAppended, Payload
from .channels import encode_id
from .frame import ROW_BYTES, pack_row
from .gate import Gate
from .journal import Journal, Write
from .live import Channel, make_batch, trim_ephemeral
from .registry import Registry

STAMP_BYTES, STAMP_ENTRY_BYTES = 128, 24  # what the record of a stamp may take, and for each entry

Row = tuple[Channel, bytes | memoryview, int]  # the last is the timestamp
Stamp = Callable[[list[bytes]], bytes]


class Appender:
    """`submit` from any thread. What it costs once per append is what small appends cost: no closures, no records of
    records."""

    def __init__(self, registry: Registry, journal: Journal, gate: Gate) -> None:
        self._registry, self._journal, self._gate = registry, journal, gate

    def submit(
        self,
        entries: Sequence[tuple[str, Payload, int]],
        done: OnAppended,
        *,
        records: Sequence[bytes] = (),
        stamp: Stamp | None = None,
    ) -> None:
        """`Wal.submit`, with control records that are in the journal with the entries or not at all.

        `stamp` makes one more record from the ids of the entries; it is called under the registry's lock and may not
        raise. Each record has taken effect in the journal's table when `done` is called. A write with records is
        acknowledged when it is durable, whatever the channels ask for.
        """
        published: list[bytes] | None = None
        with self._registry.lock:
            self._gate.check_writable()
            rows: list[Row] = []
            size = 0  # of what goes to the disk
            behind = False  # an ephemeral channel has entries that wait for a commit: these go behind them
            for name, payload, timestamp in entries:
                channel = self._registry.find(name)
                content = payload if type(payload) is bytes else _frozen(payload)
                policy = channel.policy
                if len(content) > policy.max_message_bytes:
                    raise _too_large(channel, len(content))
                if not policy.ephemeral:
                    size += len(content) + ROW_BYTES
                elif channel.queued:
                    behind = True
                rows.append((channel, content, timestamp))
            extra = sum([ROW_BYTES + len(record) for record in records])
            if stamp is not None:
                extra += ROW_BYTES + STAMP_BYTES + STAMP_ENTRY_BYTES * len(rows)
            if size:  # records alone are taken when space is short: what is acknowledged may go
                self._gate.check_space()
            if size or extra:
                self._gate.check_room(size + extra)
            if size or extra or behind:
                published = self._queue(rows, size, done, records, stamp)
            else:
                published = _publish(rows)
        if published is not None:
            done(published)

    def submit_one(self, name: str, payload: Payload, timestamp: int, done: OnAppended) -> None:
        """`submit` of one entry. The usual case has a way of its own: a third less work for each small append."""
        registry = self._registry
        with registry.lock:
            self._gate.check_writable()
            channel = registry.find(name)
            if channel.synced and type(payload) is bytes and len(payload) <= channel.policy.max_message_bytes:
                size = len(payload) + ROW_BYTES
                self._gate.check_space()
                self._gate.check_room(size)
                number, id = channel.number, channel.next_id
                channel.next_id = id + 1
                key = encode_id(id)
                write = Write(done, size)
                write.ids.append(key)
                write.entries.append((number, Entry(key, timestamp, payload)))
                write.rows.append(pack_row(number, len(payload), id, timestamp))
                write.bodies.append(payload)
                self._journal.put(write)
                return
        self.submit(((name, payload, timestamp),), done)

    def _queue(
        self, rows: list[Row], size: int, done: OnAppended, records: Sequence[bytes], stamp: Stamp | None
    ) -> list[bytes] | None:
        """Make the rows part of the next commit; return the ids when they count as appended already."""
        write = Write(done, size)
        synced = written = False  # the strongest durability that any of the channels asks for
        for channel, payload, timestamp in rows:
            number, id = channel.number, channel.next_id
            channel.next_id = id + 1
            key = encode_id(id)
            write.ids.append(key)
            policy = channel.policy
            if policy.ephemeral:
                channel.queued += 1
                write.loose.append((number, Entry(key, timestamp, payload)))
                continue
            if policy.acks is Durability.ALL:
                synced = True
            elif policy.acks is Durability.ONE:
                written = True
            write.entries.append((number, Entry(key, timestamp, payload)))
            write.rows.append(pack_row(number, len(payload), id, timestamp))
            write.bodies.append(payload)
        if stamp is not None:
            records = (*records, stamp(write.ids))
        for record in records:
            write.add_record(record, self._journal.wall_ms())
        write.early = bool(size) and not synced and not records
        handed_over = write.early and not written
        if handed_over:
            write.done = _unheard
        self._journal.put(write)
        return write.ids if handed_over else None


def _publish(rows: list[Row]) -> list[bytes]:
    """Deliver entries of ephemeral channels at once."""
    ids: list[bytes] = []
    groups: dict[Channel, list[Entry]] = {}
    for channel, payload, timestamp in rows:
        id = encode_id(channel.next_id)
        channel.next_id += 1
        ids.append(id)
        groups.setdefault(channel, []).append(Entry(id, timestamp, payload))
    for channel, entries in groups.items():
        channel.deliver(make_batch(entries))
        trim_ephemeral(channel)
    return ids


def _frozen(payload: Payload) -> bytes | memoryview:
    """The payload as something nobody else writes into, copied only where that is not sure."""
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, memoryview) and payload.readonly and payload.c_contiguous:
        return payload if payload.format == "B" and payload.ndim == 1 else payload.cast("B")
    return bytes(payload)


def _unheard(_: list[bytes] | TidewalError) -> None:
    """The callback of a write that was acknowledged when it was handed over."""


def _too_large(channel: Channel, size: int) -> MessageTooLarge:
    limit = channel.policy.max_message_bytes
    return MessageTooLarge(
        f"a message of {size} bytes for {channel.name} is over its limit of {limit}", size=size, limit=limit
    )
