"""The coordinator against a model: whatever joins, leaves, dies, commits and fails, in any order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidewal.runtime.errors import ChannelNotFound, Closed, Fenced, InvalidRequest, Overloaded, Unavailable
from tidewal.runtime.groups import coordinator as coordinating
from tidewal.runtime.groups import seating
from tidewal.runtime.groups.coordinator import Coordinator
from tidewal.runtime.groups.link import Ack
from tidewal.runtime.groups.progress import Progress
from tidewal.runtime.testing.clock import VirtualClock
from tidewal.runtime.wal import Append, ChannelPolicy, Delivery, From

SESSION_S = 10.0
QUEUE = ChannelPolicy(delivery=Delivery.QUEUE)


def id_of(number):
    return number.to_bytes(8, "big")


def number_of(id):
    return int.from_bytes(id, "big")


class Log:
    """A backend whose commits wait, in their order, until the test decides each one's outcome."""

    def __init__(self):
        self.ends: dict[str, int] = {}
        self.positions: dict[str, dict[str, Progress]] = {}
        self.policies: dict[str, ChannelPolicy] = {}
        self.outputs: list[Append] = []
        self.waiting = []  # (outputs, changes, done), in log order
        self.at_once = False
        self.refuse = False

    def create(self, channel, policy=ChannelPolicy()):  # noqa: B008 -- frozen
        self.ends[channel], self.positions[channel], self.policies[channel] = 0, {}, policy

    def channels(self):
        return list(self.ends)

    def _check(self, channel):
        if channel not in self.ends:
            raise ChannelNotFound(channel, channel=channel)

    def policy(self, channel):
        self._check(channel)
        return self.policies[channel]

    def progress(self, channel):
        self._check(channel)
        return self.positions[channel]

    def begin(self, channel):
        self._check(channel)
        return id_of(0)

    def end(self, channel):
        self._check(channel)
        return id_of(self.ends[channel])

    def commit(self, outputs, changes, done):
        if self.refuse:
            raise Unavailable("told to refuse")
        self.waiting.append((outputs, changes, done))
        if self.at_once:
            self.decide("written")

    def forget(self, group, done):
        for positions in self.positions.values():
            positions.pop(group, None)
        done([])

    def decide(self, outcome):
        """Let the oldest commit happen, or not."""
        outputs, changes, done = self.waiting.pop(0)
        if outcome != "failed":
            self.outputs += outputs
            for change in changes:
                if change.channel in self.positions:
                    self.positions[change.channel].setdefault(change.group, Progress()).apply(change)
        done([id_of(0)] * len(outputs) if outcome == "written" else Unavailable(outcome))


class Client:
    """A member as the coordinator sees it; what it was delivered under each lease."""

    def __init__(self):
        self.leases: dict[str, int] = {}
        self.delivered: dict[str, set[int]] = {}


class Heard:
    """What `done` was called with."""

    def __init__(self):
        self.results = []

    def __call__(self, result):
        self.results.append(result)


