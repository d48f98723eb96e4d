"""What every role is: an actor that follows the catalog and answers requests, through the log or directly."""

from __future__ import annotations

from collections.abc import AsyncIterable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import ClassVar, Never

from ..runtime.actor import Actor
from ..runtime.catalog.catalog_log import CatalogLog
from ..runtime.direct.server import DirectInbox
from ..runtime.errors import ActorStopped, InvalidRequest, Overloaded, TidewalError, of_unknown_outcome
from ..runtime.log.dead_letters import DeadLetters
from ..runtime.rpc.client import RpcClient
from ..runtime.rpc.protocol import Params
from ..runtime.rpc.server import Request, RequestPack, RpcServer
from ..runtime.streams.channel_reader import OnBadRecord
from .metrics import count_dead_letter, dead_letters_from_zero
from .node import Node
from .node_status import node_status
from .owners import Owners
from .requests import Method, Nothing

REQUESTS_MAX = 1024


class Role(Actor[Never, Never, RequestPack]):
    """Derive with a `role` name and `handlers()`.

    Each request is a child task: it runs to its first `await` in the order of arrival, so that a handler that submits
    to the log before it waits keeps that order. Its parameters fit their declaration (`requests.py`). A `TidewalError`
    is the reply; any other exception is a defect: it is replied too, and crashes the actor, which restarts from what is
    durable.

    Each request is read by all nodes that offer the role: it `answers` those that are its own, and ignores the others,
    which are repeated until the one that is to answer has read of that. When others have ended the membership of this
    process, the role replies nothing more, and stops; its system has failed with `Fenced`. While the role cannot know
    whether that has happened, it replies no errors.
    """

    role: ClassVar[str]

    def __init__(self, node: Node) -> None:
        self.node = node
        self.dead_letters: DeadLetters = DeadLetters(
            node.wal, node.clock, node.names.dead_letters, on_counted=self._count_bad
        )
        # Each start has a name of its own, so that nothing of an earlier one is taken for its own. The clock alone does
        # not make it: where the log is ahead of the wall clock, a process that is started again has the same times.
        name = f"{node.incarnation}-{self.role}-{node.clock.now():x}"
        version = node.cluster.version
        self.catalog: CatalogLog = CatalogLog(
            node.wal,
            node.names,
            node.clock,
            author=name,
            create=version.catalog,
            levels=version.levels,
            on_bad=self.on_bad_event(),
        )
        self.rpc: RpcClient = RpcClient(node.wal, node.names, name=name, routes=node.connections)
        self.owners: Owners = Owners(node, self.catalog, self.rpc)
        self._server = RpcServer(node.wal, self.role, node.names, on_bad=self.dead_letters.bad)
        self._inbox = DirectInbox(self._server)
        self._handlers: dict[str, Method] = {}
        self._running = 0
        names = node.names
        control = (names.catalog, names.cluster, names.insert_events, names.heartbeats, names.requests(self.role))
        dead_letters_from_zero(node.metrics, control)

    def handlers(self) -> dict[str, Method]:
        """The methods of this role, by name."""
        return {}

    async def _status(self, _: Request) -> Params:
        return node_status(self.node, self.catalog.catalog)

    def on_bad_event(self) -> OnBadRecord | None:
        """The handler of catalog entries that cannot be read: one role of a node stores them as dead letters."""
        return None

    def _count_bad(self, channel: str, reason: str) -> None:
        count_dead_letter(self.node.metrics, channel, reason)

    async def prepare(self) -> None:
        """What this role does before its first request; the catalog has been read."""

    async def on_start(self) -> None:
        try:
            await self.rpc.open()
            await self.dead_letters.open()
            await self.catalog.open()
            self._handlers = {"status": Method(self._status, Nothing), **self.handlers()}
            await self._server.open()
            self.node.connections.serve(self.role, self._inbox)
            await self.prepare()
            self.spawn_task(self._end_when_fenced(), name="membership")
        except BaseException:
            await self._close()
            raise

    def answers(self, request: Request) -> bool:
        """Whether this node is to answer a request that names none: one node for each client, the same for all its
        requests while that is a member."""
        return self.node.cluster.first(self.role, request.client) == self.node.incarnation

    def due(self, request: Request) -> Sequence[Request]:
        """The requests to be served now that `request` has arrived, in order: not itself, where it is held back."""
        return [request]

    @property
    def gives_way(self) -> bool:
        """Whether another node, or this one on another log, is to answer what was begun here."""
        return self.node.cluster.fenced is not None or self.node.is_moving

    @property
    def doubtful(self) -> bool:
        """Whether another node may be to answer without this one knowing: the lease has expired. The role replies no
        failure then: the client repeats the request, and gets the reply of the other node."""
        return not self.node.cluster.holds()

    async def _end_when_fenced(self) -> None:
        error = await self.node.cluster.until_fenced()
        self.system.escalate(self.name, error)
        self.stop()

    def inputs(self) -> Iterable[AsyncIterable[RequestPack]]:
        return (self._server, self._inbox)

    async def on_pack(self, pack: RequestPack) -> None:
        for request in pack.requests:
            if self.gives_way or not self._is_own(request):
                request.ignore()  # for another node
            else:
                for due in self.due(request):
                    self._serve(due)

    def _serve(self, request: Request) -> None:
        method = self._handlers.get(request.method)
        if method is None:
            request.fail(InvalidRequest(f"{self.role} has no method {request.method!r}"))
        elif self._running >= REQUESTS_MAX:
            request.fail(Overloaded(f"{self.role} works on {REQUESTS_MAX} requests; retry", limit="requests"))
        else:
            self._running += 1
            self.spawn_task(self._answer(method, request), name=f"{self.role} {request.method}")

    def _is_own(self, request: Request) -> bool:
        to = request.params.get("to")
        return self.answers(request) if to is None else to == self.node.incarnation

    async def _answer(self, method: Method, request: Request) -> None:
        addressed = "to" in request.params
        try:
            request.params = method.read(request.method, request.params)
            answer = await method.handler(request)
            values, body = answer if isinstance(answer, tuple) else (answer, b"")
            request.reply(values, body)
        except TidewalError as error:
            if self.gives_way or (self.doubtful and not addressed):
                request.ignore()
            else:
                request.fail(error)
        except Exception as error:
            request.fail(error)
            raise
        except BaseException:
            # After a crash the client repeats the request to the restarted role or another node. A role that is not
            # restarted must reply itself, where no other node does.
            other = not addressed and self.node.cluster.has_other(self.role)
            if self.ref.cell.mailbox.closed and not (self.gives_way or other):
                stopped = ActorStopped(f"{self.name} stopped before it could answer", actor=self.name)
                request.fail(of_unknown_outcome(stopped))
            raise
        finally:
            self._running -= 1

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """For a handler that waits where another limit holds: its request is not one of the `REQUESTS_MAX` that the
        role works on, so that those of other channels or clients are served meanwhile."""
        self._running -= 1
        try:
            yield
        finally:
            self._running += 1

    async def on_stop(self) -> None:
        await self._close()

    async def _close(self) -> None:
        self.node.connections.leave(self.role, self._inbox)
        await self.rpc.close()
        await self.catalog.close()
