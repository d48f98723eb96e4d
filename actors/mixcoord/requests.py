"""The parameters of what the coordinator can be asked."""

from __future__ import annotations

from typing import Annotated, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict

from ...runtime.schema import CollectionSchema
from ..requests import Number


class CreateParams(TypedDict):
    """A collection to be made."""

    schema: Annotated[CollectionSchema, PlainValidator(CollectionSchema.from_wire)]
    shards: int


class DropParams(TypedDict):
    """The id of a collection: a later one of its name is not meant."""

    id: Number


class RegisterParams(TypedDict):
    """A node that asks for channels; `used` is the highest timestamp that it has given out, 0 where it goes on."""

    node: str
    used: NotRequired[Number]


class RenewParams(TypedDict):
    """A node that goes on, or lets go with `limit`; from `checkpoints` on its successor must read."""

    node: str
    checkpoints: dict[str, bytes]
    limit: NotRequired[Number]