class Groups(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.clock = VirtualClock()
        self.log = Log()
        self.coordinator = Coordinator(self.clock, self.log, boot=3)
        self.clients: dict[tuple[str, str], Client] = {}
        self.dead: set[tuple[str, str]] = set()
        self.stale: list[tuple[str, str, str, int]] = []
        self.seen_leases: set[int] = set()
        self.done: dict[tuple[str, str], set[int]] = {}  # what is durably done, by group and channel
        self.count = 0

    # ---- the world --------------------------------------------------------------------------------------------------

    @initialize(at_once=st.booleans())
    def begin(self, at_once):
        """Most of what can go wrong needs two members and a few channels, so begin with those."""
        for channel in ("a1", "a2", "b1"):
            self.create(channel)
            self.log.ends[channel] = 3
        for member in ("m1", "m2"):
            self.join("g", member, ["*"], From.EARLIEST)
            while self.log.waiting:
                self.log.decide("written")
        self.log.at_once = at_once

    @rule(channel=st.sampled_from(["a1", "a2", "b1", "b2"]))
    def create(self, channel):
        if channel not in self.log.ends:
            self.log.create(channel)
            self.coordinator.channels_changed()

    @precondition(lambda self: self.log.ends and not self.log.waiting)
    @rule(data=st.data())
    def drop(self, data):
        channel = data.draw(st.sampled_from(sorted(self.log.ends)))
        for kept in (self.log.ends, self.log.positions, self.log.policies):
            del kept[channel]
        self.done = {key: ids for key, ids in self.done.items() if key[1] != channel}
        self.coordinator.channels_changed()

    @precondition(lambda self: self.log.ends)
    @rule(data=st.data(), count=st.integers(1, 3))
    def append(self, data, count):
        self.log.ends[data.draw(st.sampled_from(sorted(self.log.ends)))] += count

    @precondition(lambda self: self.log.waiting)
    @rule(outcome=st.sampled_from(["written", "written", "written", "failed", "unknown"]))
    def decide(self, outcome):
        self.log.decide(outcome)

    @rule(seconds=st.sampled_from([0.5, SESSION_S / 2, SESSION_S + 0.1]))
    def time_passes(self, seconds):
        self.clock.advance(seconds)
        for group, member in set(self.clients) - self.dead:
            self.coordinator.beat(group, member)
        self.coordinator.expire()

    # ---- members ----------------------------------------------------------------------------------------------------

    @rule(
        group=st.sampled_from(["g", "h"]),
        member=st.sampled_from(["m1", "m2", "m3"]),
        patterns=st.sampled_from([["*"], ["a*"], ["b*", "a1*"]]),
        start=st.sampled_from(From),
    )
    def join(self, group, member, patterns, start):
        self.forget(group, member)
        self.clients[group, member] = Client()
        self.dead.discard((group, member))
        self.coordinator.join(group, member, patterns, start, SESSION_S, lambda: None, Heard())

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data):
        group, member = data.draw(st.sampled_from(sorted(self.clients)))
        self.coordinator.leave(group, member)
        self.forget(group, member)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def die(self, data):
        self.dead.add(data.draw(st.sampled_from(sorted(self.clients))))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), count=st.integers(1, 3))
    def read(self, data, count):
        found = self.choose_share(data)
        if found is None:
            return
        group, member, channel, share = found
        delivered = self.clients[group, member].delivered[channel]
        behind = max([*delivered, number_of(share.acked_to)])
        new = [n for n in range(behind + 1, self.log.ends[channel] + 1) if id_of(n) not in share.acked][:count]
        assert not self.done[group, channel].intersection(new), "what is acknowledged is delivered again"
        delivered.update(new)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), single=st.booleans())
    def commit(self, data, single):
        found = self.choose_share(data)
        delivered = set() if found is None else self.clients[found[0], found[1]].delivered[found[2]]
        if found is None or not delivered:
            return
        group, member, channel, share = found
        number = data.draw(st.sampled_from(sorted(delivered)))
        output = Append("out", str(self.count).encode())
        self.count += 1
        ack = Ack(channel, share.lease, None, (id_of(number),)) if single else Ack(channel, share.lease, id_of(number))
        ids = {number} if single else set(range(1, number + 1))
        before = len(self.log.outputs)
        position = self.log.positions[channel].get(group, Progress())
        if not single and id_of(number) <= position.acked_to:
            with pytest.raises(InvalidRequest):
                self.coordinator.commit(group, member, [ack], [output], Heard())
            return

        def done(result):
            written = len(self.log.outputs) > before and output in self.log.outputs
            if written and (group, channel) in self.done:
                self.done[group, channel] |= ids
            assert written or not isinstance(result, list)

        self.coordinator.commit(group, member, [ack], [output], done)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def commit_under_a_lease_that_is_over(self, data):
        group, member, channel, lease = data.draw(st.sampled_from(self.stale))
        if channel in self.log.ends:
            waiting = len(self.log.waiting)
            with pytest.raises(Fenced):
                self.coordinator.commit(group, member, [Ack(channel, lease, id_of(0))], [Append("out", b"!")], Heard())
            self.coordinator.release(group, member, channel, lease)  # changes nothing
            assert len(self.log.waiting) == waiting

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def let_go(self, data):
        found = self.choose_share(data)
        if found is not None:
            group, member, channel, share = found
            self.coordinator.release(group, member, channel, share.lease)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), back=st.integers(0, 3))
    def seek(self, data, back):
        found = self.choose_share(data)
        if found is None:
            return
        group, member, channel, share = found
        number = max(1, self.log.ends[channel] - back) if self.log.ends[channel] else 0

        def done(error):
            moved = self.log.positions.get(channel, {}).get(group)
            if (group, channel) in self.done and moved is not None and (error is None or str(error) == "unknown"):
                self.done[group, channel] = set(range(1, number + 1))

        self.coordinator.seek(group, member, channel, share.lease, id_of(number), done)

    # ---- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def each_channel_is_with_one_member(self):
        holders: Counter[tuple[str, str]] = Counter()
        for (group, _), shares in self.all_shares().items():
            holders.update((group, channel) for channel in shares.held)
        assert all(count == 1 for count in holders.values()), holders

    @invariant()
    def a_lease_starts_from_all_that_was_accepted(self):
        """And so what was delivered and not acknowledged comes again, and nothing else does."""
        for (group, member), shares in self.all_shares().items():
            client = self.clients[group, member]
            for channel in set(client.leases) - set(shares.held):
                self.stale.append((group, member, channel, client.leases.pop(channel)))
            for channel, share in shares.held.items():
                if client.leases.get(channel) == share.lease:
                    continue
                if channel in client.leases:
                    self.stale.append((group, member, channel, client.leases[channel]))
                assert share.lease not in self.seen_leases
                assert share.lease >> 32 == 3
                self.seen_leases.add(share.lease)
                undecided = [change for _, changes, _ in self.log.waiting for change in changes]
                assert not [c for c in undecided if (c.group, c.channel) == (group, channel)]
                told = {n for n in range(1, 200) if id_of(n) <= share.acked_to or id_of(n) in share.acked}
                if (group, channel) in self.done:
                    assert told == self.done[group, channel]
                self.done[group, channel] = told
                client.leases[channel], client.delivered[channel] = share.lease, set()

    def teardown(self):
        """Left alone, with everybody giving back what is wanted back, all channels find a member, evenly."""
        for _ in range(50):
            while self.log.waiting:
                self.log.decide("written")
            for (group, member), shares in self.all_shares().items():
                for channel in shares.wanted_back:
                    self.coordinator.release(group, member, channel, shares.held[channel].lease)
            self.coordinator.expire()
        for group in {group for group, _ in self.clients}:
            everything = [s for (name, _), s in self.all_shares().items() if name == group]
            assert not any(shares.wanted_back for shares in everything)
        for info in self.coordinator.groups():
            assert {(info.name, member) for member in info.members} <= set(self.clients)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def all_shares(self):
        found = {}
        for group, member in list(self.clients):
            members = {name: info for info in self.coordinator.groups() for name in info.members if info.name == group}
            if member in members:
                alive = (group, member) not in self.dead
                seen = self.coordinator._groups[group].members[member].seen_alive
                found[group, member] = self.coordinator.shares(group, member)
                if not alive:  # looking is no sign of life here
                    self.coordinator._groups[group].members[member].seen_alive = seen
            else:
                self.forget(group, member)
        return found

    def forget(self, group, member):
        client = self.clients.pop((group, member), None)
        if client is not None:
            self.stale += [(group, member, channel, lease) for channel, lease in client.leases.items()]

    def choose_share(self, data):
        held = [
            (group, member, channel)
            for (group, member), shares in sorted(self.all_shares().items())
            for channel in shares.held
        ]
        if not held:
            return None
        group, member, channel = data.draw(st.sampled_from(held))
        return group, member, channel, self.coordinator.shares(group, member).held[channel]


