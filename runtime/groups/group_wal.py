"""The `Wal` of a backend with consumer groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from uuid import uuid4

from ..log.wal import From, GroupInfo, Start
from ..log.wal_base import WalBase
from ..metrics.metrics import Metrics
from .coordinator_client import CoordinatorClient
from .group_consumer import GroupConsumer, start_member
from .positions import resolve


class GroupWal(WalBase):
    """A `WalBase` with the calls for consumer groups, which all go to the client of the groups' coordinator: that is
    what a backend has to bring."""

    def __init__(self, shown: str, metrics: Metrics | None = None) -> None:
        """`shown` as for `WalBase`. Positions that `reset_to` of a member moves are counted in `metrics`."""
        super().__init__(shown)
        self._group_metrics = metrics
        self._resets = None if metrics is None else metrics.counter("wal_group_reset_total")

    async def join(
        self,
        group: str,
        channels: Sequence[str],
        *,
        start: From = From.EARLIEST,
        reset_to: From | None = None,
        session_timeout_s: float = 30.0,
        ack_timeout_s: float | None = None,
    ) -> GroupConsumer:
        return await start_member(
            self,
            await self._coordinator_client(),
            group,
            channels,
            start=start,
            reset_to=reset_to,
            session_timeout_s=session_timeout_s,
            ack_timeout_s=ack_timeout_s,
            member=self._new_member(),
            resets=self._resets,
            ack_timeouts=(
                None
                if self._group_metrics is None
                else self._group_metrics.counter("wal_group_ack_timeout_total", group=group)
            ),
        )

    async def groups(self) -> list[GroupInfo]:
        return await (await self._coordinator_client()).groups()

    async def seek_group(self, group: str, channel: str, start: Start) -> None:
        client = await self._coordinator_client()
        await client.seek_group(group, channel, await resolve(self, channel, start))

    async def drop_group(self, group: str) -> None:
        await (await self._coordinator_client()).drop_group(group)

    @abstractmethod
    async def _coordinator_client(self) -> CoordinatorClient:
        """The client for all groups of the log. Raises `Closed`, and `Unavailable` where it has to connect first."""

    def _new_member(self) -> str:
        """An id that no other member of any group has."""
        return uuid4().hex
