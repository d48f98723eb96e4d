"""Tidewal: a streaming runtime in which the log is the system.

    async with tidewal.standalone("data") as node, node.client() as client:
        await client.create_collection(...)

The names below are the public ones. They are imported when they are first used, so that a Spark worker that looks for
its data source, or a program that only reads a log, does not load the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .actors.client import Client, QueryResult, WriteResult
    from .actors.standalone import Standalone, standalone
    from .runtime import errors
    from .runtime.actor import Actor, ActorSystem, Supervision
    from .runtime.clock import HybridClock
    from .runtime.config.loading import load_settings
    from .runtime.config.settings import Settings
    from .runtime.errors import TidewalError
    from .runtime.groups.processing import Semantics, process
    from .runtime.log.opening import open_wal
    from .runtime.log.record import Record, RecordType
    from .runtime.log.wal import Append, ChannelPolicy, Delivery, Durability, From, FromId, FromTime, Wal
    from .runtime.rows.schema import CollectionSchema, Field
    from .runtime.streams.factory import Factory
    from .runtime.streams.messages import MsgPack, Position
    from .runtime.streams.stream import MsgStream
    from .runtime.streams.tt_stream import TtMsgStream

_MODULES = {
    "Actor": ".runtime.actor",
    "ActorSystem": ".runtime.actor",
    "Append": ".runtime.log.wal",
    "ChannelPolicy": ".runtime.log.wal",
    "Client": ".actors.client",
    "CollectionSchema": ".runtime.rows.schema",
    "Delivery": ".runtime.log.wal",
    "Durability": ".runtime.log.wal",
    "Factory": ".runtime.streams.factory",
    "Field": ".runtime.rows.schema",
    "From": ".runtime.log.wal",
    "FromId": ".runtime.log.wal",
    "FromTime": ".runtime.log.wal",
    "HybridClock": ".runtime.clock",
    "MsgPack": ".runtime.streams.messages",
    "MsgStream": ".runtime.streams.stream",
    "Position": ".runtime.streams.messages",
    "QueryResult": ".actors.client",
    "Record": ".runtime.log.record",
    "RecordType": ".runtime.log.record",
    "Semantics": ".runtime.groups.processing",
    "Settings": ".runtime.config.settings",
    "Standalone": ".actors.standalone",
    "Supervision": ".runtime.actor",
    "TidewalError": ".runtime.errors",
    "TtMsgStream": ".runtime.streams.tt_stream",
    "Wal": ".runtime.log.wal",
    "WriteResult": ".actors.client",
    "errors": ".runtime",
    "load_settings": ".runtime.config.loading",
    "open_wal": ".runtime.log.opening",
    "process": ".runtime.groups.processing",
    "standalone": ".actors.standalone",
}

__all__ = [
    "Actor",
    "ActorSystem",
    "Append",
    "ChannelPolicy",
    "Client",
    "CollectionSchema",
    "Delivery",
    "Durability",
    "Factory",
    "Field",
    "From",
    "FromId",
    "FromTime",
    "HybridClock",
    "MsgPack",
    "MsgStream",
    "Position",
    "QueryResult",
    "Record",
    "RecordType",
    "Semantics",
    "Settings",
    "Standalone",
    "Supervision",
    "TidewalError",
    "TtMsgStream",
    "Wal",
    "WriteResult",
    "errors",
    "load_settings",
    "open_wal",
    "process",
    "standalone",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "errors":
        return import_module(".runtime.errors", __name__)
    return getattr(import_module(module, __name__), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
