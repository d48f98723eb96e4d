"""Members as people name them."""

from __future__ import annotations

import pytest

from tidewal.runtime.cluster.named_members import members_named
from tidewal.runtime.cluster.roles import PROXY, STREAMING_NODE
from tidewal.runtime.cluster.state import ClusterState, NodeMember
from tidewal.runtime.errors import InvalidRequest


def cluster_of(*members: NodeMember) -> ClusterState:
    state = ClusterState()
    for member in members:
        state.apply({"kind": "register", **member.to_wire(), "replaces": ""})
    return state


CLUSTER = cluster_of(
    NodeMember("beta-2", "beta", (STREAMING_NODE,), 3_000, since_ms=20),
    NodeMember("beta-1", "beta", (STREAMING_NODE, PROXY), 3_000, since_ms=10),
    NodeMember("door-1", "door", (PROXY,), 3_000),
    NodeMember("beta-9", "beta-1", (PROXY,), 3_000),
)


def incarnations(node: str, role: str = "") -> list[str]:
    return [each.incarnation for each in members_named(CLUSTER, node, role)]


def test_a_name_is_that_of_all_its_lives_and_an_incarnation_of_one():
    assert incarnations("beta") == ["beta-1", "beta-2"], "the latest is the last"
    assert incarnations("beta", PROXY) == ["beta-1"]
    assert incarnations("beta-1") == ["beta-1"], "an incarnation goes before a name"
    assert incarnations("beta-1", STREAMING_NODE) == ["beta-1"]


@pytest.mark.parametrize(
    ("node", "role", "said"),
    [
        ("door", STREAMING_NODE, "no member 'door' that offers streamingnode"),
        ("dor", "", "the nearest known one is 'door'"),
        ("nothing like it", "", "`tidewal inspect cluster` shows all"),
        ("gone-1", "", "gone-1 is no member any more: left"),
    ],
)
def test_what_is_no_member_is_refused_with_what_there_is(node: str, role: str, said: str):
    cluster = cluster_of(*CLUSTER.members.values(), NodeMember("gone-1", "gone", (PROXY,), 3_000))
    cluster.apply({"kind": "leave", "incarnation": "gone-1"})
    with pytest.raises(InvalidRequest) as refused:
        members_named(cluster, node, role)
    assert said in str(refused.value)
    assert refused.value.argument == "node"
