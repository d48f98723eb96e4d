"""The state of a group without a broker: the same records give the same state, also from a snapshot on; and which
processes are judged silent or gone."""

from __future__ import annotations

import random
from contextlib import suppress

import msgpack
import pytest

from tidewal.adapters.pulsar.client import ends_batch
from tidewal.adapters.pulsar.groups.session import FailureDetector
from tidewal.adapters.pulsar.ids import MessagePlace, before_ledger, decode_end, encode, encode_end, next_id
from tidewal.runtime.errors import (
    BadRecord,
    ChannelNotFound,
    Fenced,
    InvalidRequest,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.groups.commands import (
    ChannelIdentity,
    ChannelsChanged,
    CommitOutputs,
    Drop,
    EvictMember,
    Join,
    Leave,
    Output,
    ProcessBeat,
    Published,
    Release,
    Seek,
    SeekGroup,
    Stage,
    command_of,
    event_of,
)
from tidewal.runtime.groups.coordinator_client import Ack
from tidewal.runtime.groups.group_log import _SilenceTracker
from tidewal.runtime.groups.group_state import GroupState
from tidewal.runtime.groups.positions import just_before
from tidewal.runtime.log.wal import Append, From

CHANNELS = [f"c{n}" for n in range(6)]


def found(ledger=1, incarnation="1-a", queue=False):
    return ChannelIdentity(incarnation, ledger, before_ledger(ledger), encode(MessagePlace(ledger, 9, 0)), queue)


def join(member, *channels, process="p", start=From.EARLIEST, of=None):
    known = {name: found() for name in CHANNELS} if of is None else of
    return Join(member, process, list(channels), start, 30.0, known)


def ack(member, channel, epoch, upto, *outputs, batch=b"", staged=0):
    acks, own = [Ack(channel, epoch, upto)], [Output(Append("out", b"x", 1), n) for n in outputs]
    return CommitOutputs(member, acks, batch, "publisher", own, {"out": b""}, staged)


def new_state():
    return GroupState("g", lambda member: None)


def apply(state, *commands):
    for number, command in enumerate(commands):
        state.apply(bytes([number]), command)


def epoch(state, member, channel):
    return state.assignment(member).held[channel].epoch


def held(state):
    return {member: set(state.assignment(member).held) for member in state.members}


class Script:
    """Commands as several processes might write them, some of them too late to count."""

    def __init__(self, seed):
        self._rng = random.Random(seed)
        self._joined = 0
        self._incarnation = 1

    def next(self, state):
        rng = self._rng
        members = sorted(state.members)
        member = rng.choice(members) if members else "nobody"
        channel = rng.choice(CHANNELS)
        with suppress(TidewalError, KeyError):
            number = epoch(state, member, channel)
        if "number" not in locals() or rng.random() < 0.1:
            number = rng.randrange(100)
        upto = encode(MessagePlace(1, rng.randrange(10), rng.randrange(3)))
        match rng.randrange(12):
            case 0:
                self._joined += 1
                channels = rng.choice([["*"], CHANNELS[:3], CHANNELS[2:], ["c1", "c4"]])
                return join(f"m{self._joined}", *channels, process=f"p{rng.randrange(3)}", start=rng.choice(list(From)))
            case 1:
                return Leave(member)
            case 2:
                return EvictMember(member, rng.randrange(3))
            case 3 | 4:
                return Release(member, channel, number)
            case 5:
                return Seek(member, channel, number, upto)
            case 6:
                return SeekGroup(channel, found(), upto)
            case 7:
                self._incarnation += 1
                late = found(self._incarnation, f"{self._incarnation}-x")
                return rng.choice(
                    [ChannelsChanged({}, {channel: "1-a"}), ChannelsChanged({channel: late, "c9": late}, {})]
                )
            case 8:
                return ProcessBeat(f"p{rng.randrange(3)}", rng.randrange(3))
            case 9:
                outputs = [Output(Append("out", b"y"), 1)]
                return rng.choice([Published([bytes([3])]), Stage(member, b"batch", outputs)])
            case _:
                ids = tuple(encode(MessagePlace(1, 20, rng.randrange(9))) for _ in range(rng.randrange(3)))
                one = Ack(channel, number, upto, ids, rng.choice([None, b"", b"noted"]))
                return CommitOutputs(member, [one], b"batch", "publisher", [], {})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_process_that_reads_the_records_has_the_same_state(seed):
    script, whole = Script(seed), new_state()
    others = []
    applied = 0
    for number in range(400):
        command = script.next(whole)
        record = msgpack.packb(event_of(bytes([number % 256]), command))
        outcomes = set()
        for state in (whole, *others):
            try:
                state.apply(*command_of(msgpack.unpackb(record, strict_map_key=False)))
                outcomes.add("applied")
            except TidewalError as error:
                outcomes.add(type(error).__name__)
        assert len(outcomes) == 1, command
        applied += "applied" in outcomes
        if number % 100 == 50:  # a state that begins from a snapshot
            later = new_state()
            later.restore(msgpack.unpackb(msgpack.packb(whole.to_wire()), strict_map_key=False))
            others.append(later)
        for other in others:
            assert other.to_wire() == whole.to_wire()
            assert other.info() == whole.info()
    assert applied > 150


def test_every_command_comes_back_from_its_record():
    commands = [
        join("m", "c*", start=From.LATEST),
        ProcessBeat("p", 3),
        Leave("m"),
        EvictMember("m", 2),
        Release("m", "c0", 7),
        Stage("m", b"b", [Output(Append("out", b"\x00\xff", 9), 4)]),
        CommitOutputs(
            "m", [Ack("c0", 7, b"u", (b"1", b"2"), b"x")], b"b", "p", [Output(Append("o", b"", 0), 5)], {"o": b"after"}
        ),
        Published([b"t"]),
        Seek("m", "c0", 7, b"u"),
        SeekGroup("c0", found(queue=True), b"u"),
        ChannelsChanged({"c0": found()}, {"c1": "made"}),
        Drop(),
    ]
    for command in commands:
        event = msgpack.unpackb(msgpack.packb(event_of(b"token", command)), strict_map_key=False)
        assert command_of(event) == (b"token", command)


def test_records_and_snapshots_from_before_positions_had_metadata_are_understood():
    old = event_of(b"token", CommitOutputs("m", [Ack("c0", 7, b"u", (b"1",))], b"", "", [], {}))
    old["fields"]["acks"] = [each[:4] for each in old["fields"]["acks"]]
    assert command_of(old)[1].acks == [Ack("c0", 7, b"u", (b"1",))]
    state = new_state()
    apply(state, join("a", "c0"))
    apply(state, ack("a", "c0", epoch(state, "a", "c0"), encode(MessagePlace(1, 3))))
    wire = state.to_wire()
    wire["positions"] = {name: position[:2] for name, position in wire["positions"].items()}
    restored = new_state()
    restored.restore(wire)
    assert restored.assignment("a").held["c0"].metadata == b""
    assert restored.info() == state.info()


@pytest.mark.parametrize("fields", [{}, None, 7, {"member": "m", "more": 1}])
def test_what_is_no_record_is_passed_over(fields):
    with pytest.raises(BadRecord):
        command_of({"kind": "Leave", "token": b"", "fields": fields})


def test_a_record_of_an_unknown_kind_is_passed_over():
    with pytest.raises(BadRecord, match="level"):
        command_of({"kind": "Bat", "token": b"", "fields": {}})


def test_an_acknowledgement_counts_until_the_channel_is_taken_away():
    state = new_state()
    apply(state, join("a", "c0"))
    number = epoch(state, "a", "c0")
    apply(state, ack("a", "c0", number, encode(MessagePlace(1, 3))))
    apply(state, Release("a", "c0", number))
    again = epoch(state, "a", "c0")
    with pytest.raises(Fenced):
        apply(state, ack("a", "c0", number, encode(MessagePlace(1, 4))))
    assert state.assignment("a").held["c0"].acked_to == encode(MessagePlace(1, 3))
    apply(state, ack("a", "c0", again, encode(MessagePlace(1, 4))))
    apply(state, Leave("a"))
    with pytest.raises(Fenced):
        apply(state, ack("a", "c0", again, encode(MessagePlace(1, 5))))
    assert state.info().positions == {"c0": encode(MessagePlace(1, 4))}


def test_a_heartbeat_that_came_meanwhile_prevents_the_eviction():
    state = new_state()
    apply(
        state, join("a", "c0", process="p1"), join("b", "c0", process="p2"), ProcessBeat("p1", 1), ProcessBeat("p1", 2)
    )
    apply(state, EvictMember("a", 1))
    assert set(state.members) == {"a", "b"}
    apply(state, EvictMember("a", 2))
    assert held(state) == {"b": {"c0"}}
    apply(state, EvictMember("a", 2), Leave("a"))


def test_outputs_are_decided_with_the_acknowledgement_or_not_at_all():
    state = new_state()
    apply(state, join("a", "c0"))
    number = epoch(state, "a", "c0")
    state.apply(b"1", Stage("a", b"one", [Output(Append("out", b"1"), 1), Output(Append("out", b"2"), 2)]))
    state.apply(b"2", ack("a", "c0", number, encode(MessagePlace(1, 0)), 3, batch=b"one", staged=2))
    assert [output.number for output in state.undelivered[b"2"].outputs] == [1, 2, 3]
    state.apply(b"3", Stage("a", b"two", [Output(Append("out", b"4"), 4)]))
    with pytest.raises(Fenced):
        state.apply(b"4", ack("a", "c0", number + 1, encode(MessagePlace(1, 1)), 5, batch=b"two", staged=1))
    state.apply(b"5", ack("a", "c0", number, encode(MessagePlace(1, 1)), 6, batch=b"three"))
    assert [output.number for output in state.undelivered[b"5"].outputs] == [6]
    assert list(state.undelivered) == [b"2", b"5"]
    state.apply(b"6", Published([b"2"]))
    assert list(state.undelivered) == [b"5"]


def test_a_commit_whose_outputs_did_not_all_arrive_does_not_count():
    """One of its records was refused or lost on its way, and the deciding one, which was sent behind it, was not."""
    state = new_state()
    apply(state, join("a", "c0"))
    number = epoch(state, "a", "c0")
    begun = state.assignment("a").held["c0"].acked_to
    state.apply(b"1", Stage("a", b"one", [Output(Append("out", b"1"), 1)]))
    for staged in (0, 2):
        with pytest.raises(Unavailable) as caught:
            state.apply(b"2", ack("a", "c0", number, encode(MessagePlace(1, 0)), 3, batch=b"one", staged=staged))
        assert "outcome_unknown" not in caught.value.fields
        state.apply(b"1", Stage("a", b"one", [Output(Append("out", b"1"), 1)]))
    assert state.undelivered == {}
    assert state.assignment("a").held["c0"].acked_to == begun


def test_a_later_channel_of_the_name_takes_the_place_of_the_earlier():
    state = new_state()
    apply(state, join("a", "c*", of={"c0": found(1, "1-a")}))
    apply(state, ack("a", "c0", epoch(state, "a", "c0"), encode(MessagePlace(1, 5))))
    apply(state, ChannelsChanged({"c0": found(7, "2-b")}, {}))
    assert state.assignment("a").held["c0"].acked_to == before_ledger(7)
    apply(state, ChannelsChanged({"c0": found(1, "1-a")}, {"c0": "1-a"}))  # an old record that was appended late
    assert state.assignment("a").held["c0"].acked_to == before_ledger(7)
    apply(state, ChannelsChanged({}, {"c0": "2-b"}))
    assert held(state) == {"a": set()}
    with pytest.raises(ChannelNotFound):
        apply(state, join("b", "c0", of={}))
    assert set(state.members) == {"a"}


def test_a_group_is_dropped_when_it_has_no_members():
    state = new_state()
    apply(state, join("a", "c0"))
    with pytest.raises(InvalidRequest):
        apply(state, Drop())
    apply(state, Leave("a"), Drop())
    assert state.dropped
    assert state.info() is None


def test_silence_is_counted_in_own_beats_and_not_while_we_were_stopped():
    silence = _SilenceTracker()
    silence.heard("other")
    assert silence.of("other") == 0
    for beat in range(11):
        silence.own_beat(float(beat), most_s=2.0)
        if beat <= 4:
            silence.heard("other")
    assert silence.of("other") == 6.0
    assert silence.of("new") == 0.0
    silence.own_beat(100.0, most_s=2.0)  # we were stopped: what the others did meanwhile comes behind this beat
    assert silence.of("other") == 6.0
    silence.own_beat(101.0, most_s=2.0)
    assert silence.of("other") == 7.0


def names(**since):
    return {f"tidewal-{process}-{number}": at for number, (process, at) in enumerate(since.items())}


def test_a_process_is_gone_when_the_broker_has_no_connection_of_it_for_a_while():
    detector = FailureDetector("me")
    everybody = {"me", "other"}
    assert detector.look(names(me="1", other="1"), everybody) == set()
    assert detector.look(names(me="1"), everybody) == set()
    assert detector.look(names(me="1"), everybody) == set()
    assert detector.look(names(me="1", other="5"), everybody) == set()  # it was just connecting anew
    checks = [detector.look(names(me="1"), everybody) for _ in range(3)]
    assert checks == [set(), set(), {"other"}]


def test_a_broker_that_came_back_says_nothing_of_who_is_not_there_yet():
    detector = FailureDetector("me")
    everybody = {"me", "slow", "dead"}
    detector.look(names(me="1", slow="1", dead="1"), everybody)
    detector.look({}, everybody)
    for _ in range(5):
        assert detector.look(names(me="7"), everybody) == set()
    detector.look(names(me="7", slow="9"), everybody)
    checks = [detector.look(names(me="7"), everybody) for _ in range(3)]
    assert checks == [set(), set(), {"slow"}]  # the session of the other decides


def test_the_place_before_a_ledger():
    assert before_ledger(5) == just_before(encode(MessagePlace(5, 0, 0)))
    assert next_id(before_ledger(5)) == encode(MessagePlace(5, 0, 0))
    for place in (MessagePlace(5, -1), MessagePlace(5, 0, 0), MessagePlace(5, 7, 3)):
        assert decode_end(encode_end(place)) == place


class Id:
    def __init__(self, index, serialized):
        self._index, self._serialized = index, serialized

    def batch_index(self):
        return self._index

    def serialize(self):
        return bytes.fromhex(self._serialized)


def test_the_last_message_of_a_batch_is_known():
    assert [ends_batch(Id(index, f"080310002{index:03x}3005")) for index in (0, 3, 4)] == [False, False, True]
    assert ends_batch(Id(-1, "0803108001"))
    assert not ends_batch(Id(150, "080310002096013ac801".replace("3ac8", "30c8")))
