"""The producer of one channel: every message is answered once, with the id under which it is stored.

Pulsar stores a message once however often the client resends it, because each producer has a name of its own and
numbers its messages. It answers a resent message without an id, so that id is looked up: after the last known id, the
producer's messages lie in the order in which they were sent.

A deleted topic may exist again under its name when the library reconnects, as something that is not a channel. So the
first answer with a new ledger is accepted only once the contents of the topic have been read.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from ...runtime.errors import ChannelNotFound, TidewalError
from ...runtime.log.stalls import StallWatch, Waiting
from ...runtime.log.wal import Append
from .client import OK, NativeId, NativeProducer, NativeResult, PulsarClient, ignore, message, place_of
from .failures import Outcome, call_failure, message_outcome, send_failure, unknown_outcome
from .ids import MessagePlace, encode, pack, unpack
from .topics import PulsarTopic, TopicContents

log: logging.Logger = logging.getLogger("tidewal.pulsar")

LOOK_UP_QUEUE_MESSAGES = 1000

Answered: TypeAlias = Callable[[int, bytes | TidewalError], None]  # called with the index of an entry and its result


@dataclass(slots=True, eq=False)
class _Unplaced:
    """A stored message whose place is not known, or not known to be in the channel."""

    number: int  # among those of this producer
    index: int
    answered: Answered
    place: bytes | None  # from the answer


class FlushingProducer(ABC):
    """What sends the messages of one channel, in batches that grow with the load."""

    def __init__(
        self,
        topic: PulsarTopic,
        native: NativeProducer,
        max_message_bytes: int,
        flush_later: Callable[[FlushingProducer], None],
        stalls: StallWatch,
    ) -> None:
        """No message may exceed `max_message_bytes`: the library does not answer one that it finds too large while it
        fails others. `flush_later` is called to flush on the sending thread."""
        self.topic = topic
        self.max_message_bytes = max_message_bytes
        self.broken: bool = False
        self._native = native
        self._flush_later = flush_later
        self._stalls = stalls
        self._waiting: Waiting | None = None  # for the flush
        self._lock = threading.Lock()
        self._flushing = False  # whether a flush is not answered yet
        self._flush_again = False

    @property
    @abstractmethod
    def progress(self) -> object:
        """What changes with each answer."""

    @abstractmethod
    def send(self, entry: Append, index: int, answered: Answered) -> None:
        """Queue the entry; `answered` is called once with `index` and the id or the error."""

    def outcome_unknown(self) -> None:
        """Note that a message may be stored or not."""
        self.broken = True
        self._stalls.outcome_unknown(self.topic.channel)

    def flush(self) -> None:
        """Send the queued batch, at once or as soon as the previous flush is answered: so batches grow with the load.
        Does not wait."""
        with self._lock:
            if self._flushing:
                self._flush_again = True
                return
            self._flushing = True
            self._waiting = self._stalls.begin("append", self.topic.channel, lambda: self.progress)
        self._native.flush_async(self._flushed)

    def _flushed(self, _: object) -> None:
        with self._lock:
            again = self._flush_again
            self._flush_again = self._flushing = False
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._stalls.end(waiting)
        if again:  # on the sending thread: the library deadlocks when it is called from its own
            self._flush_later(self)

    def close(self) -> None:
        """Close the producer; unanswered messages get an unknown outcome."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._stalls.end(waiting)
        self._native.close_async(ignore)


