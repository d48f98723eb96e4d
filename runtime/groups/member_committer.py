"""What a member of a group has its coordinator store: acknowledgements, metadata, and outputs with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias

from ..errors import Closed, Fenced, TidewalError
from ..log.wal import Append
from .coordinator_client import Ack, CoordinatorClient
from .member_fetcher import MemberFetcher
from .unacknowledged import AckPlan

Store: TypeAlias = Callable[[Sequence[Ack]], Awaitable[list[bytes]]]
"""Stores acknowledgements, with what belongs to them, and returns the ids of the outputs among that."""


class Step(NamedTuple):
    """What a commit stores of one channel: `ack`, which carries out the `plan`; without one it stores metadata only."""

    fetcher: MemberFetcher
    plan: AckPlan | None
    ack: Ack


class MemberCommitter:
    """The commits of one member. `left` is to be set once it leaves."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        group: str,
        member: str,
        put_back: Callable[[MemberFetcher], None],
        decided: Callable[[MemberFetcher], None],
    ) -> None:
        """`put_back` gives a channel back whose position has to be asked for; `decided` is called after each commit."""
        self.left = False
        self._coordinator, self._group, self._member = coordinator, group, member
        self._put_back, self._decided = put_back, decided

    async def commit_outputs(self, steps: Sequence[Step], outputs: Sequence[Append]) -> list[bytes]:
        """As `commit`, at most once: where the outcome is not known the channels go back."""
        return await self.commit_once(steps, partial(self._store, outputs))

    async def commit_once(self, steps: Sequence[Step], store: Store) -> list[bytes]:
        """Have `store` write the steps' acknowledgements with something else, together or not at all, at most once:
        where the outcome is not known the channels go back. Raises what `store` raises, and `Closed`."""
        ends = [(step.fetcher, step.plan.upto) for step in steps if step.plan is not None and step.plan.upto]
        for fetcher, upto in ends:
            fetcher.committing.append(upto)
        try:
            return await self._commit(steps, store)
        except BaseException as error:
            if not isinstance(error, TidewalError) or error.fields.get("outcome_unknown"):
                for step in steps:  # a second commit might double the outputs: the position says what happened
                    self._put_back(step.fetcher)
            raise
        finally:
            for fetcher, upto in ends:
                fetcher.committing.remove(upto)

    async def commit(self, steps: Sequence[Step], outputs: Sequence[Append]) -> list[bytes]:
        """Append the outputs and store the steps, together or not at all. Returns the outputs' ids. Raises `Closed`
        once the member has left, and what `CoordinatorClient.commit` raises."""
        return await self._commit(steps, partial(self._store, outputs))

    async def _store(self, outputs: Sequence[Append], acks: Sequence[Ack]) -> list[bytes]:
        return await self._coordinator.commit(self._group, self._member, acks, outputs)

    async def _commit(self, steps: Sequence[Step], store: Store) -> list[bytes]:
        for step in steps:
            step.fetcher.acks_in_flight += 1
        try:
            ids = await store([step.ack for step in steps])
            for step in steps:
                step.fetcher.stored(step.plan, step.ack)
        except Fenced as error:
            if self.left:
                raise has_left() from None
            fields = {"channel": steps[0].ack.channel, **error.fields}  # unless the session is over
            raise Fenced(error.message, **fields) from None
        finally:
            for step in steps:
                step.fetcher.acks_in_flight -= 1
        for step in steps:
            if step.fetcher.unacknowledged.overdue() is not None and not step.fetcher.acks_in_flight:
                await self.compact(step.fetcher)
            self._decided(step.fetcher)
        return ids

    async def compact(self, fetcher: MemberFetcher) -> None:
        """Acknowledge cumulatively what was acknowledged entry by entry."""
        upto = fetcher.unacknowledged.overdue()
        if upto is not None:
            with suppress(TidewalError):  # each entry's own acknowledgement is stored: this only shortens the list
                plan = AckPlan(upto, upto, ())
                ack = fetcher.ack(plan)
                await self._coordinator.commit(self._group, self._member, [ack], [])
                fetcher.stored(plan, ack)


def has_left() -> Closed:
    """The error for what is asked of a member that has left."""
    return Closed("the member has left its group, or the log is closed")
