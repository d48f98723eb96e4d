"""Marks of positions that transactions may move: `PositionMarks`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import TypeAlias

Assignment: TypeAlias = tuple[str, int]
"""A channel that a member has, and the epoch of its assignment."""


class PositionMarks:
    """Which token of a fence (`cluster/decided_positions.py`) is to be stored with the positions of one member. In an
    assignment each store of metadata has it from `set` on, and none that was made before comes behind that. Those of an
    earlier assignment of the channel, which its end has decided or refuses, are not waited for, and its token says
    nothing: what another member has marked since stays."""

    def __init__(self) -> None:
        self._tokens: dict[str, tuple[int, int]] = {}  # by channel: the assignment epoch, and the token in it
        self._storing: dict[Assignment, set[object]] = {}  # what is made and not stored
        self._stored = asyncio.Event()

    def of(self, assignment: Assignment, stored: int) -> int:
        """The token to store now, where `stored` is, as far as the member knows."""
        channel, epoch = assignment
        set_in, token = self._tokens.get(channel, (epoch, stored))
        return token if set_in == epoch else stored

    @asynccontextmanager
    async def storing(self, assignments: Collection[Assignment]) -> AsyncGenerator[None]:
        """The block makes metadata for these assignments, and stores it."""
        store = object()
        for each in assignments:
            self._storing.setdefault(each, set()).add(store)
        try:
            yield
        finally:
            for each in assignments:
                self._storing[each].remove(store)
                if not self._storing[each]:
                    del self._storing[each]
            self._stored.set()
            self._stored = asyncio.Event()

    async def set(self, assignment: Assignment, token: int) -> None:
        """Have `token` stored from now on; returns once all that was made before is."""
        channel, epoch = assignment
        self._tokens[channel] = epoch, token
        while assignment in self._storing:
            await self._stored.wait()
