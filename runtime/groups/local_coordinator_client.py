"""The coordinator client of members that run in the process of the log's owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ..errors import TidewalError, Unavailable
from ..log.wal import Append, From, GroupInfo
from ..loop_bridge import call_on, conclude
from .coordinator import GroupCoordinator
from .coordinator_client import Ack, MemberAssignment


class LocalCoordinatorClient:
    """`CoordinatorClient` over a coordinator in this process. A member here has no session: it lasts as long as the
    owner does. Waiting needs no timeout, because no wake-up is lost: `wait_s` only says whether to wait at all."""

    def __init__(self, coordinator: GroupCoordinator, patience_s: float | None = None) -> None:
        """After `patience_s` what is to be stored has an unknown outcome here; None: the log always says in time what
        became of it."""
        self._coordinator, self._patience_s = coordinator, patience_s
        self._changed: dict[tuple[str, str], asyncio.Event] = {}

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        event = self._changed[group, member] = asyncio.Event()

        def changed() -> None:
            call_on(loop, event.set)

        join = self._coordinator.join
        await settled(
            lambda done: join(
                group, member, channels, start, None, changed, done, revocation_timeout_s=session_timeout_s
            ),
            self._patience_s,
        )

    async def assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> MemberAssignment:
        event = self._changed.setdefault((group, member), asyncio.Event())
        while True:
            event.clear()
            assignment = self._coordinator.assignment(group, member)
            if assignment.version != seen or wait_s <= 0:
                return assignment
            await event.wait()

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        ids = await settled(lambda done: self._coordinator.commit(group, member, acks, outputs, done), self._patience_s)
        return ids or []

    async def release(self, group: str, member: str, channel: str, assignment_epoch: int) -> None:
        self._coordinator.release(group, member, channel, assignment_epoch)

    async def seek(self, group: str, member: str, channel: str, assignment_epoch: int, upto: bytes) -> None:
        await settled(
            lambda done: self._coordinator.seek(group, member, channel, assignment_epoch, upto, done), self._patience_s
        )

    async def leave(self, group: str, member: str) -> None:
        self._coordinator.leave(group, member)
        self._changed.pop((group, member), None)

    async def groups(self) -> list[GroupInfo]:
        return self._coordinator.groups()

    async def seek_group(self, group: str, channel: str, upto: bytes) -> None:
        await settled(lambda done: self._coordinator.seek_group(group, channel, upto, done), self._patience_s)

    async def drop_group(self, group: str) -> None:
        await settled(lambda done: self._coordinator.drop_group(group, done), self._patience_s)


async def settled(
    start: Callable[[Callable[[list[bytes] | TidewalError | None], None]], None], patience_s: float | None = None
) -> list[bytes] | None:
    """Call `start` with a callback, and wait until it is called, once and on any thread. Returns the callback's
    argument; an error is raised, and `Unavailable` (`outcome_unknown`) after `patience_s`."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[bytes] | None] = loop.create_future()
    start(lambda result: call_on(loop, partial(conclude, future, result)))
    try:
        async with asyncio.timeout(patience_s):
            return await future
    except TimeoutError:
        raise Unavailable("the log has not answered: what became of it is not known", outcome_unknown=True) from None
