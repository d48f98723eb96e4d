"""Process what a group's member gets, under delivery semantics that one argument chooses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TypeAlias

from ..errors import Closed, Fenced, Unsupported
from ..log.wal import Append, Delivered, GroupMember, Wal

Handler: TypeAlias = Callable[[Delivered], Awaitable[Sequence[Append]]]


class Semantics(Enum):
    """How often the effect of an entry may happen when processes die in the middle of their work."""

    AT_MOST_ONCE = "at_most_once"  # acknowledged before it is processed: what was being processed then is lost
    AT_LEAST_ONCE = "at_least_once"  # acknowledged afterwards: what was being processed then is processed again
    EXACTLY_ONCE = (
        "exactly_once"  # its outputs and the acknowledgement are one commit; a handler's other effects are not
    )


class _Left(Exception):
    """The member has left its group, or the log is closed."""


async def process(wal: Wal, member: GroupMember, handle: Handler, semantics: Semantics) -> None:
    """Call `handle` with each batch, one after the other, and append what it returns, until the member leaves or the
    log is closed. A batch whose channel another member gets meanwhile (`Fenced`) is left to that member.

    Raises what `handle`, iterating, acknowledging, committing and appending raise; the member stays in its group then,
    and processing may be started again with it, or after leaving with another one. After an error, and when it is
    cancelled, the batch goes back (`GroupMember.redeliver`): what of it is not acknowledged is delivered again, and
    nothing that lies behind it passes it. Raises `Unsupported` (`capability`) for exactly once on a log without
    `atomic_commits`."""
    if semantics is Semantics.EXACTLY_ONCE and not wal.capabilities.atomic_commits:
        raise Unsupported(f"{wal.name}:// has no commits of outputs with positions", capability="atomic_commits")
    step = {
        Semantics.AT_MOST_ONCE: _at_most_once,
        Semantics.AT_LEAST_ONCE: _at_least_once,
        Semantics.EXACTLY_ONCE: _exactly_once,
    }[semantics]
    async for delivered in member:
        try:
            await step(wal, member, handle, delivered)
        except _Left:
            return
        except BaseException as error:
            member.redeliver(delivered)
            if not isinstance(error, Fenced) or error.fields.get("channel") != delivered.channel:
                raise


async def _at_most_once(wal: Wal, member: GroupMember, handle: Handler, delivered: Delivered) -> None:
    with _ends_once_closed():
        await member.acknowledge(delivered)
    outputs = await handle(delivered)
    with _ends_once_closed():
        await wal.append_many(outputs)


async def _at_least_once(wal: Wal, member: GroupMember, handle: Handler, delivered: Delivered) -> None:
    outputs = await handle(delivered)
    with _ends_once_closed():
        await wal.append_many(outputs)
        await member.acknowledge(delivered)


async def _exactly_once(wal: Wal, member: GroupMember, handle: Handler, delivered: Delivered) -> None:
    outputs = await handle(delivered)
    with _ends_once_closed():
        await member.commit([delivered], outputs)


@contextmanager
def _ends_once_closed() -> Generator[None]:
    """What is `Closed` in here is the member or the log, as `process` expects; a handler's own `Closed` is an error."""
    try:
        yield
    except Closed:
        raise _Left from None
