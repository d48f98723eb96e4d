"""Offsets are cuts. As Spark stores and compares them:

    {"v": 1, "wal": "kafka", "collection_id": 7, "created": time, "t": T, "ends": {pchannel: [id in hex, term, cseq]}}

An offset says that everything with ts ≤ T has been read. That of a query's first batch has `from` too, the offset where
the batch begins: from `earliest` its ends have cseq -1 and lie before the entries that were first then, so that a later
read knows whether these are gone. Spark compares offsets as text, so the order of the keys is fixed: as above,
channels sorted. `wal` is the kind of log that the message ids are of. Ids of collections are small
numbers, which another log has as well: `created`, the collection's creation timestamp, tells them apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from ...runtime.catalog.catalog import Collection
from ...runtime.catalog.cuts import Cut, CutEnd
from ...runtime.errors import InvalidRequest, PositionMismatch
from ...runtime.log.names import pchannel_of
from ...runtime.log.redaction import split_url

VERSION = 1
BEGINNING = CutEnd(0, 0, b"")


def pchannels_of(collection: Collection) -> list[str]:
    """The physical channels of a collection, sorted."""
    return sorted({pchannel_of(vchannel) for vchannel in collection.vchannels})


def beginning(collection: Collection) -> Cut:
    """The cut before everything."""
    return Cut(collection.id, collection.name, 0, dict.fromkeys(pchannels_of(collection), BEGINNING))


def end_before(id: bytes | None) -> CutEnd:
    """The end before the entry `id`, the first there is; before everything when `id` is None."""
    return BEGINNING if id is None else CutEnd(0, -1, id)


def lies_before(end: CutEnd) -> bool:
    """Whether `end` lies before its entry, which is still to be read."""
    return end.cseq < 0 and end != UNKNOWN


def is_further(end: CutEnd, begin: CutEnd) -> bool:
    """Whether there may be entries between `begin` and `end`."""
    return not lies_before(end) and (end.id > begin.id or (lies_before(begin) and end.id == begin.id))


# The end in the log of a cut within the table of stored rows: it is not needed, the table has what lies before.
UNKNOWN = CutEnd(0, -1, b"")


def history_cut(collection: Collection, time: int) -> Cut:
    """The cut at the timestamp `time`, up to which a collection's table is complete. It can be read up to, or from,
    only with the table."""
    return Cut(collection.id, collection.name, time, dict.fromkeys(pchannels_of(collection), UNKNOWN))


def is_history(cut: Cut) -> bool:
    """Whether `history_cut` made `cut`."""
    return UNKNOWN in cut.ends.values()


def scheme_of(url: str) -> str:
    """The kind of log that a URL names."""
    return split_url(url).scheme.partition("+")[0]


def to_offset(cut: Cut, wal: str = "", created_ts: int = 0) -> dict[str, Any]:
    """The offset of a cut of a log of the kind `wal`, and a collection created at `created_ts`, where that is known."""
    ends = {channel: [end.id.hex(), end.term, end.cseq] for channel, end in sorted(cut.ends.items())}
    return {
        "v": VERSION,
        **({"wal": wal} if wal else {}),
        "collection_id": cut.collection_id,
        **({"created": created_ts} if created_ts else {}),
        "t": cut.time,
        "ends": ends,
    }


def first_offset(begin: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    """The offset of a query's first batch. Spark does not store where that batch begins: to run it again, Spark
    asks for the initial offset anew, and `latest` is another cut by then."""
    return {**end, "from": {name: value for name, value in begin.items() if name != "from"}}


def check_wal(offset: Mapping[str, Any], wal: str) -> None:
    """Raise `PositionMismatch` for an offset of another kind of log than `wal`."""
    found = offset.get("wal", wal)
    if found != wal:
        raise PositionMismatch(
            f"the offset is of a {found} log, option wal names a {wal} one: correct option wal, or start with a new "
            "checkpoint",
            expected=wal,
            found=str(found),
        )


def to_json(cut: Cut) -> str:
    """The offset of a cut as JSON, for the options `startingOffsets` and `endingOffsets`."""
    return json.dumps(to_offset(cut))


def from_offset(offset: Mapping[str, Any], collection: Collection, wal: str = "") -> Cut:
    """The cut that `to_offset` wrote, which must be one of `collection`, in a log of the kind `wal` (empty: of any).
    Raises `InvalidRequest`, `PositionMismatch`."""
    if wal:
        check_wal(offset, wal)
    try:
        if offset["v"] != VERSION:
            raise InvalidRequest(f"offset version {offset['v']}, this Tidewal reads {VERSION}: upgrade it")
        ends = {
            str(channel): CutEnd(int(term), int(cseq), bytes.fromhex(id))
            for channel, (id, term, cseq) in offset["ends"].items()
        }
        cut = Cut(int(offset["collection_id"]), collection.name, int(offset["t"]), ends)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"not an offset of Tidewal: {offset!r} ({error})") from error
    created_ts = offset.get("created", collection.created_ts)
    if (cut.collection_id, created_ts) != (collection.id, collection.created_ts):
        raise InvalidRequest(
            f"the offset is of another collection than {collection.name!r} (id {cut.collection_id}, created at "
            f"{created_ts}; here it is {collection.id}, {collection.created_ts}), one that was dropped or in another "
            "log: correct options wal and collection, or start with a new checkpoint",
            collection=collection.name,
        )
    if sorted(ends) != pchannels_of(collection):
        raise InvalidRequest(f"the offset is of channels {sorted(ends)}, the collection's: {pchannels_of(collection)}")
    return cut


def from_json(text: str, collection: Collection, wal: str = "") -> Cut:
    """The cut of an offset that is given as JSON. Raises `InvalidRequest`, `PositionMismatch`."""
    return from_offset(parsed(text), collection, wal)


def parsed(text: str) -> dict[str, Any]:
    """The offset in the JSON `text`. Raises `InvalidRequest`."""
    try:
        offset = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"an offset is earliest, latest, the time of a cut or JSON, not {text!r}") from error
    if not isinstance(offset, dict):
        raise InvalidRequest(f"an offset is earliest, latest, the time of a cut or a JSON object, not {text!r}")
    return cast("dict[str, Any]", offset)
