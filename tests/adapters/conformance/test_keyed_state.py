"""Any backend: keyed state equals the model, whatever fails, is cancelled or moves."""

from __future__ import annotations

import asyncio

import pytest

from tests.keyed_model import NAME, chaos, check
from tidewal.runtime.dataflow import changelog
from tidewal.runtime.dataflow.keyed_processing import process_keyed
from tidewal.runtime.groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from tidewal.runtime.log.record import decode
from tidewal.runtime.log.wal import Append, ChannelPolicy, From


@pytest.mark.slow
async def test_counts_and_outputs_equal_the_model_whatever_fails_and_is_cancelled(backend, seed, monkeypatch):
    monkeypatch.setattr(changelog, "SWEEP_FROM_BYTES", 500)
    monkeypatch.setattr(changelog, "SWEEP_BYTES", 20)
    monkeypatch.setattr(changelog, "SWEPT_AT_ONCE", 2)
    wal = await backend.wal()

    async def pause(seconds):
        await asyncio.sleep(seconds / 10)

    async with asyncio.timeout(100):
        written = await chaos(wal, seed, pause, steps=60)
        await check(wal, written)


@pytest.mark.slow
async def test_the_state_is_there_when_the_log_is_opened_again(backend):
    expected = {}
    for turn in range(3):
        wal = await backend.wal()
        await wal.create_channel("words-1", ChannelPolicy())
        words = [f"word{number}".encode() for number in range(turn, turn + 3)]
        for word in words:
            expected[word] = expected.get(word, 0) + 1
        ids = await wal.append_many([Append("words-1", word) for word in words])
        stop, found = asyncio.Event(), {}

        async def handle(delivered, state, last=ids[-1], stop=stop, found=found):
            table = state.table("counts")
            for entry in delivered.entries:
                word = bytes(entry.payload)
                table[word] = table.get(word, 0) + 1
            if delivered.entries[-1].id == last:
                found.update(table)
                stop.set()
            return []

        member = await wal.join("g", ["words-*"])
        async with asyncio.timeout(60):
            await process_keyed(wal, member, handle, NAME, stop=stop)
        assert found == expected
        await member.aclose()
        await wal.close()


@pytest.mark.slow
async def test_a_seek_begins_an_empty_state_and_the_one_before_does_not_come_back(backend):
    wal = await backend.wal()
    await wal.create_channel("words-1", ChannelPolicy())
    ids = await wal.append_many([Append("words-1", b"a"), Append("words-1", b"b")])
    member = await wal.join("g", ["words-1"])
    found = []

    async def handle(delivered, state):
        table = state.table("counts")
        for entry in delivered.entries:
            table[entry.payload] = table.get(entry.payload, 0) + 1
        if delivered.entries[-1].id == ids[-1]:
            found.append(dict(table))
            stop.set()
        return []

    async with asyncio.timeout(100):
        for _ in range(3):
            stop = asyncio.Event()
            await process_keyed(wal, member, handle, NAME, stop=stop)
            await member.seek("words-1", From.EARLIEST)
        await member.aclose()
        member = await wal.join("g", ["words-1"])
        stop = asyncio.Event()
        await process_keyed(wal, member, handle, NAME, stop=stop)
        ids += await wal.append_many([Append("words-1", b"b")])
        stop = asyncio.Event()
        await process_keyed(wal, member, handle, NAME, stop=stop)
    assert found == [*[{b"a": 1, b"b": 1}] * 4, {b"a": 1, b"b": 2}]
    await member.aclose()


@pytest.mark.slow
async def test_a_bad_entry_becomes_a_letter_and_leaves_nothing_in_the_state(backend):
    wal = await backend.wal()
    await wal.create_channel("words-1", ChannelPolicy())
    words = [b"a", b"bad", b"b", b"a", b"fails twice", b"c"]
    ids = await wal.append_many([Append("words-1", word) for word in words])
    stop, calls, found = asyncio.Event(), [], {}

    async def handle(delivered, state):
        table = state.table("counts")
        for entry in delivered.entries:
            word = bytes(entry.payload)
            calls.append(word)
            table[word] = table.get(word, 0) + 1
            if word == b"bad" or (word == b"fails twice" and calls.count(word) <= 2):
                raise ArithmeticError
        if delivered.entries[-1].id == ids[-1]:
            found.update(table)
            stop.set()
        return []

    retry = RetryPolicy(attempts=3, first_pause_s=0.01)
    member = await wal.join("g", ["words-1"])
    async with asyncio.timeout(60):
        await process_keyed(wal, member, handle, NAME, retry=retry, stop=stop)
        letters = [decode(entry.payload) for entry in await anext(wal.read(GROUP_DEAD_LETTERS, From.EARLIEST))]
    assert found == {b"a": 2, b"b": 1, b"fails twice": 1, b"c": 1}
    assert [(bytes(letter.body), letter.tags["attempts"]) for letter in letters] == [(b"bad", 3)]
    await member.aclose()
