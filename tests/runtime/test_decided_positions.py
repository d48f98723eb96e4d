"""Positions that transactions move: under the last fence alone, each step once, and over restarts of those who know."""

from __future__ import annotations

import random

import msgpack
import pytest

from tidewal.runtime.cluster import decided_positions
from tidewal.runtime.cluster.decided_positions import (
    DecidedPositions,
    PositionMove,
    PositionMoves,
    cluster_with_ids,
    position_fence,
)
from tidewal.runtime.cluster.state import ClusterState
from tidewal.runtime.cluster.transaction_decisions import TransactionDecisions, decided
from tidewal.runtime.errors import Fenced, PreconditionFailed
from tidewal.runtime.groups.coordinator_client import Ack, GroupAcks
from tidewal.runtime.groups.group_filter import GroupFilter, RecordState
from tidewal.runtime.ownership.prepared import TransactionId


def fenced(positions: DecidedPositions, group: str = "g", channel: str = "c", **gone) -> int:
    """The token of a fence."""
    known = {"gone": (), "gone_groups": (), "tokens": positions.tokens, **gone}
    positions.fence(position_fence(group, channel, "door-1", **known))
    found = positions.find(group, channel)
    assert found is not None
    return found.token


def move(token: int, upto: int, channel: str = "c") -> PositionMoves:
    return PositionMoves("g", [PositionMove(channel, token, upto.to_bytes(8, "big"), b"m%d" % upto)])


def commit(decisions: TransactionDecisions, pseq: int, moves: PositionMoves) -> int | None:
    """The outcome of a transaction."""
    id = TransactionId("p", pseq, "x")
    try:
        decisions.decide(decided(id, 7, ["out"], decisions.count, moves))
    except PreconditionFailed:
        decisions.decide(decided(id, 0, [], decisions.count))
    return decisions.outcome_of(id)


def test_a_transaction_whose_position_may_not_move_is_not_committed() -> None:
    decisions = TransactionDecisions()
    first = fenced(decisions.positions)
    assert commit(decisions, 1, move(first, 5)) == 7
    assert commit(decisions, 2, move(first, 5)) == 0, "acknowledged before"
    second = fenced(decisions.positions)
    assert commit(decisions, 3, move(first, 9)) == 0, "another member goes on"
    with pytest.raises(Fenced) as error:
        decisions.positions.check(move(first, 9))
    assert error.value.fields["group"] == "g"
    found = decisions.positions.find("g", "c")
    assert found is not None
    assert (found.decided, found.upto, found.metadata) == (first, (5).to_bytes(8, "big"), b"m5")
    assert commit(decisions, 4, move(second, 3)), "it has begun anew before that"


def test_of_several_positions_all_move_or_none() -> None:
    decisions = TransactionDecisions()
    one, other = fenced(decisions.positions), fenced(decisions.positions, channel="d")
    fenced(decisions.positions, channel="d")
    both = PositionMoves("g", [*move(one, 5).moves, *move(other, 5, "d").moves])
    assert commit(decisions, 1, both) == 0
    assert decisions.positions.find("g", "c").decided == 0


def test_a_token_of_what_was_forgotten_moves_nothing() -> None:
    decisions = TransactionDecisions()
    token = fenced(decisions.positions)
    fenced(decisions.positions, channel="d", gone=["c"])
    assert decisions.positions.channels == {"d"}
    assert commit(decisions, 1, move(token, 5)) == 0
    again = fenced(decisions.positions)
    assert again > token
    fenced(decisions.positions, group="h", channel="d", gone_groups=["g"])
    assert decisions.positions.groups == {"h"}


def test_a_group_that_has_begun_anew_is_not_forgotten_for_one_that_was_dropped() -> None:
    """It is looked up which groups are gone, and one of them is made again before the fence that says so."""
    decisions = TransactionDecisions()
    fenced(decisions.positions)
    looked_up = decisions.positions.tokens
    token = fenced(decisions.positions)
    assert commit(decisions, 1, move(token, 5)) == 7
    fenced(decisions.positions, group="h", channel="d", gone_groups=["g"], tokens=looked_up)
    assert decisions.positions.find("g", "c").decided == token
    fenced(decisions.positions, group="h", channel="d", gone_groups=["g"])
    assert decisions.positions.groups == {"h"}


