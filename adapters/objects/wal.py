"""The `Wal` over a log on object storage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from ...runtime.clock import Clock
from ...runtime.errors import ChannelNotFound, Closed, Fenced, MessageTooLarge, TidewalError, Unavailable
from ...runtime.groups.coordinator_client import CoordinatorClient
from ...runtime.groups.group_consumer import GroupConsumer
from ...runtime.groups.group_wal import GroupWal
from ...runtime.groups.progress import GroupProgress, group_info
from ...runtime.log.admission import PendingBytes
from ...runtime.log.checks import check_name, check_plain, not_found, other_policy
from ...runtime.log.migration_state import MIGRATION_CHANNEL, check_in_use
from ...runtime.log.payloads import check_timestamps, owned
from ...runtime.log.replication_state import REPLICATION_CHANNEL, check_not_replica
from ...runtime.log.wal import (
    Append,
    Capabilities,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    From,
    FromId,
    FromTime,
    GroupInfo,
    OnAppended,
    Start,
)
from ...runtime.loop_bridge import call_on
from ...runtime.metrics.metrics import Metrics
from .backend import CAPABILITIES, LINKED
from .block import CONTROL, Block
from .committer import Committer
from .control import ChannelCreated, ChannelDropped, Control, HoldMoved, Truncated
from .ephemeral_access import EphemeralAccess
from .group_positions import ObjectGroups
from .link.access import LinkAccess
from .link.linked_groups import RoutedCoordinatorClient
from .link.log_links import LinkUser, LogLinks
from .log_tail import LogTail
from .maintenance import Maintenance
from .open_log import open_log
from .ownership import Ownership
from .pace import PACE, MaintenancePace
from .section_reader import SectionReader
from .settings import ObjectsSettings
from .store import ObjectStore
from .stored_channel import StoredChannel
from .submits import QueuedSubmit, channels_of

SUBMIT_BYTES: Final = 64 * 1024 * 1024  # of one submit: it lies in one block
FIRST_POLL_S: Final = 0.025

T = TypeVar("T")


class ObjectWal(GroupWal):
    """A log of which all that lasts is in an object store. One process at a time writes to it: the first call that
    writes makes this process the owner, where no other one is. All others read it, from the store, each by itself.

    It is used from the event loop on which it was opened; `submit` may be called on any thread.
    """

    name = "objects"

    def __init__(
        self,
        shown: str,
        store: ObjectStore,
        settings: ObjectsSettings,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        pace: MaintenancePace = PACE,
        *,
        try_store: bool = False,
        access: LinkAccess | None = None,
        may_own: bool = True,
        in_use_only: bool = True,
    ) -> None:
        """With `access` this process writes through the owner of the log, where that is another one, and others through
        this one; one that must not own the log (`may_own`) needs it. With `in_use_only` it does not come to own it
        where the log is migrated since, and never where a replica has taken its place."""
        super().__init__(shown, metrics)
        self.capabilities: Capabilities = CAPABILITIES if access is None else LINKED
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._log = log = open_log(store, settings, pace, clock, metrics, try_store=try_store)
        self._objects, self._state, self._news = log.objects, log.state, log.news
        self._tail = LogTail(log, self._owns, self._on_read)
        self._committer = Committer(log, self._on_durable, self._on_queued, self._on_lost)
        self._maintenance = Maintenance(log, self._owns, self._commit)
        self._ownership = Ownership(
            log, self._tail, self._committer, self._check_may_own, lambda: self._links.listen(), self._on_owned
        )
        user = LinkUser(
            submit_here=self._submit_here,
            answer_ephemeral=lambda question: self._ephemeral.answer(question),
            groups=lambda: None if self._groups is None else self._groups.service,
            changed=self._on_link_changed,
        )
        self._links = LogLinks(log, self._tail, self._committer, self._ownership, access, user, may_own=may_own)
        self._sections = SectionReader(log, lambda: self._fresh(confirmed=True), self._is_closed)
        self._ephemeral = EphemeralAccess(log, self._ownership, self._links.route, self._is_closed, self._wait)
        self._pending = PendingBytes(settings.pending_bytes, shown)
        self._groups: ObjectGroups | None = None  # while this process owns the log
        self._routed_groups: RoutedCoordinatorClient | None = None
        if access is not None:
            self._routed_groups = RoutedCoordinatorClient(self._links.route, self._own_client, self._is_closed)
        self._members: list[GroupConsumer] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_opened = self._must_own = False
        self._in_use_only = in_use_only

    def _owns(self) -> bool:
        return self._committer.owns

    def _is_closed(self) -> bool:
        return self._closed

    async def open(self, *, must_be: bool = False, own: bool = False) -> None:
        """Read the log to its end, changing nothing unless it is to `own` the log, or be linked to its owner. A process
        that was to own the log writes nothing more, with `Fenced`, behind another one that came to own it. Raises
        `Unavailable`, also where the log `must_be` there and is not."""
        await self._tail.catch_up()
        if must_be and not self._objects.log:
            raise Unavailable(f"there is no log at {self._shown}")
        if own:
            await self._links.route.reach()
        self._is_opened, self._must_own = True, own and self._committer.owns

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        self._check_open()
        check_name("channel name", channel)
        await self._fresh(confirmed=False)
        if channel not in self._state.names:
            await self._change(ChannelCreated(channel, policy))
        found = self._find(channel)  # of several that are created at once the first is
        if found.policy != policy:
            raise other_policy(channel)

    async def channels(self) -> list[str]:
        self._check_open()
        await self._fresh(confirmed=False)
        return sorted(self._state.names)

    async def describe(self, channel: str) -> ChannelInfo:
        async def info(found: StoredChannel) -> ChannelInfo:
            first, latest = await self._ends(found)
            return ChannelInfo(channel, found.policy, first, latest, SUBMIT_BYTES)

        return await self._with_channel(channel, info)

    async def drop_channel(self, channel: str) -> None:
        self._check_open()
        await self._fresh(confirmed=False)
        found = self._state.names.get(channel)
        if found is not None:
            await self._change(ChannelDropped(found.number))

    async def latest_id(self, channel: str) -> bytes | None:
        return (await self._with_channel(channel, self._ends))[1]

    async def _ends(self, channel: StoredChannel) -> tuple[bytes | None, bytes | None]:
        """The ids of its first and last entries."""
        if channel.policy.ephemeral:
            ends = await self._ephemeral.ends(channel)
            if ends is None:  # what else there is to know is in the store
                await self._fresh(confirmed=True)
                self._ephemeral.check_there(channel)
            return ends or (None, None)
        return channel.first_id, channel.latest

    async def truncate(self, channel: str, id: bytes) -> None:
        async def remove(found: StoredChannel) -> None:
            if found.policy.ephemeral:
                await self._ephemeral.truncate(found, id)
            else:
                await self._change(Truncated(found.number, id))

        await self._with_channel(channel, remove)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        self._check_open()
        await self._fresh(confirmed=True)
        found = self._find(channel)
        if not found.policy.ephemeral and found.holds.get(holder) != id:
            await self._change(HoldMoved(found.number, holder, id))

    def _find(self, channel: str) -> StoredChannel:
        found = self._state.names.get(channel)
        if found is None:
            raise not_found(channel)
        return found

    async def _with_channel(self, channel: str, use: Callable[[StoredChannel], Awaitable[T]]) -> T:
        """The result of `use` with the channel as it is after all that was acknowledged before the call. An ephemeral
        one is asked of the log's owner in any case, which says where it was dropped, and may have been made again.
        Raises `ChannelNotFound`."""
        self._check_open()
        known = self._state.names.get(channel)
        if known is not None and known.policy.ephemeral:
            try:
                return await use(known)
            except ChannelNotFound:
                pass
        await self._fresh(confirmed=True)
        return await use(self._find(channel))

    async def _fresh(self, *, confirmed: bool) -> None:
        """Know what other processes have done. An owner knows unless it is one no more without having noticed, which
        costs a request to rule out: `confirmed`."""
        if self._committer.owns and confirmed:
            await self._ownership.confirm()
        if not self._committer.owns:
            await self._links.route.catch_up()

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        check_plain([entry.key for entry in entries], [entry.headers for entry in entries])
        check_timestamps([entry.timestamp for entry in entries])
        self._submit([entry._replace(payload=owned(entry.payload)) for entry in entries], (), done)

    def _submit_here(self, entries: Sequence[Append], controls: Sequence[Control], done: OnAppended) -> None:
        """`_submit` of what this process writes as the owner, or not at all."""
        self._submit(entries, controls, done, here=True)

    def _submit(
        self, entries: Sequence[Append], controls: Sequence[Control], done: OnAppended, *, here: bool = False
    ) -> None:
        """Queue entries, and control entries that are in the log with them or not at all."""
        if self._closed:
            raise self._closed_error()
        if self._committer.owns:
            channels_of(self._state, entries)
        size = sum(len(entry.payload) for entry in entries)
        if size > SUBMIT_BYTES:
            raise MessageTooLarge(f"{size} bytes are over what one submit takes", size=size, limit=SUBMIT_BYTES)
        if not entries and not controls:
            done([])
            return
        with self._pending.lock:  # so that the order of the calls is that of the queue
            self._pending.admit(size)
            deadline = self._loop.time() + self._settings.delivery_timeout_s
            self._committer.add(QueuedSubmit(entries, controls, size, done, deadline, self._pending, here))
        self._committer.notice()

    async def _change(self, control: Control) -> None:
        """Store a control entry, and let it have its effect here."""
        await self._links.route.reach()
        future, done = self._notifiers.promise()
        self._submit((), [control], done)
        await future
        if not self._committer.owns:
            await self._links.route.catch_up()

    async def _commit(self, controls: Sequence[Control]) -> None:
        """Store control entries in one block, as the owner of the log."""
        future, done = self._notifiers.promise()
        self._submit_here((), controls, done)
        await future

    # ---- owning ------------------------------------------------------------------------------------------------------

    async def _check_may_own(self) -> None:
        """Where this process comes to own the log after opening it, look as `open_wal` did: it may have been migrated,
        or a replica have taken its place, while this process wrote nothing. Who looks at migrations itself looks at
        none of replicas."""
        if not self._is_opened:
            return
        if self._must_own:
            if await self._ownership.has_passed():
                raise Fenced("another process has come to own the log since this one opened it: open it again")
        elif not self._state.names.keys().isdisjoint((MIGRATION_CHANNEL, REPLICATION_CHANNEL)):
            await (check_in_use if self._in_use_only else check_not_replica)(self, self._shown)

    def _on_queued(self) -> None:
        self._links.on_queued()

    def _on_link_changed(self) -> None:
        self._news.tell()
        self._poll_while_awaited()

    def _on_owned(self) -> None:
        self._groups = ObjectGroups(self._log, self._submit_here, self._committer.last_sent)
        self._run("maintain the log", self._maintenance.run)
        self._news.tell()

    def _on_read(self) -> None:
        """Others have written something that is applied now."""
        self._committer.decide()
        self._news.tell()

    def _on_durable(self, block: Block) -> None:
        self._log.cache.add(block)
        if any(row.channel == CONTROL for row in block.table):
            self._log.memory.forget(self._state)
            if self._groups is not None:
                self._groups.coordinator.channels_changed()
        self._links.push(block)
        self._news.tell()

    def _on_lost(self) -> None:
        self._links.dismiss()
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self._poll_while_awaited()

    def _run(self, name: str, work: Any) -> None:
        """Run `work`, unless it is running."""
        running = self._tasks.get(name)
        if running is None or running.done():
            self._tasks[name] = asyncio.create_task(work(), name=f"{name}: {self._shown}")

    # ---- reading -----------------------------------------------------------------------------------------------------

    async def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        self._check_open()
        try:
            found, behind = await self._begin(channel, start)
            while not self._closed:
                if found.dropped:
                    raise ChannelNotFound(f"channel {channel} was dropped", channel=channel)
                entries = await (self._ephemeral if found.policy.ephemeral else self._sections).following(found, behind)
                if entries and not self._closed:
                    behind = entries[-1].id
                    yield entries
                elif not (self._closed or found.policy.ephemeral):
                    await self._more(found, behind)
        except Closed:  # meanwhile
            return

    async def _begin(self, channel: str, start: Start) -> tuple[StoredChannel, bytes]:
        """The channel, and the id behind which a reader begins. Raises `ChannelNotFound` and `PositionLost`."""
        known = self._state.names.get(channel) if self._committer.owns else None
        end = None if known is None else known.end  # before anything that is awaited: what follows comes after

        async def begin(found: StoredChannel) -> tuple[StoredChannel, bytes]:
            if found.policy.ephemeral:
                return found, await self._ephemeral.start(found, start)
            if start is From.LATEST and found is known and end is not None and self._committer.owns:
                return found, max(end, found.removed_to)
            return found, await self._start(found, start)

        return await self._with_channel(channel, begin)

    async def _start(self, channel: StoredChannel, start: Start) -> bytes:
        """The id behind which a reader of a durable channel begins. Raises `PositionLost`."""
        match start:
            case From.EARLIEST:
                return channel.removed_to
            case From.LATEST:
                return channel.end
            case FromId(id, inclusive):
                return channel.behind_of(id, inclusive=inclusive)
            case FromTime(timestamp):
                end = channel.end  # before looking: what comes meanwhile comes behind it
                found = await self._sections.first_since(channel, timestamp)
                return end if found is None else channel.behind_of(found, inclusive=True)

    async def _more(self, channel: StoredChannel, behind: bytes) -> None:
        """Wait until there may be more behind an id."""
        there = channel.latest
        if there is None or there <= behind:
            await self._wait()

    async def _wait(self) -> None:
        """Wait until there may be news."""
        self._loop.call_soon(self._poll_while_awaited)
        await self._news.wait()

    def _poll_while_awaited(self) -> None:
        """Look into the store for readers that wait, unless this process is the one that writes, or is told."""
        if self._must_poll:
            self._run("poll", self._poll)

    @property
    def _must_poll(self) -> bool:
        told = self._committer.owns or self._links.route.link is not None
        return self._news.awaited and not told and not self._closed

    async def _poll(self) -> None:
        pause_s = FIRST_POLL_S
        while self._must_poll:
            await self._links.route.look()
            await asyncio.sleep(pause_s)
            try:
                applied = await self._tail.catch_up()
            except Unavailable:
                applied = 0
            except TidewalError as error:
                self._news.fail(error)
                return
            pause_s = FIRST_POLL_S if applied else min(2 * pause_s, self._settings.poll_s)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        async def find(found: StoredChannel) -> bytes | None:
            if found.policy.ephemeral:
                return await self._ephemeral.id_at(found, timestamp)
            return await self._sections.first_since(found, timestamp)

        return await self._with_channel(channel, find)

    # ---- groups ------------------------------------------------------------------------------------------------------

    async def join(self, group: str, channels: Sequence[str], **options: Any) -> GroupConsumer:
        member = await super().join(group, channels, **options)
        self._members.append(member)
        return member

    async def groups(self) -> list[GroupInfo]:
        self._check_open()
        await self._fresh(confirmed=True)
        if self._groups is not None or self._links.route.link is not None:
            return await (await self._coordinator_client()).groups()
        progress: dict[str, dict[str, GroupProgress]] = {}
        for channel in self._state.names.values():
            for group, each in channel.groups.items():
                progress.setdefault(group, {})[channel.name] = each
        return [group_info(group, found, {}) for group, found in sorted(progress.items())]

    async def _coordinator_client(self) -> CoordinatorClient:
        self._check_open()
        await self._links.route.reach()
        client = self._routed_groups or self._own_client()
        if client is None:
            raise Unavailable("another process owns the log now")
        return client

    def _own_client(self) -> CoordinatorClient | None:
        return None if self._groups is None else self._groups.client

    # ---- closing -----------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        for member in self._members:
            await member.aclose()
        self._closed = True
        self._links.retire()
        drained = asyncio.Event()
        self._pending.close(lambda: call_on(self._loop, drained.set))
        with suppress(TimeoutError):
            await asyncio.wait_for(drained.wait(), self._settings.delivery_timeout_s)
        await self._ownership.close()
        await self._committer.hand_over()
        await self._links.close()
        self._committer.close()
        if self._routed_groups is not None:
            self._routed_groups.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._news.tell()
        await self._objects.close()
