"""The client library's exceptions: their meaning for the outcome of a request, and their mapping to Tidewal's errors.

`outcome` says what an error tells about a request that changes something. The request was *never sent*, or *certainly
refused* (the broker refuses before it writes), or its outcome is *unknown*: that is every error that the tables do not
name. A broker that has written may still answer with an error: a leader that loses the leadership while it waits for
the other copies answers NOT_LEADER_OR_FOLLOWER for a batch that the next leader has.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from enum import Enum, auto

from aiokafka import errors as kafka_errors

from ...runtime.errors import ConfigError, InvalidRequest, TidewalError, Unavailable, Unsupported
from .bases import BrokerResponseError

Foreign: tuple[type[Exception], ...] = (kafka_errors.KafkaError, OSError, asyncio.TimeoutError)


class UnknownTopicId(BrokerResponseError):
    """The topic that was named by its id is not there (any more), or is not known to this broker yet. The library has
    no error for it."""

    errno = 100
    message = "UNKNOWN_TOPIC_ID"


class Outcome(Enum):
    """The outcome of a request that failed."""

    NEVER_SENT = auto()
    REFUSED = auto()
    UNKNOWN = auto()


class Operation(Enum):
    """The kind of change that a request makes."""

    APPEND = auto()  # Produce
    POSITION = auto()  # OffsetCommit
    COMMIT = auto()  # EndTxn
    ADMINISTRATION = auto()  # CreateTopics, DeleteTopics, DeleteRecords, AlterConfigs, DeleteGroups


# Errors of requests of which no byte was sent.
_NEVER_SENT: Mapping[type[BaseException], str] = {
    kafka_errors.NodeNotReadyError: "aiokafka, client.send: there is no connection; the only place that raises it",
    kafka_errors.StaleMetadata: "raised by this adapter for an unknown node, as aiokafka does, which catches it",
    kafka_errors.IncompatibleBrokerVersion: "aiokafka, Request.prepare: no version of the request fits the broker",
    kafka_errors.UnsupportedCodecError: "aiokafka, record builder: the package that compresses is missing",
}
_KAFKA_APIS = "KafkaApis: authorization and the existence of topics are checked before the request is handed on"
_VERSION = "KafkaApis, ApiVersions: the request was not read"
_VALIDATOR = "LogValidator and UnifiedLog.analyzeAndValidateRecords: the whole batch is checked before it is appended"
_PRODUCER_STATE = "ProducerStateManager, ProducerAppendInfo: numbers are checked before the batch is appended"
_GROUP_STATE = "GroupMetadata.validateOffsetCommit: members and generations are checked before records are written"
_LOADING = "group and transaction coordinators answer so before they look at a request"
_END_TRANSACTION = "TransactionCoordinator.endTransaction: checked before the decision is written"
_CONTROLLER = "ReplicationControlManager, ConfigurationControlManager: checked before a record is created"
# Answers that a broker gives before it writes anything. A produce request is answered after the append with
# NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID, KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT and
# NOT_ENOUGH_REPLICAS_AFTER_APPEND (DelayedProduce, Partition.checkEnoughReplicasReachOffset); coordinators, whose
# records are appended in the same way, make NOT_COORDINATOR and COORDINATOR_NOT_AVAILABLE of these, and a controller
# that is superseded answers NOT_CONTROLLER for what it has written.
_REFUSED: Mapping[Operation, Mapping[type[BaseException], str]] = {
    Operation.APPEND: {
        kafka_errors.CorruptRecordException: _VALIDATOR,
        kafka_errors.MessageSizeTooLargeError: _VALIDATOR,
        kafka_errors.RecordListTooLargeError: _VALIDATOR,
        kafka_errors.InvalidTimestampError: _VALIDATOR,
        kafka_errors.InvalidRequestError: _VALIDATOR,
        kafka_errors.UnsupportedForMessageFormatError: _VALIDATOR,
        kafka_errors.UnsupportedVersionError: _VERSION,
        kafka_errors.InvalidTopicError: "ReplicaManager.appendRecordsToLeader: internal topics are refused",
        kafka_errors.InvalidRequiredAcksError: "ReplicaManager.appendRecords: checked first",
        kafka_errors.NotEnoughReplicasError: "Partition.appendRecordsToLeader: copies are counted before the append",
        kafka_errors.TopicAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.ClusterAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.TransactionalIdAuthorizationFailed: _KAFKA_APIS,
        kafka_errors.OutOfOrderSequenceNumber: _PRODUCER_STATE,
        kafka_errors.UnknownProducerId: _PRODUCER_STATE,
        kafka_errors.InvalidProducerEpoch: _PRODUCER_STATE,
        kafka_errors.InvalidProducerIdMapping: _PRODUCER_STATE,
        kafka_errors.InvalidTxnState: _PRODUCER_STATE,
    },
    Operation.POSITION: {
        kafka_errors.UnknownTopicOrPartitionError: _KAFKA_APIS,
        kafka_errors.TopicAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.GroupAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.UnsupportedVersionError: _VERSION,
        kafka_errors.GroupLoadInProgressError: _LOADING,
        kafka_errors.OffsetMetadataTooLargeError: _GROUP_STATE,
        kafka_errors.InvalidCommitOffsetSizeError: "GroupMetadataManager: the records were too large to append",
        kafka_errors.InvalidGroupIdError: _GROUP_STATE,
        kafka_errors.IllegalGenerationError: _GROUP_STATE,
        kafka_errors.UnknownMemberIdError: _GROUP_STATE,
        kafka_errors.RebalanceInProgressError: _GROUP_STATE,
    },
    Operation.COMMIT: {
        kafka_errors.TransactionalIdAuthorizationFailed: _KAFKA_APIS,
        kafka_errors.UnsupportedVersionError: _VERSION,
        kafka_errors.GroupLoadInProgressError: _LOADING,
        kafka_errors.InvalidProducerEpoch: _END_TRANSACTION,
        kafka_errors.InvalidProducerIdMapping: _END_TRANSACTION,
        kafka_errors.InvalidTxnState: _END_TRANSACTION,
        kafka_errors.ConcurrentTransactions: _END_TRANSACTION,
    },
    Operation.ADMINISTRATION: {
        kafka_errors.TopicAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.ClusterAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.GroupAuthorizationFailedError: _KAFKA_APIS,
        kafka_errors.UnsupportedVersionError: _VERSION,
        kafka_errors.InvalidTopicError: _CONTROLLER,
        kafka_errors.InvalidPartitionsError: _CONTROLLER,
        kafka_errors.InvalidReplicationFactorError: _CONTROLLER,
        kafka_errors.InvalidReplicationAssignmentError: _CONTROLLER,
        kafka_errors.InvalidConfigurationError: _CONTROLLER,
        kafka_errors.InvalidRequestError: _CONTROLLER,
        kafka_errors.PolicyViolationError: _CONTROLLER,
        kafka_errors.OffsetOutOfRangeError: "Partition.deleteRecordsOnLeader: checked before anything is removed",
        kafka_errors.GroupLoadInProgressError: _LOADING,
        kafka_errors.InvalidGroupIdError: _GROUP_STATE,
        kafka_errors.NonEmptyGroup: _GROUP_STATE,
    },
}

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
_INVALID = (
    kafka_errors.InvalidTopicError,
    kafka_errors.InvalidConfigurationError,
    kafka_errors.InvalidPartitionsError,
    kafka_errors.InvalidRequestError,
    kafka_errors.InvalidTimestampError,
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.PolicyViolationError,
    kafka_errors.CorruptRecordException,
)
_SEQUENCE_LOST = (
    kafka_errors.OutOfOrderSequenceNumber,
    kafka_errors.UnknownProducerId,
    kafka_errors.InvalidProducerEpoch,
    kafka_errors.InvalidProducerIdMapping,
)


def outcome(error: BaseException, operation: Operation) -> Outcome:
    """The outcome of a request for `operation` that failed with `error`."""
    if type(error) in _NEVER_SENT:
        return Outcome.NEVER_SENT
    return Outcome.REFUSED if type(error) in _REFUSED[operation] else Outcome.UNKNOWN


def for_code(code: int) -> type[Exception]:
    """The error class for a code in an answer."""
    return UnknownTopicId if code == UnknownTopicId.errno else kafka_errors.for_code(code)


def topic_unknown(error: BaseException) -> bool:
    """Whether the error may mean that the topic is gone."""
    return isinstance(error, (UnknownTopicId, kafka_errors.UnknownTopicOrPartitionError))


def answered(error: BaseException) -> bool:
    """Whether a broker has finished the request, so that it cannot take effect later. The library raises the brokers'
    timeout error for its own time limit too, so that one does not count."""
    return isinstance(error, kafka_errors.BrokerResponseError) and type(error) is not kafka_errors.RequestTimedOutError


def final(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way."""
    return isinstance(error, (*_NOT_ALLOWED, *_TOO_OLD, *_INVALID))


