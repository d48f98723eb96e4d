"""The coordinator against a model: members that join, leave, die, commit and fail, in any order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidewal.runtime.errors import ChannelNotFound, Closed, Fenced, InvalidRequest, Overloaded, Unavailable
from tidewal.runtime.groups import assignment_state
from tidewal.runtime.groups import coordinator as coordinating
from tidewal.runtime.groups.coordinator import GroupCoordinator, epochs
from tidewal.runtime.groups.coordinator_client import Ack, AssignedChannel
from tidewal.runtime.groups.progress import MAX_METADATA_BYTES, GroupProgress
from tidewal.runtime.log.wal import Append, ChannelPolicy, Delivery, From
from tidewal.runtime.testing.clock import VirtualClock

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
        self.positions: dict[str, dict[str, GroupProgress]] = {}
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
            raise Unavailable("refused by the test")
        self.waiting.append((outputs, changes, done))
        if self.at_once:
            self.decide("written")

    def forget(self, group, done):
        for positions in self.positions.values():
            positions.pop(group, None)
        done([])

    def decide(self, outcome):
        """Decide the oldest commit: it happens or not."""
        outputs, changes, done = self.waiting.pop(0)
        if outcome != "failed":
            self.outputs += outputs
            for change in changes:
                if change.channel in self.positions:
                    self.positions[change.channel].setdefault(change.group, GroupProgress()).apply(change)
        done([id_of(0)] * len(outputs) if outcome == "written" else Unavailable(outcome))


class Client:
    """A member as the coordinator sees it; what it was delivered under each epoch."""

    def __init__(self):
        self.epochs: dict[str, int] = {}
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
        self.coordinator = GroupCoordinator(self.clock, self.log, epochs(3))
        self.clients: dict[tuple[str, str], Client] = {}
        self.dead: set[tuple[str, str]] = set()
        self.stale: list[tuple[str, str, str, int]] = []
        self.seen_epochs: set[int] = set()
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
        found = self.choose_assigned(data)
        if found is None:
            return
        group, member, channel, assigned = found
        delivered = self.clients[group, member].delivered[channel]
        behind = max([*delivered, number_of(assigned.acked_to)])
        new = [n for n in range(behind + 1, self.log.ends[channel] + 1) if id_of(n) not in assigned.acked][:count]
        assert not self.done[group, channel].intersection(new), "what is acknowledged is delivered again"
        delivered.update(new)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), single=st.booleans())
    def commit(self, data, single):
        found = self.choose_assigned(data)
        delivered = set() if found is None else self.clients[found[0], found[1]].delivered[found[2]]
        if found is None or not delivered:
            return
        group, member, channel, assigned = found
        number = data.draw(st.sampled_from(sorted(delivered)))
        output = Append("out", str(self.count).encode())
        self.count += 1
        ack = (
            Ack(channel, assigned.epoch, None, (id_of(number),))
            if single
            else Ack(channel, assigned.epoch, id_of(number))
        )
        ids = {number} if single else set(range(1, number + 1))
        before = len(self.log.outputs)
        position = self.log.positions[channel].get(group, GroupProgress())
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
    def commit_under_an_epoch_that_is_over(self, data):
        group, member, channel, epoch = data.draw(st.sampled_from(self.stale))
        if channel in self.log.ends:
            waiting = len(self.log.waiting)
            with pytest.raises(Fenced):
                self.coordinator.commit(group, member, [Ack(channel, epoch, id_of(0))], [Append("out", b"!")], Heard())
            self.coordinator.release(group, member, channel, epoch)  # changes nothing
            assert len(self.log.waiting) == waiting

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def release(self, data):
        found = self.choose_assigned(data)
        if found is not None:
            group, member, channel, assigned = found
            self.coordinator.release(group, member, channel, assigned.epoch)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), back=st.integers(0, 3))
    def seek(self, data, back):
        found = self.choose_assigned(data)
        if found is None:
            return
        group, member, channel, assigned = found
        number = max(1, self.log.ends[channel] - back) if self.log.ends[channel] else 0

        def done(error):
            moved = self.log.positions.get(channel, {}).get(group)
            if (group, channel) in self.done and moved is not None and (error is None or str(error) == "unknown"):
                self.done[group, channel] = set(range(1, number + 1))

        self.coordinator.seek(group, member, channel, assigned.epoch, id_of(number), done)

    # ---- invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def each_channel_is_with_one_member(self):
        holders: Counter[tuple[str, str]] = Counter()
        for (group, _), assignment in self.all_assignments().items():
            holders.update((group, channel) for channel in assignment.held)
        assert all(count == 1 for count in holders.values()), holders

    @invariant()
    def an_epoch_starts_from_all_that_was_accepted(self):
        """And so what was delivered and not acknowledged comes again, and nothing else does."""
        for (group, member), assignment in self.all_assignments().items():
            client = self.clients[group, member]
            for channel in set(client.epochs) - set(assignment.held):
                self.stale.append((group, member, channel, client.epochs.pop(channel)))
            for channel, assigned in assignment.held.items():
                if client.epochs.get(channel) == assigned.epoch:
                    continue
                if channel in client.epochs:
                    self.stale.append((group, member, channel, client.epochs[channel]))
                assert assigned.epoch not in self.seen_epochs
                assert assigned.epoch >> 32 == 3
                self.seen_epochs.add(assigned.epoch)
                undecided = [change for _, changes, _ in self.log.waiting for change in changes]
                assert not [c for c in undecided if (c.group, c.channel) == (group, channel)]
                acknowledged = {n for n in range(1, 200) if id_of(n) <= assigned.acked_to or id_of(n) in assigned.acked}
                if (group, channel) in self.done:
                    assert acknowledged == self.done[group, channel]
                self.done[group, channel] = acknowledged
                client.epochs[channel], client.delivered[channel] = assigned.epoch, set()

    def teardown(self):
        """Left alone, when each member releases what is being revoked, all channels find a member, evenly."""
        for _ in range(50):
            while self.log.waiting:
                self.log.decide("written")
            for (group, member), assignment in self.all_assignments().items():
                for channel in assignment.revoking:
                    self.coordinator.release(group, member, channel, assignment.held[channel].epoch)
            self.coordinator.expire()
        for group in {group for group, _ in self.clients}:
            everything = [s for (name, _), s in self.all_assignments().items() if name == group]
            assert not any(assignment.revoking for assignment in everything)
        for info in self.coordinator.groups():
            assert {(info.name, member) for member in info.members} <= set(self.clients)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def all_assignments(self):
        found = {}
        for group, member in list(self.clients):
            members = {name: info for info in self.coordinator.groups() for name in info.members if info.name == group}
            if member in members:
                alive = (group, member) not in self.dead
                seen = self.coordinator._groups[group].members[member].seen_alive
                found[group, member] = self.coordinator.assignment(group, member)
                if not alive:  # reading the assignment must not count as a heartbeat here
                    self.coordinator._groups[group].members[member].seen_alive = seen
            else:
                self.forget(group, member)
        return found

    def forget(self, group, member):
        client = self.clients.pop((group, member), None)
        if client is not None:
            self.stale += [(group, member, channel, epoch) for channel, epoch in client.epochs.items()]

    def choose_assigned(self, data):
        held = [
            (group, member, channel)
            for (group, member), assignment in sorted(self.all_assignments().items())
            for channel in assignment.held
        ]
        if not held:
            return None
        group, member, channel = data.draw(st.sampled_from(held))
        return group, member, channel, self.coordinator.assignment(group, member).held[channel]


Groups.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestGroups = pytest.mark.slow(Groups.TestCase)


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
    return GroupCoordinator(clock, log, epochs(1))


def join(coordinator, member, channels=("*",), group="g", session_s=SESSION_S, changed=lambda: None):
    heard = Heard()
    coordinator.join(group, member, channels, From.EARLIEST, session_s, changed, heard)
    return heard


def test_a_silent_session_ends_and_a_member_in_this_process_has_none(coordinator, clock):
    join(coordinator, "remote")
    join(coordinator, "local", session_s=None)
    clock.advance(SESSION_S + 1)
    coordinator.expire()
    with pytest.raises(Fenced):
        coordinator.assignment("g", "remote")
    assert set(coordinator.assignment("g", "local").held) == {"a", "b"}


def test_a_channel_that_is_not_given_back_is_taken_after_the_session_timeout(coordinator, clock):
    join(coordinator, "m1")
    epoch = coordinator.assignment("g", "m1").held["b"].epoch
    join(coordinator, "m2")
    (revoking,) = coordinator.assignment("g", "m1").revoking
    clock.advance(SESSION_S - 0.1)
    coordinator.beat("g", "m1")
    coordinator.beat("g", "m2")
    coordinator.expire()
    assert not coordinator.assignment("g", "m2").held
    clock.advance(0.2)
    coordinator.expire()
    assert set(coordinator.assignment("g", "m2").held) == {revoking}
    assert revoking == "b"
    with pytest.raises(Fenced):
        coordinator.commit("g", "m1", [Ack("b", epoch, id_of(1))], [], Heard())


def test_a_revocation_waits_for_the_commit_in_flight(coordinator, log):
    join(coordinator, "m1")
    join(coordinator, "m2")
    log.at_once = False
    (revoking,) = coordinator.assignment("g", "m1").revoking
    epoch = coordinator.assignment("g", "m1").held[revoking].epoch
    heard = Heard()
    coordinator.commit("g", "m1", [Ack(revoking, epoch, id_of(3))], [], heard)
    coordinator.leave("g", "m1")
    assert revoking not in coordinator.assignment("g", "m2").held
    log.decide("written")
    assert heard.results == [[]]
    assert coordinator.assignment("g", "m2").held[revoking].acked_to == id_of(3)


def test_changes_are_reported_without_the_lock(coordinator):
    versions = []
    join(coordinator, "m1")
    join(coordinator, "m2", changed=lambda: versions.append(coordinator.assignment("g", "m2").version))
    coordinator.leave("g", "m1")
    assert versions == sorted(set(versions))
    assert coordinator.assignment("g", "m2").version == versions[-1]


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
    assert "c" not in coordinator.assignment("g", "m1").held
    log.refuse = False
    coordinator.expire()
    assert "c" in coordinator.assignment("g", "m1").held


def test_limits_have_names(coordinator, log, monkeypatch):
    monkeypatch.setattr(assignment_state, "MAX_MEMBERS_PER_GROUP", 1)
    monkeypatch.setattr(assignment_state, "MAX_GROUPS", 2)
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
    epoch = coordinator.assignment("g", "m1").held["a"].epoch
    coordinator.commit("g", "m1", [Ack("a", epoch, None, (id_of(3), id_of(4)))], [], Heard())
    with pytest.raises(Overloaded) as refused:
        coordinator.commit("g", "m1", [Ack("a", epoch, None, (id_of(5),))], [], Heard())
    limits.append(refused.value.limit)
    coordinator.commit("g", "m1", [Ack("a", epoch, id_of(3), (id_of(5),))], [], Heard())
    assert limits == ["members_per_group", "groups", "subscriptions", "patterns", "single_acks"]


def test_what_lies_past_the_end_cannot_be_acknowledged(coordinator):
    join(coordinator, "m1")
    epoch = coordinator.assignment("g", "m1").held["a"].epoch
    for ack in (Ack("a", epoch, id_of(6)), Ack("a", epoch, None, (id_of(6),))):
        with pytest.raises(InvalidRequest):
            coordinator.commit("g", "m1", [ack], [], Heard())
    with pytest.raises(InvalidRequest):
        coordinator.seek("g", "m1", "a", epoch, id_of(6), Heard())


def test_metadata_of_a_client_that_checks_nothing_is_checked(coordinator):
    join(coordinator, "m1")
    epoch = coordinator.assignment("g", "m1").held["a"].epoch
    for metadata in (bytes(MAX_METADATA_BYTES + 1), "text"):
        with pytest.raises(InvalidRequest):
            coordinator.commit("g", "m1", [Ack("a", epoch, id_of(3), metadata=metadata)], [], Heard())
    coordinator.commit("g", "m1", [Ack("a", epoch, id_of(3), metadata=b"noted")], [], Heard())
    assert coordinator.assignment("g", "m1").held["a"] == AssignedChannel(epoch, id_of(3), frozenset(), b"noted")


def test_a_queue_created_for_two_patterns_goes_to_one_group(coordinator, log):
    join(coordinator, "m1", group="g")
    join(coordinator, "m1", group="h")
    log.create("jobs", QUEUE)
    coordinator.channels_changed()
    having = [group for group in "gh" if "jobs" in coordinator.assignment(group, "m1").held]
    assert having == ["g"]


def test_closing_wakes_all_members_and_refuses_later_calls(coordinator):
    woken = []
    join(coordinator, "m1", changed=lambda: woken.append(True))
    del woken[:]
    coordinator.close()
    assert woken
    for call in (
        lambda: coordinator.assignment("g", "m1"),
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
    coordinator = GroupCoordinator(VirtualClock(), log, epochs(1))
    coordinator.join("g", "m", ["a"], From.EARLIEST, SESSION_S, lambda: None, lambda _: None)
    epoch = coordinator.assignment("g", "m").held["a"].epoch
    answers = []
    coordinator.commit("g", "m", [Ack("a", epoch, id_of(3))], [Append("out", b"x")], answers.append)
    for upto in (2, 3):
        with pytest.raises(InvalidRequest):
            coordinator.commit("g", "m", [Ack("a", epoch, id_of(upto))], [Append("out", b"x")], answers.append)
    coordinator.commit(
        "g", "m", [Ack("a", epoch, id_of(3))], [], answers.append
    )  # says nothing new, and doubles nothing
    coordinator.commit("g", "m", [Ack("a", epoch, id_of(4))], [Append("out", b"y")], answers.append)
    assert [bytes(output.payload) for output in log.outputs] == [b"x", b"y"]
    assert len(answers) == 3


@pytest.mark.parametrize("step_ms", [-3_600_000, 3_600_000])
def test_sessions_and_revocations_ignore_the_wall_clock(step_ms):
    log, clock = Log(), VirtualClock()
    log.at_once = True
    log.create("a")
    coordinator = GroupCoordinator(clock, log, epochs(1))
    for member in ("holds", "waits"):
        coordinator.join("g", member, ["a"], From.EARLIEST, SESSION_S, lambda: None, lambda _: None)
    (holder,) = [member for member in ("holds", "waits") if coordinator.assignment("g", member).held]
    other = {"holds": "waits", "waits": "holds"}[holder]
    for _ in range(3):
        clock.jump_wall(step_ms)
        clock.advance(SESSION_S / 4)
        coordinator.beat("g", other)
        coordinator.expire()
    assert coordinator.assignment("g", holder).held, "a step of the wall clock has ended a session"
    clock.jump_wall(step_ms)
    clock.advance(SESSION_S / 2)
    coordinator.beat("g", other)
    clock.advance(SESSION_S)
    coordinator.beat("g", other)
    coordinator.expire()
    assert coordinator.assignment("g", other).held, "a step of the wall clock has kept a silent member alive"
