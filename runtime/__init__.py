"""The ground floor: the log and its records, streams, channel ownership, groups, actors, the catalog, requests,
settings and metrics.

Public are the names below; they are imported when they are first used. The errors are in `tidewal.runtime.errors`,
which is `tidewal.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actor import (
        NEVER_RESTART as NEVER_RESTART,
        Actor as Actor,
        ActorRef as ActorRef,
        ActorSystem as ActorSystem,
        Deferred as Deferred,
        Observer as Observer,
        Supervision as Supervision,
    )
    from .catalog.catalog import Catalog as Catalog, Collection as Collection
    from .catalog.catalog_log import CatalogLog as CatalogLog
    from .catalog.cuts import Cut as Cut, CutEnd as CutEnd
    from .clock import (
        Clock as Clock,
        HybridClock as HybridClock,
        SystemClock as SystemClock,
        add_ms as add_ms,
        physical_ms as physical_ms,
        to_datetime as to_datetime,
        to_timestamp as to_timestamp,
    )
    from .config.loading import load_settings as load_settings
    from .config.settings import Settings as Settings
    from .dataflow.changelog import Codec as Codec
    from .dataflow.keyed_processing import KeyedHandler as KeyedHandler, process_keyed as process_keyed
    from .dataflow.keyed_state import KeyedState as KeyedState, KeyedTable as KeyedTable
    from .dataflow.lookup import CollectionSnapshot as CollectionSnapshot, Lookup as Lookup
    from .dataflow.window_output import LateRow as LateRow, WindowOutput as WindowOutput, WindowResult as WindowResult
    from .dataflow.windowed import Windowed as Windowed
    from .dataflow.windows import (
        FixedWindows as FixedWindows,
        SessionWindows as SessionWindows,
        Window as Window,
        hopping as hopping,
        session as session,
        tumbling as tumbling,
    )
    from .errors import TidewalError as TidewalError
    from .garbage import collect_rarely as collect_rarely
    from .groups.ack_timer import extend_ack_timeout as extend_ack_timeout
    from .groups.processing import Semantics as Semantics, process as process
    from .groups.group_filter import change_group_filter as change_group_filter
    from .groups.record_member import RecordMember as RecordMember
    from .groups.record_pack import RecordPack as RecordPack
    from .groups.nack import Nack as Nack
    from .groups.retry_policy import RetryPolicy as RetryPolicy
    from .log.dead_letters import DeadLetters as DeadLetters
    from .log.heartbeats import Announcement as Announcement, announcements as announcements
    from .log.names import Names as Names, pchannel_of as pchannel_of
    from .log.opening import (
        find_backend as find_backend,
        installed_backends as installed_backends,
        open_wal as open_wal,
    )
    from .log.record import Record as Record, RecordType as RecordType, decode as decode, encode as encode
    from .log.redaction import shown_url as shown_url, split_url as split_url
    from .log.wal import (
        TOMBSTONE as TOMBSTONE,
        Append as Append,
        Capabilities as Capabilities,
        ChannelInfo as ChannelInfo,
        ChannelPolicy as ChannelPolicy,
        ControlAppend as ControlAppend,
        Delivered as Delivered,
        Delivery as Delivery,
        Durability as Durability,
        Entry as Entry,
        From as From,
        FromId as FromId,
        FromTime as FromTime,
        GroupInfo as GroupInfo,
        GroupMember as GroupMember,
        Headers as Headers,
        Start as Start,
        Tombstone as Tombstone,
        Wal as Wal,
    )
    from .metrics.metrics import Metrics as Metrics
    from .metrics.server import Health as Health, MetricsServer as MetricsServer, metrics_app as metrics_app
    from .ownership import (
        Appended as Appended,
        ChannelGrant as ChannelGrant,
        ChannelOwner as ChannelOwner,
        ChannelOwnerObserver as ChannelOwnerObserver,
        SyncPoint as SyncPoint,
    )
    from .ownership.producer import Producer as Producer, open_producer as open_producer
    from .rows.hashing import shard_of as shard_of
    from .rows.row_codec import decode_rows as decode_rows, encode_rows as encode_rows
    from .rows.schema import CollectionSchema as CollectionSchema, Field as Field, FieldType as FieldType
    from .rpc.client import RpcClient as RpcClient
    from .rpc.server import Request as Request, RpcServer as RpcServer
    from .signals import INTERRUPTED as INTERRUPTED, Interrupted as Interrupted, until_stopped as until_stopped
    from .streams.factory import Factory as Factory
    from .streams.messages import MsgPack as MsgPack, Position as Position
    from .streams.open_stream import open_stream as open_stream
    from .streams.stream import MsgStream as MsgStream
    from .streams.taking import take as take
    from .streams.tt_stream import TtMsgStream as TtMsgStream
else:
    from .lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            ".actor": "NEVER_RESTART Actor ActorRef ActorSystem Deferred Observer Supervision",
            ".catalog.catalog": "Catalog Collection",
            ".catalog.catalog_log": "CatalogLog",
            ".catalog.cuts": "Cut CutEnd",
            ".clock": "Clock HybridClock SystemClock add_ms physical_ms to_datetime to_timestamp",
            ".config.loading": "load_settings",
            ".config.settings": "Settings",
            ".dataflow.changelog": "Codec",
            ".dataflow.keyed_processing": "KeyedHandler process_keyed",
            ".dataflow.keyed_state": "KeyedState KeyedTable",
            ".dataflow.lookup": "CollectionSnapshot Lookup",
            ".dataflow.window_output": "LateRow WindowOutput WindowResult",
            ".dataflow.windowed": "Windowed",
            ".dataflow.windows": "FixedWindows SessionWindows Window hopping session tumbling",
            ".errors": "TidewalError",
            ".garbage": "collect_rarely",
            ".groups.ack_timer": "extend_ack_timeout",
            ".groups.processing": "Semantics process",
            ".groups.group_filter": "change_group_filter",
            ".groups.record_member": "RecordMember",
            ".groups.record_pack": "RecordPack",
            ".groups.nack": "Nack",
            ".groups.retry_policy": "RetryPolicy",
            ".log.dead_letters": "DeadLetters",
            ".log.heartbeats": "Announcement announcements",
            ".log.names": "Names pchannel_of",
            ".log.opening": "find_backend installed_backends open_wal",
            ".log.record": "Record RecordType decode encode",
            ".log.redaction": "shown_url split_url",
            ".log.wal": (
                "Append Capabilities ChannelInfo ChannelPolicy ControlAppend Delivered Delivery Durability Entry "
                "From FromId FromTime GroupInfo GroupMember Headers Start TOMBSTONE Tombstone Wal"
            ),
            ".metrics.metrics": "Metrics",
            ".metrics.server": "Health MetricsServer metrics_app",
            ".ownership": "Appended ChannelGrant ChannelOwner ChannelOwnerObserver SyncPoint",
            ".ownership.producer": "Producer open_producer",
            ".rows.hashing": "shard_of",
            ".rows.row_codec": "decode_rows encode_rows",
            ".rows.schema": "CollectionSchema Field FieldType",
            ".rpc.client": "RpcClient",
            ".rpc.server": "Request RpcServer",
            ".signals": "INTERRUPTED Interrupted until_stopped",
            ".streams.factory": "Factory",
            ".streams.messages": "MsgPack Position",
            ".streams.open_stream": "open_stream",
            ".streams.stream": "MsgStream",
            ".streams.taking": "take",
            ".streams.tt_stream": "TtMsgStream",
        },
    )
