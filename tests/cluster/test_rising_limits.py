"""The limits of owners whose successors are on the same machine: little is stored of them, and timestamps never go
back, whatever clocks, reboots, crashes and the log do."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.catalog.catalog import Catalog
from tidewal.runtime.catalog.rising_limit import RisingLimit
from tidewal.runtime.clock import HybridClock, add_ms, compose, monotonic_ms, physical_ms
from tidewal.runtime.cluster.decisions import ClusterView, decide
from tidewal.runtime.cluster.limits import FAR_MS, LIMIT_MS, NEAR_MS, OwnerLimits, StoredLimit
from tidewal.runtime.cluster.state import ClusterState, NodeMember
from tidewal.runtime.errors import BadRecord, PreconditionFailed
from tidewal.runtime.replicated.records import Claim
from tidewal.runtime.testing.clock import VirtualClock

EXTEND_S = 3.0
HOUR_MS = 3_600_000


def as_wire(snapshot: dict[str, Any]) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.packb(snapshot), strict_map_key=False)


class Life:
    """An owner of the channel `p` from its grant to its crash: what `GrantedChannels` and `ChannelOwner` do of it."""

    def __init__(self, catalog: Catalog, clock: VirtualClock, incarnation: str, rises: bool) -> None:
        self.catalog, self.incarnation = catalog, incarnation
        self.clock = HybridClock(clock)
        self.limits = OwnerLimits(self.clock, rises=rises)
        self.pending: list[StoredLimit] = []  # sent, and neither in the log nor lost: they come into it in this order
        self._grant(clock)
        state = catalog.channels["p"]
        self.term, self.limit = state.term, state.limit
        self.clock.observe(state.previous_limit)
        if state.limit <= add_ms(self.clock.now(), LIMIT_MS // 4):
            self._renew(StoredLimit(self.limits.needed(), None))
            self.limit = state.limit
        self.limits.allow(self.limit)
        catalog.apply(self._own("fenced", (self.term, b"fence")))

    def _grant(self, clock: VirtualClock) -> None:
        for _ in range(2):  # at first what the owner before has used may become known
            cluster = ClusterState()
            member = NodeMember(self.incarnation, "a", ("mixcoord", "streamingnode"), 3_000)
            cluster.apply({"kind": "register", **member.to_wire(), "replaces": ""})
            view = ClusterView(
                self.incarnation,
                self.catalog,
                Claim(b"claim", 1, self.incarnation),
                cluster,
                set(),
                set(),
                lambda owner: owner != self.incarnation,
                clock.wall_ms(),
                boot=clock.boot(),
                boot_ms=monotonic_ms(clock),
            )
            decision = decide(view, {"p": self.incarnation})
            for event in (*decision.released, *decision.grants):
                self.catalog.apply({**event, "claim": b"claim"})

    def _own(self, kind: str, said: tuple[object, ...], **fields: object) -> dict[str, object]:
        return {"kind": kind, "node": self.incarnation, "channels": {"p": said}, **fields}

    def _renew(self, stored: StoredLimit) -> None:
        rising = {} if stored.rising is None else {"rising": list(stored.rising)}
        self.catalog.apply(self._own("renewed", (self.term, stored.limit, b""), **rising))

    def stamp(self) -> int | None:
        """A timestamp for a record or a promise, where the limit allows one."""
        ts = self.clock.now()
        return ts if ts <= self.limit else None

    def extend(self, *, written: bool = False) -> bool:
        """Look whether the limit has risen; returns whether another one is to be stored, which is sent then."""
        risen = None if written else self.limits.risen()
        if risen is None:
            self.pending.append(self.limits.propose())
        else:
            self.limit = max(self.limit, risen)
        return risen is None

    def land(self, count: int) -> None:
        """So many of what was sent come into the log, and the last of them is read back where it is the last sent."""
        for stored in self.pending[:count]:
            self._renew(stored)
        if count and count == len(self.pending):
            self.limits.confirm(stored)
            self.limit = max(self.limit, stored.usable)
        del self.pending[:count]


class RebootedClock(VirtualClock):
    """After a reboot its monotonic time counts from 0."""

    booted_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() - self.booted_s

    def reboot(self) -> None:
        super().reboot()
        self.booted_s += self.monotonic()


class Machine:
    """One machine, on which owners follow each other. Each stamps whatever it may, all the time."""

    def __init__(self) -> None:
        self.clock, self.catalog = RebootedClock(), Catalog()
        self.highest, self.lives = 0, 0
        self.begin(rises=True)

    def begin(self, *, rises: bool) -> None:
        self.lives += 1
        self.before = self.highest
        self.life = Life(self.catalog, self.clock, f"a-{self.lives}", rises)

    def stamp(self) -> None:
        ts = self.life.stamp()
        if ts is not None:
            assert ts > self.before, "the owner before had stamped later"
            assert ts <= self.catalog.granted("p").limit, "readers would take it for a bad record"
            self.highest = max(self.highest, ts)


class Look(NamedTuple):
    """The clock is set, and the owner looks at its limit; the clock is set again before so much of what was sent so far
    comes into the log. Of the rest so much is lost."""

    set_ms: int
    written: bool
    seconds: float
    set_again_ms: int
    landed: int
    lost: int

    def happen(self, machine: Machine) -> None:
        machine.clock.jump_wall(self.set_ms)
        machine.stamp()
        machine.life.extend(written=self.written)
        machine.clock.advance(self.seconds)
        machine.clock.jump_wall(self.set_again_ms)
        machine.stamp()
        machine.life.land(min(self.landed, len(machine.life.pending)))
        del machine.life.pending[: self.lost]


class Crash(NamedTuple):
    """The process is killed, perhaps with the machine, and another one follows once the clock is set."""

    set_ms: int
    reboot: bool
    rises: bool
    restored: bool

    def happen(self, machine: Machine) -> None:
        machine.clock.jump_wall(self.set_ms)
        if self.reboot:
            machine.clock.reboot()
        if self.restored:  # what follows rests on a snapshot
            machine.catalog.restore(as_wire(machine.catalog.snapshot()))
        machine.begin(rises=self.rises)


SET_MS = st.sampled_from([0, 0, 0, -4_000, 4_000, 8_000, -HOUR_MS, HOUR_MS])
SECONDS = st.sampled_from([EXTEND_S, 60.0, 700.0])
LOOKS = st.builds(Look, SET_MS, st.booleans(), SECONDS, SET_MS, st.sampled_from([9, 9, 0, 1]), st.integers(0, 1))
CRASHES = st.builds(Crash, SET_MS, st.booleans(), st.sampled_from([True, True, False]), st.booleans())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(LOOKS, LOOKS, LOOKS, CRASHES), max_size=20))
def test_timestamps_never_go_back_whatever_happens_to_the_machine(happenings: list[Look | Crash]) -> None:
    machine = Machine()
    for each in happenings:
        each.happen(machine)
        machine.stamp()


@pytest.mark.parametrize(
    "looks",
    [
        [Look(-4_000, True, 0, 12_000, 1, 0)],
        [Look(0, False, 60, 0, 0, 0), Look(-4_000, True, 0, 4_000, 0, 0), Look(0, False, 0, 8_000, 1, 1)],
    ],
    ids=["before it is answered", "after it was given up"],
)
def test_a_limit_that_was_taken_while_the_clock_was_behind_allows_all_that_is_stamped_later(looks: list[Look]) -> None:
    machine = Machine()
    idle(machine.life, machine.clock, 30)
    for each in (*looks, Crash(-20_000, reboot=False, rises=True, restored=False)):
        each.happen(machine)
        machine.stamp()
    assert machine.lives == 2


# ---- what is stored, and what it is worth ---------------------------------------------------------------------------


def idle(life: Life, clock: VirtualClock, seconds: float) -> int:
    """Let time pass in which each look at the limit is answered at once; returns how often one was stored."""
    stored = 0
    for _ in range(int(seconds / EXTEND_S)):
        clock.advance(EXTEND_S)
        stored += life.extend()
        life.land(len(life.pending))
        assert life.stamp(), "time goes on"
    return stored


def first_life(*, rises: bool = True) -> tuple[VirtualClock, Life]:
    clock = VirtualClock()
    return clock, Life(Catalog(), clock, "a-1", rises)


def test_an_idle_owner_stores_a_limit_each_ten_minutes() -> None:
    clock, life = first_life()
    assert idle(life, clock, 60 * 60) == 6


def test_where_successors_may_be_elsewhere_each_limit_is_stored() -> None:
    clock, life = first_life(rises=False)
    assert idle(life, clock, 60) == 20


@pytest.mark.parametrize("away_s", [0, 5, 300])
def test_a_successor_on_the_same_boot_begins_where_the_limit_had_risen_to(away_s: int) -> None:
    clock, life = first_life()
    idle(life, clock, 2_000)
    clock.advance(away_s)
    successor = Life(life.catalog, clock, "a-2", rises=True)
    assert successor.clock.ahead_ms == pytest.approx(LIMIT_MS, abs=1)
    assert idle(successor, clock, 600) <= 5, "until its time is that of the wall clock, and then no more"


@pytest.mark.parametrize("boot", ["another", ""])
def test_a_successor_that_does_not_know_the_time_between_passes_all_that_is_stored(boot: str) -> None:
    clock, life = first_life()
    idle(life, clock, 60)
    stored = life.catalog.channels["p"].limit
    clock.boot = lambda: boot
    successor = Life(life.catalog, clock, "a-2", rises=True)
    assert successor.stamp() is not None
    assert successor.clock.last > stored
    assert NEAR_MS < successor.clock.ahead_ms <= LIMIT_MS + FAR_MS
    idle(successor, clock, FAR_MS / 1000 + 60)
    assert successor.clock.ahead_ms == 0, "the wall clock has caught up, and was not carried on"


@pytest.mark.parametrize("step_ms", [-HOUR_MS, -LIMIT_MS, LIMIT_MS, HOUR_MS])
def test_a_wall_clock_that_is_set_is_followed_with_new_limits(step_ms: int) -> None:
    clock, life = first_life()
    idle(life, clock, 60)
    clock.jump_wall(step_ms)
    assert 0 < idle(life, clock, 60) <= 20
    assert life.clock.ahead_ms <= max(0, -step_ms)
    idle(life, clock, HOUR_MS / 1000)
    assert idle(life, clock, 300) <= 1, "as before"
    assert physical_ms(life.limit) - clock.wall_ms() == pytest.approx(LIMIT_MS, abs=LIMIT_MS // 2)


def test_a_limit_rises_on_its_boot_alone_and_never_falls_below_its_beginning() -> None:
    rising = RisingLimit("boot", 1_000, compose(50_000))
    assert rising.at("boot", 1_000) == compose(50_000)
    assert rising.at("boot", 1_700) == compose(50_700)
    assert [rising.at("boot", 999), rising.at("other", 1_700)] == [None, None]
    assert RisingLimit("", 1_000, compose(50_000)).at("", 1_700) is None


# ---- in the catalog -------------------------------------------------------------------------------------------------


def test_what_an_owner_is_said_to_have_used_rests_on_the_limit_that_it_stored_last() -> None:
    clock, life = first_life()
    idle(life, clock, 10)
    catalog = life.catalog
    first = catalog.rising["p"]
    clock.jump_wall(HOUR_MS)
    idle(life, clock, 3)
    said = {"kind": "released", "claim": b"claim", "channels": {"p": (life.term, first.limit, b"")}}
    with pytest.raises(PreconditionFailed):
        catalog.apply({**said, "rising": first})
    assert catalog.channels["p"].owner == "a-1"
    catalog.apply({**said, "rising": catalog.rising["p"]})
    assert (catalog.channels["p"].owner, catalog.rising) == ("", {})


@pytest.mark.parametrize("kind", ["grant", "lease"])
def test_a_limit_that_had_risen_says_nothing_of_a_later_one(kind: str) -> None:
    clock, life = first_life()
    idle(life, clock, 10)
    said = {"node": "a-2", "channels": {"p": (life.term + 1, life.term)}} if kind == "grant" else {"node": "a-1"}
    life.catalog.apply({"kind": kind, "limit": compose(clock.wall_ms()), "checkpoints": {}, **said})
    assert life.catalog.rising == {}


def test_a_renewal_of_an_earlier_build_is_a_limit_that_may_be_used_at_once() -> None:
    clock, life = first_life()
    idle(life, clock, 10)
    life.catalog.apply(life._own("renewed", (life.term, 1, b"")))
    assert life.catalog.rising == {}
    older = {name: value for name, value in life.catalog.snapshot().items() if name != "rising"}
    restored = Catalog()
    restored.restore(as_wire(older))
    assert restored.channels == life.catalog.channels


@pytest.mark.parametrize("rising", [1, [], ["boot", 1], ["boot", "1", 1], [1, 1, 1], ["boot", 1, None]])
def test_a_limit_that_is_malformed_is_a_bad_record(rising: object) -> None:
    life = first_life()[1]
    with pytest.raises(BadRecord):
        life.catalog.apply(life._own("renewed", (life.term, compose(1), b""), rising=rising))
    assert life.catalog.rising == {}
