"""The records of a group's log: commands of its members."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast, get_type_hints

from ..errors import BadRecord
from ..log.record import DECODE_ERRORS
from ..log.wal import Append, From
from ..replicated.records import Event, typed, unknown_kind
from .coordinator_client import Ack


class ChannelIdentity(NamedTuple):
    """A channel, as a process found it."""

    incarnation: str  # the incarnation of the channel
    generation: int  # a later channel of the name has a higher one
    begin: bytes  # the position before its first entry
    end: bytes  # the position after its last one
    queue: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member, with the channels it asks for and those that were found. Assignment epochs and versions go on
    above `numbers_from`, so that a group that was dropped and made again repeats none."""

    member: str
    process: str
    channels: list[str]
    start: From
    session_timeout_s: float
    found: dict[str, ChannelIdentity]
    numbers_from: int = 0


@dataclass(frozen=True, slots=True)
class ProcessBeat:
    """A heartbeat of a process, numbered by it."""

    process: str
    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """End the membership."""

    member: str


@dataclass(frozen=True, slots=True)
class EvictMember:
    """Evict a member whose process was silent since that heartbeat; without effect after a later heartbeat."""

    member: str
    last_beat: int


@dataclass(frozen=True, slots=True)
class Release:
    """Take the channel from the member: it releases it, or its revocation has timed out. `epoch` is the assignment
    epoch."""

    member: str
    channel: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Output:
    """One entry to append elsewhere, and its number among those of its publisher, upward."""

    append: Append
    number: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Outputs of a commit that do not fit into its record; the commit refers to them by `batch`."""

    member: str
    batch: bytes
    outputs: list[Output]


@dataclass(frozen=True, slots=True)
class CommitOutputs:
    """Store the acknowledgements and decide that the outputs, with the staged ones of `batch`, are appended.

    `publisher` numbers the outputs; `after` is, for each of their channels, a place after which they will be.
    `staged` is the number of outputs of `batch`: a commit without all of them has no effect.
    """

    member: str
    acks: list[Ack]
    batch: bytes
    publisher: str
    outputs: list[Output]
    after: dict[str, bytes]
    staged: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """The outputs of these commits are in their channels."""

    commits: list[bytes]


@dataclass(frozen=True, slots=True)
class Seek:
    """Move the position in a channel that the member has. `epoch` is the assignment epoch."""

    member: str
    channel: str
    epoch: int
    upto: bytes


@dataclass(frozen=True, slots=True)
class SeekGroup:
    """Move the position in a channel that no member has."""

    channel: str
    found: ChannelIdentity
    upto: bytes


@dataclass(frozen=True, slots=True)
class ChannelsChanged:
    """Channels that were created, and known ones that were dropped."""

    found: dict[str, ChannelIdentity]
    gone: dict[str, str]  # incarnations by name


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop the group, which has no members: records after this have no effect."""


Command: TypeAlias = (
    Join
    | ProcessBeat
    | Leave
    | EvictMember
    | Release
    | Stage
    | CommitOutputs
    | Published
    | Seek
    | SeekGroup
    | ChannelsChanged
    | Drop
)

_KINDS: dict[str, type[Command]] = {
    kind.__name__: kind
    for kind in (
        *(Join, ProcessBeat, Leave, EvictMember, Release, Stage, CommitOutputs),
        *(Published, Seek, SeekGroup, ChannelsChanged, Drop),
    )
}


def event_of(token: bytes, command: Command) -> Event:
    """The event of a command. `token` identifies it for the caller that waits for its effect."""
    fields = {name: _plain(getattr(command, name)) for name in type(command).__slots__}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType, reportUnknownMemberType] -- slots of a dataclass are untyped
    return {"kind": type(command).__name__, "token": token, "fields": fields}


def command_of(event: Event) -> tuple[bytes, Command]:
    """The token and command of an event. Raises `BadRecord` for a malformed one, and for an unknown kind."""
    kind = event["kind"]
    if kind not in _KINDS:
        raise unknown_kind("log of a group", kind)
    try:
        readers = _READERS[kind]
        fields = _dict(event["fields"]).items()
        return typed(event["token"], bytes), _KINDS[kind](**{name: readers[name](value) for name, value in fields})
    except (*DECODE_ERRORS, LookupError) as error:
        raise BadRecord(f"malformed record {kind!r} of a group: {error!r}", reason="body") from error


def _plain(value: object) -> object:
    match value:
        case Output(append, number):
            return [append.channel, append.timestamp, bytes(append.payload), number]
        case From():
            return value.value
        case dict():
            return {key: _plain(each) for key, each in cast("dict[object, object]", value).items()}
        case list() | tuple():
            return [_plain(each) for each in cast("list[object]", value)]
        case _:
            return value


def outputs_to_plain(outputs: list[Output]) -> object:
    return _plain(outputs)


# ---- from the plain form: what a record says is of the types that its command has, or it is no command --------------

_Reader: TypeAlias = Callable[[Any], Any]


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", typed(value, list))


def _dict(value: Any) -> dict[Any, Any]:
    return cast("dict[Any, Any]", typed(value, dict))


def _of(kind: type[object]) -> _Reader:
    return lambda value: typed(value, kind)


def _list_of(read: _Reader) -> _Reader:
    return lambda value: [read(each) for each in _list(value)]


def _dict_of(read: _Reader) -> _Reader:
    return lambda value: {typed(key, str): read(each) for key, each in _dict(value).items()}


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"{value!r} is no duration")
    return value


def _identity(value: Any) -> ChannelIdentity:
    incarnation, generation, begin, end, queue = _list(value)
    return ChannelIdentity(
        typed(incarnation, str), typed(generation, int), typed(begin, bytes), typed(end, bytes), typed(queue, bool)
    )


def _output(value: Any) -> Output:
    channel, timestamp, payload, number = _list(value)
    return Output(Append(typed(channel, str), typed(payload, bytes), typed(timestamp, int)), typed(number, int))


outputs_from_plain: Callable[[Any], list[Output]] = _list_of(_output)

_BY_TYPE: dict[object, _Reader] = {
    str: _of(str),
    int: _of(int),
    bytes: _of(bytes),
    float: _seconds,
    From: From,
    ChannelIdentity: _identity,
    list[str]: _list_of(_of(str)),
    list[bytes]: _list_of(_of(bytes)),
    list[Ack]: _list_of(Ack.from_wire),
    list[Output]: outputs_from_plain,
    dict[str, str]: _dict_of(_of(str)),
    dict[str, bytes]: _dict_of(_of(bytes)),
    dict[str, ChannelIdentity]: _dict_of(_identity),
}
_READERS = {
    name: {field: _BY_TYPE[hint] for field, hint in get_type_hints(kind).items()} for name, kind in _KINDS.items()
}
