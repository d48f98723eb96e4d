"""The members that are to have a vchannel in memory: properties of their order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.cluster.replica_order import replica_order
from tidewal.runtime.cluster.state import NodeMember

VCHANNELS = [f"by-dev-rootcoord-dml_{n % 16}_{n}v0" for n in range(60)]


def member(name: str, life: int = 1, *, draining: bool = False) -> NodeMember:
    return NodeMember(f"{name}-{life}", name, ("querynode",), 3000, draining=draining)


MEMBERS = st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=2).map(lambda names: [*map(member, names)])


@given(MEMBERS, st.integers(1, 4))
def test_all_that_a_new_node_changes_is_what_it_gets_itself(members: list[NodeMember], replicas: int) -> None:
    joined = member("new")
    for vchannel in VCHANNELS:
        before = replica_order(vchannel, members)[:replicas]
        after = replica_order(vchannel, [*members, joined])[:replicas]
        assert set(after) - set(before) <= {joined.incarnation}
        assert len(set(before) - set(after)) <= 1


@given(MEMBERS, st.data())
def test_who_leaves_or_is_drained_comes_last_and_the_rest_keep_their_order(members: list[NodeMember], data) -> None:
    leaving = data.draw(st.sampled_from(members))
    for vchannel in VCHANNELS[:5]:
        order = replica_order(vchannel, members)
        rest = [each for each in order if each != leaving.incarnation]
        draining = [replace(each, draining=each is leaving) for each in members]
        assert replica_order(vchannel, draining) == [*rest, leaving.incarnation]
        assert replica_order(vchannel, members, {leaving.name}) == [*rest, leaving.incarnation]
        assert replica_order(vchannel, [each for each in members if each is not leaving]) == rest


@given(MEMBERS, st.randoms())
def test_the_order_is_that_of_names_and_the_earlier_life_of_one_comes_last(members: list[NodeMember], random) -> None:
    again = member(members[0].name, life=2)
    for vchannel in VCHANNELS[:5]:
        both = [*members, again]
        random.shuffle(both)
        order = replica_order(vchannel, both)
        assert order[-1] == members[0].incarnation
        names = [name.partition("-")[0] for name in order[:-1]]
        assert names == [name.partition("-")[0] for name in replica_order(vchannel, members)]


def test_vchannels_are_divided_about_evenly() -> None:
    members = [member(name) for name in "abcd"]
    firsts = Counter(each for vchannel in VCHANNELS for each in replica_order(vchannel, members)[:2])
    assert set(firsts) == {each.incarnation for each in members}
    assert max(firsts.values()) < 2.2 * min(firsts.values()), firsts
