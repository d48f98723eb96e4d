"""Every error Tidewal raises on purpose, named by what the caller can do about it.

`TidewalError.retryable` answers the first question of every caller: may the same call succeed later, unchanged?
Errors cross processes and channels by class name and fields (`to_wire`, `from_wire`), so the one that reaches a client
is the one the server raised. Messages say what happened and what to do; fields carry what a program needs (channel,
position, limit), and are attributes of the error too, with their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeAlias, TypeVar, cast, overload

FieldValue: TypeAlias = str | int | float | bytes | bool | None

_V = TypeVar("_V", str, int, float, bytes, bool)

_by_code: dict[str, type[TidewalError]] = {}


class _Named(Generic[_V]):
    """A field of an error as an attribute with a type: None where this error does not have it."""

    def __set_name__(self, owner: type[TidewalError], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, error: None, owner: type[TidewalError]) -> Self: ...

    @overload
    def __get__(self, error: TidewalError, owner: type[TidewalError]) -> _V | None: ...

    def __get__(self, error: TidewalError | None, owner: type[TidewalError]) -> Self | _V | None:
        return self if error is None else cast("_V | None", error.fields.get(self._name))


class TidewalError(Exception):
    """The base of all errors. `fields` holds the details of the case. Those that the description of a class names are
    attributes of each of its errors, None where a case does not have them; so is `outcome_unknown`, which is True where
    the request may have had its effect all the same. Any other field can be read as an attribute where it is there."""

    retryable: ClassVar[bool] = False

    outcome_unknown: _Named[bool] = _Named()

    def __init__(self, message: str, **fields: FieldValue) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, FieldValue] = fields

    def __init_subclass__(cls) -> None:
        _by_code[cls.__name__] = cls

    if not TYPE_CHECKING:  # to a checker, which would find no misspelt name

        def __getattr__(self, name: str) -> FieldValue:
            try:
                return self.__dict__["fields"][name]
            except KeyError:
                raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self).__name__, self.message, self.fields)


# ---- try again, perhaps after a pause -------------------------------------------------------------------------------


class Overloaded(TidewalError):
    """A named limit (`limit`) is reached; nothing of the request was kept. Retry after a pause."""

    retryable = True
    limit: _Named[str] = _Named()


class DiskPressure(Overloaded):
    """Free space is below the watermark: data is refused, all else goes on. Free space, or enlarge the disk."""


class Unavailable(TidewalError):
    """The peer or backend does not answer now; the request had no effect. Retry."""

    retryable = True


class DeadlineExceeded(TidewalError):
    """No answer within the deadline; a write may or may not have happened. Retry with the same producer identity."""

    retryable = True


class AckTimeout(TidewalError):
    """A handler of a consumer group held what it got for longer than its retry policy allows (`timeout_s`): the attempt
    counts, and what it made does not. A handler that needs longer extends its time."""

    timeout_s: _Named[float] = _Named()


class Lagging(TidewalError):
    """The reader is too far behind the log to answer at the asked freshness (`channel`, `lag_s`)."""

    retryable = True
    channel: _Named[str] = _Named()
    lag_s: _Named[float] = _Named()


# ---- the log's own answers ------------------------------------------------------------------------------------------


class Closed(TidewalError):
    """The object was closed; open a new one."""


class Fenced(TidewalError):
    """A newer owner holds the channel (`channel`, `term`): nothing this owner writes counts any more. Stop."""

    channel: _Named[str] = _Named()
    term: _Named[int] = _Named()


class PreconditionFailed(TidewalError):
    """What the decision rested on holds no more: another one came before it in the log. It had no effect. Read the
    state, and decide again."""

    retryable = True


class OutcomeUnknown(TidewalError):
    """Whether the write happened is not known any more (its producer entry expired), or not all of its channels have
    it, as where it would come behind a later write of its producer. Read before writing again."""


class PositionLost(TidewalError):
    """Retention removed the position, or it never existed (`channel`, and the ids `requested` and `first_available`).
    Choose where to go on."""

    channel: _Named[str] = _Named()
    requested: _Named[bytes] = _Named()
    first_available: _Named[bytes] = _Named()


class WatermarkStalled(TidewalError):
    """The time of a channel (`channel`, `time`) has not moved for `waited_s` while a reader waited for it: its owner
    announces nothing, or its announcements do not arrive. Nothing is lost: iterate again, and check the owner."""

    retryable = True
    channel: _Named[str] = _Named()
    time: _Named[int] = _Named()
    waited_s: _Named[float] = _Named()


class PositionMismatch(TidewalError):
    """The position belongs to another backend or channel (`expected`, `found`)."""

    expected: _Named[str] = _Named()
    found: _Named[str] = _Named()


class Moved(TidewalError):
    """The log was migrated to another one (`url`, without credentials), or a replica of it was promoted. Use that one,
    with the credentials for it in the settings; the command migrate translates saved positions."""

    url: _Named[str] = _Named()


class ReplicaReadOnly(TidewalError):
    """The log is a replica of another one (`source`, a URL without credentials), and only its replicator writes it.
    Open it with `read_only=True`, or promote it."""

    source: _Named[str] = _Named()


class Promoted(TidewalError):
    """The replica was promoted and is in use by itself: nothing is replicated to it any more. Take an empty log as the
    target of the next replication."""


class GroupFilterMismatch(TidewalError):
    """A member of a group has another filter than the group (`where`, None for everything; `version`) in `channel`: it
    moves nothing. Join with the group's filter, or change that by change_group_filter."""

    group: _Named[str] = _Named()
    channel: _Named[str] = _Named()
    where: _Named[str] = _Named()
    version: _Named[int] = _Named()


