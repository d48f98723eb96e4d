"""What becomes of the client library's exceptions: one place that knows them all.

`outcome` is the table of what an error says about a request that changes something. A request was *never sent*, or
*certainly refused* (the broker decides so before it writes), or its outcome is *unknown*: that is whatever the table
does not name. A broker that has written may still answer with an error: a leader that is deposed while it waits for
the other copies says NOT_LEADER_OR_FOLLOWER of a batch that the next leader has.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from enum import Enum, auto

from aiokafka import errors as kafka_errors

from ...runtime.errors import ConfigError, InvalidRequest, TidewalError, Unavailable, Unsupported

Foreign = (kafka_errors.KafkaError, OSError, asyncio.TimeoutError)


class UnknownTopicId(kafka_errors.BrokerResponseError):
    """The topic that was named by its id is not there (any more), or is not known to this broker yet. The library has
    no error for it."""

    errno = 100
    message = "UNKNOWN_TOPIC_ID"


class Outcome(Enum):
    """What has become of a request that failed."""

    NEVER_SENT = auto()
    REFUSED = auto()
    UNKNOWN = auto()


class Operation(Enum):
    """What a request would have changed."""

    APPEND = auto()  # Produce
    POSITION = auto()  # OffsetCommit
    COMMIT = auto()  # EndTxn
    ADMINISTRATION = auto()  # CreateTopics, DeleteTopics, DeleteRecords, AlterConfigs, DeleteGroups


# No byte of the request has left this process.
_NEVER_SENT: Mapping[type[BaseException], str] = {
    kafka_errors.NodeNotReadyError: "aiokafka, client.send: there is no connection; the only place that raises it",
    kafka_errors.StaleMetadata: "ours, for a node that is not known; aiokafka has it for the same, and catches it",
    kafka_errors.IncompatibleBrokerVersion: "aiokafka, Request.prepare: no version of the request fits the broker",
    kafka_errors.UnsupportedCodecError: "aiokafka, record builder: the package that compresses is missing",
}
_KAFKA_APIS = "KafkaApis: who may do what, and which topics there are, is looked at before the request is handed on"
_VERSION = "KafkaApis, ApiVersions: the request was not read"
_VALIDATOR = "LogValidator and UnifiedLog.analyzeAndValidateRecords: the whole batch is looked at before it is appended"
_PRODUCER_STATE = "ProducerStateManager, ProducerAppendInfo: numbers are checked before the batch is appended"
_GROUP_STATE = "GroupMetadata.validateOffsetCommit: members and generations are checked before records are written"
_LOADING = "group and transaction coordinators answer so before they look at a request"
_END_TRANSACTION = "TransactionCoordinator.endTransaction: checked before the decision is written"
_CONTROLLER = "ReplicationControlManager, ConfigurationControlManager: checked before a record is made"
# Answers that a broker gives before it writes anything. A produce request is answered after the append with
# NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION, UNKNOWN_TOPIC_ID, KAFKA_STORAGE_ERROR, REQUEST_TIMED_OUT and
# NOT_ENOUGH_REPLICAS_AFTER_APPEND (DelayedProduce, Partition.checkEnoughReplicasReachOffset); coordinators, whose
# records are appended in the same way, make NOT_COORDINATOR and COORDINATOR_NOT_AVAILABLE of these, and a controller
# that is deposed answers NOT_CONTROLLER for what it has written.
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
        kafka_errors.InvalidRequiredAcksError: "ReplicaManager.appendRecords: looked at first",
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
    """What has become of a request that failed so."""
    if type(error) in _NEVER_SENT:
        return Outcome.NEVER_SENT
    return Outcome.REFUSED if type(error) in _REFUSED[operation] else Outcome.UNKNOWN


def for_code(code: int) -> type[kafka_errors.BrokerResponseError]:
    """The error that an answer's code stands for."""
    return UnknownTopicId if code == UnknownTopicId.errno else kafka_errors.for_code(code)


def topic_unknown(error: BaseException) -> bool:
    """Whether the topic may be gone."""
    return isinstance(error, (UnknownTopicId, kafka_errors.UnknownTopicOrPartitionError))


def answered(error: BaseException) -> bool:
    """Whether a broker is done with the request: it does nothing with it later. The library names its own time limit
    as brokers name theirs."""
    return isinstance(error, kafka_errors.BrokerResponseError) and type(error) is not kafka_errors.RequestTimedOutError


def final(error: BaseException) -> bool:
    """Whether asking again would be answered the same."""
    return isinstance(error, (*_NOT_ALLOWED, *_TOO_OLD, *_INVALID))


def sequence_lost(error: BaseException) -> bool:
    """Whether the broker does not know the producer any more: what was sent is not in the log, and another producer
    has to be made."""
    return isinstance(error, _SEQUENCE_LOST)


def mapped(error: BaseException, what: str, *, outcome_unknown: bool = False) -> TidewalError:
    """The error to raise for one of the client's while doing `what`."""
    reason = str(error).rstrip(".") or type(error).__name__
    if outcome_unknown:
        return Unavailable(f"whether Kafka could {what} is not known: {reason}", outcome_unknown=True)
    if isinstance(error, _NOT_ALLOWED):
        return ConfigError(f"Kafka does not let us {what}: {reason}", key="kafka")
    if isinstance(error, _TOO_OLD):
        return Unsupported(f"this Kafka is too old to {what}: {reason}", capability="protocol")
    if isinstance(error, kafka_errors.UnsupportedCodecError):
        return Unsupported(f"to {what} takes a package that is missing: {reason}", capability="compression")
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
    """The same error, of what waited behind a request that failed so."""
    return type(error)(error.message, **{name: at for name, at in error.fields.items() if name != "outcome_unknown"})
