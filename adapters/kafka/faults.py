"""What becomes of the client library's exceptions: one place that knows them all."""

from __future__ import annotations

import asyncio
import ssl

from aiokafka import errors as kafka_errors

from ...runtime.errors import ConfigError, InvalidRequest, TidewalError, Unavailable, Unsupported

Foreign = (kafka_errors.KafkaError, OSError, asyncio.TimeoutError)

_NOT_ALLOWED = (
    ssl.SSLCertVerificationError,
    kafka_errors.AuthenticationFailedError,
    kafka_errors.AuthenticationMethodNotSupported,
    kafka_errors.SaslAuthenticationFailed,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.TransactionalIdAuthorizationFailed,
)
_TOO_OLD = (
    kafka_errors.IncompatibleBrokerVersion,
    kafka_errors.UnsupportedVersionError,
    kafka_errors.UnsupportedForMessageFormatError,
)
_REFUSED = (
    kafka_errors.InvalidTopicError,
    kafka_errors.InvalidConfigurationError,
    kafka_errors.InvalidReplicationFactorError,
    kafka_errors.InvalidPartitionsError,
    kafka_errors.InvalidRequestError,
    kafka_errors.InvalidTimestampError,
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.PolicyViolationError,
    kafka_errors.CorruptRecordException,
)
# After these the records of a request are certainly not in the log.
_NOT_WRITTEN = (
    kafka_errors.NodeNotReadyError,
    kafka_errors.StaleMetadata,
    kafka_errors.UnknownTopicOrPartitionError,
    kafka_errors.LeaderNotAvailableError,
    kafka_errors.NotLeaderForPartitionError,
    kafka_errors.NotEnoughReplicasError,
)
_SEQUENCE_LOST = (
    kafka_errors.OutOfOrderSequenceNumber,
    kafka_errors.UnknownProducerId,
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidProducerIdMapping,
)


def final(error: BaseException) -> bool:
    """Whether asking again would be answered the same."""
    return isinstance(error, (*_NOT_ALLOWED, *_TOO_OLD, *_REFUSED))


def not_written(error: BaseException) -> bool:
    """Whether a request that failed so has certainly left nothing in the log."""
    return isinstance(error, _NOT_WRITTEN) or final(error)


def sequence_lost(error: BaseException) -> bool:
    """Whether the broker does not know the producer any more: what was sent is not in the log, and another producer
    has to be made."""
    return isinstance(error, _SEQUENCE_LOST)


def mapped(error: BaseException, what: str, *, outcome_unknown: bool = False) -> TidewalError:
    """The error to raise for one of the client's while doing `what`."""
    reason = str(error) or type(error).__name__
    if outcome_unknown:
        return Unavailable(f"whether Kafka could {what} is not known: {reason}", outcome_unknown=True)
    if isinstance(error, _NOT_ALLOWED):
        return ConfigError(f"Kafka does not let us {what}: {reason}", key="kafka")
    if isinstance(error, _TOO_OLD):
        return Unsupported(f"this Kafka is too old to {what}: {reason}", capability="protocol")
    if isinstance(error, kafka_errors.UnsupportedCodecError):
        return Unsupported(f"to {what} takes a package that is missing: {reason}", capability="compression")
    if isinstance(error, _REFUSED):
        return InvalidRequest(f"Kafka refused to {what}: {reason}")
    return Unavailable(f"Kafka could not {what}: {reason}")
