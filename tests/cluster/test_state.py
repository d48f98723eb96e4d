"""Members of the cluster: what ends one is a record, and behind its end nothing of it counts, for any reader."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.cluster.state import (
    EVICTED,
    GONE_MAX,
    LEFT,
    REPLACED,
    ClusterIdentity,
    ClusterState,
    NodeMember,
)
from tidewal.runtime.errors import BadRecord, PreconditionFailed, TidewalError


def register(incarnation: str, *, name: str = "n", replaces: str = "", lease_ms: int = 3_000) -> dict[str, object]:
    member = NodeMember(incarnation, name, ("streamingnode",), lease_ms, number=1)
    return {"kind": "register", **member.to_wire(), "replaces": replaces}


def renew(incarnation: str, number: int, **report: object) -> dict[str, object]:
    return {"kind": "renew", "incarnation": incarnation, "number": number, "report": report}


def found(id: str, check: str = "c") -> dict[str, object]:
    return {"kind": "found", "id": id, "check": check}


def state_of(*events: dict[str, object]) -> ClusterState:
    state = ClusterState()
    for event in events:
        state.apply(event)
    return state


def refused(state: ClusterState, *events: dict[str, object]) -> None:
    before = state.snapshot()
    for event in events:
        with pytest.raises(PreconditionFailed):
            state.apply(event)
    assert state.snapshot() == before


def test_a_member_renews_and_reports():
    state = state_of(register("n-1"), renew("n-1", 2, load=0.5))
    member = state.members["n-1"]
    assert (member.number, member.report, member.lease_ms) == (2, {"load": 0.5}, 3_000)
    refused(state, renew("n-1", 2), renew("n-1", 1), renew("unknown", 9))


@pytest.mark.parametrize(("kind", "how"), [("evict", EVICTED), ("leave", LEFT)])
def test_nothing_of_a_member_counts_behind_its_end(kind, how):
    state = state_of(register("n-1"), {"kind": kind, "incarnation": "n-1"})
    assert state.members == {}
    assert (state.gone["n-1"].how, state.gone["n-1"].lease_ms) == (how, 3_000)
    refused(state, renew("n-1", 2), register("n-1"), {"kind": kind, "incarnation": "n-1"})


def test_a_node_that_has_the_lock_of_its_name_replaces_its_life_before_and_no_other_node():
    state = state_of(register("n-1"), register("m-1", name="m"))
    refused(state, register("n-2", replaces="m-1"))
    state.apply(register("n-2", replaces="n-1"))
    assert state.gone["n-1"].how == REPLACED
    assert set(state.members) == {"n-2", "m-1"}
    state.apply({"kind": "evict", "incarnation": "n-2"})
    state.apply(register("n-3", replaces="n-2"))
    assert state.gone["n-2"].how == REPLACED, "it was evicted, and is dead for certain now"
    state.apply(register("n-4", replaces="never heard of"))


def test_those_that_are_gone_are_forgotten_but_for_the_last_ones_and_the_longest_lease():
    state = state_of(register("first", lease_ms=9_000), {"kind": "evict", "incarnation": "first"})
    for number in range(GONE_MAX):
        state.apply(register(f"n-{number}"))
        state.apply({"kind": "leave", "incarnation": f"n-{number}"})
    assert len(state.gone) == GONE_MAX
    assert "first" not in state.gone
    assert state.longest_lease_ms == 9_000


def test_a_cluster_is_founded_once():
    state = state_of(register("n-1"), found("one", "a"))
    refused(state, found("two", "b"), found("one", "a"))
    assert state.identity == ClusterIdentity("one", "a")


def test_a_member_says_where_it_runs_and_since_when():
    member = NodeMember("n-1", "n", (), 3_000, host="box", since_ms=1_700_000_000_000)
    state = state_of({"kind": "register", **member.to_wire(), "replaces": ""}, renew("n-1", 2))
    assert (state.members["n-1"].host, state.members["n-1"].since_ms) == ("box", 1_700_000_000_000)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "found", "id": "one"},
        found(""),
        found("one", ""),
        {"kind": "found", "id": 1, "check": "c"},
        {**register("n-1"), "host": 7},
        {**register("n-1"), "since_ms": "now"},
        {**register("n-1"), "min_level": "first"},
        {**register("n-1"), "version": 7},
        {"kind": "hold", "held": 1},
        {"kind": "register"},
        {**register("n-1"), "lease_ms": 0},
        {**register("n-1"), "roles": 7},
        {**register(""), "name": "n"},
        {"kind": "renew", "incarnation": 5, "number": 1},
        {"kind": "renew", "incarnation": "m-1", "number": "two"},
        {"kind": "evict"},
    ],
)
def test_a_malformed_record_is_bad_and_changes_nothing(event):
    state = state_of(register("m-1", name="m"))
    before = state.snapshot()
    with pytest.raises(BadRecord):
        state.apply(event)
    assert state.snapshot() == before


def test_the_level_rises_only_while_all_members_know_it_and_nobody_holds_it():
    state = state_of({**register("a-1", name="a"), "level": 3}, {**register("b-1", name="b"), "level": 2})
    with pytest.raises(PreconditionFailed, match="b-1"):
        state.on_level(3)
    state.apply({"kind": "hold", "held": True})
    with pytest.raises(PreconditionFailed, match="held"):
        state.on_level(2)
    state.apply({"kind": "hold", "held": False})
    state.on_level(2)
    for levels in ({"level": 1}, {"level": 4, "min_level": 3}):
        with pytest.raises(PreconditionFailed, match="level 2"):
            state.apply({**register("c-1", name="c"), **levels})
    state.apply({"kind": "hold", "held": True})
    restored = ClusterState()
    restored.restore(msgpack.unpackb(msgpack.packb(state.snapshot())))
    assert (restored.level, restored.level_held) == (2, True)
    state.apply({"kind": "evict", "incarnation": "b-1"})
    assert state.known_level == 3


def test_a_record_of_an_unknown_kind_is_passed_over():
    with pytest.raises(BadRecord, match="level"):
        ClusterState().apply({"kind": "unheard_of"})


incarnations = st.sampled_from(["a-1", "a-2", "b-1", "b-2"])
records = st.one_of(
    st.builds(found, st.sampled_from(["one", "two"])),
    st.builds(
        lambda incarnation, replaces: register(incarnation, name=incarnation[0], replaces=replaces),
        incarnations,
        st.one_of(st.just(""), incarnations),
    ),
    st.builds(renew, incarnations, st.integers(0, 9)),
    st.builds(
        lambda kind, incarnation: {"kind": kind, "incarnation": incarnation},
        st.sampled_from(["evict", "leave"]),
        incarnations,
    ),
)


def fold(state: ClusterState, events: list[dict[str, object]]) -> ClusterState:
    for event in events:
        with contextlib.suppress(TidewalError):
            state.apply(event)
    return state


@given(st.lists(records, max_size=30), st.integers(0, 30))
def test_the_state_from_a_snapshot_is_the_state_from_the_start(history, cut):
    whole, begun = fold(ClusterState(), history), fold(ClusterState(), history[:cut])
    late = ClusterState()
    late.restore(begun.snapshot())
    assert fold(late, history[cut:]).snapshot() == whole.snapshot()
    assert not whole.members.keys() & whole.gone.keys(), "an incarnation is never used again"


@given(st.lists(records, max_size=30), st.integers(0, 30))
def test_what_an_earlier_version_wrote_is_read(history, cut):
    """Its log has no `found`, its members no host and no time, and its snapshots no identity."""

    def without(wire):
        return {name: value for name, value in wire.items() if name not in ("host", "since_ms")}

    before = [without(event) for event in history if event["kind"] != "found"]
    snapshot = fold(ClusterState(), before[:cut]).snapshot()
    del snapshot["identity"]
    snapshot["members"] = [without(member) for member in snapshot["members"]]
    late = ClusterState()
    late.restore(snapshot)
    assert fold(late, before[cut:]).snapshot() == fold(ClusterState(), before).snapshot()
    assert late.identity is None
    late.apply(found("one"))
    assert late.identity == ClusterIdentity("one", "c")
