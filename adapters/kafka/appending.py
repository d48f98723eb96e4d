"""Appending: check and count entries, and put them into the send queues of their channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...runtime.errors import Closed, TidewalError
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_size
from ...runtime.log.wal import Append, Durability, OnAppended
from .catalog import KafkaChannel
from .channel_access import ChannelAccess, EncodedEntries, KafkaCatalog
from .cluster import Cluster
from .io_thread import IoThread
from .options import KafkaOptions
from .send_queue import ROW_BYTES, ChannelSendQueue, SubmitCall, SubmitPart
from .sender import ACKS_ALL, ACKS_LEADER, Sender
from .topics import UNPACKED_BYTES


class SubmitColumns(NamedTuple):
    """The columns of one submit, and its `SubmitCall`."""

    encoded: EncodedEntries
    call: SubmitCall


class Appender:
    """Appends from any thread. A channel that this process does not know may just have been created by another
    process: then the submit, and all submits after it, wait until the catalog has been read."""

    def __init__(
        self,
        cluster: Cluster,
        catalog: KafkaCatalog,
        management: ChannelAccess,
        pending: PendingBytes,
        io: IoThread,
        connections: range,
        flush: Callable[[], None],
    ) -> None:
        """The send queues share `connections`; `flush` is called on the I/O loop after calls have been answered."""
        self._cluster, self._catalog, self._management = cluster, catalog, management
        self._pending, self._io = pending, io
        self._connections, self._flush = connections, flush
        self._send_queues: dict[KafkaChannel, ChannelSendQueue] = {}
        self._starting: list[ChannelSendQueue] = []
        self._unknown: deque[SubmitColumns] = deque()
        self._finding = False  # whether a task looks up the channels of `_unknown`

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`, of at least one entry: `done` is called once with the ids or the error. Raises `Overloaded`,
        `Closed`, and `MessageTooLarge` where the channels are known."""
        encoded = self._management.encode(entries)
        names, rows, sizes = self._management.route(encoded)
        size = sum(sizes) + ROW_BYTES * len(sizes)
        found = {name: self._catalog.find(name) for name in set(names)}
        known = {name: channel for name, channel in found.items() if channel is not None}
        if len(known) == len(found):
            _check_sizes(known, names, sizes, self._cluster.options)
        submitted = SubmitColumns(EncodedEntries(names, rows, sizes), SubmitCall(done, len(names), size))
        with self._pending.lock:
            self._pending.admit(size)
            if self._finding or len(known) < len(found):
                self._unknown.append(submitted)
                post = None if self._finding else self._start_finding
                self._finding = True
            else:
                post = self._start if self._put(known, submitted) else None
        if post is not None:
            self._io.post(post)

    def send_queue(self, channel: KafkaChannel) -> ChannelSendQueue:
        """The send queue of a channel, created where there is none. The caller has the lock of the
        pending bytes."""
        send_queue = self._send_queues.get(channel)
        if send_queue is None:
            all_copies = channel.policy.acks is Durability.ALL and not channel.policy.ephemeral
            sender = Sender(
                self._cluster,
                channel.topic,
                self._connections[channel.incarnation % len(self._connections)],
                lambda: self._management.ensure(channel),
                ACKS_ALL if all_copies else ACKS_LEADER,
                channel.name,
                lambda: channel.topic_id,
                channel.number,
            )
            batch_bytes = min(self._cluster.options.batch_bytes, UNPACKED_BYTES)  # the most that readers unpack
            send_queue = self._send_queues[channel] = ChannelSendQueue(channel, sender, self._pending, batch_bytes)
        return send_queue

    def acknowledged_to(self, channel: KafkaChannel) -> int:
        """The last offset of a channel that was acknowledged in this process, -1 for none."""
        send_queue = self._send_queues.get(channel)
        return -1 if send_queue is None else send_queue.last_offset

    def forget_dropped(self) -> None:
        """Remove the send queues of dropped channels."""
        with self._pending.lock:
            self._send_queues = {
                channel: send_queue for channel, send_queue in self._send_queues.items() if not channel.dropped
            }

    def _put(self, channels: dict[str, KafkaChannel], submitted: SubmitColumns) -> bool:
        """Put entries into send queues, under the lock. Returns whether `_start` has to be called."""
        (names, rows, sizes), call = submitted
        idle = not self._starting
        call.split(len(channels))
        for name, channel in channels.items():
            send_queue = self.send_queue(channel)
            if len(channels) == 1:
                starts = send_queue.add(SubmitPart(call, range(len(names))), rows, sizes)
            else:
                indexes = [index for index, other in enumerate(names) if other == name]
                starts = send_queue.add(
                    SubmitPart(call, indexes), [rows[at] for at in indexes], [sizes[at] for at in indexes]
                )
            if starts:
                self._starting.append(send_queue)
        return idle and bool(self._starting)

    # ---- on the I/O loop ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._pending.lock:
            send_queues, self._starting = self._starting, []
        for send_queue in send_queues:
            self._io.spawn(send_queue.run(self._flush))

    def _start_finding(self) -> None:
        self._io.spawn(self._find_unknown())

    async def _find_unknown(self) -> None:
        """Look up the channels of the waiting submits, one submit after the other."""
        try:
            while (submitted := self._next_unknown()) is not None:
                try:
                    for name in set(submitted.encoded.names):
                        await self._management.subscribed(name)
                    encoded = self._management.route(submitted.encoded)
                    found = {name: await self._management.find(name) for name in set(encoded.names)}
                    _check_sizes(found, encoded.names, encoded.sizes, self._cluster.options)
                except TidewalError as error:
                    self._refuse(error)
                    continue
                with self._pending.lock:
                    self._unknown.popleft()
                    start = self._put(found, submitted._replace(encoded=encoded))
                if start:
                    self._start()
        except BaseException:  # cancelled: the log is closed
            while self._next_unknown() is not None:
                self._refuse(Closed("the log is closed"))
            raise

    def _next_unknown(self) -> SubmitColumns | None:
        with self._pending.lock:
            self._finding = bool(self._unknown)
            return self._unknown[0] if self._unknown else None

    def _refuse(self, error: TidewalError) -> None:
        with self._pending.lock:
            call = self._unknown.popleft().call
        call.finished(error)
        self._pending.release(call.size, call.answer)
        self._flush()


def _check_sizes(
    channels: dict[str, KafkaChannel], names: Sequence[str], sizes: Sequence[int], options: KafkaOptions
) -> None:
    """Raise `MessageTooLarge` for the first message that is over its channel's limit."""
    limits = {name: options.largest_message(channel.policy.max_message_bytes) for name, channel in channels.items()}
    if max(sizes) <= min(limits.values()):
        return
    for name, size in zip(names, sizes, strict=True):
        check_size(name, size, limits[name])
