"""What retries need of a member whose group has a retry topic: what fails is tried again from there, and holds up
nothing."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from .work import Batch, D, Member

B = TypeVar("B", bound=Batch, contravariant=True)


@runtime_checkable
class WithRetryTopic(Protocol[B]):
    """A member that can put copies of what it got into its group's retry topic, and reads that topic, too."""

    @property
    def has_retry_topic(self) -> bool:
        """Whether its group has one."""
        ...

    def attempts_of(self, unit: B, /) -> int:
        """How many attempts were made at `unit` before it came from the retry topic; 0 where it did not."""
        ...

    def next_copy_id(self, unit: B, /) -> bytes:
        """The id of a copy of `unit` that is about to be sent: of no other one, of any member."""
        ...

    async def send_to_retry_topic(
        self, unit: B, /, *, failed: int, reason: str, delay_s: float, copy_id: bytes
    ) -> None:
        """Send a copy of `unit`, at which `failed` attempts were made since it was delivered, to be due in `delay_s`
        seconds; once, however often that is repeated with the same `copy_id`, by any member. Those of one channel are
        sent in the order of `next_copy_id`. Raises `MessageTooLarge` and `InvalidRequest` for what the topic never
        takes, having sent nothing, and `OutcomeUnknown` where this member's later copies of the channel are there and
        this one is not."""
        ...


def retry_topic_of(member: Member[D]) -> WithRetryTopic[D] | None:
    """The member, where it has a retry topic."""
    return member if isinstance(member, WithRetryTopic) and member.has_retry_topic else None
