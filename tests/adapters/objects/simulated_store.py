"""A store in memory whose requests take time and fail as those of real ones do, in virtual time and by one seed."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum

from tidewal.runtime.errors import Unavailable

STORE_EPOCH_MS = 1_900_000_000_000  # when the store's clock began: no other clock of the tests is near it


class CreateFault(Enum):
    """What happens to one request that creates an object."""

    NONE = "none"
    REFUSED = "refused"  # 500 or 503: an error, and nothing is stored
    CUT = "cut"  # stored, and the connection breaks before the answer
    LATE = "late"  # an error now; the request arrives later, and creates the object if none is there by then
    CONFLICT = "conflict"  # 409: "there is one already", and nothing is stored
    DOUBLED = "doubled"  # sent twice on its way: stored, and answered by "there is one already"


@dataclass(frozen=True)
class StoreRates:
    """How likely each fault is for a request, 0-1, and how long requests take, in seconds."""

    refused: float = 0.0
    cut: float = 0.0
    late: float = 0.0
    conflict: float = 0.0
    doubled: float = 0.0
    hidden: float = 0.0  # a `get` that does not see an object yet
    request_s: float = 0.04
    late_s: float = 30.0


class Objects:
    """What several stores, of several processes, share: the objects. `requests` counts them by kind."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.modified_ms: dict[str, int] = {}
        self.requests: dict[str, int] = defaultdict(int)

    def create(self, key: str, body: bytes) -> bool:
        created = self.bodies.setdefault(key, body) is body
        if created:
            self._touch(key)
        return created

    def _touch(self, key: str) -> None:
        self.modified_ms[key] = STORE_EPOCH_MS + int(asyncio.get_running_loop().time() * 1000)


class SimulatedStore:
    """`ObjectStore` of one process over shared objects. Faults are drawn from a seed, or given for a key in order by
    `script`. `stop` holds up all requests that begin, as when the process is stopped, until `go_on`."""

    def __init__(self, objects: Objects, seed: int = 0, rates: StoreRates | None = None) -> None:
        self.objects = objects
        self.rates = rates or StoreRates()
        self.script: dict[str, deque[CreateFault]] = {}
        self.down = False
        self._random = random.Random(seed)
        self._running = asyncio.Event()
        self._running.set()

    def stop(self) -> None:
        self._running.clear()

    def go_on(self) -> None:
        self._running.set()

    async def create(self, key: str, body: bytes) -> bool:
        fault = self._fault(key)
        await self._request("create")
        if fault is CreateFault.REFUSED or self.down:
            raise Unavailable(f"{key}: 503")
        if fault is CreateFault.CONFLICT:
            return False
        if fault is CreateFault.LATE:
            loop = asyncio.get_running_loop()
            loop.call_later(self._random.uniform(0, self.rates.late_s), self.objects.create, key, body)
            raise Unavailable(f"{key}: timed out", outcome_unknown=True)
        created = self.objects.create(key, body)
        await self._answer()
        if fault is CreateFault.CUT:
            raise Unavailable(f"{key}: connection reset", outcome_unknown=True)
        return created and fault is not CreateFault.DOUBLED

    async def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        await self._request("get")
        if self.down:
            raise Unavailable(f"{key}: 503")
        body = self.objects.bodies.get(key)
        await self._answer()
        if body is None or self._random.random() < self.rates.hidden:
            return None
        return body[start:end]

    async def modified(self, key: str) -> int | None:
        await self._request("head")
        if self.down:
            raise Unavailable(f"{key}: 503")
        return self.objects.modified_ms.get(key)

    async def delete(self, key: str) -> None:
        await self._request("delete")
        if self.down:
            raise Unavailable(f"{key}: 503")
        self.objects.bodies.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        await self._request("list")
        if self.down:
            raise Unavailable(f"{prefix}: 503")
        for key in [each for each in self.objects.bodies if each.startswith(prefix)]:
            yield key

    async def close(self) -> None:
        pass

    def _fault(self, key: str) -> CreateFault:
        scripted = self.script.get(key)
        if scripted:
            return scripted.popleft()
        draw = self._random.random()
        for fault in CreateFault:
            draw -= getattr(self.rates, fault.value, 0.0)
            if draw < 0:
                return fault
        return CreateFault.NONE

    async def _request(self, kind: str) -> None:
        await self._running.wait()
        self.objects.requests[kind] += 1
        await asyncio.sleep(self._random.uniform(0, self.rates.request_s))
        await self._running.wait()

    async def _answer(self) -> None:
        await asyncio.sleep(self._random.uniform(0, self.rates.request_s))
