"""The objects of one log: what lies under which key, and how a process makes sure what lies there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

import msgpack

from ...runtime.errors import CorruptLog, Fenced, FormatTooNew, Unavailable
from .block import HEADER_BYTES, Block, BlockHeader, BlockKind, SectionRow, check_section, decode_block, encode_block
from .hedging import HedgedCreates
from .store import ObjectStore
from .store_probe import probe

FORMAT: Final = "format"
FORMAT_VERSION: Final = 1
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 5.0


def claim_key(epoch: int) -> str:
    """Where the claim on an epoch lies."""
    return f"claim/{epoch:016x}"


def block_key(epoch: int, number: int) -> str:
    """Where a block lies."""
    return f"l0/{epoch:016x}/{number:016x}"


def run_key(epoch: int, number: int) -> str:
    """Where a run lies."""
    return f"run/{epoch:016x}/{number:016x}"


def place_of_block(key: str) -> tuple[int, int]:
    """The epoch and the number of the block with this key."""
    _, epoch, number = key.split("/")
    return int(epoch, 16), int(number, 16)


def pauses() -> Iterator[float]:
    """How long to wait between attempts, in seconds, without end."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Claimant(NamedTuple):
    """A process that has claimed an epoch: its id, and where others reach it, "" where they do not."""

    writer: bytes
    address: str


class LogObjects:
    """The objects of a log in a store, for one process. Coroutines that read raise `Unavailable` where the store does
    not answer; those that create go on until it is certain what is there, however long that takes."""

    def __init__(
        self, store: ObjectStore, *, try_store: bool = False, hedged_creates: HedgedCreates | None = None
    ) -> None:
        """With `try_store` a log is made only where the store passes the probe. Blocks are put by `hedged_creates`."""
        self.store: ObjectStore = store
        self._blocks = hedged_creates or store
        self._try_store = try_store
        self.log: bytes = b""  # the id of the log, once it is known
        self.writer: bytes = uuid4().bytes  # the id of this process in its blocks and claims

    async def look(self) -> bool:
        """Whether the log is there; then its id is known. Raises `FormatTooNew` and `CorruptLog`."""
        if not self.log:
            found = await self.store.get(FORMAT)
            if found is not None:
                self._take_format(found)
        return bool(self.log)

    async def make(self) -> None:
        """Make the log where there is none. Raises `Unsupported` where the store is found unfit."""
        if not self.log:
            if self._try_store:
                await probe(self.store)
            body = cast("bytes", msgpack.packb({"version": FORMAT_VERSION, "log": uuid4().bytes}))
            self._take_format(await self.create(FORMAT, body, len(body)) or body)

    def _take_format(self, body: bytes) -> None:
        try:
            values = cast("dict[str, Any]", msgpack.unpackb(body))
            version, log = int(values["version"]), bytes(values["log"])
        except (ValueError, TypeError, KeyError):
            raise CorruptLog(f"{FORMAT} names no log", path=FORMAT, offset=0) from None
        if version > FORMAT_VERSION:
            raise FormatTooNew(
                f"the log has version {version} of the format: upgrade Tidewal", found=version, supported=FORMAT_VERSION
            )
        self.log = log

    # ---- claims ------------------------------------------------------------------------------------------------------

    async def claimant(self, epoch: int) -> Claimant | None:
        """The process that has claimed the epoch, None where none has. Raises `CorruptLog`."""
        key = claim_key(epoch)
        found = await self.store.get(key)
        if found is None:
            return None
        try:
            values = cast("dict[str, Any]", msgpack.unpackb(found))
            return Claimant(bytes(values["writer"]), str(values.get("address", "")))
        except (ValueError, TypeError, KeyError, msgpack.UnpackException):
            raise CorruptLog(f"{key} is no claim", path=key, offset=0) from None

    async def claim(self, epoch: int, address: str = "") -> bool:
        """Claim the epoch, as a process that others reach at `address`. False where another process has it."""
        values: dict[str, object] = {"version": FORMAT_VERSION, "writer": self.writer}
        body = cast("bytes", msgpack.packb(values | ({"address": address} if address else {})))
        return await self.create(claim_key(epoch), body, len(body)) is None

    async def claimed_ms(self, epoch: int) -> int:
        """When the epoch was claimed, by the store's clock; it was, so this goes on until the store answers."""
        for pause_s in pauses():
            with suppress(Unavailable):
                modified = await self.store.modified(claim_key(epoch))
                if modified is not None:
                    return modified
            await asyncio.sleep(pause_s)
        raise AssertionError("attempts do not end")

    # ---- blocks ------------------------------------------------------------------------------------------------------

    async def block(self, epoch: int, number: int) -> Block | None:
        """The block, None where it is not there (yet). Raises `CorruptLog` and `FormatTooNew`."""
        key = block_key(epoch, number)
        found = await self.store.get(key)
        return None if found is None else self.decode(epoch, number, found)

    def decode(self, epoch: int, number: int, data: bytes) -> Block:
        """The block of this log that lies in this place. Raises `CorruptLog` and `FormatTooNew`."""
        key = block_key(epoch, number)
        block = decode_block(data, key)
        header = block.header
        if (header.log, header.epoch, header.number) != (self.log, epoch, number) or header.kind is BlockKind.RUN:
            raise CorruptLog(f"{key} is a block of another log, or of another place in it", path=key, offset=8)
        return block

    async def section(self, key: str, row: SectionRow) -> bytes | None:
        """One section of an object, None where the object is gone. Raises `CorruptLog`."""
        section = await self.store.get(key, row.offset, row.offset + row.length)
        if section is not None:
            check_section(section, row, key)
        return section

    async def put(self, block: Block) -> None:
        """Put a block of this process in its place. Where an attempt fails it may be there, or may get there later: the
        same bytes are sent again until one of them, or another block, is seen there. Raises `Fenced` where that ends
        the epoch, and `CorruptLog` for what nothing that keeps the rules can have put there."""
        key = block_key(block.header.epoch, block.header.number)
        other = await self._create_by(self._blocks, key, block.data, HEADER_BYTES)
        if other is None:
            return
        kind = decode_block(other, key).header.kind
        if kind is BlockKind.DATA:
            raise CorruptLog(f"{key} is a block of another process in this one's epoch", path=key, offset=24)
        raise Fenced("another process owns the log now")

    async def end_epoch(self, kind: BlockKind, epoch: int, number: int) -> None:
        """Put a fence or a cap into a place, unless there is a block."""
        header = BlockHeader(kind, self.log, self.writer, epoch, number, first_seq=0)
        await self.create(block_key(epoch, number), encode_block(header, {}).data, HEADER_BYTES)

    async def create(self, key: str, body: bytes, telling: int) -> bytes | None:
        """Create an object, or see what is there: None where it is this one, which its first `telling` bytes say, else
        those of the other one."""
        return await self._create_by(self.store, key, body, telling)

    async def _create_by(
        self, creator: ObjectStore | HedgedCreates, key: str, body: bytes, telling: int
    ) -> bytes | None:
        for pause_s in pauses():
            with suppress(Unavailable):
                if await creator.create(key, body):
                    return None
            with suppress(Unavailable):
                found = await self.store.get(key, 0, telling)
                if found is not None:
                    return None if found == body[:telling] else found
            await asyncio.sleep(pause_s)
        raise AssertionError("attempts do not end")

    async def close(self) -> None:
        await self.store.close()
