"""The producer of one channel: every message gets its one answer, with the id under which it is stored.

Pulsar stores a message once however often the client sends it again, because each producer has a name of its own and
numbers its messages. It answers the second sending without an id, so that id is looked up: after the last id that is
known, the producer's messages lie in the order in which they were sent.

A topic that was deleted may be back under its name when the library connects again, as something that is no channel. So
the first answer out of each ledger is believed only once the topic has been looked at.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ...runtime.errors import ChannelNotFound, TidewalError
from ...runtime.stalls import StallWatch, Waiting
from ...runtime.wal import Append
from .client import OK, Client, NativeId, NativeProducer, NativeResult, ignore, message, place_of
from .failures import Outcome, call_failure, message_outcome, send_failure, unknown_outcome
from .ids import Place, encode, pack, unpack
from .topics import Survey, Topic

log = logging.getLogger("tidewal.pulsar")

LOOK_UP_QUEUE_MESSAGES = 1000


class Answered(Protocol):
    def __call__(self, index: int, result: bytes | TidewalError) -> None: ...


@dataclass(slots=True, eq=False)
class _Unplaced:
    """A message that is stored, but where is not known, or whether that is the channel."""

    number: int  # among those of this producer
    index: int
    answered: Answered
    place: bytes | None  # as it was told


class Producer:
    """Sends from one thread, answers on the client library's. Once an answer is an unknown outcome, `broken` is set:
    a new producer has to take over, under another name, so that what this one's messages are is settled."""

    def __init__(
        self,
        client: Client,
        topic: Topic,
        address: str,
        name: str,
        survey: Callable[[str], Survey],
        ledger: int,
        end: Place,
        max_message_bytes: int,
        executor: Executor,
        flush_later: Callable[[Producer], None],
        stalls: StallWatch,
    ) -> None:
        """`survey` looks at a channel. `ledger` is its latest, and `end` its end, before this producer's first message.
        No message may be over
        `max_message_bytes`: the library forgets to answer one that it finds too large while it fails others. Blocks."""
        self._flush_later = flush_later
        self._stalls = stalls
        self._waiting: Waiting | None = None  # for the flush
        self.topic = topic
        self.max_message_bytes = max_message_bytes
        self.broken = False
        self._client = client
        self._address = address
        self._name = name
        self._executor = executor
        self._native: NativeProducer = client.producer(address, name)
        self._survey = survey
        self._ledger = ledger  # the latest that is known to be the channel's
        self._sent = 0
        self._never_sent: list[int] = []  # the numbers of these messages: all others are stored, unless `broken`
        self._known: tuple[int, bytes | Place] = (0, end)  # the last message whose place is known
        self._lock = threading.Lock()
        self._unplaced: list[_Unplaced] = []
        self._flushing = False  # a flush is not answered yet
        self._flush_again = False

    def send(self, entry: Append, index: int, answered: Answered) -> None:
        """Queue the entry; `answered` is called once. The payload must not change any more."""
        payload = entry.payload
        assert isinstance(payload, bytes)
        native = message(payload, entry.timestamp)
        self._sent += 1
        answer = partial(self._answer, self._sent, index, len(payload), answered)
        try:
            self._native.send_async(native, answer)
        except Exception as error:  # none is documented, so nothing is known of the message
            self._outcome_unknown()
            failure = f"an append to {self.topic.channel} ended with {type(error).__name__}: {error}"
            answered(index, unknown_outcome(failure, self.topic.channel))

    def flush(self) -> None:
        """Let go what waits for its batch to fill, or as soon as what was let go before is answered: so batches grow
        with the load. Does not wait."""
        with self._lock:
            if self._flushing:
                self._flush_again = True
                return
            self._flushing = True
            self._waiting = self._stalls.begin("append", self.topic.channel, lambda: self._known[0])
        self._native.flush_async(self._flushed)

    def _flushed(self, _: object) -> None:
        with self._lock:
            again = self._flush_again
            self._flush_again = self._flushing = False
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._stalls.end(waiting)
        if again:  # by the thread that sends: the library locks up when it is called from its own
            self._flush_later(self)

    def close(self) -> None:
        """Give the producer back; what is still on its way is answered as unknown."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._stalls.end(waiting)
        self._native.close_async(ignore)

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
            log.exception("the answer to an append to %s was lost", self.topic.channel)

    def _failed(self, number: int, size: int, result: str) -> TidewalError:
        if message_outcome(result) is Outcome.NEVER_SENT:
            self._never_sent.append(number)
        else:
            self._outcome_unknown()
        return send_failure(result, self.topic.channel, size)

    def _outcome_unknown(self) -> None:
        self.broken = True
        self._stalls.outcome_unknown(self.topic.channel)

    def _look_up(self, unplaced: _Unplaced) -> None:
        with self._lock:
            self._unplaced.append(unplaced)
            first = len(self._unplaced) == 1
        if first:
            self._executor.submit(self._place)

    def _place(self) -> None:
        """Find out where the messages are that Pulsar has stored without telling, or in a ledger that is not known."""
        while True:
            with self._lock:
                unplaced = list(self._unplaced)
            places: dict[int, bytes] = {}
            failure: TidewalError | None = None
            try:
                places = self._places(unplaced)
            except TidewalError as error:
                log.warning("no ids for appends to %s: %s", self.topic.channel, error)
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
        """The places of these messages, by number. Raises `ChannelNotFound` where they are in a topic that is no
        channel."""
        ledgers = dict(self._survey(self.topic.channel).ledgers)
        places = {each.number: each.place for each in unplaced if each.place is not None}
        told = {number: place for number, place in places.items() if unpack(place)[0] in ledgers}
        if len(told) < len(places):  # they are in another channel of the name, which is gone already
            self.broken = True
        numbers = {each.number for each in unplaced if each.place is None}
        # Behind an unknown outcome a message may be missing, and counting leads nowhere.
        found = self._find(numbers) if numbers and not self.broken else {}
        self._ledger = max((unpack(place)[0] for place in (told | found).values()), default=self._ledger)
        return told | found

    def _find(self, numbers: set[int]) -> dict[int, bytes]:
        """The places of the messages with these numbers: behind the last that is known, one after the other."""
        places: dict[int, bytes] = {}
        never_sent = set(self._never_sent)
        number, known = self._known
        after = known if isinstance(known, Place) else Place(*unpack(known))
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
            raise call_failure(error, f"looking for what was stored in {self.topic.channel}") from error
        finally:
            reader.close_async(ignore)
        return places

    def _lost(self) -> TidewalError:
        self._stalls.outcome_unknown(self.topic.channel)
        return unknown_outcome(
            f"an append to {self.topic.channel} is stored, but where cannot be found out", self.topic.channel
        )
