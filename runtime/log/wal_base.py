"""What the `Wal`s of all backends have in common."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from ..arguments import check_calls
from ..errors import Closed, Unsupported
from ..loop_bridge import LoopNotifiers
from .stamps import stamped
from .wal import Append, From, GroupInfo, GroupMember, Headers, OnAppended, Payload, Start, Wal

if TYPE_CHECKING:
    from ..groups.coordinator_client import GroupAcks

CALLS = (
    *("create_channel", "describe", "drop_channel", "submit", "append", "append_many", "read", "latest_id", "id_at"),
    *("truncate", "hold", "join", "seek_group", "drop_group"),
)
"""The calls of `Wal` that have arguments."""


class WalBase(Wal):
    """A `Wal` but for its channels, `submit` and reading: single appends, a close that runs to its end once, however
    often it is called or cancelled, and the refusal of consumer groups.

    A subclass sets `name` and `capabilities`, implements the abstract methods of `Wal` and `_close`, and calls
    `_check_open` first in whatever does not notice by itself that the log is closed.
    """

    def __init_subclass__(cls) -> None:
        check_calls(cls, Wal, CALLS)

    def __init__(self, shown: str) -> None:
        """`shown` is the log's URL, or what else names it in errors, without credentials."""
        self._shown = shown
        self._notifiers = LoopNotifiers()
        self._closed = False  # set by `_close`, as soon as no call is let in any more
        self._ending: asyncio.Task[None] | None = None

    # ---- appending ---------------------------------------------------------------------------------------------------

    async def append(
        self,
        channel: str,
        payload: Payload,
        timestamp: int = 0,
        *,
        key: bytes | None = None,
        headers: Headers = (),
    ) -> bytes:
        return (await self.append_many((Append(channel, payload, timestamp, key, headers),)))[0]

    async def append_many(self, entries: Sequence[Append]) -> list[bytes]:
        future, done = self._notifiers.promise()
        self.submit(stamped(entries), done)
        return await future

    # ---- groups ------------------------------------------------------------------------------------------------------

    async def join(
        self,
        group: str,
        channels: Sequence[str],
        *,
        start: From = From.EARLIEST,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
        ack_timeout_s: float | None = None,
    ) -> GroupMember:
        raise self._without_groups()

    async def groups(self) -> list[GroupInfo]:
        raise self._without_groups()

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        raise self._without_groups()

    async def drop_group(self, group: str) -> None:
        raise self._without_groups()

    def submit_with_acks(self, entries: Sequence[Append], acks: GroupAcks, done: OnAppended) -> None:
        raise Unsupported(
            f"{self.name}:// takes no position of a group in the commit of an append, or another process owns the log "
            "(docs/backends.md says which logs do, in their node)",
            capability="atomic_acks",
        )

    def _without_groups(self) -> Unsupported:
        return Unsupported(f"{self.name}:// has no consumer groups: use another log", capability="groups")

    # ---- closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """`Wal.close`. When the call is cancelled the closing goes on; another call waits for the same end."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"close {self._shown}")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        await self._close()
        self._notifiers.close()

    @abstractmethod
    async def _close(self) -> None:
        """Do what `Wal.close` says. Called once."""

    def _check_open(self) -> None:
        """Raises `Closed`."""
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> Closed:
        return Closed(f"the log {self._shown} is closed")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


check_calls(WalBase, Wal, CALLS)
