"""How transactions over several channels are decided: the first decision counts, one attempt of a write at most."""

from __future__ import annotations

import random

import msgpack
import pytest

from tidewal.runtime.cluster import transaction_decisions
from tidewal.runtime.cluster.state import ClusterState
from tidewal.runtime.cluster.transaction_decisions import TransactionDecisions, decided
from tidewal.runtime.errors import PreconditionFailed
from tidewal.runtime.ownership.prepared import TransactionId


def id_of(pseq: int, attempt: str = "x") -> TransactionId:
    return TransactionId("p", pseq, attempt)


def written(**channels: list[TransactionId]):
    return {"channels": {channel: [list(id) for id in ids] for channel, ids in channels.items()}}


def refused(decisions: TransactionDecisions, event) -> str:
    with pytest.raises(PreconditionFailed) as error:
        decisions.decide(event)
    return str(error.value)


def test_the_first_decision_of_an_attempt_counts_and_one_attempt_of_a_write_is_committed() -> None:
    decisions = TransactionDecisions()
    decisions.decide(decided(id_of(1), 0, [], 0))
    assert "decided already" in refused(decisions, decided(id_of(1), 7, ["a"], 0))
    decisions.decide(decided(id_of(1, "y"), 8, ["a", "b"], 0))
    assert "decided already" in refused(decisions, decided(id_of(1, "y"), 0, [], 0))
    assert "another attempt" in refused(decisions, decided(id_of(1, "z"), 9, ["a"], 0))
    assert [decisions.outcome_of(id_of(1, attempt)) for attempt in "xyz"] == [0, 8, 0]
    assert decisions.outcome_of(id_of(2)) is None


def test_no_two_commits_that_are_not_written_yet_have_one_timestamp() -> None:
    decisions = TransactionDecisions()
    for number in range(1, 4):
        decisions.decide(decided(id_of(number), 7, ["a"], 0))
    assert [decisions.find(id_of(number)) for number in range(1, 4)] == [7, 8, 9]
    decisions.written(written(a=[id_of(1)]))
    decisions.decide(decided(id_of(4), 8, ["b"], 0))
    assert decisions.find(id_of(4)) == 10


def test_a_commit_is_kept_until_all_its_channels_have_it(monkeypatch) -> None:
    monkeypatch.setattr(transaction_decisions, "KEPT", 3)
    decisions = TransactionDecisions()
    decisions.decide(decided(id_of(1), 7, ["a", "b"], 0))
    decisions.written(written(a=[id_of(1), id_of(9)]))
    for number in range(2, 20):
        decisions.decide(decided(id_of(number), 0, [], decisions.count))
    assert decisions.find(id_of(1)) == 7
    assert (decisions.unwritten("a"), decisions.unwritten("b")) == ([], [id_of(1)])
    decisions.written(written(b=[id_of(1)]))
    assert decisions.open == 0
    assert "another attempt" in refused(decisions, decided(id_of(1, "y"), 8, ["a"], decisions.count))
    for number in range(20, 23):
        decisions.decide(decided(id_of(number), 0, [], decisions.count))
    assert decisions.find(id_of(1)) is None


def test_a_late_commit_of_an_attempt_that_was_aborted_and_forgotten_does_not_count(monkeypatch) -> None:
    """Schedule 4: a door sleeps, its transaction is aborted, and then its decision lands."""
    monkeypatch.setattr(transaction_decisions, "KEPT", 3)
    for others in range(6):
        decisions = TransactionDecisions()
        began = decisions.count
        decisions.decide(decided(id_of(1), 0, [], decisions.count))
        for number in range(others):
            decisions.decide(decided(id_of(10 + number), 0, [], decisions.count))
        refused(decisions, decided(id_of(1), 7, ["a"], began))


def test_an_abort_is_not_forgotten_for_commits_before_it_that_are_written_now(monkeypatch) -> None:
    """Many owners report at once, and no further decision is made: the late commit was begun lately."""
    monkeypatch.setattr(transaction_decisions, "KEPT", 3)
    decisions = TransactionDecisions()
    before = [id_of(number) for number in range(2, 12)]
    for id in before:
        decisions.decide(decided(id, 7, ["a"], decisions.count))
    began = decisions.count
    decisions.decide(decided(id_of(1), 0, [], began))
    decisions.written(written(a=before))
    assert decisions.open == 0
    assert "decided already" in refused(decisions, decided(id_of(1), 7, ["a"], began))
    for number in range(20, 23):
        decisions.decide(decided(id_of(number), 0, [], decisions.count))
    assert len(decisions) == 3
    assert "too long ago" in refused(decisions, decided(id_of(1), 7, ["a"], began))


@pytest.mark.parametrize("seed", range(5))
def test_a_snapshot_has_all_that_decides_what_counts(monkeypatch, seed: int) -> None:
    monkeypatch.setattr(transaction_decisions, "KEPT", 4)
    rng = random.Random(seed)
    state, restored = ClusterState(), ClusterState()
    for _ in range(200):
        id = id_of(rng.randrange(8), rng.choice("xyz"))
        event = decided(id, rng.choice([0, 5, 6]), ["a", "b"], max(0, state.transactions.count - rng.randrange(6)))
        if rng.random() < 0.4:
            said = written(**{rng.choice("ab"): [id]})
            for each in (state, restored):
                each.transactions.written(said)
        results = []
        for each in (state, restored):
            try:
                each.transactions.decide(event)
                results.append("")
            except PreconditionFailed as error:
                results.append(str(error))
        assert results[0] == results[1]
        if rng.random() < 0.3:
            restored = ClusterState()
            restored.restore(msgpack.unpackb(msgpack.packb(state.snapshot()), strict_map_key=False))
        assert restored.snapshot() == state.snapshot()
