"""What groups on Kafka are made of, without a broker: positions as offsets, metadata, and assignments."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.adapters.kafka.catalog import KafkaChannel
from tidewal.adapters.kafka.fetching import _committed
from tidewal.adapters.kafka.groups.assigned_topics import HANGING_S, AssignedTopics
from tidewal.adapters.kafka.groups.assignor import MemberMetadata, TopicAssignment, assign_topics
from tidewal.adapters.kafka.groups.offset_store import Unstable
from tidewal.adapters.kafka.groups.offsets import METADATA_BYTES, id_before, to_position, to_progress
from tidewal.adapters.kafka.groups.requests import CommittedOffset
from tidewal.adapters.kafka.positions import prefix
from tidewal.runtime.errors import Overloaded
from tidewal.runtime.groups.progress import MAX_METADATA_BYTES, GroupProgress
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.testing.clock import VirtualClock, VirtualLoop

names = st.lists(st.sampled_from([f"c{n}" for n in range(8)]), unique=True, max_size=8)


def channel(number, name=None, **policy):
    return KafkaChannel(
        name or f"c{number}", number, ChannelPolicy(**policy), f"log.c{number}.{number}", prefix(number)
    )


def id_at(of, offset):
    return of.prefix + offset.to_bytes(8, "big")


@pytest.mark.slow
@given(
    st.integers(0, 2**16), st.integers(0, 2**62), st.sets(st.integers(1, 300), max_size=200), st.binary(max_size=2048)
)
def test_a_position_is_read_as_it_was_written(number, offset, gaps, metadata):
    of = channel(number)
    progress = GroupProgress(id_before(of, offset), {id_at(of, offset + gap) for gap in gaps}, metadata)
    position = to_position(of, progress)
    assert position.offset == offset
    assert to_progress(of, position) == progress
    assert id_before(of, offset) < id_at(of, offset)


def test_nothing_lies_before_the_first_id_of_all_but_a_position_does():
    of = channel(0)
    assert b"" < id_before(of, 0) < id_at(of, 0)


def test_more_single_acknowledgements_than_brokers_take_are_refused():
    of = channel(3)
    singles = {id_at(of, offset) for offset in range(1, METADATA_BYTES, 2)}
    with pytest.raises(Overloaded) as refused:
        to_position(of, GroupProgress(id_before(of, 0), singles))
    assert refused.value.limit == "single_acks"
    run = {id_at(of, offset) for offset in range(1, METADATA_BYTES)}  # one run is short, however many there are
    assert to_progress(of, to_position(of, GroupProgress(id_before(of, 0), run))).acked == run


def test_metadata_leave_room_for_single_acknowledgements():
    of = channel(3)
    singles = {id_at(of, offset) for offset in range(1, 600, 2)}
    largest = GroupProgress(id_before(of, 0), singles, b"\xff" * MAX_METADATA_BYTES)
    assert len(to_position(of, largest).metadata) <= METADATA_BYTES
    assert to_progress(of, to_position(of, largest)) == largest
    with pytest.raises(Overloaded, match="too many beside 2048 bytes of metadata"):
        to_position(of, replace(largest, acked=singles | {id_at(of, offset) for offset in range(601, 2000, 2)}))


OTHERS = ["", "hello", "1,2,3", "1;2", "-1,5", "9" * 30 + ",1", "1,1 no base64", "1,1 \xe4\xf6\xfc", " ", "x eHh4"]


@pytest.mark.parametrize("metadata", OTHERS)
def test_what_others_write_into_metadata_says_nothing(metadata):
    of = channel(1)
    assert to_progress(of, CommittedOffset(7, metadata)) == GroupProgress(id_at(of, 6))


def test_a_huge_run_in_metadata_is_not_believed():
    assert to_progress(channel(1), CommittedOffset(7, "1,999999999999")).acked == set()


members = st.builds(
    MemberMetadata,
    st.text(max_size=5),
    st.lists(st.sampled_from(["c1", "c*", "*", "x"]), min_size=1),
    st.sampled_from([From.EARLIEST, From.LATEST]),
    st.integers(0, 10),
    names,
    names.map(frozenset),
    st.integers(0, 5),
)


@pytest.mark.slow
@given(members)
def test_metadata_is_read_as_it_was_written(metadata):
    assert MemberMetadata.decode(metadata.encode()) == metadata


@pytest.mark.slow
@given(names, st.data())
def test_an_assignment_is_read_as_it_was_written(topics, data):
    some = st.frozensets(st.sampled_from(topics)) if topics else st.just(frozenset())
    assignment = TopicAssignment(frozenset(topics), data.draw(some), data.draw(some))
    assert TopicAssignment.decode(assignment.encode()) == assignment


@pytest.mark.parametrize("data", [b"\x00", b"\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff", bytes(40), b"\xff" * 40])
def test_what_is_no_metadata_is_a_value_error(data):
    with pytest.raises((ValueError, KeyError)):
        MemberMetadata.decode(data)


def metadata(name, *channels, held=(), start=From.EARLIEST, known_to=100):
    return MemberMetadata(name, channels, start, known_to, (), frozenset(f"log.{c}.{c[1:]}" for c in held), 0)


@pytest.mark.slow
@given(st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=4))
def test_channels_are_reassigned_one_after_the_other_and_end_evenly_distributed(helds):
    """From any distribution: no member gets a channel that another one has, and soon all have equally many."""
    channels = [channel(number) for number in range(8)]
    taken: set[int] = set()
    members: dict[str, frozenset[str]] = {}
    for number, held in enumerate(helds):
        members[f"m{number}"] = frozenset(channels[each].topic for each in held - taken)
        taken |= held
    for _ in range(3):
        assignments = assign_topics(
            "g", {m: replace(metadata(m, "*"), held=held) for m, held in members.items()}, channels
        )
        for member, assignment in assignments.items():
            assert members[member] <= assignment.topics, "no channel is taken that was not released"
            for other, held in members.items():
                assert other == member or not held & assignment.topics, "two have it"
        members = {m: assignment.topics - assignment.revoking for m, assignment in assignments.items()}
    sizes = sorted(map(len, members.values()))
    assert sum(sizes) == 8
    assert sizes[-1] - sizes[0] <= 1


def test_a_group_begins_at_the_end_only_where_all_who_read_it_say_so():
    channels = [channel(1), channel(2)]
    late = metadata("late", "*", start=From.LATEST, known_to=2)
    (assignment,) = assign_topics("g", {"m": late}, channels).values()
    assert assignment.from_latest == {channels[0].topic}, "the other one was created after it joined"
    early = metadata("early", "*")
    assignments = assign_topics("g", {"m": late, "n": early}, channels)
    assert not any(each.from_latest for each in assignments.values())


def test_channels_that_the_group_may_not_read_are_not_assigned():
    ephemeral, taken = channel(1, ephemeral=True), channel(2)
    taken.queue_bindings = {"other": 5, "later": 9}
    assert taken.queue_of == "other"
    (assignment,) = assign_topics("g", {"m": metadata("m", "*")}, [ephemeral, taken]).values()
    assert assignment.topics == frozenset()
    (assignment,) = assign_topics("other", {"m": metadata("m", "*")}, [ephemeral, taken]).values()
    assert assignment.topics == {taken.topic}


class Batch:
    """What `_committed` looks at."""

    def __init__(self, base_offset, producer_id=-1, control=False):
        self.base_offset, self.producer_id, self.is_control_batch = base_offset, producer_id, control
        self.is_transactional = producer_id >= 0


def test_batches_of_aborted_transactions_are_left_out_until_these_end():
    batches = [
        Batch(0, 7),  # aborted, as the list says, from before this piece on
        Batch(1),
        Batch(2, 8),
        Batch(3, 7),
        Batch(4, 7, control=True),
        Batch(5, 7),  # another transaction of the same producer
        Batch(6, 8, control=True),
        Batch(7, 7),
        Batch(9, 7, control=True),
    ]
    left = [batch.base_offset for batch in _committed(batches, [(7, 7), (7, -5)]) if not batch.is_control_batch]
    assert left == [1, 2, 5]


class OpenTransaction:
    """A group whose position is held open by a transaction, and a cluster with nothing to refresh."""

    group = "g"

    def __init__(self, until_s: float) -> None:
        self.offset_store = self
        self.aborts = 0
        self._until_s = until_s

    async def positions(self, topics):
        if asyncio.get_running_loop().time() < self._until_s:
            raise Unstable(topics[0])
        return {topic: CommittedOffset(7, "") for topic in topics}

    async def abort_left_open(self, channel):
        self.aborts += 1

    async def refresh(self):
        pass


@pytest.mark.parametrize(("open_s", "warnings"), [(HANGING_S / 2, 0), (10 * HANGING_S, 1)])
def test_a_transaction_that_stays_open_is_told_once_with_what_to_do(open_s, warnings, caplog):
    async def assign_one() -> tuple[int, bytes]:
        group = OpenTransaction(open_s)
        assigned_topics = AssignedTopics(group, group, None, None, itertools.count(1))
        assigned_topics.apply({channel(1): From.EARLIEST}, ())
        await assigned_topics.settled
        return group.aborts, (await assigned_topics.assignment(None, 0)).held["c1"].acked_to

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(VirtualClock())) as runner:
        aborts, position = runner.run(assign_one())
    assert aborts > 1, "it is tried again and again"
    assert position == id_at(channel(1), 6)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == warnings
    assert all("log.c1.1" in line and "kafka-transactions.sh find-hanging" in line for line in told)
