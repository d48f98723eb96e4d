"""Transactions over several pchannels, of which a decision is open, or is missing, when a node goes to another log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.actors.test_node_migration import FarWal
from tests.actors.test_online_migration import NEW, OLD, MemoryOpener, keys, node_on
from tidewal.actors.streamingnode.transactions import TransactionParticipant
from tidewal.actors.transaction_commits import TransactionCommits
from tidewal.runtime.log.migration_state import check_in_use
from tidewal.runtime.log.record import MAGIC, RecordType, decode
from tidewal.runtime.log.wal import Wal
from tidewal.runtime.ownership.prepared import PreparedTransaction
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

CAPABILITIES = replace(MemoryWal.capabilities, atomic_batches=False)


class PreparedWal(MemoryWal):
    """A log in which what is for several channels is prepared first."""

    capabilities = CAPABILITIES


class FarPreparedWal(FarWal):
    """Another one, with higher ids."""

    capabilities = CAPABILITIES


class PreparedOpener(MemoryOpener):
    """Opens such logs."""

    async def open(self, url: str) -> Wal:
        wal = PreparedWal(self.logs[url])
        await check_in_use(wal, url)
        return wal

    async def open_alone(self, url: str) -> Wal:
        kind = PreparedWal if url == OLD else FarPreparedWal
        return kind(self.logs.setdefault(url, MemoryLog()))


def types_in(log: MemoryLog) -> list[tuple[str, RecordType]]:
    """The channels and types of the records of transactions."""
    wanted = (RecordType.PREPARE, RecordType.ABORT, RecordType.ROWS)
    return [
        (name, record.type)
        for name, channel in log.channels.items()
        for entry in channel.entries
        if bytes(entry.payload[: len(MAGIC)]) == MAGIC and (record := decode(entry.payload)).type in wanted
    ]


class Parts:
    """What becomes of transactions in the log `old`: with `decided` all channels but one get nothing of what is
    committed, without it none is decided."""

    def __init__(self, old: MemoryLog, *, decided: bool, patch: pytest.MonkeyPatch) -> None:
        self.prepared = asyncio.Event()
        self._old, self._written = old, ""
        looking, deciding = TransactionParticipant._look_at, TransactionCommits._decide

        def look(this: Any, channel: str, transactions: Sequence[PreparedTransaction]) -> None:
            if not self._is_here(this._node.wal):
                looking(this, channel, transactions)
            elif decided and any(this._decisions.find(each.id) for each in transactions):
                self._written = self._written or channel
                if channel == self._written:
                    looking(this, channel, transactions)
                else:
                    self.prepared.set()

        async def decide(this: Any, *args: Any) -> int:
            if not decided and self._is_here(this._cluster.log._wal):
                self.prepared.set()
                await asyncio.Event().wait()
            return await deciding(this, *args)

        patch.setattr(TransactionParticipant, "_look_at", look)
        patch.setattr(TransactionCommits, "_decide", decide)

    def _is_here(self, wal: Any) -> bool:
        return wal.log is self._old


@pytest.mark.parametrize("decided", [True, False], ids=["decided", "undecided"])
async def test_what_is_prepared_at_the_switch_is_there_once_and_whole(
    home, monkeypatch: pytest.MonkeyPatch, decided: bool
) -> None:
    opener = PreparedOpener()
    parts = Parts(opener.logs[OLD], decided=decided, patch=monkeypatch)
    async with node_on(home, opener) as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=2)

        async def write() -> int:
            async with client.transaction() as t:
                await t.insert("people", home.people(*range(10)))
            return t.result.ts

        writing = asyncio.create_task(write())
        async with asyncio.timeout(60):
            await parts.prepared.wait()
        before = types_in(opener.logs[OLD])
        await node.migrate(NEW)
        ts = await writing
        assert await client.count("people", at=ts - 1) == 0
        assert await client.count("people", at=ts) == 10
        await client.insert("people", home.people(10))
        assert await keys(client) == list(range(11))
    assert sum(type is RecordType.PREPARE for _, type in before) >= 2
    after = types_in(opener.logs[NEW])
    assert len({name for name, type in after if type is RecordType.ROWS}) == 2
    assert any(type is RecordType.ABORT for _, type in after) == (not decided)
