"""Temporary channels of other processes: dropped when the process that created them is gone.

Those of the owner itself end with its incarnation: opening the directory drops all temporary channels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from ....runtime.errors import TidewalError
from .client_resources import ClientResources

_log = logging.getLogger(__name__)


class TemporaryChannels(ClientResources[str]):
    """The names of channels that clients asked for; `drop` drops the temporary ones among them."""

    def __init__(self, drop: Callable[[str], Coroutine[object, object, None]]) -> None:
        super().__init__()
        self._drop = drop
        self._dropping: set[asyncio.Task[None]] = set()

    def _release(self, resources: set[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._drop_all(resources))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _drop_all(self, channels: set[str]) -> None:
        results = await asyncio.gather(*map(self._drop, channels), return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        if failed:
            _log.warning(
                "%d channels of a client that is gone stay until the log is opened again: %s", len(failed), failed[0]
            )
        for error in failed:
            if not isinstance(error, TidewalError):
                raise error
