"""The pchannels of collections: the node creates them, or uses those that an administrator has created
(`common.preCreatedTopic`)."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

from ...runtime.catalog.catalog_log import CatalogLog
from ...runtime.config.section import RetainingSettings
from ...runtime.config.settings import MIB
from ...runtime.errors import ChannelExists, ChannelNotFound, ConfigError
from ...runtime.log.wal import ChannelPolicy, Delivery
from ..node import Node

KEY = "common.preCreatedTopic"

_MISSING = "(no channel of this log: create it with `Wal.create_channel`)"
_IN_USE = "(has entries that this cluster did not write: use an empty one)"
_NO_POLICY = "(does not keep what tables need: create it durable, with `Delivery.KEEP`)"
_NO_NAME = "(a name that begins with the cluster's prefix, or ends like `_1v0`, means something else)"
_TWICE = "(named twice, or the `timeticker`, too)"
_NOT_EPHEMERAL = "(would keep every heartbeat: create it ephemeral, and not temporary)"


class Pchannels:
    """Chooses the pchannel of a shard. A pre-created channel is the cluster's own once the catalog has it; before, it
    must be empty."""

    def __init__(self, node: Node, catalog: CatalogLog) -> None:
        self._node, self._catalog = node, catalog
        self._pre_created = node.settings.common.pre_created_topic

    async def check(self) -> None:
        """Raise `ConfigError` (`key`, `channels`), which names the pre-created channels that cannot be used."""
        if not self._pre_created.enabled:
            return
        if not self._pre_created.names:
            raise ConfigError(f"{KEY}.enabled is set, and {KEY}.names names no channel", key=f"{KEY}.names")
        await self._check_names(self._pre_created.names)
        timeticker = self._pre_created.timeticker
        fault = await self._fault_of_timeticker(timeticker) if timeticker else ""
        if fault:
            raise ConfigError(f"{KEY}.timeticker: {timeticker} {fault}", key=f"{KEY}.timeticker", channels=timeticker)

    async def for_shard(self, collection_id: int, shard: int) -> str:
        """The pchannel for shard number `shard` of a new collection; it exists when this returns. Raises `ConfigError`
        for a pre-created channel that can no longer be used, such as one that another cluster has begun to use."""
        index = collection_id - 1 + shard
        if self._pre_created.enabled:
            name = self._pre_created.names[index % len(self._pre_created.names)]
            fault = await self._fault(name)
            if fault:
                raise _refusal({fault: [name]})
            return name
        name = self._node.names.pchannel(index % self._node.settings.root_coord.dml_channel_num)
        with suppress(ChannelExists):  # created under other settings: a channel keeps its policy
            await self._node.wal.create_channel(name, self._policy())
        return name

    def _policy(self) -> ChannelPolicy:
        section = self._node.settings.of_backend(self._node.wal.name)
        kept = section if isinstance(section, RetainingSettings) else RetainingSettings()
        minutes, size = kept.retention_time_in_minutes, kept.retention_size_in_mb
        return ChannelPolicy(
            retention_s=None if minutes < 0 else minutes * 60.0, retention_bytes=None if size < 0 else size * MIB
        )

    async def _check_names(self, names: tuple[str, ...]) -> None:
        faults: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys(names):
            twice = names.count(name) > 1 or name == self._pre_created.timeticker
            fault = _TWICE if twice else await self._fault(name)
            if fault:
                faults[fault].append(name)
        if faults:
            raise _refusal(faults)

    async def _fault(self, name: str) -> str:
        """Why a channel cannot be a pchannel; "" where it can."""
        if not self._node.names.may_hold_data(name):
            return _NO_NAME
        try:
            found = await self._node.wal.describe(name)
        except ChannelNotFound:
            return _MISSING
        if found.policy.ephemeral or found.policy.delivery is not Delivery.KEEP:
            return _NO_POLICY
        ours = name in self._catalog.catalog.channels  # entered there before the first entry was written
        return _IN_USE if found.first_id is not None and not ours else ""

    async def _fault_of_timeticker(self, name: str) -> str:
        try:
            policy = (await self._node.wal.describe(name)).policy
        except ChannelNotFound:
            return _MISSING
        return "" if policy.ephemeral and not policy.temporary else _NOT_EPHEMERAL


def _refusal(faults: dict[str, list[str]]) -> ConfigError:
    described = "; ".join(f"{', '.join(names)} {fault}" for fault, names in faults.items())
    channels = ", ".join(name for names in faults.values() for name in names)
    return ConfigError(f"{KEY}.names: {described}", key=f"{KEY}.names", channels=channels)
