"""Follow the log of a replicated state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, cast

from ..errors import BadRecord, Closed, CorruptLog, DeadlineExceeded, PositionLost, TidewalError
from ..log.wal import Append, Entry, From, FromId, OnAppended, Start
from .fold import Applied, Fold, State

PAUSE_S = 0.5  # before reading again, after an error that may pass

_log = logging.getLogger(__name__)


class ReplicatedLog(Protocol):
    """What a replicated state needs of a `Wal`."""

    def read(self, channel: str, start: Start) -> AsyncIterator[Sequence[Entry]]: ...

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None: ...

    async def latest_id(self, channel: str) -> bytes | None: ...

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None: ...

    async def truncate(self, channel: str, id: bytes) -> None: ...


class Follower(Generic[State]):
    """Follows the log of a replicated state; `fold` has the state as far as it was read. Belongs to one event loop.

    Entries that cannot be read are counted (`skipped`), given to `on_bad` and skipped. A follower that was overtaken by
    truncation begins anew with a snapshot; until that is read, what it knew is the state. Errors that may pass are
    waited out; any other ends following, and is raised to all who wait.
    """

    def __init__(
        self,
        log: ReplicatedLog,
        channel: str,
        create_fold: Callable[[Callable[[Entry, BadRecord], None]], Fold[State]],
        *,
        on_bad: Callable[[str, Entry, BadRecord], object] | None = None,
    ) -> None:
        """`create_fold` returns an empty fold, with the handler of what cannot be read."""
        self.channel = channel
        self.skipped: int = 0
        self.ended: TidewalError | None = None
        self._log = log
        self._create_fold = create_fold
        self._on_bad = on_bad
        self.fold: Fold[State] = create_fold(self._bad)
        self._moved = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to follow, and catch up. Raises what ends following: `ChannelNotFound`, `CorruptLog`, `FormatTooNew`,
        and what the log raises; `FormatTooOld` where the log's feature level is below those that this process knows."""
        self._following = asyncio.create_task(self._follow(), name=f"follow {self.channel}")
        await self.until(lambda: self.fold.settled)
        await self.catch_up()
        self.fold.check_not_too_old()

    async def catch_up(self) -> State:
        """The state with everything that was in the log when this was called. Raises what has ended following."""
        latest = await self._log.latest_id(self.channel)
        if latest is not None:
            await self.until(lambda: self.fold.position >= latest)
        self.check_following()  # read to there is not applied to there
        return self.fold.state

    async def wait_for(self, condition: Callable[[State], bool], *, deadline_s: float) -> State:
        """Wait until `condition` holds for the state. Raises `DeadlineExceeded` after `deadline_s` seconds."""
        try:
            async with asyncio.timeout(deadline_s):
                await self.until(lambda: condition(self.fold.state))
        except TimeoutError:
            raise DeadlineExceeded(f"{self.channel} did not become as awaited within {deadline_s:g} s") from None
        return self.fold.state

    def changed(self) -> Coroutine[Any, Any, State]:
        """The state after the next entry that is read after this call: also where what it returns is awaited later."""
        return self._changed_since(self.fold.position)

    async def _changed_since(self, position: bytes) -> State:
        await self.until(lambda: self.fold.position != position)
        return self.fold.state

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition`, which depends on `fold`, holds. Raises what has ended following."""
        while not condition():
            self.check_following()
            await self._moved.wait()

    async def close(self) -> None:
        """Stop following; calls that wait fail with `Closed`."""
        self.end(Closed(f"{self.channel} is not followed any more"))
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    # ---- for what is built on this --------------------------------------------------------------------------------

    def check_following(self) -> None:
        """Raise what has ended following."""
        if self.ended is not None:
            raise self.ended

    def on_applied(self, applied: Applied) -> None:
        """A record was applied, or refused."""

    def on_restored(self) -> None:
        """Another fold has taken the place of the one before, because that was overtaken; or the first was read."""

    def end(self, error: TidewalError) -> None:
        """End following with this error; the first one counts."""
        self.ended = self.ended or error
        self._wake()

    # ---- following --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        fold = self.fold
        available: object = None  # the first entry behind what was lost
        try:
            while self.ended is None:
                try:
                    await self._read(fold)
                    self.end(Closed("the log was closed"))
                except PositionLost as error:
                    if available is not None and error.fields.get("first_available") == available:
                        self.end(error)  # no truncation: entries in the middle are lost, and are so for good
                        return
                    available = error.fields.get("first_available")
                    _log.warning(
                        "%s: truncation was faster than this reader, which begins anew: %s",
                        self.channel,
                        error,
                        extra={"channel": self.channel},
                    )
                    fold = self._create_fold(self._bad)
                except TidewalError as error:
                    if not error.retryable:
                        self.end(error)
                        return
                    _log.warning("%s is read again: %s", self.channel, error, extra={"channel": self.channel})
                    await asyncio.sleep(PAUSE_S)
        except Exception as error:  # callers that wait must learn why nothing comes
            _log.exception("%s cannot be followed", self.channel, extra={"channel": self.channel})
            self.end(CorruptLog(f"{self.channel} cannot be followed: {error!r}", path=self.channel))

    async def _read(self, fold: Fold[State]) -> None:
        """Read on into `fold` until the log is closed; once it has settled it is the one to be seen."""
        start: Start = FromId(fold.position) if fold.position else From.EARLIEST
        if not fold.settled and await self._log.latest_id(self.channel) is None:
            self._settle(fold)
        end: bytes | None = None
        reader = cast("AsyncGenerator[Sequence[Entry]]", self._log.read(self.channel, start))
        async with aclosing(reader):
            async for entries in reader:
                if end is None and not fold.settled:  # looked up now: it lies behind the snapshot of what is missing
                    end = await self._log.latest_id(self.channel) or b""
                for entry in entries:
                    applied = fold.read(entry)
                    if applied is not None:
                        self.on_applied(applied)
                if end is not None and fold.position >= end and not fold.settled:
                    self._settle(fold)
                self._wake()

    def _settle(self, fold: Fold[State]) -> None:
        try:
            fold.settle()
        except CorruptLog as error:
            message = f"{self.channel}: {error.message}: restore the log from a backup"
            raise CorruptLog(message, channel=self.channel) from None
        self.fold = fold
        self.on_restored()
        for applied in fold.replay():
            self.on_applied(applied)
        self._wake()

    def _bad(self, entry: Entry, error: BadRecord) -> None:
        self.skipped += 1
        if self._on_bad is not None:
            self._on_bad(self.channel, entry, error)

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
