"""The log of nodes in a replica: what its states and tables point to, and how they go on when it is promoted.

Channels are mirrored as those of any log, but for the states of the nodes, the catalog and the members, whose records
hold ids of the source. They are written into the replica when it is promoted, once the nodes have left: no node can
open it before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..clock import compose
from ..errors import CorruptLog, PositionLost
from ..log.names import Names
from ..log.wal import ChannelInfo, FromId, Wal
from ..migration.channel_copy import Check, entry_at
from ..migration.node_log import STATE_CHANNELS, NodeLog, NodeProof, Places, check_tables, settle_node
from ..migration.node_tables import NodeTables
from ..streams.stream_base import reading
from .channel_mirror import entry_digest, replicated_digest

SaveProof = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Called with the wire form of where all goes on in the replica; returns when that is durable."""

DISORDER = compose(60_000)  # of timestamps in a channel: what stands so much behind a time is younger


def is_written_anew(channel: str, names: Names) -> bool:
    """Whether a channel of the log of nodes is not mirrored: a state, or the cuts, of which the next node draws one."""
    return channel == names.cuts or channel in {names.prefix + ending for ending in STATE_CHANNELS}


async def check_node(source: Wal, target: Wal, tables: NodeTables | None) -> None:
    """Look, while both logs can still be used, whether nodes can go on in the replica `target`, which has all that the
    source has. Raises what `NodeLog.read` and `NodeLog.proof` do, and `CorruptLog` where the replica lacks an entry."""
    node, places = await _read(source, target, tables)
    node.proof(places, target.name)


async def bring_node(
    source: Wal, target: Wal, tables: NodeTables | None, saved: Mapping[str, Any], save: SaveProof, check: Check
) -> None:
    """Write the states of the nodes into `target`, which has all else and cannot be opened by a node, hold there what
    no table has, and let the tables go on there. The source is fenced. May be repeated, with what was `saved`, empty
    for nothing: behind that the tables may have moved. `check` is called before each write. Raises as `check_node`, and
    what `settle_node` does."""
    if not saved:
        node, places = await _read(source, target, tables)
        proof = node.proof(places, target.name)
        await check_tables(tables, proof)
        there = set(await source.channels())  # a node that ended as it began has made none for its cuts
        for name in sorted(node.states.keys() | (node.left & there)):
            await _create_as(source, target, name, check)
        await node.write_states(target, "promotion", places, check)
        saved = proof.to_wire()
        await save(saved)
    await settle_node(target, tables, NodeProof.from_wire(saved), check)


async def kept_from(source: Wal, target: Wal, info: ChannelInfo) -> bytes | None:
    """From which id on the replica keeps a channel of nodes, of which the source says `info`: what is left there may be
    in no table yet, or be pending, and only the nodes know up to where. None where the replica has nothing of it.
    Raises `PositionLost` where the source has removed its first entry since: it has another one now."""
    if not info.first_id:
        return None
    first = await entry_at(source, info, info.first_id)
    if first is None:
        raise PositionLost(
            f"the first entry of {info.name} was removed meanwhile", channel=info.name, requested=info.first_id
        )
    return await target.id_at(info.name, first.timestamp)


async def _read(source: Wal, target: Wal, tables: NodeTables | None) -> tuple[NodeLog, Places]:
    node = await NodeLog.read(source, tables)
    if node is None:
        raise CorruptLog("the source was the log of nodes, and has no catalog and no members any more")
    places: dict[str, dict[bytes, bytes]] = {}
    for channel in set(await source.channels()) & set(await target.channels()):
        if ids := node.ids(channel):
            places[channel] = {id: await replicated_place(source, target, channel, id) for id in ids}
    return node, places


async def replicated_place(source: Wal, target: Wal, channel: str, id: bytes) -> bytes:
    """Where an entry of an owner is in the replica; b"" where one of both logs has it no more. Its content finds it, as
    no other has its (term, cseq), and its time says where to look: a tick may stand behind what it is older than."""
    entry = await entry_at(source, await source.describe(channel), id)
    if entry is None:
        return b""
    wanted, there = replicated_digest(channel, entry), await target.describe(channel)
    start = await target.id_at(channel, entry.timestamp)
    if start is not None and there.latest_id is not None and start <= there.latest_id:
        async with reading(target, channel, FromId(start, inclusive=True)) as batches:
            async for entries in batches:
                for each in entries:
                    if entry_digest(each) == wanted:
                        return each.id
                last = entries[-1]
                if last.id >= there.latest_id or last.timestamp > entry.timestamp + DISORDER:
                    break
    if start is not None and start == there.first_id:  # the replica may have removed it
        return b""
    raise CorruptLog(
        f"the replica lacks the entry {id.hex()} of {channel}: something else has written to it. Take an empty log as "
        "the replica, and replicate into that one"
    )


async def _create_as(source: Wal, target: Wal, name: str, check: Check) -> None:
    info = await source.describe(name)
    await check()
    await target.create_channel(name, info.policy)
