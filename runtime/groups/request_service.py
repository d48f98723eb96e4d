"""Consumer groups between processes: what the owner of a log answers to members in other ones.

These are the requests, on whatever connection a log has:

    group.join      group member channels start session_timeout_s   → nil
    group.shares    group member seen wait_s                        → [version, {channel: assignment}, revoking]
    group.commit    group member acks outputs                       → ids
    group.release   group member channel epoch                      → nil
    group.seek      group member channel epoch upto                 → nil
    group.leave     group member                                    → nil
    group.list                                                      → [[group, positions, members, metadata], …]
    group.move      group channel upto                              → nil
    group.drop      group                                           → nil
    beat            group member                                    → nil

`members` has the channels of each member, by its id, and `metadata` what is stored with positions, by channel. `start`
is "earliest" or "latest". An assignment is [epoch, acked to, single ids, metadata], an ack [channel, epoch, upto or
nil, single ids, metadata or nil]; each log has its own form of single ids. `outputs` are entries.
`group.shares` waits up to `wait_s` (≤ `LONGEST_WAIT_S`) for another version than `seen`, unless that is nil. Every
request of a member is a heartbeat of its session; `beat` is nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from ..errors import InvalidRequest, TidewalError
from ..log.wal import Append, From, GroupInfo
from .assignment_state import Done
from .coordinator import GroupCoordinator
from .coordinator_client import Ack
from .local_coordinator_client import settled

LONGEST_WAIT_S = 60.0  # for which one request may wait


@dataclass(frozen=True, slots=True, eq=False)
class _Membership:
    """What the service knows of a member. Where another client joins as the same member, its membership replaces
    this."""

    client: bytes
    changed: asyncio.Event
    wake: Callable[[], None]  # the membership's `changed` at the coordinator


class GroupRequestService(ABC):
    """Answers group requests, on the loop of what takes them. A log derives a class that has its ids in requests."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator
        self._memberships: dict[tuple[str, str], _Membership] = {}  # by group and member

    @abstractmethod
    def encode_ids(self, ids: Iterable[bytes]) -> Sequence[object]:
        """Single ids as answers have them."""

    @abstractmethod
    def decode_ids(self, wire: Sequence[object]) -> Sequence[bytes]:
        """Single ids of a request, `MAX_SINGLE_ACKS` at most. Raises `InvalidRequest`."""

    def leave_all(self, client: bytes) -> None:
        """The client is gone, and its members have left."""
        for group, member in [key for key, membership in self._memberships.items() if membership.client == client]:
            self._leave(client, group, member)

    def forget_ended(self) -> None:
        """Forget members whose sessions are over, where nothing tells that their clients are gone."""
        for group, member in list(self._memberships):
            if not self._coordinator.has_member(group, member):
                del self._memberships[group, member]

    async def answer(self, client: bytes | None, method: str, arguments: Sequence[object]) -> object:
        """The result of one request of a client, a process with this id, as msgpack takes it. Raises what the
        coordinator raises, and `InvalidRequest`."""
        match [method, *arguments]:
            case ["beat", str(group), str(member)]:
                return self._coordinator.beat(group, member)
            case ["group.join", str(group), str(member), names, "earliest" | "latest" as start, float(timeout_s)]:
                return await self._join(client, group, member, _list(names), From(start), timeout_s)
            case ["group.shares", str(group), str(member), int() | None as seen, int() | float() as wait_s]:
                return await self._assignment(group, member, seen, wait_s)
            case ["group.commit", str(group), str(member), acks, outputs]:
                return await self._commit(group, member, _list(acks), _list(outputs))
            case ["group.release", str(group), str(member), str(channel), int(epoch)]:
                return self._coordinator.release(group, member, channel, epoch)
            case ["group.seek", str(group), str(member), str(channel), int(epoch), bytes(upto)]:
                seek = self._coordinator.seek
                return await settled(lambda done: seek(group, member, channel, epoch, upto, done))
            case ["group.leave", str(group), str(member)]:
                return self._leave(client, group, member)
            case ["group.list"]:
                return [_listed(info) for info in self._coordinator.groups()]
            case ["group.move", str(group), str(channel), bytes(upto)]:
                return await settled(lambda done: self._coordinator.seek_group(group, channel, upto, done))
            case ["group.drop", str(group)]:
                return await settled(lambda done: self._coordinator.drop_group(group, done))
            case _:
                raise InvalidRequest(f"{method[:100]!r} with these arguments is no request of the protocol")

    async def _join(
        self, client: bytes | None, group: str, member: str, names: list[object], start: From, timeout_s: float
    ) -> None:
        if client is None:
            raise InvalidRequest("a client that joins a group needs an id")
        if not all(isinstance(name, str) for name in names):
            raise InvalidRequest("channels are a list of names")
        channels = cast("list[str]", names)
        changed = asyncio.Event()
        joining = _Membership(client, changed, partial(_wake, asyncio.get_running_loop(), changed))

        def join(done: Done) -> None:
            self._coordinator.join(group, member, channels, start, timeout_s, joining.wake, done)
            self._memberships[group, member] = joining  # only now: a join that is refused ends no membership

        try:
            await settled(join)
        except TidewalError:
            if self._memberships.get((group, member)) is joining:  # its positions could not be stored
                del self._memberships[group, member]
            raise

    async def _assignment(self, group: str, member: str, seen: int | None, wait_s: float) -> object:
        membership = self._memberships.get((group, member))
        changed = None if membership is None else membership.changed
        if changed is not None:
            changed.clear()  # before looking: what changes from now on sets it again
        assignment = self._coordinator.assignment(group, member)
        if changed is not None and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, LONGEST_WAIT_S)):
                    # A loop, because a wake for a version that was seen already may come late, from another thread.
                    while assignment.version == seen:
                        await changed.wait()
                        changed.clear()
                        assignment = self._coordinator.assignment(group, member)
        held = {
            name: [channel.epoch, channel.acked_to, self.encode_ids(channel.acked), channel.metadata]
            for name, channel in assignment.held.items()
        }
        return [assignment.version, held, sorted(assignment.revoking)]

    async def _commit(self, group: str, member: str, acks: list[object], outputs: list[object]) -> object:
        if not all(isinstance(output, Append) for output in outputs):
            raise InvalidRequest("the outputs of a commit are entries")
        wanted, entries = [self._ack(ack) for ack in acks], cast("list[Append]", outputs)
        return await settled(lambda done: self._coordinator.commit(group, member, wanted, entries, done))

    def _ack(self, argument: object) -> Ack:
        match _list(argument):
            case [str(channel), int(epoch), bytes() | None as upto, ids, bytes() | None as metadata]:
                return Ack(channel, epoch, upto, tuple(self.decode_ids(_list(ids))), metadata)
            case _:
                raise InvalidRequest("an acknowledgement is a channel, an epoch, an id, single ids and metadata")

    def _leave(self, client: bytes | None, group: str, member: str) -> None:
        """End the membership if it is the client's: another may be that member by now."""
        membership = self._memberships.get((group, member))
        if membership is not None and membership.client == client:
            del self._memberships[group, member]
            self._coordinator.leave(group, member, membership.wake)


def _listed(info: GroupInfo) -> list[object]:
    members = {member: sorted(held) for member, held in info.members.items()}
    return [info.name, info.positions, members, info.metadata]


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits any more
        loop.call_soon_threadsafe(changed.set)


def _list(argument: object) -> list[object]:
    if not isinstance(argument, list):
        raise InvalidRequest("the request has something else where a list should be")
    return cast("list[object]", argument)
