"""Positions that transactions move, at a member of the group (`runtime/cluster/decided_positions.py`)."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from ...runtime.cluster.decided_positions import DecidedPosition
from ...runtime.errors import ChannelNotFound, Closed, DeadlineExceeded, Fenced, Moved, TidewalError, Unavailable
from ...runtime.groups.coordinator_client import Ack
from ...runtime.groups.group_consumer import GroupConsumer
from ...runtime.groups.group_filter import RecordState
from ...runtime.log.wal import Delivered, GroupMember

_ENDS = (ChannelNotFound, Closed, Moved)  # of the channel, or the log, which the member sees by itself

_log = logging.getLogger("tidewal.client")

FencePosition = Callable[[str, str], Awaitable[DecidedPosition]]
"""Has a node fence the position of a group in a channel, and returns what was decided until then. Raises what the node
does."""

Mark = Callable[[int], Awaitable[None]]
"""Has a token stored with the position of a delivery from now on. Raises `Fenced`, and what storing raises."""


class MemberPositions:
    """What one member knows of the positions in its channels that transactions move."""

    def __init__(self, fence: FencePosition) -> None:
        self._fence = fence
        self._tokens: dict[str, tuple[int, int]] = {}  # by channel: the assignment epoch, and its own token in it
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by channel

    def forget(self) -> None:
        """The member is one of another log now."""
        self._tokens.clear()

    def is_open(self, delivered: Delivered, metadata: bytes) -> bool:
        """Whether a transaction of another member, or of this one before, may have moved the position further than it
        was when `delivered` was, with this `metadata`."""
        token = RecordState.of(metadata).token
        return bool(token) and self._tokens.get(delivered.channel) != (delivered.assignment_epoch, token)

    async def settle(self, member: GroupMember, delivered: Delivered) -> bool:
        """Let the position be where transactions have moved it, and have the channel delivered from there. Returns
        whether that is done, or another member has it by now; it is tried again otherwise, and the iteration raises
        what does not pass by itself."""
        try:
            state = RecordState.of(member.metadata(delivered.channel))
            if isinstance(member, GroupConsumer) and self.is_open(delivered, state.to_metadata()):
                found = await self._fence(member.group, delivered.channel)
                moved = found.decided == state.token and found.upto >= delivered.entries[0].id
                settled = _settled(state, found) if moved else state._replace(token=0)
                await member.go_on_behind(delivered, found.upto if moved else None, settled.to_metadata())
        except Fenced:
            return True
        except TidewalError as error:
            _log.debug("what was decided of %s is asked later: %s", delivered.channel, error)
            if isinstance(member, GroupConsumer) and not (error.retryable or isinstance(error, _ENDS)):
                member.report(error)
            return False
        return True

    async def settle_lost(self, member: GroupConsumer, at: Delivered, begin: bytes) -> bool:
        """`settle`, where retention has removed what comes next behind the position `begin`. Returns whether
        transactions have moved it, so that this is no loss. Raises what the node and storing raise."""
        state = RecordState.of(member.metadata(at.channel))
        if not self.is_open(at, state.to_metadata()):
            return False
        found = await self._fence(member.group, at.channel)
        if found.decided != state.token or found.upto <= begin:
            return False
        await member.go_on_behind(at, found.upto, _settled(state, found).to_metadata())
        return True

    async def token(self, member: GroupMember, delivered: Delivered, mark: Mark) -> int:
        """The token under which transactions may move the position, as long as this assignment lasts: fenced, and
        stored by `mark`, before the first one. Raises `Fenced`, and what the node and storing raise; no error says that
        anything may be written."""
        channel, epoch = delivered.channel, delivered.assignment_epoch
        async with self._asking[channel]:
            known = self._tokens.get(channel)
            if known is not None and known[0] == epoch:
                return known[1]
            try:
                found = await self._fence(member.group, channel)
                self._tokens[channel] = epoch, found.token
                await mark(found.token)
            except BaseException as error:
                self._tokens.pop(channel, None)
                if isinstance(error, TidewalError) and not isinstance(error, Fenced):
                    raise _nothing_written(error) from error
                raise
            return found.token

    async def store(self, member: GroupMember, acks: Sequence[Ack]) -> None:
        """Store acknowledgements of a transaction that is committed."""
        if isinstance(member, GroupConsumer):
            await member.acknowledge_decided(acks)


def _settled(stored: RecordState, found: DecidedPosition) -> RecordState:
    """What is stored with a position once it is where transactions have moved it. None of them changes what the
    member's caller has there, which may have stored more of it since."""
    return RecordState.of(found.metadata)._replace(own=stored.own, token=0)


def _nothing_written(error: TidewalError) -> TidewalError:
    if isinstance(error, DeadlineExceeded):
        return DeadlineExceeded(error.message, outcome_unknown=False)
    return Unavailable(error.message) if error.fields.get("outcome_unknown") else error
