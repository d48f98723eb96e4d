"""Pages of delayed messages: they tell the same as the records that they hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.named_producers import clock_of
from tidewal.runtime.clock import compose
from tidewal.runtime.delays import releaser
from tidewal.runtime.delays.buffer import DelayBuffer
from tidewal.runtime.delays.delayed import DelayedId, cancellation, delayed_record, read_delayed
from tidewal.runtime.delays.pending import DelayedPlace, Pending, page_of, pending_of, read_stored
from tidewal.runtime.errors import BadRecord
from tidewal.runtime.log.record import BatchPart, Record, RecordType, decode, record_type, stamp
from tidewal.runtime.log.wal import ChannelPolicy, Entry
from tidewal.runtime.migration.node_records import node_entry
from tidewal.runtime.ownership.producer import open_producer
from tidewal.runtime.testing.clock import VirtualClock, run_virtual
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

NOW_MS = 1_800_000_000_000
PLACE, OTHER = DelayedPlace(b"\x01" * 8, 1, 1), DelayedPlace(b"\x02" * 8, 1, 9)

messages = st.builds(
    Record,
    st.sampled_from([RecordType.ROWS, RecordType.MESSAGE]),
    part=st.none() | st.builds(BatchPart, st.just(5), st.integers(0, 9), st.just(10)),
    vchannel=st.sampled_from(["", "p0_1v0"]),
    key=st.binary(max_size=9),
    tags=st.dictionaries(
        st.text(max_size=5), st.integers(0, 9) | st.text(max_size=5) | st.binary(max_size=5), max_size=3
    ),
    trace=st.text(max_size=5),
    schema_version=st.integers(0, 3),
    body=st.binary(max_size=50),
)
stored = st.tuples(messages, st.integers(-5_000, 5_000), st.booleans())


def read_pending(record: Record, place: DelayedPlace) -> list[Pending]:
    return [pending_of(each, place) for each in read_stored(record)]


def stored_message(message: Record, after_ms: int, number: int) -> Pending:
    """The message, as its record in the delay channel says, due so much after it was stored."""
    delayed = delayed_record("orders", message, NOW_MS + after_ms)
    part = BatchPart(7, number, number + 1)
    payload = stamp(replace(delayed, part=part), compose(NOW_MS) + number, 3, number + 1)
    [pending] = read_pending(decode(payload, b"id"), PLACE)
    return pending


def add(buffer: DelayBuffer, pending: Pending) -> None:
    buffer.add((pending.id, pending.channel, pending.stored()), pending.place)


def cancelled(pending: Pending) -> Pending | None:
    """The cancellation of a message; None where it would come too late."""
    record = decode(stamp(cancellation(pending.id), compose(NOW_MS) + 99, 3, 99), b"id")
    return next(iter(read_pending(record, PLACE)), None)


@given(st.lists(stored, min_size=1, max_size=20))
def test_a_page_tells_what_its_records_told(batch: list[tuple[Record, int, bool]]) -> None:
    known = [stored_message(message, after_ms, number) for number, (message, after_ms, _) in enumerate(batch)]
    gone = [cancelled(each) for each, (_, _, cancel) in zip(known, batch, strict=True) if cancel]
    for of_one_channel in (known, [each for each in gone if each is not None]):
        if of_one_channel:
            payload = stamp(page_of(of_one_channel), compose(NOW_MS) + 1_000, 4, 77)
            moved = node_entry("delays", Entry(b"id", 1, payload)).payload
            again = read_pending(decode(moved, b"id2"), OTHER)
            assert [each.place for each in again] == [OTHER] * len(again)
            assert [(each.id, each.channel) for each in again] == [(each.id, each.channel) for each in of_one_channel]
            assert [each.message() for each in again] == [each.message() for each in of_one_channel]
            assert [each.due_ms for each in again] == [each.due_ms for each in of_one_channel]
            twice = read_pending(page_of(again), PLACE)
            assert [each.content for each in twice] == [each.content for each in again], "and that is not decoded"


def test_a_message_has_the_content_that_was_sent() -> None:
    message = Record(RecordType.MESSAGE, vchannel="v", key=b"k", tags={"a": 1}, trace="t", body=b"body")
    pending = stored_message(message, 500, 4)
    assert pending.id == DelayedId.of(NOW_MS + 500, compose(NOW_MS) + 4, 4).to_bytes()
    found = pending.message()
    assert found is not None
    assert (found.channel, found.due_ms, found.record) == ("orders", NOW_MS + 500, message)


@pytest.mark.parametrize("length", [0, 3, 4, 27, 28, 60, -1])
def test_a_page_that_was_cut_is_a_bad_record(length: int) -> None:
    page = page_of([stored_message(Record(RecordType.ROWS, body=b"x"), 1, 0)])
    with pytest.raises(BadRecord):
        read_pending(Record(RecordType.DELAYED_PAGE, tags=page.tags, body=page.body[:length]), PLACE)
    with pytest.raises(BadRecord):
        read_pending(Record(RecordType.DELAYED_PAGE, body=page.body), PLACE)


def test_what_in_a_page_cannot_be_read_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = (stored_message(Record(RecordType.ROWS, body=b"%d" % n), n, n) for n in (1, 2))
    buffer = DelayBuffer(10_000)
    for each in read_pending(page_of([Pending(bad.id, "orders", b"no record", PLACE), good]), PLACE):
        add(buffer, each)
    found = buffer.hand_out(compose(NOW_MS + 10), NOW_MS + 10, 10, 10_000)
    assert [bytes(each.record.body) for each in found] == [b"2"]
    assert "cannot be read" in caplog.text
    buffer.finish()
    assert (len(buffer), buffer.bytes) == (0, 0)


def test_a_cancelled_message_that_is_next_is_waited_for_as_any() -> None:
    """The releaser looks again when it would have been due, and not all the time until then."""
    buffer, message = DelayBuffer(10_000), stored_message(Record(RecordType.ROWS), 4_000, 0)
    add(buffer, message)
    gone = cancelled(message)
    assert gone is not None
    add(buffer, gone)
    assert buffer.next_due_ms == NOW_MS + 4_000


def test_batches_are_of_one_channel_and_bounded() -> None:
    buffer = DelayBuffer(1_000_000)
    known = [stored_message(Record(RecordType.ROWS, body=bytes(10)), number, number) for number in range(40)]
    for number, each in enumerate(known):
        add(buffer, each._replace(channel=f"c{number % 3}"))
    batches = buffer.batches(5, 3 * len(known[0].stored()))
    assert {len({each.channel for each in batch}) for batch in batches} == {1}
    assert max(len(batch) for batch in batches) == 3
    assert sorted(each.id for batch in batches for each in batch) == sorted(each.id for each in known)


def test_what_is_pending_keeps_nothing_of_what_was_read_beside_it() -> None:
    """A log hands out views of pieces of some MiB."""
    stamped = [stored_message(Record(RecordType.ROWS, body=b"%d" % n), n, n).stored() for n in range(3)]
    page = stamp(page_of([stored_message(Record(RecordType.ROWS), 9, 9)]), compose(NOW_MS), 3, 50)
    piece, buffer, at = bytearray(b"".join([*stamped, page])), DelayBuffer(10_000), 0
    for payload in (*stamped, page):
        record = decode(memoryview(piece)[at : at + len(payload)])
        for each in 2 * list(read_stored(record)):  # twice, as where it is read again
            buffer.add(each, PLACE)
        at += len(payload)
    del record, each  # type: ignore[possibly-undefined]
    piece.clear()  # raises BufferError where there is any view
    assert len(buffer.hand_out(compose(NOW_MS + 10), NOW_MS + 10, 10, 10_000)) == 4


def test_other_records_are_no_delayed_messages() -> None:
    assert read_pending(Record(RecordType.TIME_TICK), PLACE) == []
    with pytest.raises(BadRecord):
        read_delayed(Record(RecordType.TIME_TICK))


def test_a_channel_of_small_messages_gets_small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written again is let go of at the front, whatever a page may hold."""
    monkeypatch.setattr(releaser, "REWRITE_BYTES", 200_000)
    clock, small = VirtualClock(), ChannelPolicy(max_message_bytes=4_000)

    async def main() -> None:
        log = MemoryLog()
        wal = MemoryWal(log)
        async with open_producer(wal, "shop", ["orders"], clock=clock_of(clock), delays=True, policy=small) as producer:
            for _ in range(25):
                await producer.schedule([("orders", b"far")] * 5, deliver_after_s=500)
                await producer.schedule([("orders", bytes(10))] * 500, deliver_after_s=3)
                await asyncio.sleep(10)
            kept = log.channels["producer-shop.delays"].entries
            pages = [entry for entry in kept if record_type(entry.payload) is RecordType.DELAYED_PAGE]
            assert len(pages) > 1
            assert decode(kept[0].payload).cseq > 1_000, "what lies before the pages is let go of"
            await asyncio.sleep(500)
            assert producer.pending_delays == 0
        bodies = [bytes(decode(entry.payload).body) for entry in log.channels["orders"].entries]
        assert bodies.count(b"far") == 125

    run_virtual(main(), clock)
