"""The outcomes of requests to Pulsar: the tables of this backend.

A result that is not in it is unknown: the request may have taken effect, now or later. Sources are pulsar-client-cpp 4
(`lib/`), its results are those of `pulsar.Result`, and Pulsar 4's REST API.
"""

from __future__ import annotations

import socket
import ssl
from enum import Enum

from ...runtime.errors import (
    ChannelNotFound,
    Closed,
    ConfigError,
    Fenced,
    FieldValue,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    TidewalError,
    Unavailable,
)


class Outcome(Enum):
    """The outcome of a request that failed."""

    NEVER_SENT = "never sent"
    REFUSED = "certainly refused"  # it reached the broker, and changed nothing
    UNKNOWN = "unknown"


# A message that was given to a producer: an append, and so each record of a group's log (acknowledgement, commit, seek)
# and each output of a commit. Only what the library answers before it queues the message is certain. All other results
# are answers to everything that is queued, also to what was sent before and is stored: when it connects again,
# `ProducerImpl::handleCreateProducer` fails all with ProducerFenced, TopicTerminated, AlreadyClosed or
# ProducerBlockedQuotaExceededException; `handleSendTimeout` fails all with Timeout. ChecksumError alone is an answer to
# one message (`ClientConnection::handleSendError`), but maybe to the second sending of what is stored from the first.
# So no message is "certainly refused".
MESSAGE_RESULTS: dict[str, tuple[Outcome, type[TidewalError]]] = {
    # ProducerImpl::sendAsyncWithStatsUpdate, MessageAndCallbackBatch::createOpSendMsg
    "MessageTooBig": (Outcome.NEVER_SENT, MessageTooLarge),
    # ProducerImpl::sendAsyncWithStatsUpdate
    "InvalidMessage": (Outcome.NEVER_SENT, InvalidRequest),
    # ProducerImpl::canEnqueueRequest
    "ProducerQueueIsFull": (Outcome.NEVER_SENT, Overloaded),
    "MemoryBufferIsFull": (Outcome.NEVER_SENT, Overloaded),
}

# Opening a client, a producer or a reader, and reading: whatever the answer, nothing is stored. Other results are
# `Unavailable`.
CALL_RESULTS: dict[str, type[TidewalError]] = {
    "ProducerBlockedQuotaExceededError": Overloaded,
    "ProducerBlockedQuotaExceededException": Overloaded,
    "ProducerFenced": Fenced,
    "TopicTerminated": Fenced,
    "TopicNotFound": ChannelNotFound,
    "NotAllowedError": InvalidRequest,
    "OperationNotSupported": InvalidRequest,
    "InvalidTopicName": InvalidRequest,
    "AuthenticationError": ConfigError,
    "ErrorGettingAuthenticationData": ConfigError,
    "AuthorizationError": ConfigError,
    "InvalidConfiguration": ConfigError,
    "InvalidUrl": ConfigError,
    "AlreadyClosed": Closed,
}

# A request to the web service: creating, changing and deleting topics, cursors and policies. The broker decides these
# codes before it begins (pulsar-broker, `admin/AdminResource`, `admin/impl/PersistentTopicsBase`). All others, and a
# connection that ends without an answer, are unknown.
WEB_ANSWERS: dict[int, Outcome] = {
    400: Outcome.REFUSED,
    401: Outcome.REFUSED,
    403: Outcome.REFUSED,
    404: Outcome.REFUSED,
    405: Outcome.REFUSED,
    409: Outcome.REFUSED,
    412: Outcome.REFUSED,  # also by a broker from which the topic has moved
    429: Outcome.REFUSED,  # the rate limit is a filter before all handlers
}
_NOT_CONNECTED = (
    ConnectionRefusedError,
    socket.gaierror,
    ssl.SSLCertVerificationError,
)  # no connection: nothing was sent


def message_outcome(result: str) -> Outcome:
    """The outcome of a message that the client library answered with `result`."""
    return MESSAGE_RESULTS.get(result, (Outcome.UNKNOWN, Unavailable))[0]


def send_failure(result: str, channel: str, size: int) -> TidewalError:
    """The error for a message of `size` bytes that the client library answered with `result`."""
    outcome, kind = MESSAGE_RESULTS.get(result, (Outcome.UNKNOWN, Unavailable))
    if outcome is Outcome.UNKNOWN:
        return unknown_outcome(f"Pulsar answered {result} to an append to {channel}", channel)
    return kind(f"an append of {size} bytes to {channel} was refused: {result}", channel=channel, size=size)


def unknown_outcome(message: str, channel: str) -> Unavailable:
    """The error for appends that may be stored or not."""
    return Unavailable(message, channel=channel, outcome_unknown=True)


def call_failure(error: BaseException, doing: str, **fields: FieldValue) -> TidewalError:
    """The error for an exception of the client library while `doing` something that stored nothing."""
    if isinstance(error, TidewalError):
        return error
    name = type(error).__name__  # the library has an exception class for each of its results
    kind = CALL_RESULTS.get(name, Unavailable)
    return kind(f"{doing}: Pulsar answered {name} ({error})", **fields)


def web_outcome(answer: int | Exception) -> Outcome:
    """The outcome of a request to the web service, by the code of its answer or the exception instead of one."""
    if isinstance(answer, int):
        return WEB_ANSWERS.get(answer, Outcome.UNKNOWN)
    reason = getattr(answer, "reason", answer)  # of a URLError
    return Outcome.NEVER_SENT if isinstance(reason, _NOT_CONNECTED) else Outcome.UNKNOWN
