"""One channel of a replica: what comes to the channel in the source is appended to that of the replica, once, in order.

One append at a time is under way, so whatever becomes of this process, what the replica has behind a saved pair of
places (`ReplicatedChannel`) are the entries that follow in the source, in order, and no others. Whoever goes on counts
and compares them: the position is the replica's own end. Both logs hold what lies behind the saved pair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

import xxhash

from ..errors import ChannelNotFound, CorruptLog, MessageTooLarge, PositionLost, Unsupported
from ..log.checks import check_size
from ..log.replication_state import ReplicatedChannel, behind
from ..log.wal import Append, ChannelInfo, Entry, From, FromId, Wal
from ..loop_bridge import promise
from ..migration.channel_copy import APPEND_BYTES, Check, Rewrite, entry_at, is_lost, movable_entry, stored_batches
from ..migration.node_records import node_entry
from ..streams.stream_base import reading
from ..waiting import to_its_end
from .channel_promise import ChannelPromise

HOLDER = "tidewal-replication"


class ReplicaDiffers(CorruptLog):
    """The replica has other entries behind the saved places than the source: the channel was dropped and created again
    at the source meanwhile, or something else has written to the replica (`channel`)."""


async def entries_behind(wal: Wal, info: ChannelInfo, id: bytes) -> AsyncIterator[Entry]:
    """`stored_batches`, one by one."""
    async for entries in stored_batches(wal, info, id):
        for entry in entries:
            yield entry


async def place_behind(target: Wal, channel: str, id: bytes, count: int) -> bytes | None:
    """The id of the `count`-th entry behind `id`; None where there are not so many. With 0 `id` itself."""
    if not count:
        return id
    async for entry in entries_behind(target, await target.describe(channel), id):
        count -= 1
        if not count:
            return entry.id
    return None


class ChannelMirror:
    """Brings one channel of `source` to `target`, from `place` on, each entry as `rewrite` returns it. `check` is
    called before each append, and raises where this process must not write any more. `place` is the last pair that is
    durable in the replica, and `promise` says up to which time it is complete, as an owner has said. `count` is told
    how many bytes each append has brought."""

    def __init__(
        self,
        source: Wal,
        target: Wal,
        channel: str,
        place: ReplicatedChannel,
        check: Check,
        rewrite: Rewrite = movable_entry,
        count: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._source, self._target, self._channel, self._check = source, target, channel, check
        self._rewrite = rewrite
        self._place = replace(place, halted="")
        self.promise: ChannelPromise = ChannelPromise(place.timestamp)
        self._largest: int = 0  # payload that the replica takes
        self._count = count

    async def follow(self) -> None:
        """Go on until cancelled; what was being appended has been answered then. Raises `ChannelNotFound` when the
        channel is dropped, `ReplicaDiffers`, `PositionLost` where the source has removed what follows, `Unsupported`
        and `MessageTooLarge` for an entry that cannot be brought over, and errors of both logs."""
        await self._resume()
        async with reading(self._source, self._channel, self._start) as batches:
            async for entries in batches:
                for part in appendable(entries):
                    await self._append(part)
        raise ChannelNotFound(f"the source has {self._channel} no more", channel=self._channel)

    async def catch_up(self) -> None:
        """Bring over what the source has now. Raises as `follow`."""
        await self._resume()
        info = await self._source.describe(self._channel)
        async for entries in stored_batches(self._source, info, self._place.source):
            for part in appendable(entries):
                await self._append(part)

    @property
    def place(self) -> ReplicatedChannel:
        return replace(self._place, timestamp=self.promise.timestamp)

    @property
    def _start(self) -> FromId | From:
        return FromId(self._place.source) if self._place.source else From.EARLIEST

    async def _resume(self) -> None:
        """Move `place` behind what the replica has already. Raises `ReplicaDiffers` where that is not what follows in
        the source."""
        info, there = await self._source.describe(self._channel), await self._target.describe(self._channel)
        self._largest = there.max_message_bytes
        await self._check_same(info, there)
        if not self._place.target and there.first_id:  # one was killed that had begun it, perhaps before it held that
            await self._check()
            await self._target.hold(self._channel, HOLDER, there.first_id)
        await self._pass_known(info, there)
        if (last := await entry_at(self._target, there, self._place.target)) is not None:
            self.promise.note([last])

    async def _pass_known(self, info: ChannelInfo, there: ChannelInfo) -> None:
        known = [
            (entry.id, entry_digest(entry)) async for entry in entries_behind(self._target, there, self._place.target)
        ]
        if not known:
            return
        following = iter(known)
        target, digest = next(following)
        try:
            async for entry in entries_behind(self._source, info, self._place.source):
                if replicated_digest(self._channel, entry) != digest:
                    break
                self.promise.note([entry])
                self._reach(entry.id, target)
                if (each := next(following, None)) is None:
                    return
                target, digest = each
        except PositionLost as error:
            raise self._differs() from error
        raise self._differs()

    async def _check_same(self, info: ChannelInfo, there: ChannelInfo) -> None:
        """Raise `ReplicaDiffers` where the source's channel is seen to be another one than the replica's. Its own one
        has all that lies behind the place: it is held."""
        if await is_lost(self._source, info, self._place.source):
            raise self._differs()
        if self._place.source > (info.latest_id or b"") or self._place.target > (there.latest_id or b""):
            raise self._differs()
        ours = await entry_at(self._source, info, self._place.source)
        theirs = await entry_at(self._target, there, self._place.target)
        if ours is None or theirs is None:
            return
        if replicated_digest(self._channel, ours) != entry_digest(theirs):
            raise self._differs()

    async def _append(self, entries: Sequence[Entry]) -> None:
        """Append `entries`, or those before the first that cannot be brought over, and raise what is wrong with it."""
        rewritten: list[Entry] = []
        for entry in entries:
            try:
                entry = self._rewrite(self._channel, entry)
                check_size(self._channel, len(entry.payload), self._largest)
            except (Unsupported, MessageTooLarge):
                await self._append_checked(rewritten)
                raise
            rewritten.append(entry)
        await self._append_checked(rewritten)

    async def _append_checked(self, entries: Sequence[Entry]) -> None:
        if entries and not self._place.target:  # before more than the first is there: retention must find the hold
            await self._append_held(entries[:1])
            await self._target.hold(self._channel, HOLDER, self._place.target)
            entries = entries[1:]
        if entries:
            await self._append_held(entries)

    async def _append_held(self, entries: Sequence[Entry]) -> None:
        await self._check()
        append, done = promise()
        self._target.submit([Append(self._channel, each.payload, each.timestamp) for each in entries], done)
        try:
            await to_its_end(append)
        finally:
            if append.done() and not append.cancelled() and append.exception() is None:
                self._arrived(entries, append.result())

    def _arrived(self, entries: Sequence[Entry], ids: Sequence[bytes]) -> None:
        is_dense = self._target.capabilities.numbered_ids
        if is_dense and self._place.target and ids[0] != behind(self._place.target):
            raise self._differs()
        self.promise.note(entries)
        self._count(sum(len(entry.payload) for entry in entries))
        self._reach(entries[-1].id, ids[-1])

    def _reach(self, source: bytes, target: bytes) -> None:
        """Move the place behind what was brought over."""
        self._place = replace(self._place, source=source, target=target)

    def _differs(self) -> ReplicaDiffers:
        return ReplicaDiffers(
            f"{self._channel} in the replica is not what the source has: the channel was created anew there, or "
            "something else has written to the replica",
            channel=self._channel,
        )


def appendable(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """`entries` in parts of at most `APPEND_BYTES`, or of one entry."""
    begin, size = 0, 0
    for at, entry in enumerate(entries):
        if at > begin and size + len(entry.payload) > APPEND_BYTES:
            yield entries[begin:at]
            begin, size = at, 0
        size += len(entry.payload)
    if begin < len(entries):
        yield entries[begin:]


def entry_digest(entry: Entry) -> bytes:
    """xxh3-128 of the payload, and of the timestamp."""
    return xxhash.xxh3_128_digest(entry.payload, entry.timestamp & ((1 << 64) - 1))


def replicated_digest(channel: str, entry: Entry) -> bytes:
    """`entry_digest` of what a replica has of an entry of its source. What no replica has counts as it is."""
    try:
        return entry_digest(node_entry(channel, entry))  # in logs without a node it is the same for all that they have
    except Unsupported:
        return entry_digest(entry)
