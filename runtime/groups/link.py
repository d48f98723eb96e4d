"""How a group's member talks to the coordinator, which may live in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..wal import Append, From


class Ack(NamedTuple):
    """What is done of one channel, under the lease it was delivered with: all ids ≤ `upto` (None: says nothing), and
    the single `ids`."""

    channel: str
    lease: int
    upto: bytes | None
    ids: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Share:
    """One channel that a member has. Under a new lease it starts behind `acked_to` (b"": before all ids) and leaves out
    what is in `acked`."""

    lease: int
    acked_to: bytes
    acked: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Shares:
    """What a member has. Versions grow, over the lives of the log's owner too. What is `wanted_back` (all of it is in
    `held` as well) is to be released once everything delivered of it is acknowledged."""

    version: int
    held: Mapping[str, Share] = field(default_factory=dict[str, Share])
    wanted_back: frozenset[str] = frozenset()


class GroupLink(Protocol):
    """The coordinator's calls as coroutines; its errors come through. Every method may raise `Unavailable` when the
    owner of the log is gone (`outcome_unknown` where something may have happened), and `Closed` once the log is closed.
    """

    async def join(
        self, group: str, member: str, channels: Sequence[str], start: From, session_timeout_s: float
    ) -> None:
        """Become a member, and keep the session alive from then on, on a thread that a busy loop cannot starve. The
        same member may join again: whatever it had is taken from it first."""
        ...

    async def shares(self, group: str, member: str, seen: int | None, wait_s: float) -> Shares:
        """What the member has now; with `seen`, wait up to `wait_s` for another version than that one. Raises `Fenced`
        for an unknown member."""
        ...

    async def commit(self, group: str, member: str, acks: Sequence[Ack], outputs: Sequence[Append]) -> list[bytes]:
        """Append the outputs and store what is done, together or not at all; the outputs' ids. Raises `Fenced` for a
        lease that is over, and what appending raises."""
        ...

    async def release(self, group: str, member: str, channel: str, lease: int) -> None:
        """End the lease. Once all that was begun under it is decided the channel goes, from its position then, to the
        member it is meant for: under a new lease to this one, unless it is wanted back. A lease that is over already is
        fine."""
        ...

    async def seek(self, group: str, member: str, channel: str, lease: int, upto: bytes) -> None:
        """Move the position, backward too; the member gets the channel back under a new lease. Raises `Fenced`."""
        ...

    async def leave(self, group: str, member: str) -> None:
        """End the session; the others get the channels at once. An unknown member is fine."""
        ...