def test_a_fence_is_a_small_record_however_much_is_gone() -> None:
    gone = {f"{number:05}" * 50 for number in range(10_000)}
    event = position_fence("g", "c", "door-1", gone, gone, 1)
    assert (len(event["gone"]), len(event["gone_groups"])) == (100, 100)
    assert len(msgpack.packb(event)) < 64 * 1024


def test_there_are_no_more_positions_than_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(decided_positions, "POSITIONS_MAX", 2)
    positions = DecidedPositions()
    for channel in "cd":
        fenced(positions, channel=channel)
    with pytest.raises(PreconditionFailed):
        fenced(positions, channel="e")
    fenced(positions, channel="c")
    fenced(positions, channel="e", gone=["d"])


def test_positions_are_in_a_snapshot_of_the_cluster_and_get_the_ids_of_another_log() -> None:
    state = ClusterState()
    assert "transactions" not in state.snapshot()
    state.apply(position_fence("g", "c", "door-1", [], [], 0))
    token = fenced(state.transactions.positions)
    fenced(state.transactions.positions, channel="d")
    assert commit(state.transactions, 1, move(token, 5))
    wire = msgpack.unpackb(msgpack.packb(state.snapshot()))
    again = ClusterState()
    again.restore(wire)
    assert again.snapshot() == state.snapshot()
    again.restore(cluster_with_ids(wire, lambda channel, id: channel.encode() + id))
    positions = again.transactions.positions
    assert [positions.find("g", channel).upto for channel in "cd"] == [b"c" + (5).to_bytes(8, "big"), b""]
    assert commit(again.transactions, 2, move(token, 6)) == 0, "what was fenced in one log moves nothing in another"
    without = {name: part for name, part in wire.items() if name != "transactions"}
    assert cluster_with_ids(without, lambda channel, id: id) == without


def test_each_input_counts_once_whichever_member_is_late(rng: random.Random) -> None:
    """Members that have the channel one after another, and know that late: all that is committed is one chain."""
    for _ in range(200):
        decisions, stored, mark = TransactionDecisions(), 0, 0
        committed: list[tuple[int, int]] = []  # from, to
        members: list[tuple[int, int]] = []  # token, and how far it is
        for pseq in range(40):
            if not members or rng.random() < 0.2:  # another member gets the channel, and goes on behind what counts
                token = fenced(decisions.positions)
                found = decisions.positions.find("g", "c")
                if found.decided == mark:
                    stored = max(stored, int.from_bytes(found.upto, "big"))
                mark = token
                members.append((token, stored))
            at = rng.randrange(len(members))
            token, upto = members[at]
            to = upto + rng.randrange(1, 4)
            if commit(decisions, pseq, move(token, to)):
                committed.append((upto, to))
                members[at] = token, to
        assert [end for _, end in committed[:-1]] == [begin for begin, _ in committed[1:]]
        assert not committed or committed[0][0] == 0


def test_acknowledgements_with_tokens_name_what_the_next_member_needs() -> None:
    acks = GroupAcks("g", "m", [Ack("c", 1, b"id", (), b"meta")], {"c": 3})
    again = GroupAcks.from_wire(msgpack.unpackb(msgpack.packb(acks.to_wire())))
    assert PositionMoves.of(again) == PositionMoves("g", [PositionMove("c", 3, b"id", b"meta")])
    assert PositionMoves.from_wire(PositionMoves.of(again).to_wire()) == PositionMoves.of(again)
    for wrong in (acks._replace(tokens={"d": 3}), acks._replace(acks=[Ack("c", 1, None, (b"id",), b"meta")])):
        with pytest.raises(ValueError, match="without a token"):
            GroupAcks.from_wire(wrong.to_wire())


@pytest.mark.parametrize("read", [b"", b"state"])
@pytest.mark.parametrize("own", [b"", b"mine"])
@pytest.mark.parametrize("token", [0, 1, 255, 256, 2**40])
def test_a_mark_is_a_part_of_a_positions_metadata(read: bytes, own: bytes, token: int) -> None:
    state = RecordState(read, GroupFilter("a > 1", 2) if read else GroupFilter(), own, token)
    assert RecordState.of(state.to_metadata()) == state
