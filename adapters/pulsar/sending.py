"""The producer of one channel: every message gets its one answer, with the id under which it is stored.

Pulsar stores a message once however often the client sends it again, because each producer has a name of its own and
numbers its messages. It answers the second sending without an id, so that id is looked up: after the last id that is
known, the producer's messages lie in the order in which they were sent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from ...runtime.errors import TidewalError
from ...runtime.wal import Append
from .client import Client, NativeId, NativeProducer, NativeResult, ignore, message, place_of
from .failures import call_failure, send_failure, unknown_outcome
from .ids import Place, encode
from .topics import Topic

log = logging.getLogger("tidewal.pulsar")

LOOK_UP_QUEUE_MESSAGES = 1000


class Answered(Protocol):
    def __call__(self, index: int, result: bytes | TidewalError) -> None: ...


@dataclass(slots=True, eq=False)
class _Sent:
    """One message on its way."""

    number: int  # among those of this producer
    index: int
    size: int
    answered: Answered


class Producer:
    """Sends from one thread, answers on the client library's. Once an answer is an unknown outcome, `broken` is set:
    a new producer has to take over, under another name, so that what this one's messages are is settled."""

    def __init__(self, client: Client, topic: Topic, address: str, name: str, end: Place, executor: Executor) -> None:
        """`end` is the end of the topic before this producer's first message. Blocks."""
        self.topic = topic
        self.broken = False
        self._client = client
        self._address = address
        self._name = name
        self._executor = executor
        self._native: NativeProducer = client.producer(address, name)
        self._sent = 0
        self._refused: list[int] = []  # the numbers of messages that are not stored
        self._known = 0  # the number of the last message whose place is known
        self._known_place = end
        self._lock = threading.Lock()
        self._unplaced: list[_Sent] = []

    def send(self, entry: Append, index: int, answered: Answered) -> None:
        """Queue the entry; `answered` is called once. The payload must not change any more."""
        payload = entry.payload
        assert isinstance(payload, bytes)
        self._sent += 1
        sent = _Sent(self._sent, index, len(payload), answered)
        self._native.send_async(message(payload, entry.timestamp), self._answer_of(sent))

    def flush(self) -> None:
        """Let go what waits for its batch to fill; does not wait for answers."""
        self._native.flush_async(ignore)

    def close(self) -> None:
        """Give the producer back; what is still on its way is answered as unknown."""
        self._native.close_async(ignore)

    def _answer_of(self, sent: _Sent) -> Callable[[NativeResult, NativeId], None]:
        def answer(result: NativeResult, id: NativeId) -> None:
            try:  # an exception would end the process: nothing above this in the library's thread expects one
                self._answer(sent, result.name, place_of(id))
            except Exception:
                log.exception("the answer to an append to %s was lost", self.topic.channel)

        return answer

    def _answer(self, sent: _Sent, result: str, place: Place) -> None:
        if result != "Ok":
            error = send_failure(result, self.topic.channel, sent.size)
            if error.fields.get("outcome_unknown"):
                self.broken = True
            else:
                self._refused.append(sent.number)
            sent.answered(sent.index, error)
        elif place.ledger >= 0:
            with self._lock:
                if not self._unplaced:
                    self._known, self._known_place = sent.number, place
            sent.answered(sent.index, encode(place))
        else:
            with self._lock:
                self._unplaced.append(sent)
                first = len(self._unplaced) == 1
            if first:
                self._executor.submit(self._place)

    def _place(self) -> None:
        """Look up where the messages are that Pulsar has stored without telling."""
        error: TidewalError | None = None
        while True:
            with self._lock:
                unplaced = list(self._unplaced)
            places: dict[int, Place] = {}
            try:
                places = self._find({sent.number for sent in unplaced})
            except TidewalError as caught:
                error = caught
                log.warning("no ids for appends to %s: %s", self.topic.channel, caught)
            for sent in unplaced:
                place = places.get(sent.number)
                sent.answered(sent.index, self._lost() if place is None else encode(place))
            with self._lock:
                if places and not error:
                    self._known = max(places)
                    self._known_place = places[self._known]
                del self._unplaced[: len(unplaced)]
                if not self._unplaced:
                    return

    def _find(self, numbers: set[int]) -> dict[int, Place]:
        """The places of the messages with these numbers: behind the last that is known, one after the other."""
        places: dict[int, Place] = {}
        refused = set(self._refused)
        number, after = self._known, self._known_place
        reader = self._client.reader(self._address, after, LOOK_UP_QUEUE_MESSAGES)
        try:
            while len(places) < len(numbers):
                found = reader.read_next(self._client.timeout_ms)
                place = place_of(found.message_id())
                if place <= after or found.producer_name() != self._name:
                    continue
                number += 1
                while number in refused:
                    number += 1
                if number in numbers:
                    places[number] = place
        except Exception as error:
            raise call_failure(error, f"looking for what was stored in {self.topic.channel}") from error
        finally:
            reader.close_async(ignore)
        return places

    def _lost(self) -> TidewalError:
        return unknown_outcome(
            f"an append to {self.topic.channel} is stored, but Pulsar did not tell where", self.topic.channel
        )
