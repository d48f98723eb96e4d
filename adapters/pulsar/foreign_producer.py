"""The producer of a topic that others made, or of one partition of it.

Nothing about the topic is changed, so whether the broker removes what is sent again is its owner's setting, and answers
are taken as they come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ...runtime.errors import TidewalError
from ...runtime.log.stalls import StallWatch
from ...runtime.log.wal import Append
from .client import OK, NativeId, NativeProducer, NativeResult, PulsarClient
from .failures import Outcome, message_outcome, send_failure, unknown_outcome
from .foreign_topics import foreign_message, route
from .ids import pack
from .producer import Answered, FlushingProducer
from .topics import PulsarTopic

log: logging.Logger = logging.getLogger("tidewal.pulsar")


class ForeignProducer(FlushingProducer):
    """Sends on one thread, answers on the client library's. After an unknown outcome `broken` is set, and another
    producer takes over."""

    def __init__(
        self,
        client: PulsarClient,
        topic: PulsarTopic,
        address: str,
        name: str,
        max_message_bytes: int,
        flush_later: Callable[[FlushingProducer], None],
        stalls: StallWatch,
    ) -> None:
        """`flush_later` is called to flush on the sending thread. Blocks."""
        native: NativeProducer = client.routing_producer(address, name, route())
        super().__init__(topic, native, max_message_bytes, flush_later, stalls)
        self._answers = 0

    @property
    def progress(self) -> object:
        return self._answers

    def send(self, entry: Append, index: int, answered: Answered) -> None:
        native = foreign_message(entry)
        try:
            self._native.send_async(native, partial(self._answer, index, len(entry.payload), answered))
        except Exception as error:  # none is documented, so the outcome is unknown
            self.outcome_unknown()
            failure = f"an append to {self.topic.channel} ended with {type(error).__name__}: {error}"
            answered(index, unknown_outcome(failure, self.topic.channel))

    def _answer(self, index: int, size: int, answered: Answered, result: NativeResult, id: NativeId) -> None:
        try:  # an exception would end the process: nothing above this in the library's thread expects one
            self._answers += 1
            answered(index, self._result(size, result, id))
        except Exception:
            log.exception("the answer to an append to %s was lost", self.topic.channel)

    def _result(self, size: int, result: NativeResult, id: NativeId) -> bytes | TidewalError:
        channel = self.topic.channel
        if int(result) != OK:
            if message_outcome(result.name) is not Outcome.NEVER_SENT:
                self.outcome_unknown()
            return send_failure(result.name, channel, size)
        if id.ledger_id() < 0:  # sent again, and the broker removes duplicates
            self.outcome_unknown()
            return unknown_outcome(f"an append to {channel} is stored, but the broker does not say where", channel)
        return pack(id.ledger_id(), id.entry_id(), max(id.batch_index(), 0))
