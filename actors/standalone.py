"""All roles in one process on one log."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar, overload
from urllib.parse import quote
from weakref import WeakKeyDictionary

import anyio.to_thread

from ..runtime.actor import ActorState, ActorSystem
from ..runtime.actor.metrics import ActorMetrics
from ..runtime.arguments import checked
from ..runtime.clock import Clock, HybridClock
from ..runtime.cluster.incarnation_file import incarnation_file
from ..runtime.cluster.pressure import NODE_MEMORY
from ..runtime.cluster.roles import ROLE_NAMES, STREAMING_NODE
from ..runtime.cluster.state import UNREACHABLE, UNREADABLE, ClusterState
from ..runtime.cluster.version import THIS_VERSION, TidewalVersion
from ..runtime.config.fitting import fitted
from ..runtime.config.loading import wal_options, wal_url
from ..runtime.config.settings import Settings
from ..runtime.direct.network import Network
from ..runtime.errors import Closed, DeadlineExceeded, InvalidRequest, Moved, PositionMismatch, TidewalError
from ..runtime.log.following import FollowingWal
from ..runtime.log.migration_state import check_in_use
from ..runtime.log.opening import find_backend
from ..runtime.log.redaction import shown_url
from ..runtime.log.wal import Wal
from ..runtime.metrics.metrics import Metrics
from ..runtime.metrics.server import AsgiApp, Health, MetricsServer, metrics_app
from ..runtime.nearest import nearest
from ..runtime.node_name import node_name
from ..runtime.process_memory import memory_limit_bytes, resident_bytes
from ..runtime.tables.table_store import StoreUri, open_tables
from ..runtime.waiting import begun, ended
from .client import Client
from .cluster_member import ClusterMember
from .datanode import DataNode
from .datanode.moved_tables import MovedTables
from .datanode.wal_identity import wal_of
from .log_migration import LogMigration
from .metrics import count_dead_letter, measure_limit
from .mixcoord import MixCoord
from .node import Node, RunBlocking, in_thread, names_of
from .node_status import SILENT_S, refused_appends, watermark_age_s
from .open_logs import OpenLogs, SettingsOpener
from .proxy import Proxy
from .querynode import QueryNode
from .role import Role
from .shared_log_migration import SWITCHING, SharedLogMigration, open_logs
from .streamingnode import StreamingNode

T = TypeVar("T")

_log = logging.getLogger("tidewal.standalone")
# Two nodes of one name that start in one ms are two incarnations. Counted by loop, since one run on virtual time is to
# be like the next one.
_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, Iterator[int]] = WeakKeyDictionary()
_starts_without_loop = itertools.count()

# A role starts after the roles that it calls. They stop in the opposite order, so that the StreamingNode can give its
# channels back.
ROLES: tuple[type[Role], ...] = (MixCoord, StreamingNode, Proxy, DataNode, QueryNode)

REPLACED_S = 10.0  # of a node that ends, until others have loaded what only it has
STARTED_S = 600.0  # for the roles of a node whose log was migrated to start, until the node ends
START_AGAIN_S = 0.5
HAND_OVER_S = 2.0  # of a node that ends, without a channel that moves
STUCK_S = 30.0  # without a handled message, though some wait, until a role counts as stuck


class Standalone:
    """A node with MixCoord, StreamingNode, Proxy, DataNode and QueryNode as supervised actors, or with those of them
    whose names are in `roles`. An async context manager.

    The nodes of one log are a cluster: this one joins it, and leaves it at its end. On a log that one process owns
    (RocksMQ), only that process can offer the role `streamingnode`. `predecessor` is the incarnation of a node that is
    known to be dead: its lease is not waited for.

    `wal` must be open and owned; it is not closed here. `tables` is the directory of the Delta tables, or a URL
    (`file:`, or a prefix of a bucket: `s3:`, `gs:`, `az:`). `name` is the node's, by default that of `metrics` or of
    the process. With `threads=False` and a `blocking` that runs in place a whole node is deterministic on a virtual
    loop (`runtime/testing`). `network` makes its direct connections to other nodes, over TCP by default. Give
    `metrics` to share them with the log's. With `logs`, whose log is `wal`, the log can be migrated while the node
    runs; `logs` are the caller's to close. Clients of this process go on then, and `node` and `wal` are others.

    Entering it raises `WrongCluster` where the settings or the tables are not those of the log's other nodes,
    `FormatTooNew` or `FormatTooOld` where they work at a feature level that this version does not know,
    `DirectoryUnwritable`, `Unavailable` where `metrics.port` is in use (before any role starts, so
    that it displaces no other node), and the error of a role that has failed before the node was ready.
    """

    _version: ClassVar[TidewalVersion] = THIS_VERSION

    @checked
    def __init__(
        self,
        wal: Wal,
        tables: StoreUri,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        blocking: RunBlocking = in_thread,
        threads: bool = True,
        name: str = "",
        metrics: Metrics | None = None,
        roles: Iterable[str] = ROLE_NAMES,
        predecessor: str = "",
        network: Network | None = None,
        logs: OpenLogs | None = None,
        on_incarnation: Callable[[str], object] = lambda incarnation: None,
    ) -> None:
        """`on_incarnation` is called with that of each further start of the roles, before it."""
        self._settings = settings or Settings()
        self._name = name or (metrics.node_id if metrics is not None else node_name())
        self._metrics = metrics or Metrics(self._name)
        self._hybrid = HybridClock(clock)
        self._roles = _roles_named(roles)
        self._tables, self._blocking, self._network = open_tables(tables), blocking, network
        self._shared_migration = SharedLogMigration(_Moving(self), logs)
        self._migration = LogMigration(_Moving(self), logs, MovedTables(self._tables, blocking), self._shared_migration)
        self.node: Node = self._node_on(wal, predecessor)
        self._on_incarnation = on_incarnation
        self._following: FollowingWal | None = None  # the log, for clients of this process
        self._clock = clock
        self._threads = threads
        self._stack = AsyncExitStack()
        self._running = AsyncExitStack()  # what is of one log
        self._system: ActorSystem | None = None
        self._failure: asyncio.Future[BaseException] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._phase: Literal["starting", "running", "migrating", "draining"] = "starting"

    def _node_on(self, wal: Wal, predecessor: str = "") -> Node:
        """A new incarnation of the node, which works on `wal`."""
        settings, metrics = fitted(self._settings, wal.capabilities), self._metrics
        cluster = ClusterMember(
            self._name,
            f"{self._name}-{self._hybrid.now() + _start_number():x}",
            [role.role for role in self._roles],
            wal,
            names_of(settings),
            self._hybrid,
            settings.cluster,
            predecessor=predecessor,
            version=self._version,
            on_bad=lambda channel, _, error: count_dead_letter(metrics, channel, str(error.reason)),
        )
        node = Node(
            self._name,
            wal,
            self._tables,
            cluster,
            settings,
            self._hybrid,
            metrics,
            self._blocking,
            network=self._network,
            log_migration=self._migration,
            shared_migration=self._shared_migration,
        )
        cluster.reports[UNREADABLE] = lambda: sorted({name for _, name in list(node.unreadable)}) or None
        cluster.reports[UNREACHABLE] = node.connections.unreachable
        if limit_bytes := memory_limit_bytes():
            measure_limit(cluster, metrics, NODE_MEMORY, lambda: (resident_bytes(), limit_bytes))
        return node

    async def __aenter__(self) -> Standalone:
        interval_ms = self.node.settings.interpreter.switch_interval_ms
        await self.node.blocking(self.node.tables.prepare)
        self._failure = asyncio.get_running_loop().create_future()
        self._following = FollowingWal(self.node.wal)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._following.close)
            await self._serve_metrics(stack)
            if interval_ms:
                stack.callback(sys.setswitchinterval, sys.getswitchinterval())
                sys.setswitchinterval(interval_ms / 1000)
            stack.push_async_callback(self._stop_roles)
            if not await self._start_roles():
                await self._shared_migration.go_along()
            self._stack = stack.pop_all()
        _log.info("node %s is ready", self.node.name)
        self._phase = "running"
        self._shared_migration.begin()
        return self

    async def _start_roles(self) -> bool:
        """Become a member of the cluster of the log, and start the roles. Returns False, with none started, where the
        log is in use no more."""
        actor = self.node.settings.actor
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.node.cluster.close)
            stack.push_async_callback(self.node.connections.close)
            address = await self.node.connections.listen()
            actor_metrics = ActorMetrics(self.node.metrics)
            system = ActorSystem(
                clock=self._clock,
                mailbox_size=actor.mailbox_size,
                mailbox_bytes=actor.mailbox_bytes,
                blocked_after_ms=actor.blocked_after_ms,
                stop_deadline_s=actor.stop_deadline,
                stop_grace_s=actor.stop_grace,
                threads=self._threads,
                observer=actor_metrics,
            )
            self._system = await stack.enter_async_context(system)
            actor_metrics.watch([role.role for role in self._roles], system.status, lambda: system.loop_lag_s)
            reads_tables = not {DataNode, QueryNode}.isdisjoint(self._roles)
            tables = await self.node.blocking(self.node.tables.identity) if reads_tables else ""
            await self.node.cluster.open(system.heartbeat, lambda: system.loop_lag_s, tables=tables, address=address)
            if await self._shared_migration.has_left():
                return False
            waits = self._begin_roles(system, stack), self._shared_migration.until_left()
            async with begun(*waits) as (beginning, left):  # what the roles wait for may have left
                await asyncio.wait([beginning, left], return_when=asyncio.FIRST_COMPLETED)
                if not beginning.done():
                    return False
                await beginning
            self._running = stack.pop_all()
        return True

    async def _begin_roles(self, system: ActorSystem, stack: AsyncExitStack) -> None:
        """Start the roles, and wait until this node accepts writes, where it is to. Raises the error of a role that
        fails before."""
        for role in self._roles:
            await system.spawn(partial(role, self.node), name=role.role)
        self._watching = asyncio.create_task(self._watch(system), name="failures of roles")
        stack.push_async_callback(ended, self._watching)
        if Proxy in self._roles:
            await self._ready()

    async def _stop_roles(self) -> None:
        """Stop the roles, and leave the cluster."""
        running, self._running = self._running, AsyncExitStack()
        await running.aclose()

    async def _leave_log(self) -> None:
        """Stop the roles, for the log is about to be closed. An error of one is logged: it has stopped all the same."""
        assert self._following is not None
        self._phase = "migrating"
        self._following.leave()
        try:
            await self._stop_roles()
        except Exception:
            _log.exception("the roles of %s have stopped, not all of them in order", self.node.name)

    async def _go_on_with(self, wal: Wal) -> bool:
        """Start the roles on another log, or on the same one again, as `_start_roles` does. Where the log fails for a
        moment they are started again: there may be no supervisor that starts this process with the right URL."""
        assert self._following is not None
        until_s = self._hybrid.clock.monotonic() + STARTED_S
        started: bool | None = None
        while started is None:
            self.node = self._node_on(wal)
            self._on_incarnation(self.node.incarnation)
            self._following.arrive(wal)
            try:
                started = await self._start_roles()
            except TidewalError as error:
                if not error.retryable or self._hybrid.clock.monotonic() >= until_s:
                    raise
                _log.warning("the roles of %s are started again: %s", self.node.name, error)
                await asyncio.sleep(START_AGAIN_S)
        if not started:
            return False
        self._phase = "running"
        self._shared_migration.begin()  # it may be another kind of log
        return True

    async def _watch(self, system: ActorSystem) -> None:
        escalation = await system.failed
        assert escalation.error is not None
        self._fail(escalation.error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)

    async def _serve_metrics(self, stack: AsyncExitStack) -> None:
        """Listen before any role starts: a node whose port is in use must not take the log from one that works."""
        endpoint = self.node.settings.metrics
        if endpoint.port:
            server = MetricsServer(self.node.metrics, self.health, host=endpoint.host, port=endpoint.port)
            await stack.enter_async_context(server)

    async def _ready(self) -> None:
        """Wait until this node accepts writes. Raises the error of a role that fails before."""
        async with self.client("start") as client:
            ready = asyncio.create_task(client.ready(node=self.node.incarnation))
            failed = asyncio.create_task(self.failed())
            try:
                await asyncio.wait([ready, failed], return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    raise failed.result()
                await ready
            finally:
                await ended(ready, failed)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drain and stop all roles: what was accepted is durable, and a later start continues from the directory. A
        migration of the log is waited for where the roles are stopped for it; else it ends, and may be gone on with."""
        if self._phase not in ("running", "migrating"):
            return
        await self._migration.stop()
        await self._shared_migration.stop()
        if self._phase == "running":
            await self._drain()
        self._phase = "draining"
        await self._stack.aclose()

    async def _drain(self) -> None:
        self._phase = "draining"
        began_s = self.node.clock.clock.monotonic()
        _log.info("node %s is draining", self.node.name)
        await self.node.cluster.drain()
        if self.node.cluster.has_other(STREAMING_NODE):
            await self._hand_over()
        with suppress(TimeoutError):
            async with asyncio.timeout(REPLACED_S):
                await asyncio.gather(*(until_replaced() for until_replaced in self.node.before_leaving.values()))
        await self._stop_roles()
        _log.info("node %s has drained in %.1f s", self.node.name, self.node.clock.clock.monotonic() - began_s)

    async def _hand_over(self) -> None:
        """Let the channels of this node move to others, one after another while the rest take appends, until it has
        none, or nothing has moved for `HAND_OVER_S`: it then releases those that are left as it stops."""
        owner = self.node.local_owner
        with suppress(TimeoutError):
            while owner.granted:
                async with asyncio.timeout(HAND_OVER_S):
                    await owner.changed()

    @checked
    def client(self, name: str = "") -> Client:
        """A client of this node; enter it with `async with`. `name` is shown in the names of its channel and
        records."""
        prefix = self.node.settings.msg_channel.chan_name_prefix.cluster
        unique = f"{name or 'client'}-{self.node.incarnation}-{self.node.clock.now():x}"
        return Client(self._following or self.node.wal, prefix=prefix, name=unique)

    @property
    def wal(self) -> Wal:
        """The log of the node: for streams, groups and records beside the collections. The node closes it. Where it is
        migrated while the node runs, that is the new one from then on, and what uses the old one ends with `Closed`."""
        return self.node.wal

    @property
    def system(self) -> ActorSystem:
        """The actor system of the roles. Raises `Closed` when the node is not running."""
        if self._system is None:
            raise _not_running()
        return self._system

    async def failed(self) -> BaseException:
        """Wait until a role has failed for good, or a migration of the log has left the node without one, and return
        the error. Raises `Closed` when the node is not running."""
        if self._failure is None:
            raise _not_running()
        return await asyncio.shield(self._failure)

    @checked
    async def migrate(self, to: str) -> None:
        """Migrate the log of this node to that at the URL `to`, which is empty or not there yet and is opened with the
        node's settings, and return when the node works on it. All goes on meanwhile, but for a moment in which the
        roles stop; clients wait then, and go on by themselves. Where it fails the node goes on with the log that it
        has, and the call may be repeated; `tidewal migrate` takes it back.

        Raises `Unsupported` for a log that several processes write to, for a node that was given an open log, and for
        what cannot be migrated, `Unavailable` where other nodes use the log or it is written to faster than it is
        copied, `InvalidRequest` where the new one is not empty, `Closed` when the node is not running, and what opening
        that raises. A node that cannot go on with either log ends (`failed`)."""
        if self._phase != "running":
            raise _not_running()
        await self._migration.migrate(find_backend(to).absolute_url(to))

    @overload
    async def run(self, work: None = None, *, timeout_s: float | None = None) -> None: ...
    @overload
    async def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T: ...
    @checked
    async def run(self, work: Coroutine[Any, Any, T] | None = None, *, timeout_s: float | None = None) -> T | None:
        """Run `work` while the node is well, and return its result; without `work` serve for `timeout_s` seconds, or
        for ever.

        Raises the error of a role that fails for good before, and `DeadlineExceeded` when `work` has not ended after
        `timeout_s` seconds; `work` is cancelled then, and has ended. The node runs on: leaving its block stops it.
        """
        failed = asyncio.create_task(self.failed())
        working = None if work is None else asyncio.create_task(work)
        tasks = (failed,) if working is None else (failed, working)
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if working is not None and working.done():
                return await working
            if failed.done():
                raise failed.result()
        finally:
            await ended(*tasks)
        if working is not None:
            raise DeadlineExceeded(f"the work of node {self.node.name} has not ended after {timeout_s:g} s")
        return None

    def metrics_app(self) -> AsgiApp:
        """`/metrics`, `/healthz` and `/readyz` of this node as an ASGI application, to mount in the service that embeds
        it: `app.mount("/tidewal", node.metrics_app())` in FastAPI and Starlette. The service says who may read them."""
        return metrics_app(self.node.metrics, self.health)

    def health(self) -> Health:
        """Whether the node makes progress: all roles run, none is stuck, and the log's owner keeps stamping ticks.
        One that is starting or draining is not healthy. Neither is a node whose log refuses appends, though it answers
        reads: `refused` says why, and what to do. Collections whose tables are `unreadable` are named; the node serves
        the others, and a restart does not help, so it is healthy. So is one whose roles have stopped because its log is
        migrated, but it is not `ready`: a restart does not help, and where it cannot go on it ends by itself."""
        if self._phase == "migrating" and self._failure is not None and not self._failure.done():
            return SWITCHING
        if self._phase != "running":
            return Health(False, {"error": f"the node is {self._phase}"})
        statuses = self.system.status()
        owns = bool(self.node.local_owner.granted)  # else nothing is to be announced here
        silent_s = (watermark_age_s(self.node) if owns else None) or 0.0
        stuck = [status.name for status in statuses if status.mailbox_depth and status.idle_s > STUCK_S]
        running = all(status.state is ActorState.RUNNING for status in statuses)
        refused = refused_appends(self.node)
        ok = running and not self.system.failed and not stuck and silent_s < SILENT_S and not refused
        roles = {status.name: status.state.value for status in statuses}
        unreadable = {f"{role} {name}": error.message for (role, name), error in self.node.unreadable.items()}
        details = {
            "roles": roles,
            "stuck": stuck,
            "watermark_age_s": silent_s,
            "refused": refused,
            "unreadable": unreadable,
        }
        return Health(ok, details)


