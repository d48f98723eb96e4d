"""One reader a pchannel for all streams of a process: each record is read and decoded once, and handed to the targets
that want its vchannel.

A dispatcher has a main scan, which follows the channel's end. A target whose place the main scan has passed, because
it joins later, or was set aside, is read by one more scan, behind, which all such targets share; it joins the main
scan as soon as it gets there. Both overlap: a target drops what it has, by id and by (term, cseq).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from ..clock import physical_ms
from ..errors import BadRecord, Closed
from ..log.record import TIMELESS_TYPES, Record, RecordType
from ..log.wal import Entry, From, FromId, Start, Wal
from ..metrics.metrics import Metrics
from .channel_reader import ChannelReader, Granted
from .channel_time import ChannelTime
from .read_metrics import ReadMetrics
from .stream_base import RECORD_OVERHEAD_BYTES, reading
from .tt_stream import TtChannel

RECENT_BYTES = 256 * 1024  # of records that a scan keeps, for targets that join a little behind it
PATIENCE_S = 0.1  # how long the other targets of a scan wait for one whose buffer is full
TURN_BYTES = 64 * 1024 * 1024  # that the scan behind reads at most while other targets wait for it
IDLE_STEP_MS = 500  # of the channel's time, after which streams whose turn it is hear of it
IDLE_TURNS = 60  # so each stream hears of it twice a minute, and the loop is not busy with all of them at once


class Place(NamedTuple):
    """A place in a channel: just before the entry `id`, or with `done` just behind it; the record (term, cseq) and all
    before it are known. A reader that goes on from a lower place reads all that lies behind a higher one. (Numbers tell
    that only of one entry: a reader that began at a record which its owner had repeated late has low ones.)"""

    id: bytes
    done: bool
    term: int
    cseq: int


def place_of(start: Start, after: tuple[int, int]) -> Place:
    """The place of a reader that starts there, and has everything up to the record `after`."""
    if isinstance(start, FromId):
        return Place(start.id, not start.inclusive, *after)
    return Place(b"", False, *after)


class ReadBudget:
    """What all targets of a node may buffer together. Each gets as much as it leaves free, so that any number of them
    that stand still leaves room to the others; one whose buffer is empty always gets the next batch of the log, so
    none waits for the others."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: int = limit_bytes
        self.used: int = 0

    def has_room(self, held: int) -> bool:
        """Whether a target that holds `held` bytes may get more."""
        return not held or held <= self.limit_bytes - self.used


class TargetStream(Protocol):
    """The stream that a target belongs to."""

    @property
    def vchannels(self) -> frozenset[str]: ...

    @property
    def turn(self) -> int:
        """With which others the stream hears of the time, where it waits for nothing."""
        ...

    def take_record(self, target: Target, record: Record) -> None:
        """Buffer a record for its target, or skip it."""
        ...

    def wake(self) -> None:
        """Look at what is there."""
        ...

    def fail(self, error: Exception) -> None:
        """End with `error`."""
        ...


