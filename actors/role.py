"""What every role is: an actor that follows the catalog and answers requests, both read from the log."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable
from typing import ClassVar

from ..runtime.actor import Actor
from ..runtime.catalog_log import CatalogLog
from ..runtime.channel_reader import OnBadRecord
from ..runtime.dead_letters import DeadLetters
from ..runtime.errors import ActorStopped, Fenced, InvalidRequest, Overloaded, TidewalError, of_unknown_outcome
from ..runtime.rpc import Caller, Request, RequestInbox, RequestPack
from .node import Node
from .requests import Method

REQUESTS_MAX = 1024


class Role(Actor):
    """Derive with a `role` name and `handlers()`.

    Each request is a child task: it runs to its first `await` in the order of arrival, so that a handler that submits
    to the log before it waits keeps that order. Its parameters fit their declaration (`requests.py`). An error of
    Tidewal's own is the answer; any other is a defect: it is answered too, and crashes the actor, which restarts from
    what is durable.

    When another node has taken the log over, the role answers nothing more, since the other one does, and stops; its
    system has failed with `Fenced`. While it cannot know that, it tells no errors.
    """

    role: ClassVar[str]

    def __init__(self, node: Node) -> None:
        self.node = node
        self.dead_letters = DeadLetters(node.wal, node.clock, node.names.dead_letters, on_counted=self._count_bad)
        self.catalog = CatalogLog(node.wal, node.names, node.clock, on_bad=self.on_bad_event())
        # each life has a name of its own, so that no answer to an earlier one is taken for its own
        self.caller = Caller(node.wal, node.names, name=f"{node.name}-{self.role}-{node.clock.now():x}")
        self._inbox = RequestInbox(node.wal, self.role, node.names, on_bad=self.dead_letters.bad)
        self._handlers: dict[str, Method] = {}
        self._running = 0

    def handlers(self) -> dict[str, Method]:
        """The methods of this role, by name."""
        return {}

    def on_bad_event(self) -> OnBadRecord | None:
        """What to do with an entry of the catalog that cannot be read: one role of a node keeps it aside."""
        return None

    def _count_bad(self, channel: str, reason: str) -> None:
        self.node.metrics.counter("wal_dead_letter_message_total", channel_name=channel, reason=reason).inc()

    async def prepare(self) -> None:
        """What this role does before its first request; the catalog has been read."""

    async def on_start(self) -> None:
        try:
            await self.caller.open()
            await self.dead_letters.open()
            await self.catalog.open()
            self._handlers = self.handlers()
            await self._inbox.open()
            await self.prepare()
            self.spawn_task(self._end_when_deposed(), name="successor")
        except BaseException:
            await self._close()
            raise

    @property
    def deposed(self) -> bool:
        """Whether another node leads than this one, as far as this role has read the catalog."""
        return bool(self.node.life) and self.catalog.catalog.leader not in ("", self.node.life)

    @property
    def doubtful(self) -> bool:
        """Whether another node may lead without this one knowing: its lease is over, or was never asked for. What it
        could say of a failure is no answer then: who asked asks again, and hears the node that leads, or this one."""
        return self.node.lease is not None and not self.node.lease.holds()

    async def _end_when_deposed(self) -> None:
        while not self.deposed:
            await self.catalog.changed()
        successor = self.catalog.catalog.leader
        self.system.escalate(self.name, Fenced(f"{successor} has taken the log over: there is one node to a log"))
        self.stop()

    def inputs(self) -> Iterable[AsyncIterable[object]]:
        return (self._inbox,)

    async def on_pack(self, pack: object) -> None:
        assert isinstance(pack, RequestPack)
        for request in pack.requests:
            method = self._handlers.get(request.method)
            if self.deposed or request.params.get("to", self.node.life) != self.node.life:
                request.leave()  # for another node
            elif method is None:
                request.fail(InvalidRequest(f"{self.role} has no method {request.method!r}"))
            elif self._running >= REQUESTS_MAX:
                request.fail(Overloaded(f"{self.role} works on {REQUESTS_MAX} requests; retry", limit="requests"))
            else:
                self._running += 1
                self.spawn_task(self._answer(method, request), name=f"{self.role} {request.method}")

    async def _answer(self, method: Method, request: Request) -> None:
        addressed = "to" in request.params
        try:
            request.params = method.read(request.method, request.params)
            answer = await method.handler(request)
            values, body = answer if isinstance(answer, tuple) else (answer, b"")
            request.reply(values, body)
        except TidewalError as error:
            if self.deposed or (self.doubtful and not addressed):
                request.leave()
            else:
                request.fail(error)
        except Exception as error:
            request.fail(error)
            raise
        except BaseException:
            # after a crash the next life is asked again, or another node; when this was the last, nobody will answer
            if self.ref.cell.mailbox.closed and not self.deposed:
                stopped = ActorStopped(f"{self.name} stopped before it could answer", actor=self.name)
                request.fail(of_unknown_outcome(stopped))
            raise
        finally:
            self._running -= 1

    async def on_stop(self) -> None:
        await self._close()

    async def _close(self) -> None:
        await self.caller.close()
        await self.catalog.close()