class ChannelNotFound(TidewalError):
    """No such channel (`channel`). Create it first, or check the name."""

    channel: _Named[str] = _Named()


class GroupNotFound(TidewalError):
    """No such consumer group (`group`): it has no position and no members. Check the name."""

    group: _Named[str] = _Named()


class ChannelExists(TidewalError):
    """The channel exists with another policy (`channel`)."""

    channel: _Named[str] = _Named()


class OrderViolated(TidewalError):
    """A record came behind a time that its channel had announced already (`channel`, `ts`): its owner broke its
    promise."""

    channel: _Named[str] = _Named()
    ts: _Named[int] = _Named()


class MessageTooLarge(TidewalError):
    """One message is over the backend's limit (`size`, `limit`, bytes); nothing was sent."""

    size: _Named[int] = _Named()
    limit: _Named[int] = _Named()


class JournalFailed(TidewalError):
    """A write or sync of the journal failed: it takes no more writes. Reopen it; recovery decides what survived."""


class DiskFull(JournalFailed):
    """The device had no space for a write. Free space, then reopen."""


class CorruptLog(TidewalError):
    """Stored data fails its checksum (`path`, `offset`): what lies before it is intact and readable. Or another tool
    has changed the rows of a table (`path`, `version`, `operation`): go back to the version before."""

    path: _Named[str] = _Named()
    offset: _Named[int] = _Named()
    version: _Named[int] = _Named()
    operation: _Named[str] = _Named()


class IncompleteLog(TidewalError):
    """The directory is a copy that `tidewal salvage` did not finish (`path`). Remove it, and salvage again."""

    path: _Named[str] = _Named()


class FormatTooNew(TidewalError):
    """What is stored was written by a newer Tidewal, in a format of another version (`found`, `supported`). Upgrade
    this one: it neither reads nor changes what it does not know."""

    found: _Named[int] = _Named()
    supported: _Named[int] = _Named()


class FormatTooOld(TidewalError):
    """The log has a feature level (`found`) below those that this Tidewal knows (`supported`, the lowest). Let a
    version between raise it first."""

    found: _Named[int] = _Named()
    supported: _Named[int] = _Named()


class DirectoryInUse(TidewalError):
    """Another process owns the directory (`path`, `pid`)."""

    path: _Named[str] = _Named()
    pid: _Named[int] = _Named()


class DirectoryUnwritable(TidewalError):
    """The directory, or a file in it, cannot be created, read or written (`path`). Check its permissions and mount."""

    path: _Named[str] = _Named()


# ---- what was asked for is wrong ------------------------------------------------------------------------------------


class InvalidRequest(TidewalError):
    """The request cannot be served as it stands; the message says what to change. Where one argument of a call is
    wrong, `argument` is its name."""

    argument: _Named[str] = _Named()


class ReadOnly(InvalidRequest):
    """The log was opened with `read_only=True`, and the call writes (`call`): nothing was sent."""

    call: _Named[str] = _Named()


class InvalidRows(InvalidRequest):
    """Rows do not fit the collection: a null key, NaN, a wrong type or vector length. `column` is the one that does not
    fit, None where all rows are wrong; `row` the first row that does not, counted from 0 in what was written, None
    where a column does not fit as a whole."""

    column: _Named[str] = _Named()
    row: _Named[int] = _Named()


class InvalidFilter(InvalidRequest):
    """The filter expression does not parse or does not fit the schema (`position`, in characters), or has a parameter
    without a fitting value (`parameter`, its name)."""

    position: _Named[int] = _Named()
    parameter: _Named[str] = _Named()