class Target(TtChannel):
    """One pchannel of a stream that dispatchers feed. `reader` says how far the target has come; it reads nothing."""

    time: int

    def __init__(self, reader: ChannelReader, start: Start, stream: TargetStream, dispatcher: Dispatcher) -> None:
        super().__init__(reader, start)
        self.stream: TargetStream = stream
        self.dispatcher: Dispatcher = dispatcher
        self.place: Place = place_of(start, (reader.term, reader.cseq))
        self.scan: Scan | None = None
        self.aside: bool = False  # until its buffer has room again
        self.closed: bool = False
        self._counted = 0

    def placed(self) -> None:
        """Take the start, which is an id or the first entry by now, as the place."""
        self.place = place_of(self.start, (self.reader.term, self.reader.cseq))

    def deliver(self, record: Record, known_time: int) -> bool:
        """Take a record of one of the target's vchannels, unless it has it or begins behind it; `known_time` is the
        channel's time before it. Returns whether it took it."""
        id, done, term, cseq = self.place
        if record.id < id or (done and record.id == id) or (record.term, record.cseq) <= (term, cseq):
            return False
        self.time = max(self.time, known_time)
        self.moved_to(Place(record.id, True, record.term, record.cseq))
        self.stream.take_record(self, record)
        self.account()
        return True

    @property
    def first_message(self) -> Record | None:
        """The first record of the buffer that is no tick, if there is one. (Ticks do not follow each other.) From any
        thread."""
        try:
            first = self.buffer[0]
            return self.buffer[1] if first.type is RecordType.TIME_TICK else first
        except IndexError:
            return None

    def moved_to(self, place: Place) -> None:
        """Everything up to `place` was delivered."""
        self.place = place
        self.reader.term, self.reader.cseq = place.term, place.cseq
        self.reader.position = (place.id, place.term, place.cseq)

    def handed_out(self, records: Sequence[Record], last: Record | None) -> None:
        super().handed_out(records, last)
        self.account()
        self.dispatcher.buffer_shrank(self)

    def account(self) -> None:
        """Count the buffer in the node's budget."""
        held = 0 if self.closed else self.bytes
        self.dispatcher.budget.used += held - self._counted
        self._counted = held

    @property
    def idle_time(self) -> int:
        """Up to when all of the channel was handed out: its time, or that before the first message that was not; 0
        where it was not read yet."""
        if (message := self.first_message) is not None:
            return message.ts - 1
        scan = self.scan
        return 0 if scan is None or not scan.reached(self) else scan.time

    @property
    def has_room(self) -> bool:
        """Whether the target may get more."""
        return self.dispatcher.budget.has_room(self.bytes)


