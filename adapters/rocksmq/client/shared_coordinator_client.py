"""The coordinator client of group members in a process that shares a log: to the coordinator at the present owner."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ....runtime.errors import Closed, Unavailable
from ....runtime.groups.coordinator_client import CoordinatorClient
from ....runtime.groups.forwarding_client import ForwardingClient
from .owner import Owner

if TYPE_CHECKING:
    from .shared import SharedRocksMQ

T = TypeVar("T")


class SharedCoordinatorClient(ForwardingClient):
    """`CoordinatorClient` over changes of the owner. A new owner knows no members: they get `Fenced` and join again.
    Joining and what needs no member is repeated here; any other call that a change of the owner cuts off raises
    `Unavailable`."""

    def __init__(self, shared: SharedRocksMQ) -> None:
        self._shared = shared
        self._owner: Owner | None = None
        self._client: CoordinatorClient

    async def _call_again(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        return await self._shared.ask(lambda owner: call(self._of(owner)))

    async def _call(self, call: Callable[[CoordinatorClient], Coroutine[Any, Any, T]]) -> T:
        owner = await self._shared.owner()
        try:
            return await call(self._of(owner))
        except Closed as error:
            if not self._shared.superseded(owner):
                raise
            raise Unavailable("the owner of the log has yielded it") from error

    def _of(self, owner: Owner) -> CoordinatorClient:
        if owner is not self._owner:
            self._owner, self._client = owner, owner.coordinator_client()
        return self._client