@checked
@asynccontextmanager
async def standalone(
    directory: str | Path,
    *,
    wal: str = "",
    settings: Settings | None = None,
    name: str = "",
    roles: Iterable[str] = ROLE_NAMES,
    follow: bool = False,
) -> AsyncGenerator[Standalone]:
    """Run a node that keeps everything in `directory`: the tables in `tables/` unless the settings name another place
    (`tables`), and the log in `log/` unless the URL `wal` or the settings name another one (`log_url`). Leaving the
    block drains the node; a later one with the same directory continues where this one ended.

    `name` and `roles` are those of `Standalone`. A node that is killed and started again with the same directory, and
    the same name where it has one, takes its channels back at once. A node without the role `streamingnode` uses the
    log of a process that owns it, where a log has such an owner (RocksMQ). With `follow` the log at `wal`, which the
    node had before, may have been migrated since: it goes on with the one that has taken its place.

    Raises `DirectoryInUse` when another node has the directory open, `DirectoryUnwritable`, `FormatTooNew`,
    `CorruptLog`, and what `log_url` and `Standalone` raise.
    """
    settings, roles = settings or Settings(), tuple(roles)
    home = _absolute(directory)
    metrics = Metrics(name or node_name())
    url = wal if follow and wal else await log_url(home, settings, wal=wal)  # tables may name the new one already
    owns = StreamingNode.role in roles
    opener = SettingsOpener(settings, metrics, owns=owns)
    logs = await open_logs(opener, url, settings, metrics, follow=follow)
    options: dict[str, Any] = {"settings": settings, "metrics": metrics, "roles": roles, "logs": logs}
    try:
        with incarnation_file(home / (f"node-{quote(name, safe='')}.lock" if name else "node.lock")) as file:
            if file:
                options |= {"predecessor": file.predecessor, "on_incarnation": file.write}
            node = Standalone(logs.wal, tables_of(home, settings), **options)
            if file:
                file.write(node.node.incarnation)
            async with node:
                yield node
    finally:
        await logs.close()