class InvalidSchema(InvalidRequest):
    """The schema of a collection cannot be used."""


class CollectionNotFound(InvalidRequest):
    """No such collection (`collection`)."""

    collection: _Named[str] = _Named()


class CollectionNotLoaded(InvalidRequest):
    """The collection is released: no QueryNode has its rows in memory (`collection`)."""

    collection: _Named[str] = _Named()


class CollectionExists(InvalidRequest):
    """A collection of that name exists with another schema or shard count (`collection`)."""

    collection: _Named[str] = _Named()


class TopicNotFound(InvalidRequest):
    """No such topic (`topic`), or it was dropped. Check the name, or create it."""

    topic: _Named[str] = _Named()


class TopicExists(InvalidRequest):
    """A topic of that name exists with other partitions or another retention (`topic`)."""

    topic: _Named[str] = _Named()


class TopicEpochEnded(InvalidRequest):
    """The topic (`topic`) has other partitions by now than those that messages were sent to. What was for the pchannels
    in `written`, with commas between, is in the log; the rest never will be under that number. A client sends it to the
    new partitions."""

    topic: _Named[str] = _Named()
    written: _Named[str] = _Named()

    @property
    def written_channels(self) -> frozenset[str]:
        """The pchannels in `written`."""
        return frozenset((self.written or "").split(",")) - {""}


class ConfigError(TidewalError):
    """A setting is unknown, malformed or contradicts another (`key`)."""

    key: _Named[str] = _Named()


class WrongCluster(ConfigError):
    """The log belongs to another cluster than the settings say (`found`, its id), or that has another secret. `key` is
    the setting that does not fit: set it to the cluster's, or use the log, or the prefix, of the cluster that is
    meant."""

    found: _Named[str] = _Named()


class BadRecord(TidewalError):
    """A record failed its length, checksum, version or content check (`reason`). It is dead-lettered, never fatal."""

    reason: _Named[str] = _Named()


class MemoryLimitExceeded(TidewalError):
    """A named memory limit (`limit`) would be exceeded; raise it or hold less."""

    limit: _Named[str] = _Named()


class Unsupported(TidewalError):
    """The backend cannot do this at all (`capability`)."""

    capability: _Named[str] = _Named()


# ---- actors ---------------------------------------------------------------------------------------------------------


class ActorStopped(TidewalError):
    """The actor has stopped (`actor`); the message will not be answered."""

    actor: _Named[str] = _Named()


class HandlerFailed(TidewalError):
    """The actor's handler raised an error that is not Tidewal's own (`actor`, `error`)."""

    actor: _Named[str] = _Named()
    error: _Named[str] = _Named()


def check_version(what: str, found: object, supported: int) -> None:
    """Raise unless `found`, the version of a stored or sent form named `what`, is known: versions 1 to `supported` are.
    `FormatTooNew` for a later one, `BadRecord` for what is no version."""
    if type(found) is not int or found < 1:
        raise BadRecord(f"{what} of version {found!r}, known are 1 to {supported}", reason="version")
    if found > supported:
        raise FormatTooNew(
            f"{what} of version {found}, this Tidewal knows up to {supported}: upgrade",
            found=found,
            supported=supported,
        )


def of_unknown_outcome(error: TidewalError) -> TidewalError:
    """The same error, with the field `outcome_unknown`: the request may have had its effect, or may still have it."""
    if error.fields.get("outcome_unknown"):
        return error
    return _rebuild(type(error).__name__, error.message, {**error.fields, "outcome_unknown": True})


def to_wire(error: BaseException) -> dict[str, object]:
    """The wire form of `error`, a map that msgpack can encode; a foreign exception becomes `HandlerFailed`."""
    if not isinstance(error, TidewalError):
        error = HandlerFailed(f"{type(error).__name__}: {error}", error=type(error).__name__, outcome_unknown=True)
    return {"code": type(error).__name__, "message": error.message, "fields": error.fields}


def from_wire(wire: Mapping[str, object]) -> TidewalError:
    """The error of a wire form that `to_wire` returned; a class this version does not know becomes plain
    `TidewalError`. Accepts any map that another process may have sent: no field of it is taken for an argument."""
    fields = wire.get("fields")
    known = cast("dict[object, FieldValue]", fields) if isinstance(fields, dict) else {}
    return _rebuild(str(wire.get("code")), str(wire.get("message")), {str(k): v for k, v in known.items()})


def _rebuild(code: str, message: str, fields: Mapping[str, FieldValue]) -> TidewalError:
    error = _by_code.get(code, TidewalError)(message)
    error.fields.update(fields)
    return error
