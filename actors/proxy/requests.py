"""The parameters of the Proxy's methods."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from ...runtime.groups.coordinator_client import GroupAcks
from ...runtime.replicated.records import typed
from ..requests import Number
from ..transactions.buffer import MESSAGES, ROWS, ParticipantWire


def _participants(wire: Any) -> list[ParticipantWire]:
    found = [ParticipantWire(kind, typed(name, str), *map(_number, rest)) for kind, name, *rest in wire]
    if any(each.kind not in (ROWS, MESSAGES) for each in found):
        raise ValueError(f"a part is of {ROWS} or {MESSAGES}")
    return found


def _number(value: Any) -> int:
    if typed(value, int) < 0:
        raise ValueError("a negative number")
    return value


class WriteParams(TypedDict):
    """Rows, which are in the body, for a collection as the client knows it. A repeated write has the same
    `producer` and `pseq`; `digest` says whether it has the same rows. `after` is the number of the client's last write
    before it whose outcome it does not know. The client waits `deadline_s` for the answer."""

    collection: str
    id: Number
    schema_version: Number
    producer: str
    pseq: Number
    digest: NotRequired[int]
    after: NotRequired[Number]
    deadline_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class SendParams(TypedDict):
    """Messages for an epoch of a topic, as the client knows it; they are in the body (`topics/messages.py`). With
    `due_ms`, ms since 1970, or `after_ms`, from their arrival on, they are due then, and of one partition. The rest as
    for `WriteParams`."""

    topic: str
    id: Number
    epoch: Number
    due_ms: NotRequired[Number]
    after_ms: NotRequired[Number]
    producer: str
    pseq: Number
    after: NotRequired[Number]
    deadline_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class CancelParams(TypedDict):
    """The id of a delayed message (`delays/delayed.py`), and the pchannel of its partition. The rest as for
    `SendParams`."""

    topic: str
    id: Number
    epoch: Number
    channel: str
    message: bytes
    producer: str
    pseq: Number
    after: NotRequired[Number]
    deadline_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class FencePositionParams(TypedDict):
    """The position of a group in a pchannel of a topic, for the member that has it and asks."""

    group: str
    channel: str


class CommitParams(TypedDict):
    """A transaction: for each collection and topic what is in the body (`ParticipantWire`), one after another, and what
    of a group is acknowledged in the same commit. The rest as for `WriteParams`."""

    parts: Annotated[list[Any], PlainValidator(_participants)]
    acks: NotRequired[Annotated[GroupAcks, PlainValidator(GroupAcks.from_wire)]]
    producer: str
    pseq: Number
    after: NotRequired[Number]
    deadline_s: NotRequired[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
