"""What working through a group's channels needs of a member, whatever it delivers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isawaitable
from typing import Protocol, Self, TypeVar

from ..errors import Closed, InvalidRequest
from ..log.wal import Append, Entry


class Left(Exception):
    """The member has left its group, or the log is closed."""


@contextmanager
def ends_once_closed() -> Generator[None]:
    """What is `Closed` in here is the member or the log; a handler's own `Closed` is an error."""
    try:
        yield
    except Closed:
        raise Left from None


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

    async def __anext__(self) -> D: ...

    async def acknowledge(self, delivered: D, /, *, metadata: bytes | None = None) -> None: ...

    async def annotate(self, of: str | D, /, metadata: bytes) -> None: ...

    def metadata(self, channel: str, /) -> bytes: ...

    async def commit(
        self, delivered: Sequence[D], /, outputs: Sequence[Append], *, metadata: Mapping[str, bytes] | None = None
    ) -> list[bytes]: ...

    def redeliver(self, delivered: D, /) -> None: ...

    def pause(self, channel: str, /) -> None: ...

    def resume(self, channel: str, /) -> None: ...
