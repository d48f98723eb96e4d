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
    from .actors.client import Client as Client, QueryResult as QueryResult, WriteResult as WriteResult
    from .actors.connection import connect as connect
    from .actors.standalone import Standalone as Standalone, standalone as standalone
    from .actors.sync_client import SyncClient as SyncClient, connect_sync as connect_sync
    from .runtime import errors as errors
    from .runtime.actor import Actor as Actor, ActorSystem as ActorSystem, Supervision as Supervision
    from .runtime.clock import (
        HybridClock as HybridClock,
        to_datetime as to_datetime,
        to_timestamp as to_timestamp,
    )
    from .runtime.config.loading import load_settings as load_settings
    from .runtime.config.settings import Settings as Settings
    from .runtime.errors import TidewalError as TidewalError
    from .runtime.groups.processing import Semantics as Semantics, process as process
    from .runtime.log.opening import open_wal as open_wal
    from .runtime.log.record import Record as Record, RecordType as RecordType
    from .runtime.log.wal import (
        Append as Append,
        ChannelPolicy as ChannelPolicy,
        Delivery as Delivery,
        Durability as Durability,
        From as From,
        FromId as FromId,
        FromTime as FromTime,
        Wal as Wal,
    )
    from .runtime.rows.schema import CollectionSchema as CollectionSchema, Field as Field
    from .runtime.streams.factory import Factory as Factory
    from .runtime.streams.messages import MsgPack as MsgPack, Position as Position
    from .runtime.streams.stream import MsgStream as MsgStream
    from .runtime.streams.tt_stream import TtMsgStream as TtMsgStream
else:
    # By its full name: pytest imports this file once more, as a module of no package.
    from tidewal.runtime.lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        "tidewal",
        {
            ".actors.client": "Client QueryResult WriteResult",
            ".actors.connection": "connect",
            ".actors.standalone": "Standalone standalone",
            ".actors.sync_client": "SyncClient connect_sync",
            ".runtime": "errors",
            ".runtime.actor": "Actor ActorSystem Supervision",
            ".runtime.clock": "HybridClock to_datetime to_timestamp",
            ".runtime.config.loading": "load_settings",
            ".runtime.config.settings": "Settings",
            ".runtime.errors": "TidewalError",
            ".runtime.groups.processing": "Semantics process",
            ".runtime.log.opening": "open_wal",
            ".runtime.log.record": "Record RecordType",
            ".runtime.log.wal": "Append ChannelPolicy Delivery Durability From FromId FromTime Wal",
            ".runtime.rows.schema": "CollectionSchema Field",
            ".runtime.streams.factory": "Factory",
            ".runtime.streams.messages": "MsgPack Position",
            ".runtime.streams.stream": "MsgStream",
            ".runtime.streams.tt_stream": "TtMsgStream",
        },
    )
