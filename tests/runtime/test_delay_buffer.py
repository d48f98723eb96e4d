"""What a buffer of delayed messages hands out, whatever of that is given back, and whatever is read meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from tidewal.runtime.clock import compose
from tidewal.runtime.delays.buffer import DelayBuffer
from tidewal.runtime.delays.delayed import DelayedMessage, cancellation, delayed_record
from tidewal.runtime.delays.pending import DelayedPlace, Pending, page_of, read_stored
from tidewal.runtime.log.record import Record, RecordType, decode, stamp

BEGAN_MS = 1_800_000_000_000
STUCK, GONE = "stuck", "gone"  # channels: what is for the first may be given back, the second refuses all
LIMIT = 6 * 1024


class DelayChannel:
    """A delay channel, and the buffer of what reads it: each record at once, one ms after the other."""

    def __init__(self) -> None:
        self.now_ms = BEGAN_MS
        self.records: list[Record] = []
        self.pages: list[Sequence[Pending]] = []  # snapshots of which the pages are not written yet
        self.messages: list[bytes] = []
        self.cancelled = set[bytes]()
        self.reached: dict[str, bytes] = {}  # by channel, as it says itself
        self.found: dict[str, list[bytes]] = {}
        self.on_its_way: list[DelayedMessage] = []
        self.buffer = DelayBuffer(LIMIT)

    def write(self, record: Record) -> Record:
        cseq = len(self.records) + 1
        self.records.append(decode(stamp(record, compose(self.now_ms), 1, cseq), cseq.to_bytes(8, "big")))
        self._read(self.records[-1])
        self.now_ms += 1
        return self.records[-1]

    def _read(self, record: Record) -> None:
        for stored in read_stored(record):
            id, channel, _ = stored
            if id > self.reached.get(channel, b""):
                self.buffer.add(stored, DelayedPlace(record.id, record.term, record.cseq))

    def message(self, channel: str, after_ms: int, size: int) -> None:
        record = self.write(delayed_record(channel, Record(RecordType.ROWS, body=bytes(size)), self.now_ms + after_ms))
        self.messages += [id for id, _, _ in read_stored(record)]

    def cancel(self, number: int) -> None:
        if number < len(self.messages) and read_stored(self.write(cancellation(self.messages[number]))):
            self.cancelled.add(self.messages[number])

    def snapshot(self) -> None:
        self.pages += self.buffer.batches(5, 10_000)

    def page(self) -> None:
        if self.pages:
            self.write(page_of(self.pages.pop(0)))

    def hand_out(self, count: int) -> None:
        if not self.on_its_way:
            self.on_its_way = self.buffer.hand_out(compose(self.now_ms) - 1, self.now_ms, count, LIMIT)

    def finish(self, *, stuck: bool) -> None:
        """What is on its way is dealt with, but for what is for the channel that may stand still."""
        back = {each.id for each in self.on_its_way if stuck and each.channel == STUCK}
        for each in self.on_its_way:
            if each.id not in back and each.id > self.reached.get(each.channel, b""):
                self.found.setdefault(each.channel, []).append(each.id)
                if each.channel != GONE:
                    self.reached[each.channel] = each.id
        self.on_its_way = []
        self.buffer.finish(back)
        if self.buffer.exhausted:
            self._start_pass()

    def _start_pass(self) -> None:
        first = self.buffer.first_place
        assert first is not None
        self.buffer = DelayBuffer(LIMIT, self.buffer.done)
        for record in self.records[first.cseq - 1 :]:
            self._read(record)

    def check(self) -> None:
        buffer, on_its_way = self.buffer, set(self.buffer._handed_out)
        pending = buffer._pending
        assert buffer.bytes == sum(each.size for each in pending.values() if each.id not in on_its_way)
        assert buffer.horizon is None or max(pending, default=b"") < buffer.horizon
        dealt_with = {id for found in self.found.values() for id in found} | self.cancelled
        for id in set(self.messages) - dealt_with:
            assert id > buffer.done, "what is pending is not done"
            assert id in pending or (buffer.horizon is not None and id >= buffer.horizon), "nor is it forgotten"


@pytest.mark.parametrize("seed", range(60))
def test_each_message_is_dealt_with_once(seed: int):
    channel, draw = DelayChannel(), random.Random(seed)
    for _ in range(200):
        match draw.choice(["message", "message", "message", "cancel", "snapshot", "page", "hand out", "finish"]):
            case "message":
                name = draw.choice(["sent", STUCK, GONE])
                channel.message(name, draw.randrange(60), draw.choice([0, 0, 0, 500, 2_500]))
            case "cancel":
                channel.cancel(draw.randrange(len(channel.messages) + 1))
            case "snapshot":
                channel.snapshot()
            case "page":
                channel.page()
            case "hand out":
                channel.hand_out(draw.randrange(1, 6))
            case _:
                channel.finish(stuck=draw.random() < 0.7)
        channel.check()
    channel.now_ms += 1_000
    while channel.pages:
        channel.page()
    channel.finish(stuck=False)
    while len(channel.buffer) or channel.buffer.horizon is not None:
        channel.hand_out(100)
        channel.finish(stuck=False)
        channel.check()
    found = [id for each in channel.found.values() for id in each]
    assert Counter(found) == Counter(set(channel.messages) - channel.cancelled)
    for each in channel.found.values():
        assert each == sorted(each)


def test_what_was_given_back_is_not_left_out_below_what_is_done():
    """Of what does not fit any more the half goes that is due last: here that would be most of what was given back."""
    channel = DelayChannel()
    for name in (STUCK, STUCK, "sent"):
        channel.message(name, 0, 0)
    channel.hand_out(3)
    channel.finish(stuck=True)
    channel.buffer.fit(1024)
    for _ in range(2):
        channel.hand_out(1)
        channel.finish(stuck=False)
        channel.check()