Groups.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestGroups = Groups.TestCase


# ---- single cases ---------------------------------------------------------------------------------------------------


@pytest.fixture
def log():
    found = Log()
    found.at_once = True
    for channel in ("a", "b"):
        found.create(channel)
        found.ends[channel] = 5
    return found


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def coordinator(log, clock):
    return Coordinator(clock, log, 1)


def join(coordinator, member, channels=("*",), group="g", session_s=SESSION_S, changed=lambda: None):
    heard = Heard()
    coordinator.join(group, member, channels, From.EARLIEST, session_s, changed, heard)
    return heard


def test_a_session_without_life_ends_and_one_in_this_process_has_none(coordinator, clock):
    join(coordinator, "remote")
    join(coordinator, "local", session_s=None)
    clock.advance(SESSION_S + 1)
    coordinator.expire()
    with pytest.raises(Fenced):
        coordinator.shares("g", "remote")
    assert set(coordinator.shares("g", "local").held) == {"a", "b"}


def test_a_channel_that_is_not_given_back_is_taken_after_the_session_timeout(coordinator, clock):
    join(coordinator, "m1")
    lease = coordinator.shares("g", "m1").held["b"].lease
    join(coordinator, "m2")
    (wanted,) = coordinator.shares("g", "m1").wanted_back
    clock.advance(SESSION_S - 0.1)
    coordinator.beat("g", "m1")
    coordinator.beat("g", "m2")
    coordinator.expire()
    assert not coordinator.shares("g", "m2").held
    clock.advance(0.2)
    coordinator.expire()
    assert set(coordinator.shares("g", "m2").held) == {wanted}
    assert wanted == "b"
    with pytest.raises(Fenced):
        coordinator.commit("g", "m1", [Ack("b", lease, id_of(1))], [], Heard())


