"""What an owner is asked over a connection, by the methods of the protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ....runtime.log.policy_codec import encode_policy
from ....runtime.log.wal import ChannelInfo, ChannelPolicy
from ..protocol import info_of


class OwnerCalls(ABC):
    """The calls of a `Wal` that are one request each; `_ask` makes it."""

    @abstractmethod
    async def _ask(self, method: str, *arguments: object) -> Any: ...

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await self._ask("create", channel, encode_policy(policy))

    async def drop_channel(self, channel: str) -> None:
        await self._ask("drop", channel)

    async def channels(self) -> list[str]:
        return await self._ask("channels")

    async def describe(self, channel: str) -> ChannelInfo:
        return info_of(channel, await self._ask("describe", channel))

    async def latest_id(self, channel: str) -> bytes | None:
        return await self._ask("latest_id", channel)

    async def id_at(self, channel: str, timestamp: int) -> bytes | None:
        return await self._ask("id_at", channel, timestamp)

    async def truncate(self, channel: str, id: bytes) -> None:
        await self._ask("truncate", channel, id)

    async def hold(self, channel: str, holder: str, id: bytes | None) -> None:
        await self._ask("hold", channel, holder, id)
