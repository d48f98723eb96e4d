"""The outputs of commits: decided by a record of the group's log that contains them, then appended to their channels.

So acknowledgements and outputs take effect together: before the record no output is in its channel, after it a process
appends them. That is the committing process, or once its member is gone, any process of the group that notices. No
output is duplicated: the outputs of one publisher have its name and are numbered, only one process at a time can have
a name, Pulsar drops numbers that it has stored for that name, and a process that takes over first reads what is stored.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from ....runtime.errors import (
    ChannelNotFound,
    Closed,
    TidewalError,
    Unavailable,
    Unsupported,
    of_unknown_outcome,
)
from ....runtime.groups.commands import Command, CommitOutputs, Output, Published
from ....runtime.groups.coordinator_client import Ack
from ....runtime.groups.group_log import GroupLog
from ....runtime.groups.group_state import Decided
from ....runtime.log.checks import check_size
from ....runtime.log.wal import Append, Capabilities, ChannelPolicy
from ..client import (
    NUMBER_PROPERTY,
    OK,
    NativeId,
    NativeProducer,
    NativeReader,
    NativeResult,
    ignore,
    message,
    place_of,
)
from ..failures import call_failure, unknown_outcome
from ..ids import MessagePlace, decode_end, encode, encode_end, pack
from ..topics import TopicContents

log: logging.Logger = logging.getLogger("tidewal.pulsar")

T = TypeVar("T")

RECORD_BYTES = 1024 * 1024  # of outputs in one record of the group's log
ENTRY_OVERHEAD_BYTES = 200
PAUSE_S = 0.2  # before another attempt with a name that is in use


class OutputHost(Protocol):
    """What publishing needs of the WAL; all of it blocks, except for `blocking`."""

    @property
    def timeout_ms(self) -> int: ...

    capabilities: Capabilities

    async def blocking(self, call: Callable[[], T]) -> T: ...

    def policy(self, channel: str) -> ChannelPolicy: ...

    def behind_all(self, channel: str) -> MessagePlace: ...

    def last(self, channel: str) -> MessagePlace: ...

    def contents(self, channel: str) -> TopicContents: ...

    def publisher(self, channel: str, name: str, *, batches: bool) -> NativeProducer: ...

    def open_reader(self, channel: str, start: MessagePlace, queue_messages: int | None = None) -> NativeReader: ...


class OutputPublisher:
    """Appends the outputs of this process's commits for one group. Belongs to the loop of the group's log."""

    def __init__(self, wal: OutputHost, group_log: GroupLog) -> None:
        self._wal = wal
        self._log = group_log
        self._publisher = uuid.uuid4().hex
        self._number = 0
        self._after: dict[str, bytes] = {}  # by channel, an id after which the next outputs will be
        self._producers: dict[str, NativeProducer] = {}
        self._queue: deque[Decided] = deque()  # own commits, until they are published or have failed
        self._failed: set[bytes] = set()  # own commits, left to `adopt`
        self._published: set[bytes] = set()  # own commits without their `Published` record in the log
        self._waiting: dict[bytes, asyncio.Future[list[bytes]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._adopting: asyncio.Task[None] | None = None

    # ---- committing -------------------------------------------------------------------------------------------------

    async def check(self, outputs: Sequence[Append]) -> None:
        """Check the outputs before a commit. Raises `MessageTooLarge`, `ChannelNotFound`, `Unsupported`; then nothing
        is committed."""
        if outputs and self._wal.capabilities.foreign_topics:
            raise Unsupported(
                "commits with outputs need topics in which Pulsar removes duplicates, and nothing is changed about"
                " topics that others made: acknowledge and append, at least once",
                capability="atomic_commits",
            )
        for channel in {output.channel for output in outputs}:
            policy = await self._wal.blocking(partial(self._wal.policy, channel))
            for output in outputs:
                if output.channel == channel:
                    check_size(channel, len(output.payload), policy.max_message_bytes)
            if channel not in self._after:
                behind = await self._wal.blocking(partial(self._wal.behind_all, channel))
                self._after.setdefault(channel, encode_end(behind))

    def number(self, outputs: Sequence[Append]) -> list[list[Output]]:
        """The outputs with their numbers, in parts that fit into records. The parts must be appended in the order of
        the calls."""
        parts: list[list[Output]] = [[]]
        size = 0
        for output in outputs:
            self._number += 1
            more = len(output.payload) + ENTRY_OVERHEAD_BYTES
            if parts[-1] and size + more > RECORD_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(Output(output, self._number))
            size += more
        return parts

    def deciding(self, member: str, acks: Sequence[Ack], batch: bytes, parts: Sequence[list[Output]]) -> CommitOutputs:
        """The record that decides the commit, with the last of the parts."""
        after = {output.append.channel: self._after[output.append.channel] for part in parts for output in part}
        staged = sum(map(len, parts[:-1]))
        return CommitOutputs(member, list(acks), batch, self._publisher, parts[-1], after, staged)

    async def published(self, token: bytes) -> list[bytes]:
        """The ids of the outputs of a commit, once they are published; `expect` comes first. Raises `Unavailable` with
        `outcome_unknown` when that takes too long, and what publishing raised."""
        try:
            async with asyncio.timeout(2 * self._wal.timeout_ms / 1000):
                return await asyncio.shield(self._waiting[token])
        except TimeoutError:
            raise Unavailable(
                f"a commit of group {self._log.group} is decided, but its outputs are not in their channels yet",
                outcome_unknown=True,
            ) from None
        finally:
            self._waiting.pop(token, None)

    def expect(self, token: bytes) -> None:
        """Prepare to await this commit with `published`."""
        self._waiting[token] = asyncio.get_running_loop().create_future()

    def forget(self, token: bytes) -> None:
        """The commit was refused."""
        self._waiting.pop(token, None)

    def applied(self, token: bytes, command: Command) -> None:
        """A record of the log has taken effect: publish the outputs if it is a commit of this publisher."""
        if isinstance(command, CommitOutputs) and command.publisher == self._publisher:
            decided = self._log.state.undelivered.get(token)
            self._begin([] if decided is None else [decided])

    def restored(self) -> None:
        """The state was restored from a snapshot. This process has not read the records before it, so the state may
        have own commits for which `applied` was never called. They have to be published before later own ones: Pulsar
        would drop their numbers after higher ones."""
        undelivered = self._log.state.undelivered
        self._published &= undelivered.keys()
        begun = {each.token for each in self._queue} | self._failed | self._published
        own = (each for each in undelivered.values() if each.publisher == self._publisher)
        self._begin([each for each in own if each.token not in begun])

    def _begin(self, decided: Sequence[Decided]) -> None:
        self._queue.extend(decided)
        if self._queue and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name=f"outputs of group {self._log.group}")

    # ---- publishing -------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._queue:
            decided = await self._next()
            try:
                places = await self._publish(decided)
            except Exception as error:  # the commit stays in the state, and its outputs to be published
                if not isinstance(error, Closed):
                    log.exception("outputs of group %s are not appended", self._log.group)
                self._drop_producers()
                failure = of_unknown_outcome(call_failure(error, "appending outputs"))
                for each in decided:
                    self._failed.add(each.token)
                    self._answer(each.token, failure)
            else:
                self._mark_published(decided, places)
            for _ in decided:
                self._queue.popleft()

    def _mark_published(self, decided: Sequence[Decided], places: Mapping[int, bytes]) -> None:
        """Note that the outputs of these commits are in their channels, and append a `Published` record."""
        for each in decided:
            ids = [places.get(output.number, b"") for output in each.outputs]
            for output, id in zip(each.outputs, ids, strict=True):
                channel = output.append.channel
                self._after[channel] = max(self._after.get(channel, b""), id)
            self._answer(each.token, ids)
        tokens = [each.token for each in decided]
        self._published.update(tokens)
        self._log.tell(Published(tokens))

    async def _publish(self, decided: Sequence[Decided]) -> dict[int, bytes]:
        try:
            return await self._wal.blocking(partial(self._send, decided))
        except TidewalError as error:
            log.warning("outputs of group %s are sent again: %s", self._log.group, error)
        self._drop_producers()
        places: dict[int, bytes] = {}
        for each in decided:
            places |= await self._until_published(each)
        return places

    def _answer(self, token: bytes, result: list[bytes] | TidewalError) -> None:
        future = self._waiting.get(token)
        if future is None or future.done():
            return
        if isinstance(result, TidewalError):
            future.set_exception(result)
            future.exception()  # retrieved: the caller may not wait any more
        else:
            future.set_result(result)

    async def _next(self) -> list[Decided]:
        """The commits of the queue that can be published. Earlier commits of the same inputs by other processes come
        first, published by their processes, or by this one where the member is gone."""
        while self._log.ended is None:
            with suppress(Unavailable):  # the log is being read anew
                if ready := self._ready(self._log.state.undelivered):
                    return ready
                self.adopt()
            await asyncio.sleep(PAUSE_S)
        return list(self._queue)

    def _ready(self, undelivered: Mapping[bytes, Decided]) -> list[Decided]:
        begun = {each.token for each in self._queue} | self._published
        order = {token: at for at, token in enumerate(undelivered)}
        left = [each for each in undelivered.values() if each.token not in begun]
        ready: list[Decided] = []
        for mine in self._queue:
            at = order.get(mine.token, 0)  # it is not in the state when another process has published it
            if any(order[each.token] < at and mine.follows(each) for each in left):
                break
            ready.append(mine)
        return ready

    async def _until_published(self, decided: Decided) -> dict[int, bytes]:
        while True:
            try:
                return await self._wal.blocking(partial(self._publish_again, decided))
            except Closed:
                raise
            except TidewalError as error:
                log.warning("outputs of group %s: %s", self._log.group, error)
            await asyncio.sleep(PAUSE_S)

    def _send(self, commits: Sequence[Decided]) -> dict[int, bytes]:
        """Send the outputs of commits, in order, and return their places by number. Blocks. Raises when one may not be
        stored, or its place is unknown."""
        outputs = [output for commit in commits for output in commit.outputs]
        answers = _Answers(len(outputs))
        touched: dict[str, NativeProducer] = {}
        for output in outputs:
            channel = output.append.channel
            producer = self._producers.get(channel)
            if producer is None:
                producer = self._wal.publisher(channel, _name(self._publisher), batches=True)
                self._producers[channel] = producer
            touched[channel] = producer
            _send_one(producer, output, partial(answers.answer, output.number))
        for producer in touched.values():
            producer.flush_async(ignore)
        return answers.wait(self._wal.timeout_ms / 1000)

    # ---- publishing what may be stored already ----------------------------------------------------------------------

    def adopt(self) -> None:
        """Begin to publish the commits whose members are gone."""
        if self._adopting is None or self._adopting.done():
            self._adopting = asyncio.create_task(self._adopt(), name=f"outputs left in group {self._log.group}")

    async def _adopt(self) -> None:
        with suppress(TidewalError):
            undelivered = self._log.state.undelivered
            self._published &= undelivered.keys()
            if self._published:  # the record that says so may not have been stored
                self._log.tell(Published(list(self._published)))
            left: list[Decided] = []  # to other processes, or to a later call
            for decided in list(undelivered.values()):
                if not self._is_orphan(decided) or any(map(decided.follows, left)):
                    left.append(decided)
                    continue
                try:
                    await self._wal.blocking(partial(self._publish_again, decided))
                except Unavailable as error:  # its process may still be publishing
                    log.info("outputs left in group %s: %s", self._log.group, error)
                    return
                self._log.tell(Published([decided.token]))

    def _is_orphan(self, decided: Decided) -> bool:
        if decided.publisher == self._publisher:
            return decided.token in self._failed
        return decided.member not in self._log.state.members

    def _publish_again(self, decided: Decided) -> dict[int, bytes]:
        """Publish the missing outputs and return the places of all by number. Blocks. Raises `Unavailable`, also while
        another process has the name."""
        places: dict[int, bytes] = {}
        for channel in {output.append.channel: None for output in decided.outputs}:
            outputs = [output for output in decided.outputs if output.append.channel == channel]
            try:
                places |= self._complete(channel, outputs, decided)
            except ChannelNotFound as error:
                log.warning("outputs of group %s have no channel any more: %s", self._log.group, error)
        return places

    def _complete(self, channel: str, outputs: Sequence[Output], decided: Decided) -> dict[int, bytes]:
        name = _name(decided.publisher)
        producer = self._wal.publisher(
            channel, name, batches=False
        )  # from now on no other process sends under the name
        try:
            after = decode_end(decided.after[channel])
            places = self._look(channel, after, name)
            missing = [output for output in outputs if output.number not in places]
            # A missing output whose number is a duplicate was stored, and its ledger removed by retention since.
            removed = bool(missing) and self._begins_behind(channel, after)
            for output in missing:
                answers = _Answers(1)
                _send_one(producer, output, partial(answers.answer, output.number))
                places |= answers.wait(self._wal.timeout_ms / 1000, duplicates=removed)
        finally:
            closed = threading.Event()
            producer.close_async(lambda _: closed.set())
            closed.wait(self._wal.timeout_ms / 1000)
        return {output.number: places.get(output.number, b"") for output in outputs}

    def _begins_behind(self, channel: str, after: MessagePlace) -> bool:
        """Whether retention has removed the ledger of `after`, and possibly entries after it."""
        first = self._wal.contents(channel).stored_from
        return first is None or first.ledger > after.ledger

    def _look(self, channel: str, after: MessagePlace, name: str) -> dict[int, bytes]:
        """The places of this publisher's outputs in the channel after `after`, by number."""
        places: dict[int, bytes] = {}
        last = self._wal.last(channel)
        if last.entry < 0 or last <= after:
            return places
        reader = self._wal.open_reader(channel, after)
        try:
            place = after
            while place < last:
                found = reader.read_next(self._wal.timeout_ms)
                place = place_of(found.message_id())
                if found.producer_name() == name:
                    places[int(found.properties()[NUMBER_PROPERTY])] = encode(place)
        except Exception as error:
            raise call_failure(error, f"looking for outputs in {channel}", channel=channel) from error
        finally:
            reader.close_async(ignore)
        return places

    # ---- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Publish what is decided, as long as Pulsar answers; other processes publish the rest."""
        tasks = [task for task in (self._task, self._adopting) if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._wal.timeout_ms / 1000)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(unknown_outcome("the log is closed; outputs are appended by others", ""))
                future.exception()
        self._drop_producers()

    def _drop_producers(self) -> None:
        producers, self._producers = self._producers, {}
        for producer in producers.values():
            producer.close_async(ignore)


