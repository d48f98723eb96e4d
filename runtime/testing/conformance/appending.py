"""What is appended, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ...clock import SystemClock, compose
from ...errors import Closed, InvalidRequest, MessageTooLarge, TidewalError, Unsupported
from ...log.wal import TOMBSTONE, Append, ChannelPolicy, Durability, Entry, From, Payload, Wal
from .backend_under_test import ConformanceTests
from .helpers import PLAIN, WITHIN_S, on_loop, payloads, submitted, take


def read_only(payload: bytes) -> memoryview:
    """A view that cannot be written through, of what can be."""
    return memoryview(bytearray(payload)).toreadonly()


class TestAppending(ConformanceTests):
    """What is appended, in which order, and what is refused."""

    @pytest.mark.slow
    async def test_concurrent_appends_are_read_by_all_in_one_order(self, wal: Wal) -> None:
        channels = ["a", "b", "c"]
        for channel in channels:
            await wal.create_channel(channel, PLAIN)

        async def produce(channel: str, worker: int) -> list[tuple[bytes, str]]:
            return [(await wal.append(channel, f"{worker}:{i}".encode(), i), f"{worker}:{i}") for i in range(60)]

        async def consume(channel: str) -> list[Entry]:
            return await take(wal, channel, From.EARLIEST, 300)

        for channel in channels:
            readers = [asyncio.create_task(consume(channel)) for _ in range(2)]
            written = [
                pair for pairs in await asyncio.gather(*(produce(channel, w) for w in range(5))) for pair in pairs
            ]
            first, second = await asyncio.gather(*readers)
            expected = sorted((id, text.encode()) for id, text in written)
            assert [(entry.id, bytes(entry.payload)) for entry in first] == expected
            assert first == second
            assert len({id for id, _ in written}) == 300

    async def test_channels_are_isolated(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        await wal.create_channel("b", PLAIN)
        for i in range(50):
            await wal.append("ab"[i % 2], bytes([i]))
        assert payloads(await take(wal, "a", From.EARLIEST, 25)) == [bytes([i]) for i in range(0, 50, 2)]
        assert payloads(await take(wal, "b", From.EARLIEST, 25)) == [bytes([i]) for i in range(1, 50, 2)]

    async def test_a_batch_over_channels_answers_with_ids_in_order(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        await wal.create_channel("b", PLAIN)
        ids = await wal.append_many([Append("a", b"1", 5), Append("b", b"2", 6), Append("a", b"3", 7)])
        entries = await take(wal, "a", From.EARLIEST, 2)
        assert [(e.id, e.timestamp, bytes(e.payload)) for e in entries] == [(ids[0], 5, b"1"), (ids[2], 7, b"3")]
        assert (await take(wal, "b", From.EARLIEST, 1))[0].id == ids[1]

    async def test_entries_without_a_timestamp_get_the_present_time(self, wal: Wal) -> None:
        """But for `submit`: what appends by it has its own time, or none."""
        await wal.create_channel("a", PLAIN)
        before = compose(SystemClock().wall_ms())
        await wal.append("a", b"now")
        await wal.append_many([Append("a", b"now"), Append("a", b"then", 7), Append("a", b"now")])
        after = compose(SystemClock().wall_ms())
        await submitted(wal, [Append("a", b"never")])
        first, second, then, third, never = [each.timestamp for each in await take(wal, "a", From.EARLIEST, 5)]
        assert before <= first <= second == third <= after
        assert (then, never) == (7, 0)

    async def test_nothing_to_append_is_fine(self, wal: Wal) -> None:
        assert await wal.append_many([]) == []

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, read_only])
    async def test_payloads_come_back_byte_for_byte_and_belong_to_the_log(
        self, wal: Wal, kind: Callable[[bytes], Payload]
    ) -> None:
        await wal.create_channel("a", PLAIN)
        sent = [b"", b"\0", bytes(range(256)), "äöü🦀".encode(), b"x" * 70_000]
        buffers = [kind(payload) for payload in sent]
        answer: asyncio.Future[list[bytes] | TidewalError] = asyncio.get_running_loop().create_future()
        wal.submit([Append("a", buffer) for buffer in buffers], on_loop(answer.set_result))
        for buffer in buffers:  # it may be on its way still
            memory = buffer.obj if isinstance(buffer, memoryview) else buffer
            if isinstance(memory, bytearray):
                memory[:] = b"!" * len(memory)
        assert isinstance(await answer, list)
        assert payloads(await take(wal, "a", From.EARLIEST, len(sent))) == sent

    @pytest.mark.parametrize("payload", ["text", 5, None, [1, 2]], ids=repr)
    async def test_a_payload_that_is_no_bytes_is_refused_by_name(self, wal: Wal, payload: Any) -> None:
        await wal.create_channel("a", PLAIN)
        named = type(payload).__name__
        with pytest.raises(InvalidRequest, match=named):
            await wal.append("a", payload)
        for entries in ([Append("a", payload)], [Append("a", b"good"), Append("a", payload)]):
            with pytest.raises(InvalidRequest, match=named):
                await wal.append_many(entries)
            with pytest.raises(InvalidRequest, match=named):
                await submitted(wal, entries)
        await wal.append("a", b"after")
        assert payloads(await take(wal, "a", From.EARLIEST, 1)) == [b"after"]

    @pytest.mark.parametrize(
        "entry",
        [
            Append("a", b"x", key=b"k"),
            Append("a", b"x", key=b""),
            Append("a", b"x", headers=(("h", None),)),
            Append("a", TOMBSTONE),
        ],
        ids=["key", "empty-key", "headers", "tombstone"],
    )
    async def test_what_a_channel_cannot_carry_is_refused_and_not_dropped(self, wal: Wal, entry: Append) -> None:
        await wal.create_channel("a", PLAIN)
        for entries in ([entry], [Append("a", b"good"), entry]):
            with pytest.raises(Unsupported, match="topics that others made"):
                await wal.append_many(entries)
            with pytest.raises(Unsupported):
                await submitted(wal, entries)
        with pytest.raises(Unsupported):
            await wal.append("a", entry.payload, key=entry.key, headers=entry.headers)
        if wal.capabilities.groups:
            await wal.append("a", b"input")
            member = await wal.join("g", ["a"])
            with pytest.raises(Unsupported):
                await member.commit([await anext(member)], [entry])
            await member.aclose()

    async def test_the_size_limit_is_exact_and_harmless(self, wal: Wal) -> None:
        await wal.create_channel("a", ChannelPolicy(max_message_bytes=100))
        await wal.append("a", bytes(100))
        with pytest.raises(MessageTooLarge) as caught:
            await wal.append_many([Append("a", b"small"), Append("a", bytes(101))])
        assert (caught.value.size, caught.value.limit) == (101, 100)
        await wal.append("a", b"after")
        assert payloads(await take(wal, "a", From.EARLIEST, 2)) == [bytes(100), b"after"]

    @pytest.mark.parametrize("acks", list(Durability))
    async def test_every_durability_acknowledges_with_the_id_that_is_read(self, wal: Wal, acks: Durability) -> None:
        await wal.create_channel("a", ChannelPolicy(acks=acks))
        ids = [await wal.append("a", bytes([i])) for i in range(5)]
        assert [entry.id for entry in await take(wal, "a", From.EARLIEST, 5)] == ids

    async def test_submit_from_other_threads_calls_back_once_each(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        answers: asyncio.Queue[list[bytes] | TidewalError] = asyncio.Queue()
        answered = on_loop(answers.put_nowait)

        def work() -> None:
            for _ in range(100):
                wal.submit([Append("a", b"x")], answered)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        results = [await asyncio.wait_for(answers.get(), WITHIN_S) for _ in range(400)]
        for thread in threads:
            thread.join()
        assert len({id for ids in results if isinstance(ids, list) for id in ids}) == 400
        assert answers.empty()

    async def test_a_cancelled_append_is_there_once_or_not_at_all(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        task = asyncio.create_task(wal.append("a", b"maybe"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wal.append("a", b"sure")
        entries = await take(wal, "a", From.EARLIEST, 1)
        if bytes(entries[0].payload) == b"maybe":
            entries = await take(wal, "a", From.EARLIEST, 2)
        assert payloads(entries)[-1] == b"sure"

    async def test_after_close_everything_says_closed(self, wal: Wal) -> None:
        await wal.create_channel("a", PLAIN)
        await wal.close()
        await wal.close()
        for call in (
            lambda: wal.append("a", b""),
            lambda: wal.create_channel("b", PLAIN),
            lambda: wal.drop_channel("a"),
            lambda: wal.channels(),
            lambda: wal.describe("a"),
            lambda: wal.latest_id("a"),
            lambda: wal.id_at("a", 0),
            lambda: wal.truncate("a", bytes(8)),
            lambda: wal.hold("a", "me", None),
        ):
            with pytest.raises(Closed):
                await call()
        with pytest.raises(Closed):
            wal.submit([Append("a", b"")], lambda _: None)