class ChannelProducer(FlushingProducer):
    """Sends on one thread, answers on the client library's. After an unknown outcome `broken` is set: a new producer
    has to take over under another name, so that no more messages of this one are stored."""

    broken: bool

    def __init__(
        self,
        client: PulsarClient,
        topic: PulsarTopic,
        address: str,
        name: str,
        contents: Callable[[str], TopicContents],
        ledger: int,
        end: MessagePlace,
        max_message_bytes: int,
        executor: Executor,
        flush_later: Callable[[FlushingProducer], None],
        stalls: StallWatch,
    ) -> None:
        """`contents` returns the contents of a channel's topic. `ledger` is its latest ledger, and `end` its end,
        before this producer's first message. Blocks."""
        native = client.producer(address, name)
        super().__init__(topic, native, max_message_bytes, flush_later, stalls)
        self._client = client
        self._address = address
        self._name = name
        self._executor = executor
        self._contents = contents
        self._ledger = ledger  # the latest that is known to be the channel's
        self._sent = 0
        self._never_sent: list[int] = []  # the numbers of these messages: all others are stored, unless `broken`
        self._known: tuple[int, bytes | MessagePlace] = (0, end)  # the last message whose place is known
        self._unplaced: list[_Unplaced] = []

    @property
    def progress(self) -> object:
        return self._known[0]

    def send(self, entry: Append, index: int, answered: Answered) -> None:
        """Queue the entry; `answered` is called once with `index` and the id or the error. The payload must be
        `bytes`."""
        payload = entry.payload
        assert isinstance(payload, bytes)
        native = message(payload, entry.timestamp)
        self._sent += 1
        answer = partial(self._answer, self._sent, index, len(payload), answered)
        try:
            self._native.send_async(native, answer)
        except Exception as error:  # none is documented, so the outcome is unknown
            self.outcome_unknown()
            failure = f"an append to {self.topic.channel} ended with {type(error).__name__}: {error}"
            answered(index, unknown_outcome(failure, self.topic.channel))

    def _answer(
        self, number: int, index: int, size: int, answered: Answered, result: NativeResult, id: NativeId
    ) -> None:
        try:  # an exception would end the process: nothing above this in the library's thread expects one
            ledger = id.ledger_id()
            if int(result) != OK:
                answered(index, self._failed(number, size, result.name))
                return
            place = pack(ledger, id.entry_id(), max(id.batch_index(), 0)) if ledger >= 0 else None
            if place is None or ledger != self._ledger:
                self._look_up(_Unplaced(number, index, answered, place))
                return
            if not self._unplaced:
                self._known = number, place
            answered(index, place)
        except Exception:
            log.exception(
                "the answer to an append to %s was lost", self.topic.channel, extra={"channel": self.topic.channel}
            )

    def _failed(self, number: int, size: int, result: str) -> TidewalError:
        if message_outcome(result) is Outcome.NEVER_SENT:
            self._never_sent.append(number)
        else:
            self.outcome_unknown()
        return send_failure(result, self.topic.channel, size)

    def _look_up(self, unplaced: _Unplaced) -> None:
        with self._lock:
            self._unplaced.append(unplaced)
            first = len(self._unplaced) == 1
        if first:
            self._executor.submit(self._place)

    def _place(self) -> None:
        """Look up the messages that Pulsar answered without an id, or with a ledger that is not known."""
        while True:
            with self._lock:
                unplaced = list(self._unplaced)
            places: dict[int, bytes] = {}
            failure: TidewalError | None = None
            try:
                places = self._places(unplaced)
            except TidewalError as error:
                log.warning(
                    "no ids for appends to %s: %s", self.topic.channel, error, extra={"channel": self.topic.channel}
                )
                if isinstance(error, ChannelNotFound):
                    self.broken, failure = True, error
            for each in unplaced:
                each.answered(each.index, places.get(each.number) or failure or self._lost())
            with self._lock:
                if places:
                    self._known = max(places.items())
                del self._unplaced[: len(unplaced)]
                if not self._unplaced:
                    return

    def _places(self, unplaced: Sequence[_Unplaced]) -> dict[int, bytes]:
        """The places of these messages, by number. Raises `ChannelNotFound` where they are in a topic that is not a
        channel."""
        ledgers = dict(self._contents(self.topic.channel).ledgers)
        places = {each.number: each.place for each in unplaced if each.place is not None}
        told = {number: place for number, place in places.items() if unpack(place)[0] in ledgers}
        if len(told) < len(places):  # they are in another channel of the name, which is dropped already
            self.broken = True
        numbers = {each.number for each in unplaced if each.place is None}
        # After an unknown outcome a message may be missing, so that counting is not possible.
        found = self._find(numbers) if numbers and not self.broken else {}
        self._ledger = max((unpack(place)[0] for place in (told | found).values()), default=self._ledger)
        return told | found

    def _find(self, numbers: set[int]) -> dict[int, bytes]:
        """The places of the messages with these numbers, counted after the last known place."""
        places: dict[int, bytes] = {}
        never_sent = set(self._never_sent)
        number, known = self._known
        after = known if isinstance(known, MessagePlace) else MessagePlace(*unpack(known))
        reader = self._client.reader(self._address, after, LOOK_UP_QUEUE_MESSAGES)
        try:
            while len(places) < len(numbers):
                found = reader.read_next(self._client.timeout_ms)
                place = place_of(found.message_id())
                if place <= after or found.producer_name() != self._name:
                    continue
                number += 1
                while number in never_sent:
                    number += 1
                if number in numbers:
                    places[number] = encode(place)
        except Exception as error:
            raise call_failure(error, f"looking up stored messages in {self.topic.channel}") from error
        finally:
            reader.close_async(ignore)
        return places

    def _lost(self) -> TidewalError:
        self._stalls.outcome_unknown(self.topic.channel)
        return unknown_outcome(
            f"an append to {self.topic.channel} is stored, but its id cannot be found", self.topic.channel
        )
