"""`SharedRocksMQ`: a directory that several processes share, as a `Wal`, for a process that need not own it.

It asks the owner over a connection. When the owner ends, by a crash or a close, one of the processes that share the
directory takes it over and the others connect to that process; it yields the directory to a process that requires
ownership. Appends in flight are sent again with their numbers, so each is in the log once or not at all; other requests
are repeated; readers go on behind the last entry that they delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ....runtime.clock import Clock, SystemClock
from ....runtime.errors import Closed, DirectoryInUse, Fenced, Overloaded, TidewalError, Unavailable
from ....runtime.groups.coordinator_client import CoordinatorClient
from ....runtime.groups.group_consumer import GroupConsumer
from ....runtime.groups.group_wal import GroupWal
from ....runtime.log.admission import PendingBytes
from ....runtime.log.checks import check_plain
from ....runtime.log.migration_state import check_in_use
from ....runtime.log.stamps import present
from ....runtime.log.wal import (
    Append,
    ChannelInfo,
    ChannelPolicy,
    Entry,
    Headers,
    OnAppended,
    Payload,
    Start,
)
from ..address import Address
from ..backend import FAILOVER_S
from ..log_directory import check_access, has_log
from ..owner.directory import is_owned, ownership_requested
from ..owner.handover import open_store
from ..owner.store import CAPABILITIES, RocksMQ
from .inflight import InflightAppends
from .owner import Owner, RemoteOwner
from .shared_coordinator_client import SharedCoordinatorClient
from .shared_reader import RemoteLog, SharedReader, cancelling

if TYPE_CHECKING:
    from ....runtime.filters.record_filter import RecordFilter
    from ....runtime.log.wal import Wal

T = TypeVar("T")


PENDING_BYTES = 64 * 1024 * 1024
FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.2  # between two attempts to find an owner
HELLO_S = 2.0  # for an owner's first answer, at least

_log = logging.getLogger(__name__)


class SharedRocksMQ(GroupWal):
    """Open with `SharedRocksMQ.connect`. Coroutines belong to the loop that opened it, `submit` to any thread."""

    name = "rocksmq"
    capabilities = CAPABILITIES

    @classmethod
    async def connect(
        cls,
        address: Address,
        *,
        takeover: bool = True,
        unowned_s: float | None = None,
        failover_s: float = FAILOVER_S,
        in_use_only: bool = True,
        **options: Any,
    ) -> SharedRocksMQ:
        """Find the owner at `address`, or with `takeover` become it, with `options` of `RocksMQ.open`. With `unowned_s`
        this fails after that many seconds where no process owns the directory, and waits longer only for one that
        starts.

        Whenever the owner is lost, this process searches another for `failover_s` seconds (0: one attempt); then all
        calls that wait end with `Unavailable`, and the next call begins another search. Over `pending_bytes` (one of
        `options`; 64 MiB here) of appends that are not answered, `submit` raises `Overloaded`. Each owner but the
        first, which is the opener's to check, is asked whether the log is in use (`check_in_use`), unless `in_use_only`
        is False: where it was migrated or replaced meanwhile, all calls end with `Moved`.

        Raises `Unavailable`, and what `RocksMQ.open` raises.
        """
        shared = cls(address, takeover, failover_s, options)
        if unowned_s is not None and address.directory:
            shared._unowned_s = min(unowned_s, failover_s)
        try:
            await shared.owner()
            shared._unowned_s = None  # from now on the owner may change
            shared._is_checked = in_use_only
        except BaseException:
            await shared.close()
            raise
        return shared

    def __init__(self, address: Address, takeover: bool, failover_s: float, options: dict[str, Any]) -> None:
        """Use `connect`."""
        super().__init__(str(address), options.get("metrics"))
        inspect.signature(RocksMQ.open).bind(address.directory, **options)  # an unknown option is a TypeError now
        self._address, self._failover_s, self._options = address, failover_s, options
        self._takeover = takeover and bool(address.directory)
        self._unowned_s: float | None = None
        self._is_checked = False
        self._clock: Clock = options.get("clock") or SystemClock()
        self._loop = asyncio.get_running_loop()
        pending = PendingBytes(options.get("pending_bytes", PENDING_BYTES), self._shown)
        self._inflight = InflightAppends(pending, self._clock, self._lose)
        self._shared_client = SharedCoordinatorClient(self)
        self._store: RocksMQ | None = None  # once this process owns the directory
        self._owner: Owner | None = None
        self._search: asyncio.Task[Owner] | None = None
        self._closings: set[asyncio.Task[None]] = set()
        self._readers: set[SharedReader] = set()

    @property
    def store(self) -> RocksMQ | None:
        """The log itself, while this process owns the directory."""
        return self._store

    @property
    def tcp_port(self) -> int | None:
        """The port of 127.0.0.1 at which this process serves other processes, if it does."""
        return self._store.tcp_port if self._store is not None else None

    # ---- channels ----------------------------------------------------------------------------------------------------

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self.ask(lambda owner: owner.create_channel(channel, policy))

    async def channels(self) -> list[str]:
        return await self.ask(lambda owner: owner.channels())

    async def describe(self, channel: str) -> ChannelInfo:
        return await self.ask(lambda owner: owner.describe(channel))

    async def drop_channel(self, channel: str) -> None:
        await self.ask(lambda owner: owner.drop_channel(channel))

    async def latest_id(self, channel: str) -> bytes | None:
        return await self.ask(lambda owner: owner.latest_id(channel))

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self.ask(lambda owner: owner.id_at(channel, timestamp))

    async def truncate(self, channel: str, id: bytes) -> None:
        await self.ask(lambda owner: owner.truncate(channel, id))

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self.ask(lambda owner: owner.hold(channel, holder, id))

    # ---- appending ---------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        """`Wal.submit`; the errors for a missing channel or a message that is too large come through `done` while
        another process owns the log."""
        self._check_open()
        store = self._store
        if store is not None:
            try:
                store.submit(entries, done)
                return
            except Closed:  # this process yielded the log a moment ago, and the append was not taken
                self._check_open()
        if not self._inflight.submit(entries, done):
            self._loop.call_soon_threadsafe(self._start_search)

    async def append(
        self,
        channel: str,
        payload: Payload,
        timestamp: int = 0,
        *,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> bytes:
        self._check_open()
        check_plain((key,), (headers,))
        timestamp = timestamp or present()
        store = self._store
        if store is not None:
            try:
                return await store.append(channel, payload, timestamp)
            except Closed:  # as in `submit`
                pass
        future, done = self._notifiers.promise()
        self.submit((Append(channel, payload, timestamp),), done)
        return (await future)[0]

    def refusal(self) -> TidewalError | None:
        """`Wal.refusal`, known only while this process owns the log."""
        store = self._store
        return None if store is None else store.refusal()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]:
        self._check_open()
        return SharedReader(self, channel, start, self._readers)

    def read_where(self, channel: str, start: Start, where: RecordFilter) -> AsyncIterator[Sequence[Entry]]:
        """`Wal.read_where`: another process that owns the log leaves entries out before it sends them."""
        self._check_open()
        return SharedReader(self, channel, start, self._readers, where)

    # ---- groups ------------------------------------------------------------------------------------------------------

    async def join(self, group: str, channels: Sequence[str], **options: Any) -> GroupConsumer:
        """`Wal.join`, again where the log gets another owner meanwhile."""
        join = super().join

        async def joined(_: Owner) -> GroupConsumer:
            try:
                return await join(group, channels, **options)
            except Fenced as error:
                raise Unavailable("the log has got another owner since the member joined") from error

        return await self.ask(joined)

    async def _coordinator_client(self) -> CoordinatorClient:
        self._check_open()
        return self._shared_client

    # ---- the owner ---------------------------------------------------------------------------------------------------

    async def ask(self, call: Callable[[Owner], Awaitable[T]]) -> T:
        """The answer of the owner, whichever process that is by then: asked again for `failover_s` while it changes."""
        deadline: float | None = None
        while True:
            owner = await self.owner()
            try:
                return await call(owner)
            except Closed:
                if not self.superseded(owner):
                    raise
            except Unavailable:
                now = self._clock.monotonic()
                deadline = now + self._failover_s if deadline is None else deadline
                if now >= deadline or owner is self._store:
                    raise
                self._detach(owner)

    def superseded(self, owner: Owner) -> bool:
        """Whether another process owns the log by now, or will: the errors of `owner` say nothing of the log then."""
        return owner is not self._owner and not self._closed

    async def owner(self) -> Owner:
        """The present owner, waited for while it changes. Raises `Closed`, `Unavailable`, what opening raises."""
        self._check_open()
        if self._owner is not None:
            return self._owner
        search = self._start_search()
        try:
            return await asyncio.shield(search)
        except asyncio.CancelledError:
            if search.cancelled() and not cancelling():
                raise self._closed_error() from None
            raise

    def _start_search(self) -> asyncio.Task[Owner]:
        """Search an owner, unless a search is running. On the loop."""
        if self._search is None or (self._search.done() and self._owner is None):
            self._search = self._loop.create_task(self._find())
            self._search.add_done_callback(_retrieve)
        return self._search

    def _lose(self, owner: Owner) -> None:
        """The owner does not answer any more. From any thread."""
        self._loop.call_soon_threadsafe(self._detach, owner)

    def _request_yield(self) -> None:
        """A process asks for the directory because it requires ownership. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the log will be soon
            self._loop.call_soon_threadsafe(self._yield_ownership)

    def _yield_ownership(self) -> None:
        """Yield the directory, if that process still requests it. It asks again where this comes too early."""
        store = self._store
        if store is not None and not self._closed and ownership_requested(store.directory):
            _log.info("%s is yielded: another process requires ownership", self._address)
            self._store = None  # first: calls that find it closed from now on go on with the next owner
            self._detach(store)

    def _detach(self, owner: Owner) -> None:
        if owner is not self._owner or owner is self._store:
            return
        self._owner = None
        self._inflight.interrupt()
        self._close_later(owner.close())
        if not self._closed or len(self._inflight):
            self._start_search()

    async def _find(self) -> Owner:
        """Own the directory or connect to its owner, and send again what is in flight."""
        if self._closings:  # a log that this process yields has the directory until it is closed
            await asyncio.wait(set(self._closings))
        began = self._clock.monotonic()
        deadline = began + self._failover_s
        pause_s = FIRST_PAUSE_S
        try:
            while True:
                try:
                    return await self._attempt(deadline)
                except (Unavailable, DirectoryInUse, Overloaded) as error:
                    if self._address.directory:
                        check_access(self._address.directory)  # waiting gives no permission
                    now = self._clock.monotonic()
                    unowned_s = self._unowned_s
                    if unowned_s is not None and now >= began + unowned_s and not is_owned(self._address.directory):
                        raise self._not_open() from None
                    if now >= deadline:
                        raise self._no_owner(error) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
        except TidewalError as error:
            self._inflight.fail(error)
            raise
        except Exception as error:
            _log.exception("the search for an owner of %s failed", self._address)
            failure = self._no_owner(error)
            self._inflight.fail(failure)
            raise failure from error

    async def _attempt(self, deadline: float) -> Owner:
        owner: Owner | None = None
        if self._takeover and not ownership_requested(self._address.directory):
            owner = await self._take_over()
        if owner is None:
            owner = await self._connect(deadline)
        try:
            if self._is_checked:  # as `open_wal` does, once more: the log may have been migrated without an owner
                wal = owner if isinstance(owner, RocksMQ) else cast("Wal", RemoteLog(owner))
                await check_in_use(wal, f"{self.name}://{self._address}")
            ephemeral = await self._ephemeral(owner)
            if isinstance(owner, RemoteOwner) and owner.lost:
                raise self._no_owner(ConnectionResetError())
        except BaseException:
            await owner.close()
            raise
        self._inflight.resume(owner, ephemeral)
        self._owner = owner
        if isinstance(owner, RocksMQ):
            self._store = owner
            _log.info("%s is owned by this process now", self._address)
        else:
            _log.info("%s is owned by another process, incarnation %d", self._address, owner.boot)
        return owner

    async def _take_over(self) -> Owner | None:
        """Own the directory; None while another process does."""
        try:
            return await open_store(self._address.directory, {**self._options, "yield_ownership": self._request_yield})
        except DirectoryInUse:
            return None

    async def _connect(self, deadline: float) -> RemoteOwner:
        try:
            async with asyncio.timeout(max(deadline - self._clock.monotonic(), HELLO_S)):
                return await RemoteOwner.open(self._address, self._inflight.client, self._detach)
        except TimeoutError as error:
            raise self._no_owner(error) from None

    async def _ephemeral(self, owner: Owner) -> set[str]:
        """The ephemeral channels among those of appends that an earlier owner has got."""
        found: set[str] = set()
        for channel in self._inflight.sent_before(owner.boot):
            try:
                if (await owner.describe(channel)).policy.ephemeral:
                    found.add(channel)
            except TidewalError as error:
                if isinstance(error, Unavailable):
                    raise
        return found

    def _no_owner(self, error: Exception) -> Unavailable:
        reason = str(error) or type(error).__name__
        message = f"no owner of {self._address} answers: {reason}"
        if not self._takeover:
            message += ". This process never owns it (read_only, own=False or a port): start one that does, e.g. a node"
        return Unavailable(message, path=str(self._address))

    def _not_open(self) -> Unavailable:
        directory, others = self._address.directory, "open the log without read_only or own=False"
        if has_log(directory):
            message = (
                f"no process has the log in {directory} open, and this one must not own it: start one that does, e.g. a"
                f" node (tidewal run), {others}, or look at it with `tidewal tail`"
            )
        else:
            message = (
                f"there is no log in {directory}, and this process must not make one: check the URL, start a process "
                f"that makes it, e.g. a node (tidewal run), or {others}"
            )
        return Unavailable(message, path=directory)

    # ---- closing -----------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        """Appends in flight are answered first, or end with `Unavailable` after `failover_s`. Where this process owned
        the log, another process takes it over."""
        self._closed = True
        answered, answer = self._notifiers.promise()
        self._inflight.close(lambda: answer([]))
        await answered
        for reader in list(self._readers):
            await reader.aclose()
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait([self._search])
        if self._owner is not None:
            await self._owner.close()
        if self._closings:
            await asyncio.wait(self._closings)

    def _close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(closing)
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)


def _retrieve(search: asyncio.Task[Owner]) -> None:
    """Retrieve the error of a search for which no task waits: the appends in flight have got it."""
    if not search.cancelled():
        search.exception()
