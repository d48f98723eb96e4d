"""Consumer groups over links: the requests of `runtime/groups/request_service.py`, with ids as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from ....runtime.errors import Closed, InvalidRequest, Unavailable
from ....runtime.groups.coordinator import MAX_SINGLE_ACKS
from ....runtime.groups.coordinator_client import CoordinatorClient
from ....runtime.groups.forwarding_client import ForwardingClient
from ....runtime.groups.request_client import RequestCoordinatorClient, SessionHeartbeat
from ....runtime.groups.request_service import GroupRequestService
from ....runtime.log.wal import Append
from .log_link import LogLink
from .messages import check_entries
from .owner_route import RETRY_S, OwnerRoute

T = TypeVar("T")


class LinkedGroupService(GroupRequestService):
    """The groups of the owner, for members in other processes. One that is gone has left when its session is over, not
    when its link is: a link ends also where a handler keeps the loop of its process from running."""

    def encode_ids(self, ids: Iterable[bytes]) -> Sequence[object]:
        return list(ids)

    def decode_ids(self, wire: Sequence[object]) -> Sequence[bytes]:
        ids = [id for id in wire if isinstance(id, bytes)]
        if len(ids) < len(wire) or len(ids) > MAX_SINGLE_ACKS:
            raise InvalidRequest(f"single ids are bytes, {MAX_SINGLE_ACKS} at most")
        return ids

    async def ask(self, client: bytes, method: str, arguments: Sequence[Any]) -> object:
        """The result of one request of the process `client` that came over a link."""
        if method == "group.join":
            self.forget_ended()
        if method == "group.commit" and len(arguments) == 4 and isinstance(arguments[3], list):
            rows = cast("list[Sequence[Any]]", arguments[3])
            outputs = [Append(*row[:3]) for row in rows]
            check_entries(outputs)
            arguments = [*arguments[:3], outputs]
        return await self.answer(client, method, arguments)


class LinkCoordinatorClient(RequestCoordinatorClient):
    """`CoordinatorClient` over one link."""

    def encode_ids(self, ids: Iterable[bytes]) -> Sequence[object]:
        return list(ids)

    def decode_ids(self, wire: Sequence[Any]) -> Iterable[bytes]:
        return wire


class RoutedCoordinatorClient(ForwardingClient):
    """`CoordinatorClient` over changes of the owner, which may be this process. A new owner knows no members: they get
    `Fenced` and join again. Joining and what needs no member is repeated here; any other call that a change of the
    owner cuts off raises `Unavailable`."""

    def __init__(
        self, route: OwnerRoute, local: Callable[[], CoordinatorClient | None], closed: Callable[[], bool]
    ) -> None:
        """`local` is the client of this process' own coordinator, None while it does not own the log."""
        self._route, self._local, self._closed = route, local, closed
        self._link: LogLink | None = None
        self._client: LinkCoordinatorClient | None = None
        self._heartbeat = SessionHeartbeat(self._notify)  # over all links: the next owner may be the same one

    async def _call_again(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._route.patience_s
        while True:
            link = self._route.link
            try:
                return await self._call(call)
            except Unavailable:
                if loop.time() >= give_up_at or (link is not None and link is self._route.link):
                    raise
            await asyncio.sleep(RETRY_S)

    async def _call(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        await self._route.reach()
        try:
            return await call(self._local() or self._remote())
        except Closed as error:
            if self._closed():
                raise
            raise Unavailable("the log has got another owner") from error

    async def leave(self, group: str, member: str) -> None:
        """`CoordinatorClient.leave`. Where no owner answers the session ends by itself: none is looked for, nor does
        this process come to own the log."""
        self._heartbeat.remove(group, member)
        if self._local() is None and self._route.link is None:
            raise Unavailable("the owner of the log is gone")
        await super().leave(group, member)

    def _remote(self) -> CoordinatorClient:
        link = self._route.link
        if link is None:
            raise Unavailable("the owner of the log is gone")
        if self._client is None or link is not self._link:
            self._link, self._client = link, LinkCoordinatorClient(link, self._heartbeat)
        return self._client

    def _notify(self, method: str, group: str, member: str) -> None:
        link = self._route.link
        if link is not None:
            link.notify(method, group, member)

    def close(self) -> None:
        """Keep no session alive any more."""
        self._heartbeat.stop()