async def log_url(directory: str | Path, settings: Settings, *, wal: str = "", embedded: str | Path = "log") -> str:
    """The URL of the log of a node in `directory`: `wal`, or what the settings choose; an embedded log is the directory
    `embedded` in it. Tables that are there already name the log that they came from, which has precedence over
    `mq.type`.

    Raises `PositionMismatch` where the settings allow only another kind of log, `Moved` where a log of that kind has
    taken the place of the one that they choose, and `ConfigError`.
    """
    home = _absolute(directory)
    chosen = settings.model_copy(update={"wal": wal or settings.wal})
    stored = await anyio.to_thread.run_sync(partial(wal_of, open_tables(tables_of(home, settings))))
    try:
        return wal_url(chosen, checkpoint_wal_name=stored, directory=str(home / embedded))
    except PositionMismatch as error:
        await _check_not_moved(wal_url(chosen, directory=str(home / embedded)), settings, error)
        raise


async def _check_not_moved(url: str, settings: Settings, mismatch: PositionMismatch) -> None:
    """Raise `Moved` where the log at `url`, of which the tables are no more, says that another has taken its place."""
    backend = find_backend(url)
    try:
        options: dict[str, Any] = {"own": True, "serve": False} if await backend.abandoned(url) else {"read_only": True}
        async with await backend.open(url, **options, **wal_options(settings, url)) as wal:
            await check_in_use(wal, shown_url(url))
    except Moved as moved:
        raise moved from mismatch
    except TidewalError as error:
        _log.debug("%s is not looked at: %s", shown_url(url), error)


