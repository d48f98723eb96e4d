"""Temporary channels of other processes: dropped when the process that created them is gone.

Those of the owner itself end with its incarnation: opening the directory drops all temporary channels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....runtime.errors import TidewalError
from .channel_cache import LiveChannel
from .client_resources import ClientResources

if TYPE_CHECKING:
    from .store import RocksMQ

_log = logging.getLogger(__name__)


class TemporaryChannels(ClientResources):
    """The temporary channels of a store that clients created; each notes its creators."""

    def __init__(self, store: RocksMQ) -> None:
        super().__init__()
        self._store = store
        self._dropping: set[asyncio.Task[None]] = set()

    def _release(self, client: bytes) -> None:
        channels = self._store.created_by(client)
        if channels:
            task = asyncio.get_running_loop().create_task(self._drop_all(client, channels))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop_all(self, client: bytes, channels: Sequence[LiveChannel]) -> None:
        drops = [self._store.drop_created(client, channel) for channel in channels]
        results = await asyncio.gather(*drops, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            _log.warning(
                "%d channels of a client that is gone stay until the log is opened again: %s", len(failed), failed[0]
            )
        for error in failed:
            if not isinstance(error, TidewalError):
                raise error
