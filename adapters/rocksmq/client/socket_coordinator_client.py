"""The coordinator client of group members over the owner's socket: single ids are as `owner/group_service.py` says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ....runtime.groups.request_client import RequestCoordinatorClient
from ..journal.channels import ids_of_runs, runs_of_ids


class SocketCoordinatorClient(RequestCoordinatorClient):
    """`CoordinatorClient` over one connection to the owner. `close` it with the connection."""

    def encode_ids(self, ids: Iterable[bytes]) -> Sequence[object]:
        return runs_of_ids(ids)

    def decode_ids(self, wire: Sequence[Any]) -> Iterable[bytes]:
        return ids_of_runs(wire)
