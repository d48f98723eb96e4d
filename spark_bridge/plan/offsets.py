"""Offsets: where a read stands in each of its channels. As Spark stores and compares them:

    {"v": 2, "wal": "kafka", "of": "collection 7 created at 446", "t": T, "ends": {channel: place}}

`t` is the time up to which all of the channels have been read; an offset of channels that are read on their own has
none. A place is `behind ID TERM CSEQ` or `at ID`: the one behind an entry or before it, its id in hex, and the last
record before the place, where that is known; `earliest`; or `table`, for a time up to which the collection's table has
the rows. A query that begins with the earliest entries begins `at` those that were first then, so that a later read
knows whether these are gone. `of` says what the offset is of: ids of collections are small numbers, which another log
has as well. `wal` is the kind of log that the ids of entries are of, and, where the log was migrated, the mark of that.

The offset of a query's first batch has `from` too, the offset where the batch begins. Spark compares offsets as text,
so the order of the keys is fixed: as above, channels sorted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

from ...runtime.catalog.cuts import Cut
from ...runtime.errors import InvalidRequest, PositionMismatch
from ...runtime.log.redaction import split_url
from ..scan.channel_range import ChannelPlace

VERSION: Final = 2
UNTIMED: Final = -1  # the time of an offset whose channels are read on their own

StoredOffset: TypeAlias = Mapping[str, Any]  # as Spark has it


@dataclass(frozen=True, slots=True)
class Offset:
    """A time, and for each channel where the records at or before it end. `ends_beyond`: they are the ends of a later
    time, and the records between are not asked for."""

    time: int
    ends: Mapping[str, ChannelPlace]
    ends_beyond: bool = False

    @classmethod
    def of_cut(cls, cut: Cut) -> Offset:
        """The offset up to which a cut is read."""
        return cls(cut.time, {name: ChannelPlace(end.id, True, end.term, end.cseq) for name, end in cut.ends.items()})

    def stored(self, wal: str, of: str) -> StoredOffset:
        """As Spark stores it, as an offset in the log that is known as `wal`: its kind, and its mark."""
        time = {} if self.time == UNTIMED else {"t": self.time}
        ends = {channel: str(place) for channel, place in sorted(self.ends.items())}
        return {"v": VERSION, "wal": wal, "of": of, **time, "ends": ends}

    @classmethod
    def parse(cls, stored: StoredOffset, wal: str, of: str) -> Offset:
        """The offset that `stored` wrote with the same arguments. Raises `InvalidRequest`, and `PositionMismatch` for
        one of another log."""
        time, ends = stored.get("t", UNTIMED), stored.get("ends")
        if stored.get("v") not in (None, VERSION):
            raise InvalidRequest(
                f"an offset of version {stored['v']}, this Tidewal reads {VERSION}: start with a new checkpoint, or go "
                "on with the Tidewal that wrote it"
            )
        if "v" not in stored or not isinstance(time, int) or not isinstance(ends, Mapping):
            raise InvalidRequest(f"not an offset of {of}: {stored!r}; correct it, or start with a new checkpoint")
        if stored.get("wal") != wal:
            raise PositionMismatch(
                f"the offset is of a {stored.get('wal')} log, option wal names a {wal} one: correct option wal, or "
                "start with a new checkpoint, which a query needs whose log was migrated, or replaced by a replica",
                expected=wal,
                found=str(stored.get("wal")),
            )
        if stored.get("of") != of:
            raise InvalidRequest(
                f"the offset is of {stored.get('of')}, not of {of}, but of one that was dropped or in another log: "
                "correct options wal and collection (or topic and consistency), or start with a new checkpoint"
            )
        return cls(time, {name: parsed_place(name, text) for name, text in cast("Mapping[str, object]", ends).items()})


def parsed_place(channel: str, text: object) -> ChannelPlace:
    """The place in `channel` that an offset names. Raises `InvalidRequest`."""
    try:
        return ChannelPlace.parse(str(text))
    except ValueError as error:
        raise InvalidRequest(f"the offset of channel {channel!r}: {error}") from error


def first_offset(begin: StoredOffset, end: StoredOffset) -> dict[str, Any]:
    """The offset of a query's first batch. Spark does not store where that batch begins: to run it again, Spark
    asks for the initial offset anew, and `latest` is another cut by then."""
    return {**end, "from": {name: value for name, value in begin.items() if name != "from"}}


def parsed(text: str) -> dict[str, Any]:
    """The offset in the JSON `text`. Raises `InvalidRequest`."""
    try:
        offset = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"an offset is earliest, latest, the time of a cut or JSON, not {text!r}") from error
    if not isinstance(offset, dict):
        raise InvalidRequest(f"an offset is earliest, latest, the time of a cut or a JSON object, not {text!r}")
    return cast("dict[str, Any]", offset)


def scheme_of(url: str) -> str:
    """The kind of log that a URL names."""
    return split_url(url).scheme.partition("+")[0]