def test_a_hand_over_waits_for_the_commit_in_flight(coordinator, log):
    join(coordinator, "m1")
    join(coordinator, "m2")
    log.at_once = False
    (wanted,) = coordinator.shares("g", "m1").wanted_back
    lease = coordinator.shares("g", "m1").held[wanted].lease
    heard = Heard()
    coordinator.commit("g", "m1", [Ack(wanted, lease, id_of(3))], [], heard)
    coordinator.leave("g", "m1")
    assert wanted not in coordinator.shares("g", "m2").held
    log.decide("written")
    assert heard.results == [[]]
    assert coordinator.shares("g", "m2").held[wanted].acked_to == id_of(3)


def test_changes_are_told_without_the_lock(coordinator):
    versions = []
    join(coordinator, "m1")
    join(coordinator, "m2", changed=lambda: versions.append(coordinator.shares("g", "m2").version))
    coordinator.leave("g", "m1")
    assert versions == sorted(set(versions))
    assert coordinator.shares("g", "m2").version == versions[-1]


def test_a_first_position_that_cannot_be_stored_fails_the_join(coordinator, log):
    log.refuse = True
    heard = join(coordinator, "m1")
    assert isinstance(heard.results[0], Unavailable)
    assert coordinator.groups() == []
    log.refuse = False
    assert join(coordinator, "m1").results == [None]


def test_a_new_channel_whose_position_cannot_be_stored_is_given_out_later(coordinator, log):
    join(coordinator, "m1")
    log.refuse = True
    log.create("c")
    coordinator.channels_changed()
    assert "c" not in coordinator.shares("g", "m1").held
    log.refuse = False
    coordinator.expire()
    assert "c" in coordinator.shares("g", "m1").held


def test_limits_have_names(coordinator, log, monkeypatch):
    monkeypatch.setattr(seating, "MAX_MEMBERS_PER_GROUP", 1)
    monkeypatch.setattr(seating, "MAX_GROUPS", 2)
    monkeypatch.setattr(coordinating, "MAX_SINGLE_ACKS", 2)
    join(coordinator, "m1")
    join(coordinator, "m1", group="h")
    limits = []
    for attempt in (
        lambda: join(coordinator, "m2"),
        lambda: join(coordinator, "m1", group="i"),
        lambda: join(coordinator, "m1", ["x"] * 10_001),
        lambda: join(coordinator, "m1", [f"x*{n}" for n in range(101)]),
    ):
        with pytest.raises(Overloaded) as refused:
            attempt()
        limits.append(refused.value.limit)
    lease = coordinator.shares("g", "m1").held["a"].lease
    coordinator.commit("g", "m1", [Ack("a", lease, None, (id_of(3), id_of(4)))], [], Heard())
    with pytest.raises(Overloaded) as refused:
        coordinator.commit("g", "m1", [Ack("a", lease, None, (id_of(5),))], [], Heard())
    limits.append(refused.value.limit)
    coordinator.commit("g", "m1", [Ack("a", lease, id_of(3), (id_of(5),))], [], Heard())
    assert limits == ["members_per_group", "groups", "subscriptions", "patterns", "single_acks"]