def tables_of(directory: str | Path, settings: Settings) -> str:
    """The path or URL of the tables of a node in `directory`."""
    return settings.tables or str(_absolute(directory) / "tables")


class _Moving:
    """A node as the migration of its log has it: `MovingNode`."""

    def __init__(self, node: Standalone) -> None:
        self._node = node

    @property
    def members(self) -> ClusterState:
        return self._node.node.cluster.state

    async def stop_roles(self) -> None:
        await self._node._leave_log()  # pyright: ignore[reportPrivateUsage] -- a part of it

    async def start_roles(self, wal: Wal) -> bool:
        return await self._node._go_on_with(wal)  # pyright: ignore[reportPrivateUsage]

    def fail(self, error: BaseException) -> None:
        self._node._fail(error)  # pyright: ignore[reportPrivateUsage]


def _not_running() -> Closed:
    return Closed("the node is not running; enter it with `async with`")


def _roles_named(names: Iterable[str]) -> tuple[type[Role], ...]:
    """The roles of these names, in the order in which they start. Raises `InvalidRequest`."""
    wanted = set(names)
    for name in sorted(wanted.difference(ROLE_NAMES)):
        raise InvalidRequest(f"there is no role {name!r}{nearest(name, ROLE_NAMES)}; there are {', '.join(ROLE_NAMES)}")
    if not wanted:
        raise InvalidRequest(f"a node offers at least one role of {', '.join(ROLE_NAMES)}")
    return tuple(role for role in ROLES if role.role in wanted)


def _start_number() -> int:
    """A number that no other start of a node on this loop has."""
    try:
        return next(_starts.setdefault(asyncio.get_running_loop(), itertools.count()))
    except RuntimeError:  # it is made before its loop runs
        return next(_starts_without_loop)


def _absolute(directory: str | Path) -> Path:
    return Path(directory).absolute()
