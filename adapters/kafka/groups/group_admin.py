"""Listing, moving and dropping the groups of a log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiokafka.protocol.admin import DeleteGroupsRequest, DescribeGroupsRequest, ListGroupsRequest
from aiokafka.protocol.commit import OffsetCommitRequest

from ....runtime.errors import InvalidRequest
from ....runtime.groups.progress import GroupProgress, group_info
from ....runtime.log.wal import GroupInfo
from .. import faults
from ..catalog import KafkaChannel
from ..channel_access import KafkaCatalog
from ..cluster import Cluster
from .assignor import MemberMetadata, TopicAssignment
from .coordinator_broker import Code, CoordinatorBroker, CoordinatorType
from .offset_store import FOREVER
from .offsets import to_position, to_progress
from .requests import CommittedOffset, OffsetFetch, by_topic
from .session import NO_GENERATION

T = TypeVar("T")

NO_MEMBER = ""


class GroupAdmin:
    """The administration of groups. Belongs to the I/O loop."""

    def __init__(self, cluster: Cluster, catalog: KafkaCatalog) -> None:
        self._cluster, self._catalog = cluster, catalog

    async def groups(self) -> list[GroupInfo]:
        """`Wal.groups`."""
        await self._catalog.sync()
        names = await self._cluster.retrying("list the groups", self._names)
        infos = [await self._info(name) for name in sorted(names)]
        return [info for info in infos if info.positions or info.members]

    async def move(self, group: str, channel: KafkaChannel, position: bytes) -> None:
        """Store the position of a group in a channel. Raises `InvalidRequest` where the group has members."""
        coordinator = self._coordinator(group)
        at = to_position(channel, GroupProgress(position))
        topics = by_topic([(channel.key, (at.offset, at.metadata))])
        request = OffsetCommitRequest(self._id(group), NO_GENERATION, NO_MEMBER, FOREVER, topics)
        has_members = (Code.UNKNOWN_MEMBER, Code.ILLEGAL_GENERATION, Code.REBALANCE_IN_PROGRESS)

        async def attempt() -> int:
            response = await coordinator.ask(request)
            codes = [code for _, partitions in response.topics for _, code in partitions]
            return coordinator.check(*codes, but=has_members)

        if await self._cluster.retrying(f"move group {group}", attempt, faults.Operation.POSITION):
            raise InvalidRequest(f"group {group} has members: on Kafka only they can move it, with `seek`")

    async def drop(self, group: str) -> None:
        """`Wal.drop_group`."""
        await self._catalog.sync()
        coordinator = self._coordinator(group)

        async def attempt() -> int:
            response = await coordinator.ask(DeleteGroupsRequest([self._id(group)]))
            return coordinator.check(response.results[0][1], but=(Code.NOT_EMPTY, Code.GROUP_NOT_FOUND))

        dropped = await self._cluster.retrying(f"drop group {group}", attempt, faults.Operation.ADMINISTRATION)
        if dropped == Code.NOT_EMPTY:
            raise InvalidRequest(f"group {group} has members: they have to leave first")
        await self._catalog.unbind_queues(group)

    async def _names(self) -> set[str]:
        """The names of all groups: every broker lists those that it coordinates."""
        prefix = self._cluster.options.group_id("")
        answers = await asyncio.gather(
            *(self._cluster.ask(node, ListGroupsRequest()) for node in self._cluster.nodes())
        )
        names: set[str] = set()
        for answer in answers:
            self._coordinator("").check(answer.error_code)
            names |= {name.removeprefix(prefix) for name, _ in answer.groups if name.startswith(prefix)}
        return names

    async def _info(self, group: str) -> GroupInfo:
        members = await self._asking(group, self._members)
        return group_info(group, await self._asking(group, self._progress), members)

    async def _members(self, group: str, coordinator: CoordinatorBroker) -> dict[str, frozenset[str]]:
        response = await coordinator.ask(DescribeGroupsRequest([self._id(group)]))
        code, _, _, _, _, described, *_ = response.groups[0]
        if coordinator.check(code, but=(Code.GROUP_NOT_FOUND,)):
            return {}
        names = {channel.key: channel.name for channel in self._catalog.all()}
        members: dict[str, frozenset[str]] = {}
        for id, _, _, metadata, assignment in described:
            try:
                decoded = TopicAssignment.decode(assignment, foreign=self._cluster.options.foreign)
                members[MemberMetadata.decode(metadata).id] = frozenset(names[t] for t in decoded.topics if t in names)
            except (ValueError, KeyError):  # another client, or the group is rebalancing
                members[id] = frozenset()
        return members

    async def _progress(self, group: str, coordinator: CoordinatorBroker) -> dict[str, GroupProgress]:
        response = await coordinator.ask(OffsetFetch(self._id(group), None, stable=False))
        coordinator.check(response.error_code, but=(Code.GROUP_NOT_FOUND,))
        channels = {channel.place: channel for channel in self._catalog.all()}
        progress: dict[str, GroupProgress] = {}
        for topic, partitions, _ in response.topics or ():
            for number, offset, _, metadata, _, _ in partitions:
                channel = channels.get((topic, number))
                if channel is not None and offset >= 0:
                    progress[channel.name] = to_progress(channel, CommittedOffset(offset, metadata or ""))
        return dict(sorted(progress.items()))

    async def _asking(self, group: str, ask: Callable[[str, CoordinatorBroker], Awaitable[T]]) -> T:
        coordinator = self._coordinator(group)
        return await self._cluster.retrying(f"describe group {group}", lambda: ask(group, coordinator))

    def _coordinator(self, group: str) -> CoordinatorBroker:
        return CoordinatorBroker(self._cluster, CoordinatorType.GROUP, self._id(group))

    def _id(self, group: str) -> str:
        return self._cluster.options.group_id(group)
