"""The parameters of the StreamingNode's methods."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from ..requests import Number, WireCollection


class FlushParams(TypedDict):
    """The id of the collection to be stored."""

    id: Number


class OfChannels(TypedDict):
    """For methods that need the names of channels only."""

    channels: list[str]


class AnnounceParams(TypedDict):
    """A collection that begins or ends."""

    what: Literal["create", "drop"]
    collection: WireCollection
