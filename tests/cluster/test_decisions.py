"""What a coordinator proposes is a function of what it has read."""

from __future__ import annotations

from dataclasses import replace

from tidewal.runtime.catalog.catalog import Catalog, PChannelState
from tidewal.runtime.catalog.placement_wishes import PlacementWishes
from tidewal.runtime.clock import compose
from tidewal.runtime.cluster.channel_assignment import MOVES_MAX, assign_channels
from tidewal.runtime.cluster.decisions import ClusterView, decide
from tidewal.runtime.cluster.state import RATES, ClusterState, NodeMember
from tidewal.runtime.replicated.records import Claim

CHANNELS = [f"p{number}" for number in range(64)]
LEASE_MS = 3_000
WALL_MS = 1_000_000
MIB = 1024 * 1024


def view(
    *members: str,
    own: str = "a-1",
    leader: str = "a-1",
    silent: set[str] | None = None,
    long_silent: set[str] | None = None,
    over: set[str] | None = None,
    channels: dict[str, PChannelState] | None = None,
) -> ClusterView:
    cluster, catalog = ClusterState(), Catalog()
    for incarnation in members:
        member = NodeMember(incarnation, incarnation[:-2], ("mixcoord", "streamingnode"), LEASE_MS)
        cluster.apply({"kind": "register", **member.to_wire(), "replaces": ""})
    catalog.channels = channels or {}
    return ClusterView(
        own,
        catalog,
        Claim(b"claim", 2, leader),
        cluster,
        silent or set(),
        long_silent or set(),
        (over or set()).__contains__,
        WALL_MS,
        LEASE_MS,
    )


def test_the_leader_grants_what_has_no_owner_and_what_nothing_rests_on():
    owned = {
        "free": PChannelState("", 4, limit=7),
        "alive": PChannelState("b-1", 3),
        "waited for": PChannelState("gone-1", 3),
        "over": PChannelState("gone-2", 9),
    }
    wanted = dict.fromkeys((*owned, "new"), "b-1") | {"elsewhere": "a-1"}
    grants = decide(view("a-1", "b-1", over={"gone-2"}, channels=owned), wanted).grants
    assert [(grant["node"], grant["channels"]) for grant in grants] == [
        ("a-1", {"elsewhere": (1, 0)}),
        ("b-1", {"free": (5, 4), "new": (1, 0), "over": (10, 9)}),
    ]


def levelled(**highest: int) -> ClusterView:
    """What the leader `a-1` has read, of members `a-1` and so on that know the levels from 1 to this one."""
    seen = replace(view(), settled=True)
    for name, level in highest.items():
        member = NodeMember(f"{name}-1", name, ("mixcoord",), LEASE_MS, level)
        seen.cluster.apply({"kind": "register", **member.to_wire(), "replaces": ""})
    return seen


def test_the_leader_raises_the_level_to_the_highest_that_all_members_know_and_the_catalogs_behind_it():
    assert decide(levelled(a=1, b=1), {}).level == 0
    assert decide(levelled(a=3, b=1), {}).level == 0
    risen = levelled(a=3, b=2)
    assert (decide(risen, {}).level, decide(risen, {}).catalog_level) == (2, 0)
    assert decide(replace(risen, settled=False), {}).level == 0, "members that know less may be about to return"
    first = replace(risen, settled=False, leader=Claim(b"claim", 1, "a-1"))
    assert decide(first, {}).level == 2, "before the first leader of a log there were no members"
    assert decide(replace(risen, leader=Claim(b"claim", 1, "b-1")), {}).level == 0
    risen.cluster.on_level(2)
    assert (decide(risen, {}).level, decide(risen, {}).catalog_level) == (0, 2)
    assert decide(replace(risen, catalog_level=2), {}).catalog_level == 0
    held = levelled(a=2, b=2)
    held.cluster.apply({"kind": "hold", "held": True})
    assert decide(held, {}).level == 0


def test_only_the_leader_grants_and_nothing_goes_to_a_node_that_is_no_member():
    wanted = {"p0": "b-1"}
    assert decide(view("a-1", "b-1", leader="b-1"), wanted).grants == ()
    assert decide(view("a-1"), wanted).grants == ()


def test_the_first_coordinator_claims_where_the_leader_is_no_member_any_more():
    for leader, own, claims in [
        ("", "a-1", True),
        ("gone-1", "a-1", True),
        ("gone-1", "b-1", False),
        ("b-1", "a-1", False),
        ("a-1", "a-1", False),
    ]:
        assert decide(view("a-1", "b-1", own=own, leader=leader), {}).claim == claims


def test_any_coordinator_evicts_and_the_leader_is_the_first_to():
    silent, long_silent = {"c-1", "b-1"}, {"c-1"}
    seen = {"silent": silent, "long_silent": long_silent}
    assert decide(view("a-1", "b-1", "c-1", **seen), {}).evict == ("b-1", "c-1")
    assert decide(view("a-1", "b-1", "c-1", leader="b-1", **seen), {}).evict == ("c-1",)


def limit_of(state: PChannelState) -> int:
    (grant,) = decide(view("a-1", channels={"p0": state}), {"p0": "a-1"}).grants
    return grant["limit"]