class Scan(ChannelTime):
    """Reads a pchannel on from the place of its first target, for its `members`."""

    time: int

    def __init__(self, dispatcher: Dispatcher, first: Target) -> None:
        super().__init__()
        self.place: Place = first.place  # everything up to it was delivered, and up to `time`
        self.members: dict[Target, None] = {}
        self.bytes_read: int = 0
        self.room: asyncio.Event = asyncio.Event()
        self._dispatcher = dispatcher
        self._by_vchannel: dict[str, list[Target]] = {}
        self._ahead: list[Target] = []  # members whose place was not reached yet
        self._recent: deque[tuple[Record, int]] = deque()  # the last records, each with the time before it
        self._recent_bytes = 0
        self._recent_from = first.place
        self._tick = Record(RecordType.TIME_TICK)
        self._turns: list[dict[Target, None]] = [{} for _ in range(IDLE_TURNS)]  # the members by their streams' turns
        self._steps = 0  # of the channel's time, of which the streams were told whose turn they were
        self._known = first  # whose role's grants and dead letters the reader uses
        self.reader: ChannelReader = ChannelReader(
            dispatcher.name,
            fences=first.reader.fences,
            after=first.place[2:],
            on_bad=self._bad,
            grants=self if first.reader.grants else None,
        )
        self._metrics = ReadMetrics(dispatcher.metrics, "dispatcher", {dispatcher.name: self.reader.counts})
        self.add(first)
        start = FromId(first.place.id, inclusive=not first.place.done) if first.place.id else From.EARLIEST
        self.task: asyncio.Task[None] = asyncio.create_task(self._run(start), name=f"dispatch {dispatcher.name}")

    # ---- members ----------------------------------------------------------------------------------------------------

    def serves(self, place: Place) -> bool:
        """Whether a target at `place` misses nothing when it joins now."""
        return self._recent_from <= place

    def add(self, target: Target) -> None:
        """Let `target` join, whose place the scan `serves`."""
        target.scan = self
        self.members[target] = self._turns[target.stream.turn % IDLE_TURNS][target] = None
        for vchannel in target.stream.vchannels:
            self._by_vchannel.setdefault(vchannel, []).append(target)
        for record, known_time in self._recent:
            if record.vchannel in target.stream.vchannels:
                target.deliver(record, known_time)
        if not self.reached(target):
            self._ahead.append(target)
        target.stream.wake()
        self.room.set()  # the others wait for a full buffer no longer than its patience

    def remove(self, target: Target) -> None:
        target.scan = None
        del self.members[target], self._turns[target.stream.turn % IDLE_TURNS][target]
        for vchannel in target.stream.vchannels:
            self.forget(target, vchannel)
        if target in self._ahead:
            self._ahead.remove(target)
        self.room.set()

    def forget(self, target: Target, vchannel: str) -> None:
        """Hand the records of one of its vchannels to a member no more."""
        self._by_vchannel[vchannel].remove(target)
        if not self._by_vchannel[vchannel]:
            del self._by_vchannel[vchannel]

    def reached(self, target: Target) -> bool:
        """Whether the scan has come to the place of `target`."""
        return target.place <= self.place

    def tell(self, target: Target) -> None:
        """Tell a member how far the channel has been read, and its time: as a tick at that place would."""
        if target in self._ahead or (self.time <= target.time and self.place.id == target.place.id):
            return
        target.moved_to(self.place)
        target.stream.take_record(target, self._tick_here())
        target.account()

    def _tick_here(self) -> Record:
        """A tick at the place and time of the scan: one for all targets that are told of it."""
        id, _, term, cseq = self.place
        if (self._tick.id, self._tick.ts) != (id, self.time):
            self._tick = Record(RecordType.TIME_TICK, self.time, term, cseq, id=id)
        return self._tick

    def announce(self, upto: tuple[int, int], time: int, *, wake: bool = True) -> None:
        """Apply an announcement of the channel's owner."""
        self.apply_when_read(upto, time, self.place[2:])
        if wake:
            self._wake_idle()

    def _wake_idle(self) -> None:
        """Wake the streams that wait for the time, and those whose turn it is. A stream has its turn in all its
        channels at once, for their times go together, and so looks at them once."""
        self._dispatcher.wake_eager(self.time)
        steps, before = physical_ms(self.time) // IDLE_STEP_MS, self._steps
        if steps > before:
            self._steps = steps
            for step in range(max(before, steps - IDLE_TURNS) + 1, steps + 1):
                for target in self._turns[step % IDLE_TURNS]:
                    target.stream.wake()

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def _run(self, start: Start) -> None:
        dispatcher = self._dispatcher
        try:
            async with reading(dispatcher.wal, dispatcher.name, start) as batches:
                async for entries in batches:
                    records, doubtful = self.reader.accept_granted(entries)
                    await self._hand_out(records)
                    if doubtful and self.members:
                        await self.reader.learn_grants()
                        await self._hand_out(self.reader.accept(doubtful))
                    if self.members:
                        self._batch_done(entries)
                    if not self.members:
                        return
            raise Closed(f"the log was closed while {dispatcher.name} was being read")
        except Exception as error:  # -- every failure of the task must reach the streams, whatever it is
            dispatcher.scan_failed(self, error)

    async def _hand_out(self, records: Sequence[Record]) -> None:
        """Hand records to the members. Other tasks run in between only where everything up to some time is handed out,
        and nothing behind it."""
        full: dict[Target, None] = {}
        for record in records:
            if full and record.ts > self.time:
                await self._wait_for_room(full)
                full.clear()
            known_time = self.time
            if record.type not in TIMELESS_TYPES:
                self.time = max(known_time, record.ts)
            self.place = Place(record.id, True, record.term, record.cseq)
            self._remember(record, known_time)
            for target in self._by_vchannel.get(record.vchannel, ()):
                if target.deliver(record, known_time):
                    target.stream.wake()
                    if not target.has_room:
                        full[target] = None
        if full:
            await self._wait_for_room(full)

    def _remember(self, record: Record, known_time: int) -> None:
        self._recent.append((record, known_time))
        self._recent_bytes += len(record.body) + RECORD_OVERHEAD_BYTES
        while self._recent_bytes > RECENT_BYTES:
            oldest, _ = self._recent.popleft()
            self._recent_bytes -= len(oldest.body) + RECORD_OVERHEAD_BYTES
            self._recent_from = Place(oldest.id, True, oldest.term, oldest.cseq)

    async def _wait_for_room(self, full: dict[Target, None]) -> None:
        """Wait until the targets in `full` have room. Where that holds up others, those that have none after
        `PATIENCE_S` are set aside."""
        began_s = asyncio.get_running_loop().time()
        while True:
            full = {target: None for target in full if target.scan is self and not target.has_room}
            if not full:
                return
            self.room.clear()
            holds_up = len(full) < len(self.members) or self._dispatcher.waits_for(self)
            try:
                async with asyncio.timeout_at(began_s + PATIENCE_S if holds_up else None):
                    await self.room.wait()
            except TimeoutError:
                for target in full:
                    if target.scan is self and not target.has_room:  # it may have changed at this moment
                        self._dispatcher.set_aside(target)
                return

    def _batch_done(self, entries: Sequence[Entry]) -> None:
        id, term, cseq = self.reader.position
        if (id, True) > self.place[:2]:
            self.place = Place(id, True, term, cseq)
        self.bytes_read += sum(len(entry.payload) for entry in entries)
        self.apply_announced(self.place[2:])
        self._ahead = [target for target in self._ahead if not self.reached(target)]
        self._metrics.publish()
        self._wake_idle()
        self._dispatcher.batch_done(self)

    # ---- grants and dead letters, of the role of one of the members --------------------------------------------------

    def _of_role(self) -> ChannelReader:
        if self._known not in self.members and self.members:
            self._known = next(iter(self.members))
        return self._known.reader

    def granted(self, pchannel: str) -> Granted:
        grants = self._of_role().grants
        assert grants is not None
        return grants.granted(pchannel)

    async def catch_up(self) -> None:
        """Read the grants to their present end, those of another role where one ends meanwhile."""
        while True:
            grants, asked = self._of_role().grants, self._known
            assert grants is not None
            try:
                await grants.catch_up()
                return
            except Exception:
                if asked in self.members or not self.members:
                    raise

    def _bad(self, channel: str, entry: Entry, error: BadRecord) -> None:
        on_bad = self._of_role().on_bad
        if on_bad is not None:
            on_bad(channel, entry, error)


