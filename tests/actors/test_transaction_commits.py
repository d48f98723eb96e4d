"""When a door tries a transaction again that owners have not prepared."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from tidewal.actors.cluster_member import ClusterMember
from tidewal.actors.local_owner import WritePart
from tidewal.actors.transaction_commits import AGAIN_MAX_S, AGAIN_S, TransactionCommits
from tidewal.actors.write_requests import SendAgain
from tidewal.runtime.cluster.transaction_decisions import TransactionDecisions
from tidewal.runtime.errors import DeadlineExceeded, TidewalError, Unavailable
from tidewal.runtime.ownership import Appended
from tidewal.runtime.ownership.prepared import TransactionId

pytestmark = [pytest.mark.asyncio(loop_factories=["memory"]), pytest.mark.usefixtures("home")]

PART = WritePart("", 0, 0, [], "client", 1, 0)


class _RefusingOwner:
    """Prepares nothing, as its channel is for other writes now, until `error` is None."""

    def __init__(self) -> None:
        self.error: TidewalError | None = Unavailable("other writes wait")
        self.asked_s: list[float] = []

    def __call__(
        self, owner: str, part: WritePart, channels: set[str], deadline_s: float, attempt: str
    ) -> asyncio.Future[Appended]:
        loop = asyncio.get_running_loop()
        self.asked_s.append(loop.time())
        future: asyncio.Future[Appended] = loop.create_future()
        if self.error is None:
            future.set_result(Appended(7, 0, repeated=True))
        else:
            future.set_exception(self.error)
        return future


async def _propose(event: object) -> None:
    """A log of decisions that takes each."""


async def _settle(transaction: TransactionId, channels: Sequence[str], *, deadline_s: float) -> int:
    raise AssertionError(f"{transaction} is committed in {channels}")


def commits_at(owner: _RefusingOwner) -> TransactionCommits:
    cluster = SimpleNamespace(
        incarnation="here",
        state=SimpleNamespace(transactions=TransactionDecisions()),
        log=SimpleNamespace(propose=_propose),
    )
    return TransactionCommits(cast("ClusterMember", cluster), "door", owner, _settle)


async def failed_attempts(commits: TransactionCommits, count: int) -> None:
    for _ in range(count):
        with pytest.raises(SendAgain):
            await commits.commit(PART, {"there": ["a"], "elsewhere": ["b"]}, 60)


async def test_attempts_that_come_to_nothing_follow_each_other_later_and_later() -> None:
    owner = _RefusingOwner()
    await failed_attempts(commits_at(owner), 12)
    pauses = [after - before for before, after in pairwise(owner.asked_s[::2])]
    for number, pause_s in enumerate(pauses):
        longest_s = min(AGAIN_MAX_S, AGAIN_S * 2**number)
        assert longest_s / 2 <= pause_s <= longest_s * 1.5, f"attempt {number}: {pauses}"
    assert sum(pauses) > 2 * AGAIN_MAX_S


async def test_the_next_write_and_one_that_had_its_answer_begin_with_short_pauses() -> None:
    owner = _RefusingOwner()
    commits = commits_at(owner)
    await failed_attempts(commits, 5)
    refusal, owner.error = owner.error, None
    assert (await commits.commit(PART, {"there": ["a"], "elsewhere": ["b"]}, 60)).ts == 7
    owner.error, owner.asked_s = refusal, []
    await failed_attempts(commits, 2)
    assert owner.asked_s[2] - owner.asked_s[0] <= AGAIN_S * 1.5


async def test_a_write_of_unknown_outcome_is_told_at_once() -> None:
    owner = _RefusingOwner()
    owner.error = DeadlineExceeded("no answer", outcome_unknown=True)
    with pytest.raises((DeadlineExceeded, SendAgain)):
        await commits_at(owner).commit(PART, {"there": ["a"]}, 60)
    assert asyncio.get_running_loop().time() - owner.asked_s[0] <= AGAIN_S * 1.5
