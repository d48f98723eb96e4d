"""A line of a replica that stands still is seen: its age, why, and what the replica keeps for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.actors.test_forced_promotion import DRAWN_S
from tests.actors.test_node_migration import FarWal, logs_of
from tests.actors.test_node_replication import replica_of, replicating
from tidewal.runtime.errors import MessageTooLarge
from tidewal.runtime.log.replication_state import replication_state
from tidewal.runtime.log.wal import Append, OnAppended
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.replication.line_age import LATE_S
from tidewal.runtime.replication.replication_lag import ReplicationLag

MEMORY_ONLY = pytest.mark.asyncio(loop_factories=["memory"])


class RefusingWal(FarWal):
    """A log that takes nothing in topics for a while."""

    refuses = False

    def submit(self, batch: Sequence[Append], done: OnAppended) -> None:
        if self.refuses and any("-topic_" in append.channel for append in batch):
            raise MessageTooLarge("it takes nothing there", limit=1, size=2)
        super().submit(batch, done)


@MEMORY_ONLY
async def test_a_line_that_stands_still_says_how_long_why_and_what_is_kept(
    home, caplog: pytest.LogCaptureFixture
) -> None:
    other = replica_of(home)
    other.memory = RefusingWal
    metrics = Metrics("replicator")
    age, kept = "replication_line_age_seconds", "replication_line_kept_bytes"
    async with logs_of(home, other) as (old, replica), home.people_client() as client:
        assert isinstance(replica, RefusingWal)
        await client.create_topic("orders", 1)
        async with replicating(old, replica, ReplicationLag(metrics, asyncio.get_running_loop().clock)):
            await asyncio.sleep(2 * DRAWN_S)
            assert metrics.value(age) < 5
            assert not caplog.records
            replica.refuses = True
            await client.send("orders", "0")
            written = 0
            for number in range(15):
                await client.insert("people", home.people(number))
                written += 1
                await asyncio.sleep(LATE_S / 10)
            assert metrics.value(age) > LATE_S
            assert metrics.value(kept) > 100 * written
            assert (await replication_state(replica)).line_kept > 100 * written
            said = [each.getMessage() for each in caplog.records if each.name.endswith("line_age")]
            assert len(said) == 1, "once a minute"
            assert "the replica lacks what is in by-dev-topic_" in said[0]
            replica.refuses = False
            await asyncio.sleep(2 * DRAWN_S)
            assert metrics.value(age) < 5
            assert metrics.value(kept) < 100 * written


@MEMORY_ONLY
async def test_a_line_is_not_late_while_no_node_runs(home) -> None:
    """Nothing is written, so nothing is left out."""
    async with home.people_client() as client:
        await client.insert("people", home.people(1))
    other, metrics = replica_of(home), Metrics("replicator")
    lag = ReplicationLag(metrics, asyncio.get_running_loop().clock)
    async with logs_of(home, other) as (old, replica), replicating(old, replica, lag):
        await asyncio.sleep(2 * LATE_S)
    assert metrics.value("replication_line_age_seconds") < 5