def sequence_lost(error: BaseException) -> bool:
    """Whether the broker does not know the producer any more: the batch is not in the log, and a new producer id is
    needed."""
    return isinstance(error, _SEQUENCE_LOST)


def mapped(error: BaseException, what: str, *, outcome_unknown: bool = False) -> TidewalError:
    """Tidewal's error for an error of the client library; `what` completes "Kafka could not"."""
    reason = str(error).rstrip(".") or type(error).__name__
    if outcome_unknown:
        return Unavailable(f"whether Kafka could {what} is not known: {reason}", outcome_unknown=True)
    if isinstance(error, _NOT_ALLOWED):
        return ConfigError(f"Kafka does not allow this client to {what}: {reason}", key="kafka")
    if isinstance(error, _TOO_OLD):
        return Unsupported(f"this Kafka is too old to {what}: {reason}", capability="protocol")
    if isinstance(error, kafka_errors.UnsupportedCodecError):
        return Unsupported(f"to {what} needs a package that is missing: {reason}", capability="compression")
    if isinstance(error, _INVALID):
        return InvalidRequest(f"Kafka refused to {what}: {reason}")
    if isinstance(error, kafka_errors.InvalidReplicationFactorError):  # not final: brokers register one by one
        return Unavailable(
            f"Kafka could not {what}, for a topic is to have more copies than there are brokers to hold them: {reason}."
            " Start the other brokers, or ask for fewer copies: `replication_factor`, where that is -1 the brokers'"
            " `default.replication.factor`"
        )
    return Unavailable(f"Kafka could not {what}: {reason}")


def never_sent(error: TidewalError) -> TidewalError:
    """The same error without `outcome_unknown`, for appends that waited behind the failed request."""
    return type(error)(error.message, **{name: at for name, at in error.fields.items() if name != "outcome_unknown"})
