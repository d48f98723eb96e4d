"""Tidewal: a streaming runtime in which the log is the system.

    async with tidewal.standalone("data") as node, node.client() as client:
        await client.create_collection(...)

The names below are those of programs that use Tidewal. They are imported when they are first used, so that a Spark
worker that looks for its data source, or a program that only reads a log, does not load the rest. Further public names
are those of `tidewal.runtime`, `tidewal.runtime.testing`, `tidewal.actors`, `tidewal.adapters` and
`tidewal.spark_bridge`; what none of them has may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors.client import (
        Client as Client,
        Consistency as Consistency,
        QueryResult as QueryResult,
        Vector as Vector,
        WriteResult as WriteResult,
    )
    from .actors.connection import connect as connect
    from .actors.keys import Keys as Keys
    from .actors.querynode.filter_params import FilterParams as FilterParams
    from .actors.querynode.search import Metric as Metric
    from .actors.rows import Rows as Rows
    from .actors.standalone import Standalone as Standalone, standalone as standalone
    from .actors.sync_client import SyncClient as SyncClient, connect_sync as connect_sync
    from .actors.sync_standalone import SyncStandalone as SyncStandalone, standalone_sync as standalone_sync
    from .actors.topics.member import TopicMember as TopicMember
    from .actors.topics.requests import TopicReply as TopicReply, TopicRequest as TopicRequest
    from .actors.topics.serving import serve as serve
    from .actors.topics.messages import (
        Message as Message,
        MessageBodies as MessageBodies,
        Partitioner as Partitioner,
        SendResult as SendResult,
        TopicMessage as TopicMessage,
        TopicPack as TopicPack,
    )
    from .actors.topics.sync_member import SyncTopicMember as SyncTopicMember
    from .actors.transactions.sync_transaction import SyncTransaction as SyncTransaction
    from .actors.transactions.transaction import Transaction as Transaction, TransactionResult as TransactionResult
    from .runtime import errors as errors
    from .runtime.actor import (
        Actor as Actor,
        ActorRef as ActorRef,
        ActorSystem as ActorSystem,
        Deferred as Deferred,
        Supervision as Supervision,
    )
    from .runtime.catalog.catalog import Collection as Collection
    from .runtime.catalog.topics import Topic as Topic
    from .runtime.clock import (
        HybridClock as HybridClock,
        to_datetime as to_datetime,
        to_timestamp as to_timestamp,
    )
    from .runtime.config.loading import load_settings as load_settings
    from .runtime.config.settings import Settings as Settings
    from .runtime.dataflow.keyed_processing import process_keyed as process_keyed
    from .runtime.dataflow.keyed_state import KeyedState as KeyedState, KeyedTable as KeyedTable
    from .runtime.dataflow.lookup import Lookup as Lookup
    from .runtime.dataflow.windowed import Windowed as Windowed
    from .runtime.dataflow.windows import hopping as hopping, session as session, tumbling as tumbling
    from .runtime.errors import TidewalError as TidewalError
    from .runtime.groups.ack_timer import extend_ack_timeout as extend_ack_timeout
    from .runtime.groups.processing import Semantics as Semantics, process as process
    from .runtime.groups.group_filter import change_group_filter as change_group_filter
    from .runtime.groups.record_member import RecordMember as RecordMember
    from .runtime.groups.record_pack import RecordPack as RecordPack
    from .runtime.groups.nack import Nack as Nack
    from .runtime.groups.retry_policy import RetryPolicy as RetryPolicy
    from .runtime.log.opening import open_wal as open_wal
    from .runtime.log.record import Record as Record, RecordType as RecordType
    from .runtime.log.wal import (
        TOMBSTONE as TOMBSTONE,
        Append as Append,
        ChannelPolicy as ChannelPolicy,
        Delivered as Delivered,
        Delivery as Delivery,
        Durability as Durability,
        Entry as Entry,
        From as From,
        FromId as FromId,
        FromTime as FromTime,
        GroupMember as GroupMember,
        Tombstone as Tombstone,
        Wal as Wal,
    )
    from .runtime.ownership.producer import Producer as Producer, open_producer as open_producer
    from .runtime.rows.schema import CollectionSchema as CollectionSchema, Field as Field
    from .runtime.streams.factory import Factory as Factory
    from .runtime.streams.messages import MsgPack as MsgPack, Position as Position
    from .runtime.streams.open_stream import open_stream as open_stream
    from .runtime.streams.stream import MsgStream as MsgStream
    from .runtime.streams.taking import take as take
    from .runtime.streams.tt_stream import TtMsgStream as TtMsgStream
else:
    # By its full name: pytest imports this file once more, as a module of no package.
    from tidewal.runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        "tidewal",
        {
            ".actors.client": "Client Consistency QueryResult Vector WriteResult",
            ".actors.connection": "connect",
            ".actors.keys": "Keys",
            ".actors.querynode.filter_params": "FilterParams",
            ".actors.querynode.search": "Metric",
            ".actors.rows": "Rows",
            ".actors.standalone": "Standalone standalone",
            ".actors.sync_client": "SyncClient connect_sync",
            ".actors.sync_standalone": "SyncStandalone standalone_sync",
            ".actors.topics.member": "TopicMember",
            ".actors.topics.requests": "TopicReply TopicRequest",
            ".actors.topics.serving": "serve",
            ".actors.topics.messages": "Message MessageBodies Partitioner SendResult TopicMessage TopicPack",
            ".actors.topics.sync_member": "SyncTopicMember",
            ".actors.transactions.sync_transaction": "SyncTransaction",
            ".actors.transactions.transaction": "Transaction TransactionResult",
            ".runtime": "errors",
            ".runtime.actor": "Actor ActorRef ActorSystem Deferred Supervision",
            ".runtime.catalog.catalog": "Collection",
            ".runtime.catalog.topics": "Topic",
            ".runtime.clock": "HybridClock to_datetime to_timestamp",
            ".runtime.config.loading": "load_settings",
            ".runtime.config.settings": "Settings",
            ".runtime.dataflow.keyed_processing": "process_keyed",
            ".runtime.dataflow.keyed_state": "KeyedState KeyedTable",
            ".runtime.dataflow.lookup": "Lookup",
            ".runtime.dataflow.windowed": "Windowed",
            ".runtime.dataflow.windows": "hopping session tumbling",
            ".runtime.errors": "TidewalError",
            ".runtime.groups.ack_timer": "extend_ack_timeout",
            ".runtime.groups.processing": "Semantics process",
            ".runtime.groups.group_filter": "change_group_filter",
            ".runtime.groups.record_member": "RecordMember",
            ".runtime.groups.record_pack": "RecordPack",
            ".runtime.groups.nack": "Nack",
            ".runtime.groups.retry_policy": "RetryPolicy",
            ".runtime.log.opening": "open_wal",
            ".runtime.log.record": "Record RecordType",
            ".runtime.log.wal": "Append ChannelPolicy Delivered Delivery Durability Entry From FromId FromTime "
            "GroupMember TOMBSTONE Tombstone Wal",
            ".runtime.ownership.producer": "Producer open_producer",
            ".runtime.rows.schema": "CollectionSchema Field",
            ".runtime.streams.factory": "Factory",
            ".runtime.streams.messages": "MsgPack Position",
            ".runtime.streams.open_stream": "open_stream",
            ".runtime.streams.stream": "MsgStream",
            ".runtime.streams.taking": "take",
            ".runtime.streams.tt_stream": "TtMsgStream",
        },
    )
