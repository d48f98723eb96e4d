"""The ids of the log that the catalog holds, so that it can be brought to another log, which has others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any, TypeAlias

IdIn: TypeAlias = Callable[[str, bytes], bytes]
"""Called with a channel and an id that is stored; returns the one to store in its place."""


def with_ids(snapshot: Mapping[str, Any], id_in: IdIn) -> dict[str, Any]:
    """A snapshot of the catalog (`Catalog.snapshot`) with other ids: checkpoints and fences of channels, beginnings of
    collections, and ends of partitions."""
    replaced = dict(snapshot)
    replaced["channels"] = {
        name: (owner, term, limit, previous, _id(name, checkpoint, id_in), _fences(name, fences, id_in), *rest)
        for name, (owner, term, limit, previous, checkpoint, fences, *rest) in snapshot["channels"].items()
    }
    replaced["collections"] = [_collection(wire, id_in) for wire in snapshot["collections"]]
    if "topics" in snapshot:
        replaced["topics"] = [_topic(wire, id_in) for wire in snapshot["topics"]]
    return replaced


def _id(channel: str, id: bytes, id_in: IdIn) -> bytes:
    return id_in(channel, id) if id else b""


def _fences(channel: str, fences: Mapping[int, bytes], id_in: IdIn) -> dict[int, bytes]:
    return {term: id_in(channel, id) for term, id in fences.items()}


def _collection(wire: Mapping[str, Any], id_in: IdIn) -> dict[str, Any]:
    if wire["beginning"] is None:
        return dict(wire)
    time, ends = wire["beginning"]
    return {
        **wire,
        "beginning": (time, {name: (term, cseq, _id(name, id, id_in)) for name, (term, cseq, id) in ends.items()}),
    }


def _topic(wire: Mapping[str, Any], id_in: IdIn) -> dict[str, Any]:
    return {**wire, "ends": {name: (id_in(name, id), ts) for name, (id, ts) in wire["ends"].items()}}


def as_settled(snapshot: Mapping[str, Any], checkpoints: Mapping[str, bytes], drained: Set[str]) -> dict[str, Any]:
    """A snapshot of the catalog with these checkpoints of channels, b"" for others, and of the delay channels that have
    nothing pending those alone that are among `drained`: what was said since rests on entries that may be missing,
    without naming them."""
    replaced = dict(snapshot)
    replaced["channels"] = {
        name: (owner, term, limit, previous, checkpoints.get(name, b""), *rest)
        for name, (owner, term, limit, previous, _, *rest) in snapshot["channels"].items()
    }
    if "topics" in snapshot:
        replaced["topics"] = [
            {**wire, "drained": [name for name in wire["drained"] if name in drained]} for wire in snapshot["topics"]
        ]
    return replaced


def without_later(
    snapshot: Mapping[str, Any], is_later: Callable[[str, bytes], bool], unbegun: Set[str]
) -> dict[str, Any]:
    """A snapshot of the catalog without what it says of entries for which `is_later`, called with their channels and
    ids, is true, and without the beginnings of the partitions `unbegun`: as if those that have written it had not come
    so far. A collection that begins there is about to be created."""

    def kept(channel: str, id: bytes) -> bool:
        return not (id and is_later(channel, id))

    replaced = dict(snapshot)
    replaced["channels"] = {
        name: (
            *(owner, term, limit, previous, checkpoint if kept(name, checkpoint) else b""),
            {number: id for number, id in fences.items() if kept(name, id)},
            *rest,
        )
        for name, (owner, term, limit, previous, checkpoint, fences, *rest) in snapshot["channels"].items()
    }
    replaced["collections"] = [
        wire if _begins(wire, kept) else {**wire, "state": "creating", "beginning": None}
        for wire in snapshot["collections"]
    ]
    if "topics" in snapshot:
        replaced["topics"] = [
            {
                **wire,
                "ends": {name: (id, ts) for name, (id, ts) in wire["ends"].items() if kept(name, id)},
                "begun": [name for name in wire["begun"] if name not in unbegun],
            }
            for wire in snapshot["topics"]
        ]
    return replaced


def _begins(wire: Mapping[str, Any], kept: Callable[[str, bytes], bool]) -> bool:
    if wire["state"] != "ready" or wire["beginning"] is None:
        return True
    _, ends = wire["beginning"]
    return all(kept(name, id) for name, (_, _, id) in ends.items())
