"""`RocksMQ`: the owner of a directory, as a `Wal`.

Three threads beside the callers': the journal's writer, maintenance (segments, retention, free space) and, when served,
the socket's. Appending is in `appending.py`, managing channels in `management.py`, what both share in
`journal/registry.py`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ....runtime.aio_fsync import KernelDisk
from ....runtime.clock import Clock, SystemClock
from ....runtime.disk import Disk
from ....runtime.errors import DirectoryInUse, DirectoryUnwritable, DiskFull, JournalFailed, TidewalError
from ....runtime.groups.coordinator import GroupCoordinator, epochs
from ....runtime.groups.coordinator_client import CoordinatorClient, GroupAcks
from ....runtime.groups.group_wal import GroupWal
from ....runtime.groups.local_coordinator_client import LocalCoordinatorClient
from ....runtime.log.checks import check_plain
from ....runtime.log.stamps import present, stamped
from ....runtime.log.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    Headers,
    OnAppended,
    Payload,
    Start,
)
from ....runtime.loop_bridge import LoopNotifier
from ....runtime.metrics.metrics import Metrics
from ..index.history import History
from ..index.index import Index
from ..index.lookup import first_at, first_entry
from ..journal import channels as records
from ..journal.channels import encode_id
from ..journal.commits import Commits
from ..journal.journal import PENDING_BYTES, Journal
from ..journal.maintenance import TICK_S, Maintenance
from ..journal.pending import control
from ..journal.recovery import Recovered, Recovery, RecoveryReport
from ..journal.registry import Registry
from ..journal.retention import Retention
from ..journal.segments import Segments
from ..metrics import RocksMQMetrics
from .admission import Admission
from .appending import Appender
from .channel_cache import LiveChannel
from .dedup import Deduplicator
from .directory import Directory
from .group_service import GroupService
from .groups import JournalGroups
from .management import Management
from .reader import Reader
from .server import Server

T = TypeVar("T")

_log = logging.getLogger(__name__)

SEGMENT_BYTES = 32 * 1024 * 1024
TAIL_BYTES = 64 * 1024 * 1024
FREE_SPACE_BYTES = 256 * 1024 * 1024
SPARE_SEGMENTS = 1
READ_THREADS = 2
LATE_TICK_S = 2.0  # a tick that comes so late shows that the process was suspended, or had no processor
CAPABILITIES = Capabilities(
    atomic_batches=True,
    seek_by_time=True,
    truncate=True,
    multi_process_write=True,
    one_node=True,
    groups=True,
    individual_acks=True,
    atomic_commits=True,
    atomic_acks=True,
    drops_temporary=True,
    shared_segments=True,
    one_machine=True,
)


class RocksMQ(GroupWal):
    """An owned journal. Open with `RocksMQ.open`; everything public is thread-safe unless it is a coroutine."""

    name = "rocksmq"
    capabilities = CAPABILITIES

    @classmethod
    async def open(
        cls,
        directory: str,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        spare_segments: int = SPARE_SEGMENTS,
        tail_bytes: int = TAIL_BYTES,
        pending_bytes: int = PENDING_BYTES,
        free_space_bytes: int = FREE_SPACE_BYTES,
        disk: Disk | None = None,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        serve: bool = True,
        tcp_port: int | None = None,
        yield_ownership: Callable[[], None] | None = None,
    ) -> RocksMQ:
        """Own `directory`, created if absent, and recover what it holds.

        `segment_bytes` may differ from one opening to the next. `spare_segments` recycled files are kept beside the one
        made ready ahead of need. `tail_bytes` of the newest entries stay in memory. Over `pending_bytes` of appends not
        yet written, `submit` raises `Overloaded`; below `free_space_bytes` of free space, `DiskPressure`. With `serve`,
        other processes may use the log through a Unix socket in the directory, with `tcp_port` also through that port
        of 127.0.0.1 (0: any; see `tcp_port`), if they can read the secret in the file `token`. `yield_ownership` is
        called on another thread when a process that requires ownership asks for the directory: close the log then.
        Without it, that process is refused.

        Raises `DirectoryInUse`, `DirectoryUnwritable`, `FormatTooNew`, `CorruptLog`, `DiskFull`, `JournalFailed`.
        """
        store = cls(directory, disk or KernelDisk(), clock or SystemClock(), metrics, yield_ownership)
        return await asyncio.to_thread(
            store._open,
            directory,
            segment_bytes,
            spare_segments,
            tail_bytes,
            pending_bytes,
            free_space_bytes,
            serve,
            tcp_port,
        )

    def __init__(
        self,
        directory: str,
        disk: Disk,
        clock: Clock,
        metrics: Metrics | None,
        yield_ownership: Callable[[], None] | None,
    ) -> None:
        """Use `open`."""
        super().__init__(directory, metrics)
        self._disk, self._clock, self._yield_ownership = disk, clock, yield_ownership
        self._metrics = RocksMQMetrics(metrics)
        self._ticked = clock.monotonic()
        self._server: Server | None = None

    # ---- opening and closing -----------------------------------------------------------------------------------------

    def _open(
        self,
        directory: str,
        segment_bytes: int,
        spare_segments: int,
        tail_bytes: int,
        pending_bytes: int,
        free_space_bytes: int,
        serve: bool,
        tcp_port: int | None,
    ) -> RocksMQ:
        self._directory = Directory(directory)
        self._reads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="tidewal-read")
        undo = self._undo = [self._directory.close]
        try:
            self._index = Index(self._directory.index, self._metrics.index_failures.inc)
            undo.append(self._index.close)
            self._segments = Segments(self._disk, self._directory.journal, segment_bytes, spare_segments)
            undo.append(self._segments.close)
            recovered = Recovery(self._disk, self._segments, self._index).run()
            if recovered.current is None and self._segments.wants_spare:
                self._segments.prepare_spare()
            self._adopt(recovered, tail_bytes, pending_bytes, free_space_bytes)
            undo += [self._journal.mark_end, self._stop_reading, self._maintenance.stop, self._journal.stop]
            self._maintenance.start()
            self._journal.start()
            self._begin_incarnation()
            if serve:
                self._server = Server(
                    self,
                    self._directory.path,
                    boot=self._registry.boot,
                    frame_bytes=self._segments.capacity,
                    groups=GroupService(self._coordinator),
                    tcp_port=tcp_port,
                )
                undo.append(self._server.stop)
                self._server.start()
        except BaseException as error:
            self._undo_opening()
            if isinstance(error, OSError):
                raise _opening_failed(self._directory.path, error) from error
            raise
        return self

    def _adopt(self, recovered: Recovered, tail_bytes: int, pending_bytes: int, free_space_bytes: int) -> None:
        self.recovery: RecoveryReport = recovered.report
        recovered.table.drop_temporary()
        self.history: History = History(self._segments, self._index, recovered.sealed)
        self._registry = Registry(recovered, tail_bytes, self._segments.capacity // 7)  # an eighth of a segment
        self._maintenance = Maintenance(lambda: self._segments.wants_spare, self._segments.prepare_spare, self._tick)
        commits = Commits(
            self._disk,
            self._segments,
            self._index,
            recovered,
            clock=self._clock,
            deliver=self._registry.deliver,
            budget=self._registry.budget,
            need_spare=self._maintenance.need_spare,
            keep_ready=self._maintenance.wake,
            metrics=self._metrics,
        )
        self._journal = Journal(
            self._disk,
            commits,
            capacity=self._segments.capacity,
            clock=self._clock,
            lock=self._registry.lock,
            notifiers=self._notifiers,
            metrics=self._metrics,
        )
        self._admission = Admission(
            self._directory.path,
            self._journal,
            commit_bytes=self._segments.capacity,
            pending_bytes=pending_bytes,
            free_space_bytes=free_space_bytes,
        )
        self._metrics.free_limit.set(free_space_bytes)
        self._appender = Appender(self._registry, self._journal, self._admission, self._notifiers)
        self._dedup = Deduplicator(recovered.table.clients, self._registry, self._appender, self._clock)
        self._coordinator = GroupCoordinator(
            self._clock, JournalGroups(self._registry, self._journal.table, self._appender), epochs(self._registry.boot)
        )
        self._management = Management(
            self._registry,
            self._journal,
            self._admission,
            self._notifiers,
            self._clock,
            channels_changed=self._coordinator.channels_changed,
        )
        self._retention = Retention(
            self._journal, self._segments, self._index, self._registry, clock=self._clock, metrics=self._metrics
        )

    def _begin_incarnation(self) -> None:
        """Count this incarnation in the journal, which also proves that the journal takes writes."""
        done = threading.Event()
        outcome: list[TidewalError] = []

        def settled(result: list[bytes] | TidewalError) -> None:
            if isinstance(result, TidewalError):
                outcome.append(result)
            done.set()

        self._journal.put(control(records.boot(self._registry.boot), self._clock.wall_ms(), settled))
        done.wait()
        if outcome:
            raise outcome[0]
        self.check_space()

    async def _close(self) -> None:
        with self._registry.lock:
            self._closed = True
            self._admission.close()
        self._registry.wake_all()
        self._coordinator.close()
        await asyncio.to_thread(self._undo_opening)

    def _undo_opening(self) -> None:
        """Undo what opening did, each step even where those before it failed, so that the directory is free in the end.
        A step that fails loses nothing that was acknowledged: that is in the journal, and the next opening finds it. So
        the error is logged, and not raised."""
        for step in reversed(self._undo):
            try:
                step()
            except Exception:
                _log.exception("%s is closed, but for a step that failed", self._directory.path)

    def _stop_reading(self) -> None:
        self._registry.wake_all()
        self._reads.shutdown(wait=True)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def directory(self) -> str:
        return self._directory.path

    @property
    def tcp_port(self) -> int | None:
        """The port of 127.0.0.1 at which other processes are served, if any."""
        return self._server.port if self._server is not None else None

    @property
    def boot(self) -> int:
        """The number of this incarnation of the owner, another for each opening of the directory."""
        return self._registry.boot

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._management.create(channel, policy)

    async def create_channel_for(self, client: bytes | None, channel: str, policy: ChannelPolicy) -> None:
        """`create_channel` for a client in another process."""
        await self._management.create(channel, policy, client)

    def created_by(self, client: bytes) -> list[LiveChannel]:
        """The temporary channels that a client in another process has created, perhaps beside others."""
        return [channel for channel in list(self._registry.by_number.values()) if client in channel.creators]

    async def drop_channel(self, channel: str) -> None:
        await self._management.drop(channel)

    async def drop_created(self, client: bytes, channel: LiveChannel) -> None:
        """Drop a temporary channel of a client that is gone, unless others have created it, too."""
        await self._management.drop_created(client, channel)

    async def truncate(self, channel: str, id: bytes) -> None:
        await self._management.truncate(self.find(channel), id)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._management.hold(self.find(channel), holder, id)

    async def channels(self) -> list[str]:
        self._admission.check_open()
        return sorted(self._registry.names)

    async def describe(self, channel: str) -> ChannelInfo:
        found = self.find(channel)
        first = await self.blocking(lambda: first_entry(found, self.history))
        return ChannelInfo(channel, found.policy, first, found.latest_id)

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        self._appender.submit(entries, done)

    def submit_with_acks(self, entries: Sequence[Append], acks: GroupAcks, done: OnAppended) -> None:
        self._coordinator.commit(acks.group, acks.member, acks.acks, entries, done)

    def submit_from(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> None:
        """`submit` for another process, written once however often it is sent: `client` is that process's random id,
        `number` counts its appends from 1, and all up to `settled` are answered. Never raises: `done` gets the error,
        too."""
        self._dedup.submit(client, number, settled, entries, done)

    def submit_each_from(
        self, client: bytes, number: int, settled: int, entries: Sequence[Append], done: OnAppended
    ) -> bool:
        """`submit_from` for each entry by itself, numbered from `number` on, in one commit; `done` gets all ids. False,
        with nothing done, where one might be refused or repeated, or asks for less than durability.

        The commit begins with `wake`, or with the next append of another caller.
        """
        return self._dedup.submit_each(client, number, settled, entries, done)

    def wake(self) -> None:
        """Let the journal commit what `submit_each_from` has queued. From a loop."""
        self._journal.schedule(self._notifiers.current())

    async def append(
        self,
        channel: str,
        payload: Payload,
        timestamp: int = 0,
        *,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> bytes:
        check_plain((key,), (headers,))
        return await self._appender.append(channel, payload, timestamp or present())

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        future, done = self._notifiers.promise()
        self._appender.submit(stamped(entries), done, notifier=self._notifiers.current())
        return await future

    def refusal(self) -> TidewalError | None:
        return self._admission.refusal()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        self._admission.check_open()
        return Reader(self, channel, start)

    async def latest_id(self, channel: str) -> bytes | None:
        return self.find(channel).latest_id

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        found = self.find(channel)
        number = await self.blocking(lambda: first_at(found, self.history, timestamp))
        return None if number is None else encode_id(number)

    def find(self, channel: str) -> LiveChannel:
        """The open channel of that name. Raises `Closed` and `ChannelNotFound`."""
        self._admission.check_open()
        return self._registry.find(channel)

    def notifier(self) -> LoopNotifier:
        """The notifier of the running loop."""
        return self._notifiers.current()

    async def blocking(self, call: Callable[[], T]) -> T:
        """Run a blocking read on one of the read threads."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, call)
        except RuntimeError:
            if self._admission.closing:
                raise self._admission.closed() from None
            raise

    # ---- groups ------------------------------------------------------------------------------------------------------

    async def _coordinator_client(self) -> CoordinatorClient:
        return self.coordinator_client()

    def coordinator_client(self) -> CoordinatorClient:
        """The client with which this process calls the groups' coordinator."""
        return LocalCoordinatorClient(self._coordinator)

    # ---- yielding the directory --------------------------------------------------------------------------------------

    def request_yield(self) -> None:
        """Ask the caller that opened the log to close it, for a process that requires ownership of the directory.
        Raises `DirectoryInUse` where this process requires it, too."""
        if self._yield_ownership is None:
            path = self._directory.path
            raise DirectoryInUse(f"{path} is in use by process {os.getpid()}", path=path, pid=os.getpid())
        self._yield_ownership()

    # ---- maintenance -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._clock.monotonic()
        late_s, self._ticked = now - self._ticked - TICK_S, now
        self._management.publish()
        self._journal.check_stalled()
        self._keep_reserve()
        if late_s > LATE_TICK_S:  # heartbeats of members wait in the sockets: the next tick will know them
            self._coordinator.extend_sessions(late_s)
        else:
            self._coordinator.expire()
        self.check_space()
        self.retain_now()

    def _keep_reserve(self) -> None:
        before = self._segments.short
        try:
            self._segments.prepare_reserve()
        except OSError as error:
            if before is None or before.errno != error.errno:
                _log.warning("%s takes no more data, its reserve cannot be made: %s", self.directory, error)

    def check_space(self) -> bool:
        """Look at the free space; whether appends to durable channels are accepted. Runs twice a second by itself."""
        free = self._disk.free_bytes(self._directory.journal)
        before, pressure = self._admission.pressure, self._admission.note_space(free, short=self._segments.short)
        self._metrics.space(
            free, self._segments.size, len(self._segments.epochs), self._segments.spares, refused=bool(pressure)
        )
        if pressure and not before:
            _log.warning("appends are refused: %s", pressure[0])
        elif before and not pressure:
            _log.warning("appends to %s are accepted again, %d bytes are free", self.directory, free)
        return not pressure

    def retain_now(self) -> int:
        """Apply retention; how many segments went. Runs twice a second by itself."""
        return self._retention.apply()


def _opening_failed(path: str, error: OSError) -> TidewalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{path} cannot be opened: no space", path=path)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DirectoryUnwritable(f"{path} cannot be written: {error.strerror}", path=path)
    return JournalFailed(f"{path} cannot be opened: {error}", path=path)
