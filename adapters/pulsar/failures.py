"""What the client library and the web service answer, in Tidewal's errors."""

from __future__ import annotations

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

# What is certain about a message that was answered so: it was not stored. Of all else the outcome is unknown.
_REFUSED: dict[str, type[TidewalError]] = {
    "MessageTooBig": MessageTooLarge,
    "InvalidMessage": InvalidRequest,
    "ProducerQueueIsFull": Overloaded,
    "MemoryBufferIsFull": Overloaded,
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
_UNKNOWN_WHEN_SENT = frozenset({"AlreadyClosed", "TopicNotFound"})  # refused at first, unknown once it was on its way


def send_failure(result: str, channel: str, size: int) -> TidewalError:
    """The error of a message that Pulsar answered with `result`."""
    kind = None if result in _UNKNOWN_WHEN_SENT else _REFUSED.get(result)
    if kind is None:
        return unknown_outcome(f"Pulsar answered {result} to an append to {channel}", channel)
    return kind(f"Pulsar refused an append of {size} bytes to {channel}: {result}", channel=channel, size=size)


def unknown_outcome(message: str, channel: str) -> Unavailable:
    """For appends that may be stored or not."""
    return Unavailable(message, channel=channel, outcome_unknown=True)


def call_failure(error: BaseException, doing: str, **fields: FieldValue) -> TidewalError:
    """The error for an exception of the client library while `doing` something that stored nothing."""
    if isinstance(error, TidewalError):
        return error
    name = type(error).__name__  # the library has an exception class for each of its results
    kind = _REFUSED.get(name, Unavailable)
    return kind(f"{doing}: Pulsar answered {name} ({error})", **fields)
