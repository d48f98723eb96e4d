"""What of a consumer group a transaction acknowledges: the input from which it was made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from ...runtime.errors import InvalidRequest
from ...runtime.groups.ack_timer import check_ack_timeout
from ...runtime.groups.coordinator_client import GroupAcks
from ...runtime.groups.record_pack import RecordPack
from ..topics.member import TopicMember

PACKS_MAX = 64  # of the input of one transaction


def check_member(member: object, kind: type) -> None:
    """Raise `InvalidRequest` for what is no member of that kind."""
    if not isinstance(member, kind):
        raise InvalidRequest(
            f"a transaction acknowledges what a {kind.__name__} got, which `subscribe` returns, not what a "
            f"{type(member).__name__} got",
            argument="member",
        )


class TransactionInputs:
    """The packs of one member of a group that one transaction acknowledges. What is refused changes nothing."""

    def __init__(self) -> None:
        self._member: TopicMember | None = None
        self._packs: list[RecordPack] = []

    def __len__(self) -> int:
        return len(self._packs)

    def add(self, member: TopicMember, delivered: RecordPack) -> None:
        """Add a pack. Raises `InvalidRequest` for what is none, for that of another member and over the limit, and
        `Unsupported` for a member of which no position can be a part of a transaction."""
        check_member(member, TopicMember)
        if not isinstance(cast(object, delivered), RecordPack):
            raise InvalidRequest(
                f"a transaction acknowledges a pack of the member, or a part of one, not a {type(delivered).__name__}",
                argument="delivered",
            )
        member.check_atomic_acks()
        if self._member not in (None, member):
            raise InvalidRequest(
                "a transaction acknowledges packs of one member: use another transaction for the other"
            )
        if len(self._packs) >= PACKS_MAX:
            raise InvalidRequest(
                f"a transaction acknowledges up to {PACKS_MAX} packs: the last of a channel covers those before it"
            )
        self._member = member
        self._packs.append(delivered)

    async def commit_with(self, write: Callable[[GroupAcks | None], Awaitable[int]]) -> int:
        """Have `write` store the acknowledgements, None where there are none, with the rest of the transaction, for the
        first time; returns what it returns. Raises what it raises, `Fenced` for packs that may have gone to another
        member, `InvalidRequest` for what is acknowledged, and `AckTimeout` in a handler whose attempt is over."""
        if self._member is None:
            return await write(None)
        check_ack_timeout()
        ts = 0

        async def store(acks: GroupAcks) -> None:
            nonlocal ts
            ts = await write(acks)

        await self._member.commit_with(self._packs, store)
        return ts

    async def commit_alone(self) -> None:
        """Acknowledge, where the transaction writes nothing. Raises what `RecordMember.commit` raises."""
        if self._member is not None:
            check_ack_timeout()
            await self._member.commit(self._packs, [])
