"""Consumer groups over the socket: the requests of `runtime/groups/request_service.py`, single ids as runs of numbers:
first number, count, first number, count, …"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from ....runtime.errors import InvalidRequest
from ....runtime.groups.coordinator import MAX_SINGLE_ACKS, GroupCoordinator
from ....runtime.groups.request_service import GroupRequestService
from ..journal.channels import ids_of_runs, runs_of_ids
from .client_resources import RETURN_S, ClientResources


class GroupService(ClientResources):
    """Answers the group requests of one server, on its loop. The members of a client that is gone have left."""

    def __init__(self, coordinator: GroupCoordinator, *, return_s: float = RETURN_S) -> None:
        super().__init__(return_s)
        self._requests = _SocketGroupRequests(coordinator)

    async def answer(self, connection_id: int, method: str, arguments: Sequence[object]) -> object:
        """The result of one request, as msgpack takes it. Raises what the coordinator raises, and `InvalidRequest`."""
        return await self._requests.answer(self._clients.get(connection_id), method, arguments)

    def _release(self, client: bytes) -> None:
        self._requests.leave_all(client)


class _SocketGroupRequests(GroupRequestService):
    def encode_ids(self, ids: Iterable[bytes]) -> Sequence[object]:
        return runs_of_ids(ids)

    def decode_ids(self, wire: Sequence[object]) -> Sequence[bytes]:
        return _ids(wire)


def _ids(runs: Sequence[object]) -> list[bytes]:
    """The ids of runs from a client that may not be trusted: their number is bounded."""
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in runs) or len(runs) % 2:
        raise InvalidRequest("single ids are runs: first number, count, …")
    numbers = cast("Sequence[int]", runs)
    if sum(numbers[1::2]) > MAX_SINGLE_ACKS:
        raise InvalidRequest(f"more than {MAX_SINGLE_ACKS} single ids in one acknowledgement")
    return list(ids_of_runs(numbers))
