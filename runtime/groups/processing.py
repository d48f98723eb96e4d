"""Work through what a group's member gets, under delivery semantics that one argument chooses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import TypeAlias

from ..errors import Fenced, Unsupported
from ..wal import Append, Delivered, GroupMember, Wal

Handler: TypeAlias = Callable[[Delivered], Awaitable[Sequence[Append]]]


class Semantics(Enum):
    """How often the effect of an entry may happen when processes die in the middle of their work."""

    AT_MOST_ONCE = "at_most_once"  # acknowledged before it is worked on: what was being worked on then is lost
    AT_LEAST_ONCE = "at_least_once"  # acknowledged afterwards: what was being worked on then is worked on again
    EXACTLY_ONCE = "exactly_once"  # its outputs and the acknowledgement are one commit; what else a handler does is not


async def process(wal: Wal, member: GroupMember, handle: Handler, semantics: Semantics) -> None:
    """Call `handle` with each batch, one after the other, and append what it returns, until the member leaves or the
    log is closed. What another member gets meanwhile is left to that one, as `Fenced` says.

    Raises what `handle`, iterating, acknowledging, committing and appending raise; the member stays in its group then,
    and processing may be started again with it, or after leaving with another one. Raises `Unsupported` (`capability`)
    for exactly once on a log without `atomic_commits`."""
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
        except Fenced as error:
            if error.fields.get("channel") != delivered.channel:
                raise


async def _at_most_once(wal: Wal, member: GroupMember, handle: Handler, delivered: Delivered) -> None:
    await member.acknowledge(delivered)
    await wal.append_many(await handle(delivered))


async def _at_least_once(wal: Wal, member: GroupMember, handle: Handler, delivered: Delivered) -> None:
    await wal.append_many(await handle(delivered))
    await member.acknowledge(delivered)


async def _exactly_once(wal: Wal, member: GroupMember, handle: Handler, delivered: Delivered) -> None:
    await member.commit([delivered], await handle(delivered))