class Dispatcher:
    """Feeds the targets of one pchannel, of all streams of a process."""

    def __init__(self, name: str, wal: Wal, budget: ReadBudget, metrics: Metrics) -> None:
        self.name: str = name
        self.wal: Wal = wal
        self.budget: ReadBudget = budget
        self.metrics: Metrics = metrics
        self.eager: dict[Target, int] = {}  # targets whose streams wait for a time
        self._main: Scan | None = None
        self._behind: Scan | None = None
        self._waiting: deque[Target] = deque()  # for the scan behind
        self._announced: tuple[tuple[int, int], int] = ((0, 0), 0)
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def scans(self) -> list[Scan]:
        """The scans under way: none without targets, and never more than two."""
        return [scan for scan in (self._main, self._behind) if scan is not None]

    def announce(self, term: int, cseq: int, time: int, *, wake: bool = True) -> None:
        """Apply an announcement of the channel's owner: nothing at or before `time` follows behind (term, cseq). With
        `wake` the streams that wait for that are woken."""
        if time > self._announced[1]:
            self._announced = ((term, cseq), time)
        for scan in self.scans:
            scan.announce((term, cseq), time, wake=wake)

    def join(self, target: Target) -> None:
        """Feed `target` from its place on."""
        if self._main is None:
            self._main = self._scan(target)
            return
        for scan in self.scans:
            if scan.serves(target.place):
                scan.add(target)
                return
        self._waiting.append(target)
        self._begin_turn()
        for scan in self.scans:
            scan.room.set()  # who waits for a full buffer may hold this one up

    def leave(self, target: Target) -> None:
        """Feed `target` no more."""
        target.closed = True
        target.account()
        self.eager.pop(target, None)
        if target in self._waiting:
            self._waiting.remove(target)
        if target.scan is not None:
            self._remove(target.scan, target)

    async def ended(self) -> None:
        """Return once no reading is under way that has no targets any more."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    # ---- targets that lag -------------------------------------------------------------------------------------------

    def waits_for(self, scan: Scan) -> bool:
        """Whether targets wait until `scan` ends."""
        return scan is self._behind and bool(self._waiting)

    def set_aside(self, target: Target) -> None:
        """Feed `target` no more until its buffer has room."""
        if target.scan is not None:
            target.scan.tell(target)
            target.aside = True
            self._remove(target.scan, target)

    def buffer_shrank(self, target: Target) -> None:
        """Go on with a target that was waited for, or set aside. (Later, for its stream is just making a pack.)"""
        if target.scan is not None:
            target.scan.room.set()
        elif target.aside and not target.closed and self.budget.has_room(2 * target.bytes):
            target.aside = False
            asyncio.get_running_loop().call_soon(self._rejoin, target)

    def _rejoin(self, target: Target) -> None:
        if not target.closed:
            self.join(target)

    def _begin_turn(self) -> None:
        """Read for the target that has waited longest, and for those whose place lies behind its."""
        if self._behind is None and self._waiting:
            first = self._waiting.popleft()
            if self._main is None:
                self._main = self._scan(first)
            else:
                self._behind = self._scan(first)
            waiting, self._waiting = self._waiting, deque()
            for target in waiting:
                self.join(target)

    # ---- scans ------------------------------------------------------------------------------------------------------

    def _scan(self, first: Target) -> Scan:
        scan = Scan(self, first)
        scan.announce(*self._announced)
        return scan

    def _remove(self, scan: Scan, target: Target) -> None:
        scan.remove(target)
        if not scan.members:
            self._end(scan)
            self._begin_turn()

    def _end(self, scan: Scan) -> None:
        if scan is self._main:
            self._main, self._behind = self._behind, None
        elif scan is self._behind:
            self._behind = None
        if scan.task is not asyncio.current_task():  # else it ends by itself
            scan.task.cancel()
        self._ending.add(scan.task)
        scan.task.add_done_callback(self._ending.discard)

    def batch_done(self, scan: Scan) -> None:
        """Let the targets of the scan behind join the main one where that is possible, or others have their turn."""
        if scan is not self._behind or self._main is None:
            return
        meets = self._main.serves(scan.place)
        if meets or (self._waiting and scan.bytes_read > TURN_BYTES):
            members = list(scan.members)
            for target in members:
                scan.tell(target)
                scan.remove(target)
            self._end(scan)
            if meets:
                for target in members:
                    self._main.add(target)
            else:
                self._waiting.extend(members)
            self._begin_turn()

    def scan_failed(self, scan: Scan, error: Exception) -> None:
        """End the streams of a scan that cannot go on; targets that begin further on are read from there."""
        reached = [target for target in scan.members if scan.reached(target)]
        later = [target for target in scan.members if target not in reached]
        for target in (*reached, *later):
            scan.remove(target)
        self._end(scan)
        for target in reached:
            target.stream.fail(error)
        for target in later:
            self.join(target)
        self._begin_turn()

    def wake_eager(self, time: int) -> None:
        """Wake the streams that wait for `time`, or an earlier one."""
        for target in [target for target, needed in self.eager.items() if needed <= time]:
            del self.eager[target]
            target.stream.wake()


class Dispatchers:
    """The dispatchers of a node, by pchannel, with one budget for what they have read and no stream has taken yet."""

    def __init__(self, wal: Wal, buffer_bytes: int, metrics: Metrics) -> None:
        self.budget: ReadBudget = ReadBudget(buffer_bytes)
        self.listening: asyncio.Lock = asyncio.Lock()  # one role of the node listens to heartbeats for all
        self.turns: Iterator[int] = count()  # of the streams
        self._wal, self._metrics = wal, metrics
        self._by_pchannel: dict[str, Dispatcher] = {}

    def of(self, pchannel: str) -> Dispatcher:
        """The dispatcher of `pchannel`."""
        if pchannel not in self._by_pchannel:
            self._by_pchannel[pchannel] = Dispatcher(pchannel, self._wal, self.budget, self._metrics)
        return self._by_pchannel[pchannel]

    def announce(self, channel: str, term: int, cseq: int, time: int) -> None:
        """Apply an owner's announcement: behind the record `cseq` of `term`, `channel` has nothing with a timestamp ≤
        `time`."""
        self.of(channel).announce(term, cseq, time)
