"""The parameters of the coordinator's methods."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator
from typing_extensions import TypedDict

from ...runtime.rows.schema import CollectionSchema
from ..requests import Number


class CreateParams(TypedDict):
    """A collection to be created."""

    schema: Annotated[CollectionSchema, PlainValidator(CollectionSchema.from_wire)]
    shards: int


class DropParams(TypedDict):
    """The id of a collection, which a later one of its name does not have."""

    id: Number


class CordonParams(TypedDict):
    """A node, by name or incarnation, and what it is to be: "cordoned", "drained", or "" for as others."""

    node: str
    state: Literal["cordoned", "drained", ""]


class MoveParams(TypedDict):
    """A pchannel, and a node by name or incarnation; "" for none."""

    channel: str
    node: str


class BalanceParams(TypedDict):
    """Whether channels are to move for balance."""

    on: bool
