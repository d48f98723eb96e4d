"""Which cluster a log belongs to: founded once, by the first of those that come, and compared by all others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.clock import HybridClock
from tidewal.runtime.cluster.cluster_log import ClusterLog
from tidewal.runtime.cluster.identity import found_or_check, identity_of
from tidewal.runtime.cluster.membership import NodeMembership
from tidewal.runtime.cluster.state import NodeMember
from tidewal.runtime.errors import ConfigError, TidewalError, Unavailable, WrongCluster
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal
from tidewal.runtime.testing.simulation.process import NodeClock


class FailingWal(MemoryWal):
    """The next `unknown` appends land, and say that their outcome is unknown; the next `refused` ones do not land."""

    unknown = refused = 0

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if self.refused:
            self.refused -= 1
            done(Unavailable("not now"))
        elif self.unknown:
            self.unknown -= 1
            super().submit(entries, lambda _: done(Unavailable("no answer", outcome_unknown=True)))
        else:
            super().submit(entries, done)


@asynccontextmanager
async def cluster_log(log: MemoryLog, author: str, wal: MemoryWal | None = None) -> AsyncIterator[ClusterLog]:
    clock = HybridClock(NodeClock(asyncio.get_running_loop().clock))
    cluster = ClusterLog(wal or MemoryWal(log), Names(), clock, author)
    await cluster.open()
    yield cluster
    await cluster.close()


def over_a_log(test: Callable[[MemoryLog], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test(MemoryLog()), VirtualClock())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@over_a_log
async def test_the_first_one_founds_and_the_others_are_compared(log: MemoryLog) -> None:
    async with cluster_log(log, "a-1") as a, cluster_log(log, "b-1") as b:
        assert await found_or_check(a, "", "s3cret", new_id=lambda: "random") == "random"
        await b.catch_up()
        assert await found_or_check(b, "", "s3cret", new_id=lambda: "other") == "random"
        assert await found_or_check(b, "random", "s3cret") == "random"


@over_a_log
async def test_a_wanted_id_is_the_clusters(log: MemoryLog) -> None:
    async with cluster_log(log, "a-1") as a:
        assert await found_or_check(a, "production", "") == "production"
        assert await found_or_check(a, "", "") == "production"


@over_a_log
async def test_ids_are_drawn_at_random(log: MemoryLog) -> None:
    async with cluster_log(log, "a-1") as a, cluster_log(MemoryLog(), "b-1") as b:
        assert await found_or_check(a, "", "") != await found_or_check(b, "", "")


@pytest.mark.parametrize(
    ("founded", "wanted", "key", "said"),
    [
        (("one", "s3cret"), ("two", "s3cret"), "cluster.id", "cluster.id is 'two'"),
        (("one", "s3cret"), ("", "hunter2"), "cluster.secret", "not its secret"),
        (("one", "s3cret"), ("one", "hunter2"), "cluster.secret", "not its secret"),
        (("one", "s3cret"), ("", ""), "cluster.secret", "cluster.secret is empty"),
        (("one", ""), ("", "hunter2"), "cluster.secret", "leave cluster.secret"),
    ],
)
def test_a_stranger_is_told_what_does_not_fit_and_no_secret(founded, wanted, key, said) -> None:
    @over_a_log
    async def meet(log: MemoryLog) -> None:
        async with cluster_log(log, "a-1") as a:
            await found_or_check(a, *founded)
            with pytest.raises(WrongCluster) as refused:
                await found_or_check(a, *wanted)
        error = refused.value
        assert isinstance(error, ConfigError)
        assert (error.retryable, error.key, error.found) == (False, key, "one")
        assert said in error.message
        assert key == "cluster.id" or "TIDEWAL__CLUSTER__SECRET" in error.message
        shown = f"{error.message} {error.fields}"
        assert all(secret not in shown for _, secret in (founded, wanted) if secret)

    meet()


@over_a_log
async def test_of_two_founders_at_once_the_first_in_the_log_counts(log: MemoryLog) -> None:
    async with cluster_log(log, "a-1") as a, cluster_log(log, "b-1") as b, cluster_log(log, "c-1") as c:
        assert {each.cluster.identity for each in (a, b, c)} == {None}, "each goes on to found it"
        first, second, stranger = await asyncio.gather(
            found_or_check(a, "", "s", new_id=lambda: "of a"),
            found_or_check(b, "", "s", new_id=lambda: "of b"),
            found_or_check(c, "", "another", new_id=lambda: "of c"),
            return_exceptions=True,
        )
        assert (first, second) == ("of a", "of a")
        assert isinstance(stranger, WrongCluster)
        assert a.cluster.identity == b.cluster.identity == c.cluster.identity == identity_of("of a", "s")


@over_a_log
async def test_two_founders_at_once_that_want_other_ids_are_two_clusters(log: MemoryLog) -> None:
    async with cluster_log(log, "a-1") as a, cluster_log(log, "b-1") as b:
        results = await asyncio.gather(
            found_or_check(a, "one", ""), found_or_check(b, "two", ""), return_exceptions=True
        )
        assert results[0] == "one"
        assert isinstance(results[1], WrongCluster)


@pytest.mark.parametrize("failing", ["unknown", "refused"])
def test_a_founder_whose_record_fails_or_has_an_unknown_outcome_goes_on(failing: str) -> None:
    @over_a_log
    async def found(log: MemoryLog) -> None:
        wal = FailingWal(log)
        async with cluster_log(log, "a-1", wal) as a, cluster_log(log, "b-1") as b:
            setattr(wal, failing, 2)
            assert await found_or_check(a, "", "s", new_id=lambda: "of a") == "of a"
            assert getattr(wal, failing) == 0
            await b.catch_up()
            assert await found_or_check(b, "", "s") == "of a"

    found()


@over_a_log
async def test_a_log_that_is_closed_ends_the_founder(log: MemoryLog) -> None:
    async with cluster_log(log, "a-1") as a:
        await a.close()
        with pytest.raises(TidewalError):
            await found_or_check(a, "", "")


@over_a_log
async def test_a_cluster_of_members_that_was_never_founded_is_founded_by_the_next(log: MemoryLog) -> None:
    """As one of an earlier version, whose log has registrations and a snapshot."""
    async with cluster_log(log, "a-1") as a:
        clock = asyncio.get_running_loop().clock
        await NodeMembership(a, clock, NodeMember("a-1", "a", (), 3_000)).join()
        await a.snapshot()
    async with cluster_log(log, "b-1") as b:
        assert "a-1" in b.cluster.members
        assert await found_or_check(b, "late", "s") == "late"
        await b.snapshot()
    async with cluster_log(log, "c-1") as c:
        assert c.cluster.identity == identity_of("late", "s"), "snapshots have it"


texts = st.text(st.characters(exclude_categories=()), max_size=80)  # lone surrogates, too


@given(texts, texts, texts, texts)
def test_a_check_is_that_of_its_id_and_its_secret_alone(id: str, secret: str, other_id: str, other: str) -> None:
    """Secrets of any length and of any characters have one; the empty one is a secret as others are."""
    check = identity_of(id, secret).check
    assert len(check) == 64
    assert (identity_of(id, other).check == check) == (other == secret)
    assert (identity_of(other_id, secret).check == check) == (other_id == id)
