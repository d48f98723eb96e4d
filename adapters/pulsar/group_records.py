"""What is written into a group's log: commands of its members, and pictures of the state that they make together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import msgpack

from ...runtime.groups.link import Ack
from ...runtime.wal import Append, From

FORMAT = 1


class Found(NamedTuple):
    """A channel, as whoever looked found it."""

    made: str  # which channel of that name
    ledger: int  # its latest; a later channel of the name has higher ones
    begin: bytes  # the position before its first entry
    end: bytes  # the position behind its last one
    queue: bool


@dataclass(frozen=True, slots=True)
class Join:
    """Become a member, with what it asks for and what of that was found."""

    member: str
    process: str
    channels: list[str]
    start: From
    session_timeout_s: float
    found: dict[str, Found]


@dataclass(frozen=True, slots=True)
class Beat:
    """A process lives. It numbers its beats."""

    process: str
    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    member: str


@dataclass(frozen=True, slots=True)
class Expel:
    """Somebody has not heard of the process of this member since that beat; one that came meanwhile saves it."""

    member: str
    last_beat: int


@dataclass(frozen=True, slots=True)
class Release:
    """Take the channel from the member: it lets go of it, or has kept for too long what was wanted back."""

    member: str
    channel: str
    lease: int


@dataclass(frozen=True, slots=True)
class Output:
    """One entry to append elsewhere, and its number among those of its publisher, upward."""

    append: Append
    number: int


@dataclass(frozen=True, slots=True)
class Stage:
    """Outputs of a commit that has more than fit into one record; the commit names it by its `batch`."""

    member: str
    batch: bytes
    outputs: list[Output]


@dataclass(frozen=True, slots=True)
class Commit:
    """Store what is done and decide that the outputs, with those of `batch`, are appended.

    `publisher` numbers the outputs; `after` says for each of their channels a place behind which they will be.
    `staged` is the number of outputs of `batch`: a commit that has not all of them does not count.
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
    """Move the position of a channel that the member has."""

    member: str
    channel: str
    lease: int
    upto: bytes


@dataclass(frozen=True, slots=True)
class SeekGroup:
    """Move the position of a channel that no member has."""

    channel: str
    found: Found
    upto: bytes


@dataclass(frozen=True, slots=True)
class Channels:
    """Channels that came, and which of those that are known went."""

    found: dict[str, Found]
    gone: dict[str, str]  # by name, which one


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the group, which has no members: nothing behind this counts."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The state behind the record with the id `base`; b"" and an empty state where the log begins."""

    base: bytes
    state: dict[str, Any]


Command: TypeAlias = (
    Join | Beat | Leave | Expel | Release | Stage | Commit | Published | Seek | SeekGroup | Channels | Drop | Picture
)

_KINDS: dict[str, type[Command]] = {
    kind.__name__: kind
    for kind in (
        *(Join, Beat, Leave, Expel, Release, Stage, Commit),
        *(Published, Seek, SeekGroup, Channels, Drop, Picture),
    )
}


def encode_record(token: bytes, command: Command) -> bytes:
    """`token` names the record for whoever waits for what becomes of it."""
    fields = {name: _plain(getattr(command, name)) for name in type(command).__slots__}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType, reportUnknownMemberType] -- slots of a dataclass are untyped
    return cast(bytes, msgpack.packb([FORMAT, type(command).__name__, token, fields]))


def decode_record(payload: bytes | memoryview) -> tuple[bytes, Command] | None:
    """None for what is no record: others may write to the topic."""
    try:
        record = cast("tuple[int, str, bytes, dict[str, Any]]", msgpack.unpackb(payload, strict_map_key=False))
        format, name, token, fields = record
        if format != FORMAT:
            return None
        return token, _KINDS[name](**{field: _from_plain(field, value) for field, value in fields.items()})
    except (ValueError, TypeError, KeyError, RecursionError, MemoryError, msgpack.UnpackException):
        return None


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


def _from_plain(field: str, value: Any) -> Any:
    match field:
        case "found":
            if isinstance(value, dict):
                return {name: Found(*each) for name, each in cast("dict[str, list[Any]]", value).items()}
            return Found(*value)
        case "outputs":
            return [Output(Append(name, payload, timestamp), number) for name, timestamp, payload, number in value]
        case "acks":
            return [Ack(channel, lease, upto, tuple(ids)) for channel, lease, upto, ids in value]
        case "start":
            return From(value)
        case _:
            return value


def outputs_to_plain(outputs: list[Output]) -> object:
    return _plain(outputs)


def outputs_from_plain(value: Any) -> list[Output]:
    return _from_plain("outputs", value)
