"""What working through a group's channels needs of a member, whatever it delivers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from typing import Protocol, Self, TypeVar, runtime_checkable

from ..errors import Closed, Fenced, InvalidRequest, TidewalError
from ..log.wal import Append, Entry

OUTAGE_S = 30.0  # for how long failures of the log that may pass are waited out before they are raised
FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 1.0

_log = logging.getLogger("tidewal.groups")


class Left(Exception):
    """The member has left its group, or the log is closed."""


class LogAway(Exception):
    """The log failed with `error`, which may pass, in a call that began at `began` by the loop's clock. What was not
    acknowledged is given back."""

    def __init__(self, error: TidewalError, began: float) -> None:
        super().__init__(error)
        self.error = error
        self.began = began


@contextmanager
def ends_once_closed() -> Generator[None]:
    """What is `Closed` in here is the member or the log; a handler's own `Closed` is an error."""
    try:
        yield
    except Closed:
        raise Left from None


@contextmanager
def of_the_log() -> Generator[None]:
    """As `ends_once_closed`; and what may pass in here is the log's fault and not the handler's: `LogAway`."""
    began = asyncio.get_running_loop().time()
    try:
        with ends_once_closed():
            yield
    except TidewalError as error:
        if error.retryable:
            raise LogAway(error, began) from error
        raise


async def next_of(member: Member[D]) -> D:
    """The next batch of the member. Raises `Left`, and `LogAway` where a channel cannot be read; a member that is
    without channels has tried to join for as long as its session lasts, so that error is raised as it is."""
    try:
        with ends_once_closed():
            return await anext(member)
    except StopAsyncIteration:
        raise Left from None
    except TidewalError as error:
        if error.retryable and member.channels:  # how long the wait for a batch was says nothing
            raise LogAway(error, asyncio.get_running_loop().time()) from error
        raise


def has_lost(error: BaseException, channel: str) -> bool:
    """Whether another member has the channel now."""
    return isinstance(error, Fenced) and error.fields.get("channel") == channel


class Outage:
    """Failures of the log in a row, while a group's channels are worked through."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._since: float | None = None
        self._last = 0.0
        self._pause_s = FIRST_PAUSE_S

    def over(self) -> None:
        """Something succeeded."""
        self._since = None

    async def wait(self, away: LogAway) -> None:
        """Wait before going on after a failure. Raises its error once failures have lasted for `OUTAGE_S`."""
        now = asyncio.get_running_loop().time
        if self._since is None or away.began - self._last > 2 * LAST_PAUSE_S:  # what failed before is over
            self._since, self._pause_s = now(), FIRST_PAUSE_S
            _log.warning("group %s goes on when the log answers again: %s", self._group, away.error)
        if now() - self._since >= OUTAGE_S:
            raise away.error
        await asyncio.sleep(self._pause_s)
        self._last = now()
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)


def check_awaitable(answer: object, handle: Callable[..., object]) -> None:
    """Raise `InvalidRequest` for what `handle` has returned, unless it can be awaited."""
    if not isawaitable(answer):
        name = getattr(handle, "__qualname__", None) or type(handle).__qualname__
        raise InvalidRequest(
            f"the handler {name} has returned a {type(answer).__name__}, which cannot be awaited: write `async def`"
        )


def outputs_of(returned: Sequence[Append] | None) -> Sequence[Append]:
    """What a handler has returned: a handler that writes nothing need not return anything."""
    return () if returned is None else returned


class Batch(Protocol):
    """What a member delivers of one channel."""

    @property
    def channel(self) -> str: ...

    @property
    def first(self) -> bytes:
        """The id of the first entry that is to be processed."""
        ...

    @property
    def handled(self) -> Sequence[Entry]:
        """The entries that are to be processed."""
        ...

    @property
    def assignment_epoch(self) -> int: ...

    def parts(self) -> Sequence[Self]:
        """The least units that can be acknowledged by themselves, in order."""
        ...


D = TypeVar("D", bound=Batch)


class Member(Protocol[D]):
    """`GroupMember`, or what delivers its channels in another form. See there."""

    @property
    def group(self) -> str: ...

    @property
    def channels(self) -> frozenset[str]: ...

    async def __anext__(self) -> D: ...

    async def acknowledge(self, delivered: D, /, *, metadata: bytes | None = None) -> None: ...

    async def annotate(self, of: str | D, /, metadata: bytes) -> None: ...

    def metadata(self, channel: str, /) -> bytes: ...

    async def commit(
        self, delivered: Sequence[D], /, outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]: ...

    def redeliver(self, delivered: D, /) -> None: ...

    def pause(self, of: str | D, /) -> None: ...

    def resume(self, channel: str, /) -> None: ...


@runtime_checkable
class TellsAcknowledged(Protocol):
    """A member that knows what a handler may have acknowledged by itself: with a transaction of its own."""

    def is_acknowledged(self, delivered: Batch, /) -> bool: ...


@runtime_checkable
class HasAckTimeout(Protocol):
    """A member that takes back what is held for too long: what was joined with `ack_timeout_s`."""

    @property
    def ack_timeout_s(self) -> float | None: ...


def check_no_ack_timeout(member: object) -> None:
    """Raise `InvalidRequest` for a member that would take back what is held back to be tried again."""
    if isinstance(member, HasAckTimeout) and member.ack_timeout_s is not None:
        raise InvalidRequest(
            "a member with ack_timeout_s takes back what a RetryPolicy holds: give ack_timeout_s to the policy instead",
            argument="retry",
        )


def is_acknowledged(member: object, unit: Batch) -> bool:
    """Whether the handler of `unit` has acknowledged it: it is done then, whatever else that ends in."""
    return isinstance(member, TellsAcknowledged) and member.is_acknowledged(unit)
