"""The delayed messages of a named producer: they wait in a channel of its own, which it owns beside the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from ..clock import HybridClock
from ..delays.buffer import BUFFER_BYTES
from ..delays.delayed import DelayedMessage, cancellation, delay_policy, delayed_record
from ..delays.releaser import Releaser
from ..delays.targets import OwnedTargets
from ..errors import ChannelExists, InvalidRequest, TidewalError
from ..log.dead_letters import delayed_letter
from ..log.record import MAX_RECORD_BYTES, Record
from ..log.wal import Append, ChannelPolicy, Wal
from ..waiting import ended
from .channel_owner import ChannelOwner

_LETTERS_POLICY = ChannelPolicy(max_message_bytes=MAX_RECORD_BYTES)
_log = logging.getLogger("tidewal.delays")


class ProducerDelays:
    """`wanted`: the producer is to take delayed messages; it also does where the name did so before."""

    def __init__(self, wal: Wal, name: str, clock: HybridClock, *, wanted: bool) -> None:
        self.channel: str = f"producer-{name}.delays"
        self.asked: tuple[str, ...] = (self.channel,) if wanted else ()
        self._letters = f"producer-{name}.dead_letters"
        self._wal, self._name, self._clock = wal, name, clock
        self._releaser: Releaser | None = None
        self._releasing: asyncio.Task[None] | None = None

    def policy_of(self, channel: str, policy: ChannelPolicy) -> ChannelPolicy:
        """The policy of a channel of the producer."""
        return delay_policy(policy) if channel == self.channel else policy

    def records(self, batch: Sequence[tuple[str, Record]], due_ms: int) -> list[tuple[str, Record]]:
        """What is stored for a batch that is due at `due_ms`."""
        self._check_started()
        return [(self.channel, delayed_record(channel, record, due_ms)) for channel, record in batch]

    def cancellations(self, id: bytes) -> list[tuple[str, Record]]:
        """What is stored to cancel a message."""
        self._check_started()
        return [(self.channel, cancellation(id))]

    def _check_started(self) -> None:
        if self._releaser is None:
            raise InvalidRequest(
                f"the producer {self._name} takes no delayed messages: open it with open_producer(…, delays=True)"
            )

    # ---- releasing --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many messages are known to wait."""
        return self._releaser.pending if self._releaser is not None else 0

    def start(self, owner: ChannelOwner, failed: Callable[[TidewalError], Awaitable[None]]) -> None:
        """Release what is due. `failed` is called with an error that does not pass."""
        self._releaser = Releaser(
            self._wal,
            owner,
            self.channel,
            self.channel,
            self._clock,
            self._keep,
            OwnedTargets(owner, self.channel, lambda channel: channel in owner.channels),
            buffer_bytes=lambda: BUFFER_BYTES,
        )
        self._releasing = asyncio.create_task(self._release(self._releaser, failed), name=f"delays of {self._name}")

    async def _release(self, releaser: Releaser, failed: Callable[[TidewalError], Awaitable[None]]) -> None:
        try:
            await releaser.run()
        except Exception as error:
            _log.exception("the producer %s cannot release delayed messages", self._name)
            self._releasing = None  # it ends itself
            known = isinstance(error, TidewalError)
            await failed(
                error if known else TidewalError(f"delayed messages of {self._name} cannot be sent: {error!r}")
            )

    async def stop(self) -> None:
        """Release nothing more."""
        releasing, self._releasing = self._releasing, None
        if releasing is not None:
            await ended(releasing)

    async def _keep(self, message: DelayedMessage, reason: str) -> None:
        """Keep what its channel does not take, in the dead letters."""
        with suppress(ChannelExists):
            await self._wal.create_channel(self._letters, _LETTERS_POLICY)
        ts = self._clock.now()
        letter = delayed_letter(message.channel, message.id, message.record, reason, ts)
        await self._wal.append_many([Append(self._letters, letter, ts)])
