"""The parameters of the coordinator's methods."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field, PlainValidator
from typing_extensions import TypedDict

from ...runtime.rows.schema import CollectionSchema
from ..requests import Number

MAX_REPLICAS = 1_024


class CreateParams(TypedDict):
    """A collection to be created. Without `replicas`, as the leader's settings say."""

    schema: Annotated[CollectionSchema, PlainValidator(CollectionSchema.from_wire)]
    shards: int
    replicas: NotRequired[Annotated[int, Field(ge=0, le=MAX_REPLICAS)] | None]


class LoadParams(TypedDict):
    """A collection, and how many QueryNodes are to have it. Without that as many as now; of a released one, as the
    leader's settings say."""

    collection: str
    replicas: NotRequired[Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None]


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


class MigrateParams(TypedDict):
    """The URL, without credentials, of the log to which that of the node goes."""

    target: str  # `to` names the node that is to answer


class BalanceParams(TypedDict):
    """Whether channels are to move for balance."""

    on: bool


class CreateTopicParams(TypedDict):
    """A topic to be created, with the retention of each partition's channel; None keeps everything."""

    name: str
    partitions: int
    retention_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    retention_bytes: Number | None


class AlterTopicParams(TypedDict):
    """The id of a topic, the number of the epoch that is its last, and how many partitions the next one is to have;
    `hashed` as for `Client.alter_topic`."""

    id: Number
    epoch: Number
    partitions: int
    hashed: bool


class TopicIdParams(TypedDict):
    """The id of a topic, which a later one of its name does not have."""

    id: Number


class OfTopic(TypedDict):
    """The name of a topic."""

    name: str
