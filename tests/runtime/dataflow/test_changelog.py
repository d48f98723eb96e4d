"""The changelog of keyed state: what a recovery makes of its records, wherever it begins to read and writing ended."""

from __future__ import annotations

import operator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewal.runtime.dataflow import changelog as module
from tidewal.runtime.dataflow.changelog import Changelog, Checkpoint, MsgpackCodec, StateRecovery
from tidewal.runtime.dataflow.keyed_state import KeyedState
from tidewal.runtime.errors import CorruptLog, FormatTooNew, InvalidRequest, MessageTooLarge
from tidewal.runtime.log.record import Record, RecordType, decode, encode

KEYS = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.tuples(st.integers(0, 9), st.text(max_size=2), st.tuples(st.booleans())),
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=20),
        st.binary(max_size=20),
        st.datetimes(timezones=st.just(UTC)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.integers(0, 9), st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=6,
)
CHANGES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 12), st.one_of(st.none(), st.integers(0, 99))))


def new_changelog(state: KeyedState, limit: int = 5 * 1024 * 1024, life: str = "life") -> Changelog:
    return Changelog(state, Checkpoint(life, 0), codec=MsgpackCodec(), limit=limit)


def contents(state: KeyedState) -> dict[str, dict[Any, Any]]:
    return {name: dict(table.data) for name, table in state.tables.items() if table.data}


def recovered(records: list[bytes], checkpoint: Checkpoint) -> StateRecovery:
    recovery = StateRecovery(Checkpoint.from_bytes(checkpoint.to_bytes()), MsgpackCodec())
    for record in records:
        recovery.feed(decode(record))
    return recovery