def test_what_lies_past_the_end_cannot_be_acknowledged(coordinator):
    join(coordinator, "m1")
    lease = coordinator.shares("g", "m1").held["a"].lease
    for ack in (Ack("a", lease, id_of(6)), Ack("a", lease, None, (id_of(6),))):
        with pytest.raises(InvalidRequest):
            coordinator.commit("g", "m1", [ack], [], Heard())
    with pytest.raises(InvalidRequest):
        coordinator.seek("g", "m1", "a", lease, id_of(6), Heard())


def test_a_queue_created_for_two_patterns_goes_to_one_group(coordinator, log):
    join(coordinator, "m1", group="g")
    join(coordinator, "m1", group="h")
    log.create("jobs", QUEUE)
    coordinator.channels_changed()
    having = [group for group in "gh" if "jobs" in coordinator.shares(group, "m1").held]
    assert having == ["g"]


def test_closing_wakes_everybody_and_refuses_the_rest(coordinator):
    woken = []
    join(coordinator, "m1", changed=lambda: woken.append(True))
    del woken[:]
    coordinator.close()
    assert woken
    for call in (
        lambda: coordinator.shares("g", "m1"),
        lambda: join(coordinator, "m2"),
        coordinator.groups,
    ):
        with pytest.raises(Closed):
            call()
    coordinator.leave("g", "m1")


def test_outputs_of_what_is_acknowledged_are_refused():
    log = Log()
    log.at_once = True
    log.create("a")
    log.ends["a"] = 5
    coordinator = Coordinator(VirtualClock(), log, 1)
    coordinator.join("g", "m", ["a"], From.EARLIEST, SESSION_S, lambda: None, lambda _: None)
    lease = coordinator.shares("g", "m").held["a"].lease
    answers = []
    coordinator.commit("g", "m", [Ack("a", lease, id_of(3))], [Append("out", b"x")], answers.append)
    for upto in (2, 3):
        with pytest.raises(InvalidRequest):
            coordinator.commit("g", "m", [Ack("a", lease, id_of(upto))], [Append("out", b"x")], answers.append)
    coordinator.commit(
        "g", "m", [Ack("a", lease, id_of(3))], [], answers.append
    )  # says nothing new, and doubles nothing
    coordinator.commit("g", "m", [Ack("a", lease, id_of(4))], [Append("out", b"y")], answers.append)
    assert [bytes(output.payload) for output in log.outputs] == [b"x", b"y"]
    assert len(answers) == 3


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_sessions_and_hand_overs_believe_no_wall_clock(step_ms):
    log, clock = Log(), VirtualClock()
    log.at_once = True
    log.create("a")
    coordinator = Coordinator(clock, log, 1)
    for member in ("holds", "waits"):
        coordinator.join("g", member, ["a"], From.EARLIEST, SESSION_S, lambda: None, lambda _: None)
    (holder,) = [member for member in ("holds", "waits") if coordinator.shares("g", member).held]
    other = {"holds": "waits", "waits": "holds"}[holder]
    for _ in range(3):
        clock.jump_wall(step_ms)
        clock.advance(SESSION_S / 4)
        coordinator.beat("g", other)
        coordinator.expire()
    assert coordinator.shares("g", holder).held, "a step of the wall clock has ended a session"
    clock.jump_wall(step_ms)
    clock.advance(SESSION_S / 2)
    coordinator.beat("g", other)
    clock.advance(SESSION_S)
    coordinator.beat("g", other)
    coordinator.expire()
    assert coordinator.shares("g", other).held, "a step of the wall clock has kept a silent member alive"