def test_a_limit_passes_what_was_used_and_terms_without_a_fence_carry_it_no_further():
    lease_ahead, ahead = compose(WALL_MS + LEASE_MS), compose(WALL_MS + 10 * LEASE_MS)
    assert limit_of(PChannelState("", 3, limit=5)) == lease_ahead
    assert limit_of(PChannelState("", 3, limit=ahead, fences={3: b"f"})) == compose(WALL_MS + 10 * LEASE_MS + 1_500)
    assert limit_of(PChannelState("", 3, limit=ahead)) == ahead, "its fence may have any time up to there"
    assert limit_of(PChannelState("", 4, limit=lease_ahead)) == lease_ahead


def placed(seen: ClusterView, channels: list[str] = CHANNELS) -> dict[str, str]:
    return assign_channels(seen, channels).owners()


def test_channels_stay_with_the_name_of_their_node_and_move_only_when_theirs_goes():
    before = placed(view("a-1", "b-1", "c-1"))
    assert set(before.values()) == {"a-1", "b-1", "c-1"}
    assert min(list(before.values()).count(node) for node in ("a-1", "b-1", "c-1")) > 10
    restarted = placed(view("a-1", "b-2", "c-1"))
    assert restarted == {name: "b-2" if node == "b-1" else node for name, node in before.items()}
    owned = {name: PChannelState(node, 1) for name, node in before.items()}
    without = placed(view("a-1", "b-1", "c-1", silent={"c-1"}, over={"c-1"}, channels=owned))
    assert {name: node for name, node in before.items() if node != "c-1"}.items() <= without.items()
    assert "c-1" not in without.values()
    assert placed(view()) == {}


def reporting(seen: ClusterView) -> ClusterView:
    """The same once all members have reported, and the leader has led for a lease."""
    members = seen.cluster.members
    for name, member in members.items():
        members[name] = replace(member, report={RATES: {}})
    return replace(seen, settled=True)


def test_a_channel_moves_to_the_node_that_is_to_have_it_and_stays_there():
    owned = {name: PChannelState("a-1", 1, fences={1: b"f"}) for name in CHANNELS}
    seen = reporting(view("a-1", "b-1", channels=owned))
    wanted = placed(seen)
    [move] = decide(seen, wanted).moves
    targets = {name: target for name, (_, target) in move["channels"].items()}
    assert set(targets.values()) == {"b-1"}
    assert 1 <= len(targets) <= MOVES_MAX
    seen.catalog._on_move({**move, "claim": b"claim"})
    assert decide(seen, placed(seen)).moves == (), "it is under way"
    name = next(iter(targets))
    released = {"node": "a-1", "channels": {name: (1, 7, b"")}}
    seen.catalog._on_released(released)
    [grant] = decide(seen, placed(seen)).grants
    assert (grant["node"], list(grant["channels"])) == ("b-1", [name])
    seen.catalog._on_grant({**grant, "claim": b"claim"})
    assert placed(seen)[name] == "b-1"
    assert owned[name].target == ""


def test_a_move_whose_target_is_gone_is_taken_back():
    owned = {"p0": PChannelState("a-1", 1, fences={1: b"f"}, target="b-1")}
    seen = reporting(view("a-1", channels=owned))
    [move] = decide(seen, placed(seen, ["p0"])).moves
    assert move["channels"] == {"p0": (1, "")}


def test_operators_cordon_drain_pin_and_stop_balance():
    owned = {name: PChannelState("a-1", 1, fences={1: b"f"}) for name in ("p0", "p1")}
    seen = reporting(view("a-1", "b-1", channels=owned))
    wishes = PlacementWishes(balance=False)

    def wanted(wishes: PlacementWishes) -> set[str]:
        seen.catalog.wishes = wishes
        return {name for name, node in placed(seen, ["p0", "p1"]).items() if node == "b-1"}

    assert wanted(wishes) == set()
    assert wanted(wishes.with_pin("p1", "b")) == {"p1"}
    assert wanted(wishes.with_node("a", "drained")) == {"p0", "p1"}
    assert wanted(wishes.with_node("a", "drained").with_node("b", "cordoned")) == set()
    assert wanted(PlacementWishes()) == {"p0"} or wanted(PlacementWishes()) == {"p1"}
    assert wanted(PlacementWishes().with_node("b", "cordoned")) == set()


def test_a_channel_weighs_what_its_owner_reports_whoever_else_reports_of_it():
    owned = {name: PChannelState("a-1", 1, fences={1: b"f"}) for name in ("p0", "p1")}
    seen = reporting(view("a-1", "b-1", channels=owned))
    members = seen.cluster.members
    members["a-1"] = replace(members["a-1"], report={RATES: {"p0": 10 * MIB, "p1": "much"}})
    members["b-1"] = replace(members["b-1"], report={RATES: {"p0": 0, "p1": 100 * MIB}})  # of when it was the owner
    assert set(placed(seen, ["p0", "p1"]).values()) == {"a-1", "b-1"}
    [move] = assign_channels(seen, ["p0", "p1"]).moves
    assert move.channel == "p1", "the lighter one moves"


def test_a_channel_that_a_node_could_not_open_goes_to_another_one():
    name = next(name for name in CHANNELS if placed(view("a-1", "b-1"), [name]) == {name: "a-1"})
    seen = view("a-1", "b-1", channels={name: PChannelState("a-1", 4, limit=5)})
    seen.catalog._on_released({"node": "a-1", "channels": {name: (4, 7, b"")}})
    assert placed(seen, [name]) == {name: "b-1"}