@pytest.mark.slow
@settings(max_examples=300)
@given(
    commits=st.lists(CHANGES, min_size=1, max_size=30),
    crashes=st.sets(st.integers(0, 29)),
    data=st.data(),
)
def test_the_state_is_there_again_from_every_place_that_the_base_allows(commits, crashes, data):
    """Sweeps of a few bytes, so that many begin and end; members that crash with what they had not committed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SWEEP_FROM_BYTES", 60)
        patch.setattr(module, "SWEEP_BYTES", 10)
        patch.setattr(module, "SWEPT_AT_ONCE", 2)
        patch.setattr(module, "KEYS_AT_ONCE", 3)
        state = KeyedState()
        changelog = new_changelog(state)
        records: list[bytes] = []
        firsts = {1: 0}  # where the records of each commit begin
        for number, changes in enumerate(commits):
            changed = False
            for table, key, value in changes:
                changed = changed or value is not None or key in state.table(table)
                if value is None:
                    state.table(table).pop(key, None)
                else:
                    state.table(table)[key] = value
            known = contents(state)
            new = changelog.next_commit()
            assert bool(new) == changed
            if new:
                firsts[changelog.checkpoint.sequence] = len(records)
                records += new
            start = data.draw(st.integers(0, firsts.get(changelog.base, 0)), label="start")
            repeated = data.draw(st.integers(start, len(records)), label="repeated")
            recovery = recovered(records[start:repeated] + records[start:], changelog.checkpoint)
            assert recovery.done
            assert contents(recovery.state) == known
            if number in crashes:
                recovery.state.table("a")["never committed"] = 1
                recovery = recovered(records[start:], changelog.checkpoint)
                state, changelog = recovery.state, recovery.changelog(limit=5 * 1024 * 1024)


def test_what_is_needed_stays_bounded_however_long_a_program_runs():
    state = KeyedState()
    changelog = new_changelog(state)
    table = state.table("a")
    for number in range(2000):
        table[number] = "x" * 1000
    sizes: dict[int, int] = {}
    most = 0
    for number in range(3000):
        for key in range(20):
            table[(number * 20 + key) % 2000] = "y" * 1000
        records = changelog.next_commit()
        sizes[changelog.checkpoint.sequence] = sum(map(len, records))
        needed = sum(size for sequence, size in sizes.items() if sequence >= changelog.base)
        most = max(most, needed)
    assert changelog.base > 2000
    assert most < 6 * 2_000_000 + 2 * module.SWEEP_FROM_BYTES


def test_what_is_needed_stays_bounded_however_short_the_lives_are():
    """A sweep goes on in the next life, so that it comes to its end; and the next one waits until it is worth it."""
    state = KeyedState()
    changelog = new_changelog(state)
    for number in range(5000):
        state.table("a")[number] = "x" * 1000
    records = changelog.next_commit()
    firsts = {1: 0}
    most, bases = 0, set[int]()
    for _ in range(60):
        recovery = recovered(records[firsts[changelog.base] :], changelog.checkpoint)
        assert recovery.done
        changelog = recovery.changelog(limit=5 * 1024 * 1024)
        for number in range(10):
            for key in range(60):
                changelog.state.table("a")[number * 60 + key] = "y" * 1000
            firsts[changelog.checkpoint.sequence + 1] = len(records)
            records += changelog.next_commit()
            bases.add(changelog.base)
        most = max(most, sum(map(len, records[firsts[changelog.base] :])))
    assert contents(recovered(records, changelog.checkpoint).state) == contents(changelog.state)
    assert len(bases) > 3
    assert most < 5 * 5_000_000
    assert sum(map(len, records)) < 2.5 * 600 * 60_000


def test_a_recovered_changelog_counts_as_the_one_before():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SWEEP_FROM_BYTES", 3000)
        patch.setattr(module, "SWEEP_BYTES", 200)
        patch.setattr(module, "SWEPT_AT_ONCE", 2)
        state = KeyedState()
        changelog, records, sweeps = new_changelog(state), [], set[int]()
        for number in range(300):
            state.table("a")[number % 20] = "x" * (number % 90)
            records += changelog.next_commit()
            again = recovered(records, changelog.checkpoint).changelog(limit=5 * 1024 * 1024)
            names = ["base", "sweep_began", "written", "_written"]
            if changelog._sweep is None:
                assert again._sweep is None
                names += ["_swept"]
            else:
                sweeps.add(changelog._sweep.sequence)
                assert again._sweep is not None
                assert again._sweep.bytes == changelog._sweep.bytes
                names += ["_before_sweep", "_changed_in_sweep"]
            assert [getattr(again, name) for name in names] == [getattr(changelog, name) for name in names]
        assert len(sweeps) > 3


def test_a_sweep_of_large_values_writes_a_few_with_each_commit():
    state = KeyedState()
    changelog = new_changelog(state)
    most = 0
    for number in range(60):
        state.table("a")[number] = b"x" * 500_000
        most = max(most, sum(map(len, changelog.next_commit())))
    assert changelog.base > 1
    assert most < 3_000_000


def test_a_recovery_waits_for_the_commit_of_the_position():
    """The newest commit is visible a little later than the position: the state must not be taken for whole before."""
    state = KeyedState()
    changelog = new_changelog(state)
    state.table("a")["k"] = 1
    first = changelog.next_commit()
    state.table("a")["k"] = 2
    second = changelog.next_commit()
    recovery = recovered(first, changelog.checkpoint)
    assert not recovery.done
    recovery.feed(decode(second[0]))
    assert recovery.done
    assert contents(recovery.state) == {"a": {"k": 2}}


def test_a_commit_of_several_records_counts_only_as_a_whole():
    state = KeyedState()
    changelog = new_changelog(state, limit=5000)
    for number in range(100):
        state.table("a")[number] = "x" * 100
    records = changelog.next_commit()
    assert len(records) > 1
    assert max(map(len, records)) <= 5000
    for end in range(len(records)):
        assert not recovered(records[:end], changelog.checkpoint).done
    assert recovered(records, changelog.checkpoint).done


def test_records_of_another_life_and_later_ones_do_not_count():
    old, new = KeyedState(), KeyedState()
    old.table("a")["k"] = "old"
    records = new_changelog(old, life="before").next_commit()
    changelog = new_changelog(new)
    new.table("a")["k"] = "new"
    records += changelog.next_commit()
    checkpoint = changelog.checkpoint
    new.table("a")["k"] = "behind the position"
    records += changelog.next_commit()
    records.append(encode(Record(RecordType.ROWS, body=b"a stranger's")))
    assert contents(recovered(records, checkpoint).state) == {"a": {"k": "new"}}


def test_missing_records_are_told():
    state = KeyedState()
    changelog = new_changelog(state)
    commits = []
    for number in range(4):
        state.table("a")[number] = number
        commits += changelog.next_commit()
    with pytest.raises(CorruptLog, match="missing"):
        recovered([commits[0], *commits[2:]], changelog.checkpoint)
    with pytest.raises(CorruptLog, match="begins with"):
        recovered(commits[1:], changelog.checkpoint)


def test_a_state_that_was_never_stored_is_recovered_at_once():
    assert StateRecovery(Checkpoint("life", 0), MsgpackCodec()).done


@given(values=st.lists(VALUES, max_size=5))
def test_values_come_back_as_they_were(values):
    codec = MsgpackCodec()
    again = codec.decode(codec.encode(values))
    assert again == values
    assert repr(again) == repr(values) or any(isinstance(each, (dict, datetime, list, tuple)) for each in values)


@given(keys=st.sets(KEYS, max_size=10))
def test_keys_come_back_as_they_were(keys):
    state = KeyedState()
    changelog = new_changelog(state)
    state.table("a").update(dict.fromkeys(keys, 0))
    records = changelog.next_commit()
    assert set(recovered(records, changelog.checkpoint).state.table("a")) == keys


def test_a_value_read_and_changed_in_place_is_stored_again():
    state = KeyedState()
    changelog = new_changelog(state)
    state.table("a")["k"] = [1]
    records = changelog.next_commit()
    state.table("a")["k"].append(2)
    state.table("a").get("k").append(3)
    records += changelog.next_commit()
    assert len(records) == 2
    assert contents(recovered(records, changelog.checkpoint).state) == {"a": {"k": [1, 2, 3]}}


@pytest.mark.parametrize("read", [lambda table: table["k"], lambda table: table.get("k")])
def test_a_list_within_a_tuple_that_is_changed_in_place_is_stored_again(read):
    state = KeyedState()
    changelog = new_changelog(state)
    state.table("a")["k"] = (0, (None, [1]))
    records = changelog.next_commit()
    read(state.table("a"))[1][1].append(2)
    records += changelog.next_commit()
    assert contents(recovered(records, changelog.checkpoint).state) == {"a": {"k": (0, (None, [1, 2]))}}


def test_what_is_merged_is_stored():
    state = KeyedState()
    changelog = new_changelog(state)
    table = state.table("a")
    table["k"] = 1
    records = changelog.next_commit()
    table.merge({"k": 2, "l": 5}, operator.add)
    records += changelog.next_commit()
    assert contents(recovered(records, changelog.checkpoint).state) == {"a": {"k": 3, "l": 5}}


def test_nothing_is_written_where_nothing_has_changed():
    state = KeyedState()
    changelog = new_changelog(state)
    state.table("a")["k"] = (1, ("x", (None, b"y")))
    changelog.next_commit()
    assert state.table("a")["k"] == state.table("a").get("k") == (1, ("x", (None, b"y")))
    assert not state.changed
    assert changelog.next_commit() == []


@pytest.mark.parametrize("value", [{1, 2}, object(), 2**70, datetime(2026, 1, 1)])  # noqa: DTZ001 -- that it has no zone
def test_a_value_that_cannot_be_encoded_is_told_with_its_table(value):
    state = KeyedState()
    state.table("visits")["k"] = value
    with pytest.raises(InvalidRequest, match="visits"):
        new_changelog(state).next_commit()


def test_a_value_that_no_record_can_hold_is_told_with_its_key():
    state = KeyedState()
    state.table("a")["large"] = b"x" * 10_000
    with pytest.raises(MessageTooLarge, match="large"):
        new_changelog(state, limit=8000).next_commit()


@pytest.mark.parametrize("metadata", [b"", b"attempts", b"\x93\xa5other\x01\x02", b"\x94\xa5state\x01\x01\x01"])
def test_the_metadata_of_another_program_is_refused(metadata):
    with pytest.raises(InvalidRequest, match="another program"):
        Checkpoint.from_bytes(metadata)


def test_the_checkpoint_of_a_newer_version_is_refused():
    with pytest.raises(FormatTooNew):
        Checkpoint.from_bytes(b"\x94\xa5state\x02\xa1a\x01")