class _Answers:
    """Collects the answers to messages from the client library's thread."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._places: dict[int, bytes] = {}
        self._failure: str | None = None
        self._duplicate = False
        self._changed = threading.Condition()

    def answer(self, number: int, result: NativeResult, id: NativeId) -> None:
        with self._changed:
            if int(result) != OK:
                self._failure = result.name
            elif id.ledger_id() < 0:
                self._duplicate = True
            else:
                self._places[number] = pack(id.ledger_id(), id.entry_id(), max(id.batch_index(), 0))
            self._missing -= 1
            self._changed.notify()

    def wait(self, timeout_s: float, *, duplicates: bool = False) -> dict[int, bytes]:
        """Wait for the answers and return the places by number. With `duplicates`, messages whose number Pulsar has
        stored before are left out; otherwise they raise `Unavailable`, as all that may not be stored do."""
        deadline = time.monotonic() + 2 * timeout_s  # the library answers sooner, by its own limit
        with self._changed:
            while self._missing and time.monotonic() < deadline:
                self._changed.wait(1.0)
            if self._duplicate and not duplicates:
                self._failure = self._failure or "a duplicate"
            if self._missing or self._failure is not None:
                raise Unavailable(f"Pulsar answered {self._failure or 'nothing'} to outputs of a commit")
            return self._places


def _name(publisher: str) -> str:
    return f"tidewal-outputs-{publisher}"


def _send_one(producer: NativeProducer, output: Output, answered: Callable[[NativeResult, NativeId], None]) -> None:
    append = output.append
    producer.send_async(message(bytes(append.payload), append.timestamp, output.number), answered)
