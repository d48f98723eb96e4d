"""A log on brokers as Spark's processes read it: each connects by itself, with the adapter that the URL names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from ..runtime.config.loading import load_settings, wal_options
from ..runtime.errors import Closed, PositionLost
from ..runtime.log.opening import open_wal
from ..runtime.log.wal import Entry, FromId, Wal

T = TypeVar("T")


class BrokerLog:
    """The log at `url`, opened at the first call, with the credentials in the environment. Its coroutines run on a
    thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wal: Wal | None = None
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def channels(self) -> list[str]:
        """The names of all channels, sorted. Raises what the adapter raises."""
        return self._run(self._opened().channels())

    def latest_id(self, channel: str) -> bytes | None:
        """The id of the last entry of `channel`, None when there was none ever. Raises `ChannelNotFound`, and what the
        adapter raises."""
        return self._run(self._opened().latest_id(channel))

    def read(
        self, channel: str, after: bytes | None, upto: bytes | None, *, inclusive: bool = False
    ) -> Iterator[list[Entry]]:
        """The entries of `channel` behind `after` up to and including `upto`, as `BridgeLog.read` says. Raises
        `PositionLost`, and what the adapter raises."""
        latest = self.latest_id(channel)
        if upto is not None and (latest is None or latest < upto):
            raise PositionLost(
                f"channel {channel} ends before {upto.hex()}", requested=upto, first_available=latest, channel=channel
            )
        end = latest if upto is None else upto
        if end is None or (after is not None and (after > end if inclusive else after >= end)):
            return
        if after is None:
            first = self.id_at(channel, 0)
            if first is None or first > end:
                return  # nothing is left of it, and the next entry may never come
            after, inclusive = first, True
        batches: Any = self._opened().read(channel, FromId(after, inclusive))
        try:
            while True:
                entries: list[Entry] = list(self._run(_next(batches, channel)))
                wanted = [entry for entry in entries if entry.id <= end]
                if wanted:
                    yield wanted
                if entries[-1].id >= end:
                    return
        finally:
            self._close_read(batches)

    def id_at(self, channel: str, timestamp: int) -> bytes | None:
        """The id of the first entry of `channel` whose timestamp is ≥ `timestamp`, None when there is none yet. Raises
        `ChannelNotFound`, and what the adapter raises."""
        return self._run(self._opened().id_at(channel, timestamp))

    def alive(self) -> bool:
        """Whether the log is connected, as far as that is known without a request. Clients of brokers connect again by
        themselves."""
        return self._wal is not None

    def close(self) -> None:
        """Release the connection."""
        if self._thread is not None:
            if self._wal is not None:
                self._run(self._wal.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None
        self._loop.close()

    def _opened(self) -> Wal:
        if self._wal is None:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop.run_forever, name="tidewal-spark-log", daemon=True)
                self._thread.start()
            self._wal = self._run(open_wal(self._url, read_only=True, **wal_options(load_settings(), self._url)))
        return self._wal

    def _close_read(self, batches: Any) -> None:
        """End a read. An abandoned one is ended by the garbage collector: perhaps on the loop's own thread, which must
        not wait for itself, or when the log is closed already and there is nothing to end."""
        if threading.current_thread() is self._thread:
            self._ending.add(ending := self._loop.create_task(batches.aclose()))
            ending.add_done_callback(self._ending.discard)
        elif self._thread is not None:
            self._run(batches.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(batches: Any, channel: str) -> list[Entry]:
    try:
        return await anext(batches)
    except StopAsyncIteration:
        raise Closed(f"the log was closed while {channel} was being read") from None
