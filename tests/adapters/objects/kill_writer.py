"""One process of the kill tests: it appends without end to a log on object storage, as soon as it may own it.

Arguments: URL, history, lease in seconds. The history has each append and what came of it.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.runtime.errors import TidewalError
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, Wal
from tidewal.runtime.testing import CallRecorder
from tidewal.runtime.testing.histories.client_history import error_result, outcome_of

CHANNEL = "a"
TASKS = 4
PAUSE_S = 0.01  # so that a run of minutes stays small enough to be compared
REFUSED_PAUSE_S = 0.2
DELIVERY_TIMEOUT_S = 5.0


class Writer:
    """Numbers what it appends, a few at a time, in the order of the calls."""

    def __init__(self, wal: Wal, history: Path) -> None:
        self._wal, self._name, self._recorder = wal, history.stem, CallRecorder(history)
        self._numbers = itertools.count()

    async def run(self) -> None:
        while True:
            payload = f"{self._name}:{next(self._numbers)}"
            call = self._recorder.begin("append", entries=[{"channel": CHANNEL, "payload": payload}])
            try:
                id = await self._wal.append(CHANNEL, payload.encode())
                self._recorder.end(call, "ok", ids=[id.hex()])
                await asyncio.sleep(PAUSE_S)
            except TidewalError as error:
                self._recorder.end(call, outcome_of(error), **error_result(error))
                await asyncio.sleep(REFUSED_PAUSE_S)


async def until_created(url: str, settings: ObjectsSettings) -> Wal:
    """The log, with its channel, however long the store is away or another process owns it."""
    while True:
        try:
            wal = await open_wal(url, settings=settings)
            if CHANNEL not in await wal.channels():
                await wal.create_channel(CHANNEL, ChannelPolicy(retention_s=None))
            return wal
        except TidewalError as error:
            print(repr(error), file=sys.stderr, flush=True)
            await asyncio.sleep(REFUSED_PAUSE_S)


async def main(url: str, history: str, lease_s: str) -> None:
    settings = ObjectsSettings(lease_s=float(lease_s), linger_ms=5, delivery_timeout_s=DELIVERY_TIMEOUT_S)
    writer = Writer(await until_created(url, settings), Path(history))
    await asyncio.gather(*(writer.run() for _ in range(TASKS)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
