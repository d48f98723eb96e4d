"""Send a request that creates a block once more where its answer is late: of a store's requests some take very long."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from ...runtime.metrics.metrics import Metrics
from .store import ObjectStore

MEASURED: Final = 500  # answers whose times count
LEAST_MEASURED = 100  # before so many are known none is late
LATE: Final = 0.99  # the share of answers that were faster than a late one
SAVED_UP: Final = 4.0  # requests that may be sent once more at the same moment, behind a quiet time


class HedgedCreates:
    """Creates objects in a store. A request that has no answer after the time in which 99 of 100 had theirs is sent
    once more, with the same bytes, over another connection, and the first answer counts. It may be "there is one
    already", of the very same bytes, as after any request that was sent twice: `get` tells.

    All belongs to one loop."""

    def __init__(self, store: ObjectStore, share: float, metrics: Metrics | None = None) -> None:
        """At most `share` of the requests (0-1) are sent once more; 0: none."""
        self._store, self._share = store, share
        self._hedged = None if metrics is None else metrics.counter("objects_hedged_requests_total")
        self._allowed = 0.0
        self._answered_s: deque[float] = deque(maxlen=MEASURED)

    async def create(self, key: str, body: bytes) -> bool:
        """`ObjectStore.create`. Where both requests fail it raises the error of the last."""
        loop = asyncio.get_running_loop()
        began, late_s = loop.time(), self._late_s()
        self._allowed = min(self._allowed + self._share, SAVED_UP)
        requests = [loop.create_task(self._store.create(key, body), name="create an object")]
        try:
            await asyncio.wait(requests, timeout=late_s)
            if not requests[0].done() and self._allowed >= 1:
                self._allowed -= 1
                if self._hedged is not None:
                    self._hedged.inc()
                requests.append(loop.create_task(self._store.create(key, body), name="create an object once more"))
            created = await _first_answer(requests)
        finally:
            for request in requests:
                request.cancel()
        self._answered_s.append(loop.time() - began)
        return created

    def _late_s(self) -> float | None:
        """After so many seconds an answer is late, None while that is not known."""
        if not self._share or len(self._answered_s) < LEAST_MEASURED:
            return None
        return sorted(self._answered_s)[int(LATE * len(self._answered_s))]


async def _first_answer(requests: list[asyncio.Task[bool]]) -> bool:
    """The result of the first request that has one. Raises the error of the last where none has."""
    answers: list[asyncio.Task[bool]] = []
    while len(answers) < len(requests):
        await asyncio.wait([each for each in requests if each not in answers], return_when=asyncio.FIRST_COMPLETED)
        answers += [each for each in requests if each.done() and each not in answers]
        results = [each.result() for each in answers if each.exception() is None]
        if results:
            return any(results)
    return answers[-1].result()
