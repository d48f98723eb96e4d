"""Appending: check, count, and put entries into the lanes of their channels."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...runtime.errors import Closed, MessageTooLarge, TidewalError
from ...runtime.payloads import as_bytes
from ...runtime.wal import Append, Durability, OnAppended
from .catalog import Catalog, Channel
from .cluster import Cluster
from .io_thread import IoThread
from .lane import ROW_BYTES, Backlog, Lane, Part, Write
from .management import Management
from .options import Options
from .positions import Row, to_rows
from .sender import ACKS_ALL, ACKS_LEADER, Sender
from .topics import UNPACKED_BYTES


class Submitted(NamedTuple):
    """The columns of one submit, and its answer."""

    names: Sequence[str]
    rows: Sequence[Row]
    sizes: Sequence[int]
    write: Write


class Appender:
    """Appends from any thread. Where this process does not know a channel it may have been made elsewhere a moment
    ago: then the submit, and all behind it, wait until that is known."""

    def __init__(
        self,
        cluster: Cluster,
        catalog: Catalog,
        management: Management,
        backlog: Backlog,
        io: IoThread,
        connections: range,
        flush: Callable[[], None],
    ) -> None:
        """The lanes share `connections`; `flush` is called on the I/O loop when answers were given."""
        self._cluster, self._catalog, self._management = cluster, catalog, management
        self._backlog, self._io = backlog, io
        self._connections, self._flush = connections, flush
        self._lanes: dict[Channel, Lane] = {}
        self._starting: list[Lane] = []
        self._unknown: deque[Submitted] = deque()
        self._looking = False  # for the channels of these

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`, of one entry at least."""
        names, payloads, timestamps = zip(*entries, strict=True)
        payloads = payloads if set(map(type, payloads)) == {bytes} else tuple(map(as_bytes, payloads))
        sizes = list(map(len, payloads))
        size = sum(sizes) + ROW_BYTES * len(sizes)
        found = {name: self._catalog.find(name) for name in set(names)}
        known = {name: channel for name, channel in found.items() if channel is not None}
        if len(known) == len(found):
            _check_sizes(known, names, sizes, self._cluster.options)
        rows = to_rows(timestamps, payloads, int(time.time() * 1000))
        submitted = Submitted(names, rows, sizes, Write(done, len(names), size))
        with self._backlog.lock:
            self._backlog.admit(size)
            if self._looking or len(known) < len(found):
                self._unknown.append(submitted)
                post = None if self._looking else self._look
                self._looking = True
            else:
                post = self._start if self._put(known, submitted) else None
        if post is not None:
            self._io.post(post)

    def lane(self, channel: Channel) -> Lane:
        """The way into a channel; under the backlog's lock."""
        lane = self._lanes.get(channel)
        if lane is None:
            all_copies = channel.policy.acks is Durability.ALL and not channel.policy.ephemeral
            sender = Sender(
                self._cluster,
                channel.topic,
                self._connections[channel.incarnation % len(self._connections)],
                lambda: self._management.ensure(channel),
                ACKS_ALL if all_copies else ACKS_LEADER,
                channel.name,
                lambda: channel.topic_id,
            )
            batch_bytes = min(self._cluster.options.batch_bytes, UNPACKED_BYTES)  # what readers unpack
            lane = self._lanes[channel] = Lane(channel, sender, self._backlog, batch_bytes)
        return lane

    def acknowledged_to(self, channel: Channel) -> int:
        """The last offset of a channel that was acknowledged here, -1 for none."""
        lane = self._lanes.get(channel)
        return -1 if lane is None else lane.last_offset

    def forget_dropped(self) -> None:
        """Let go of the lanes into channels that are gone."""
        with self._backlog.lock:
            self._lanes = {channel: lane for channel, lane in self._lanes.items() if not channel.dropped}

    def _put(self, channels: dict[str, Channel], submitted: Submitted) -> bool:
        """Put entries into lanes, under the lock; whether `_start` has to be called."""
        names, rows, sizes, write = submitted
        idle = not self._starting
        write.split(len(channels))
        for name, channel in channels.items():
            lane = self.lane(channel)
            if len(channels) == 1:
                starts = lane.add(Part(write, range(len(names))), rows, sizes)
            else:
                places = [place for place, other in enumerate(names) if other == name]
                starts = lane.add(Part(write, places), [rows[at] for at in places], [sizes[at] for at in places])
            if starts:
                self._starting.append(lane)
        return idle and bool(self._starting)

    # ---- on the I/O loop ---------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._backlog.lock:
            lanes, self._starting = self._starting, []
        for lane in lanes:
            self._io.spawn(lane.run(self._flush))

    def _look(self) -> None:
        self._io.spawn(self._find_unknown())

    async def _find_unknown(self) -> None:
        """Find the channels of what waits for them, one submit after the other."""
        try:
            while (submitted := self._next_unknown()) is not None:
                try:
                    found = {name: await self._management.find(name) for name in set(submitted.names)}
                    _check_sizes(found, submitted.names, submitted.sizes, self._cluster.options)
                except TidewalError as error:
                    self._refuse(error)
                    continue
                with self._backlog.lock:
                    self._unknown.popleft()
                    start = self._put(found, submitted)
                if start:
                    self._start()
        except BaseException:  # cancelled: the log is closed
            while self._next_unknown() is not None:
                self._refuse(Closed("the log is closed"))
            raise

    def _next_unknown(self) -> Submitted | None:
        with self._backlog.lock:
            self._looking = bool(self._unknown)
            return self._unknown[0] if self._unknown else None

    def _refuse(self, error: TidewalError) -> None:
        with self._backlog.lock:
            write = self._unknown.popleft().write
        write.finished(error)
        self._backlog.release(write)
        self._flush()


def _check_sizes(channels: dict[str, Channel], names: Sequence[str], sizes: Sequence[int], options: Options) -> None:
    """Raise `MessageTooLarge` for the first message that is over its channel's limit."""
    limits = {name: options.largest_message(channel.policy.max_message_bytes) for name, channel in channels.items()}
    if max(sizes) <= min(limits.values()):
        return
    for name, size in zip(names, sizes, strict=True):
        limit = limits[name]
        if size > limit:
            raise MessageTooLarge(
                f"a message of {size} bytes for {name} is over its limit of {limit}", size=size, limit=limit
            )
