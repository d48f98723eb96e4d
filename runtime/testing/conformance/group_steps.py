"""Consumer groups: what becomes of a batch whose step failed, was cancelled, or whose end was not seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import pytest

from ...errors import Closed, Fenced, InvalidRequest, Overloaded
from ...groups.ack_timer import extend_ack_timeout
from ...groups.nack import Nack
from ...groups.processing import Semantics, process
from ...groups.retry_policy import GROUP_DEAD_LETTERS, RetryPolicy
from ...log.record import decode
from ...log.wal import Append, Delivered, From, Wal
from .backend_under_test import BackendUnderTest, ConformanceTests
from .group_helpers import GROUPS, batches, collect, idle_member, one, outputs_of, position
from .helpers import WITHIN_S, create, fill, payloads, take


async def acknowledged(wal: Wal, id: bytes) -> None:
    """Wait until the group has acknowledged channel `a` up to there."""
    async with asyncio.timeout(WITHIN_S):
        while not any((info.positions.get("a") or b"") >= id for info in await wal.groups()):  # noqa: ASYNC110
            await asyncio.sleep(0)


class TestGroupSteps(ConformanceTests):
    """What becomes of a batch whose step failed, was cancelled, or whose end was not seen."""

    needed: ClassVar[tuple[str, ...]] = GROUPS

    @pytest.mark.parametrize("semantics", list(Semantics))
    async def test_processing_again_with_the_same_member_loses_nothing_that_failed(
        self, wal: Wal, semantics: Semantics
    ) -> None:
        await create(wal, "a", "out")
        member = await wal.join("g", ["a"])
        attempts = 0

        async def handle(delivered: Delivered) -> Sequence[Append]:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise Overloaded("a trouble that passes")
            return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

        await fill(wal, "a", 1)
        with pytest.raises(Overloaded):
            await process(wal, member, handle, semantics)
        last = (await fill(wal, "a", 1, 1))[-1]
        processing = asyncio.create_task(process(wal, member, handle, semantics))
        await acknowledged(wal, last)
        await member.aclose()
        await processing
        expected = [b"1"] if semantics is Semantics.AT_MOST_ONCE else [b"0", b"1"]
        if semantics is Semantics.EXACTLY_ONCE:
            assert await outputs_of(wal) == expected
        else:  # what was worked on while it left may be worked on again
            assert set(await outputs_of(wal)) <= set(expected)

    async def test_what_is_given_back_is_delivered_again_and_nothing_passes_it(self, wal: Wal) -> None:
        await create(wal, "a", "out")
        ids = await fill(wal, "a", 3)
        member = await wal.join("g", ["a"])
        first = await batches(member, 3)
        await member.acknowledge(first[0], ids[:1])
        ids += await fill(wal, "a", 2, 3)
        pending = [each for each in first if each.entries[-1].id != ids[0]] + await batches(member, 2)
        member.redeliver(pending[0])
        member.redeliver(pending[0])
        for each in pending:
            with pytest.raises(Fenced):
                await member.acknowledge(each)
            with pytest.raises(Fenced):
                await member.commit([each], [Append("out", b"never")])
        again = await batches(member, 4)
        assert [entry.id for each in again for entry in each.entries] == ids[1:]
        member.redeliver(pending[0])  # of a lease that is over: nothing happens
        for each in again:
            await member.acknowledge(each)
        (info,) = await wal.groups()
        assert info.positions == {"a": ids[-1]}

    async def test_a_commit_that_was_cancelled_and_is_made_again_doubles_nothing(self, wal: Wal) -> None:
        await create(wal, "a", "out")
        member = await wal.join("g", ["a"])
        await fill(wal, "a", 1)
        written, committed = 1, b""
        while not committed.startswith(b"30"):
            delivered = await one(member)
            outputs = [Append("out", bytes(entry.payload)) for entry in delivered.entries]
            committing = asyncio.create_task(member.commit([delivered], outputs))
            for _ in range(written):
                await asyncio.sleep(0)
            if written <= 30:
                committing.cancel()
                await fill(wal, "a", 1, written)
                written += 1
            (result,) = await asyncio.gather(committing, return_exceptions=True)
            if isinstance(result, asyncio.CancelledError):
                with pytest.raises(Fenced):
                    await member.commit([delivered], outputs)
            else:
                assert isinstance(result, list)
                committed = bytes(outputs[-1].payload)
        assert await outputs_of(wal) == [str(n).encode() for n in range(31)]

    async def test_the_same_batch_committed_twice_at_once_is_refused(self, wal: Wal) -> None:
        await create(wal, "a", "out")
        await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        delivered = await one(member)
        commits = [asyncio.create_task(member.commit([delivered], [Append("out", b"once")])) for _ in range(2)]
        first, second = await asyncio.gather(*commits, return_exceptions=True)
        assert isinstance(first, list)
        assert isinstance(second, InvalidRequest)
        assert await outputs_of(wal) == [b"once"]

    async def test_a_batch_is_acknowledged_and_committed_in_parts(self, backend: BackendUnderTest) -> None:
        wal = await backend.wal()
        await create(wal, "a", "out")
        ids = await fill(wal, "a", 6)
        member = await wal.join("g", ["a"])
        parts = (await one(member, 6)).parts()
        await member.acknowledge(parts[1])
        assert await position(wal, "g", "a") == ids[1]
        await member.commit([parts[2]], [Append("out", b"2")], metadata={"a": b"third"})
        with pytest.raises(InvalidRequest):
            await member.commit([parts[2]], [Append("out", b"again")])
        await member.commit([parts[3]], [Append("out", b"3")])
        await member.acknowledge(parts[0])  # done already
        await wal.close()
        wal = await backend.wal()
        assert await position(wal, "g", "a") == ids[3]
        member = await wal.join("g", ["a"])
        assert member.metadata("a") == b"third"
        assert await collect(member, 2) == {"a": ids[4:]}
        assert await outputs_of(wal) == [b"2", b"3"]

    async def test_a_paused_channel_waits_and_the_others_go_on(self, wal: Wal) -> None:
        await create(wal, "a", "b")
        member = await wal.join("g", ["a", "b"])
        member.pause("a")
        first = await fill(wal, "a", 2)
        other = await fill(wal, "b", 2)
        assert await collect(member, 2) == {"b": other}
        await idle_member(member)
        member.resume("a")
        member.resume("a")
        assert await collect(member, 2) == {"a": first}
        member.pause("a")
        member.resume("a")
        assert await collect(member, len(second := await fill(wal, "a", 1, 2))) == {"a": second}
        with pytest.raises(Fenced):
            member.pause("nowhere")
        member.resume("nowhere")

    @pytest.mark.parametrize("semantics", [Semantics.AT_LEAST_ONCE, Semantics.EXACTLY_ONCE])
    async def test_a_poison_entry_becomes_a_dead_letter_and_the_channel_goes_on(
        self, wal: Wal, semantics: Semantics
    ) -> None:
        await create(wal, "a", "out")
        ids = await fill(wal, "a", 4)

        async def handle(delivered: Delivered) -> Sequence[Append]:
            if b"2" in payloads(delivered.entries):
                raise ArithmeticError("poison")
            return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

        member = await wal.join("g", ["a"])
        retry = RetryPolicy(attempts=2, first_pause_s=0.001)
        processing = asyncio.create_task(process(wal, member, handle, semantics, retry=retry))
        assert payloads(await take(wal, "out", From.EARLIEST, 3)) == [b"0", b"1", b"3"]
        (entry,) = await take(wal, GROUP_DEAD_LETTERS, From.EARLIEST, 1)
        letter = decode(entry.payload)
        assert (letter.key, bytes(letter.body)) == (ids[2], b"2")
        assert {name: letter.tags[name] for name in ("channel", "group", "reason", "attempts")} == {
            "channel": "a",
            "group": "g",
            "reason": "handler",
            "attempts": 2,
        }
        await member.aclose()
        await processing

    @pytest.mark.parametrize("semantics", [each for each in Semantics if each is not Semantics.AT_MOST_ONCE])
    async def test_what_a_handler_holds_for_too_long_or_gives_back_comes_again_and_counts(
        self, wal: Wal, semantics: Semantics
    ) -> None:
        if semantics is Semantics.EXACTLY_ONCE and not wal.capabilities.atomic_commits:
            pytest.skip("no commits of outputs with positions")
        await create(wal, "a", "out")
        await fill(wal, "a", 4)
        calls: Counter[bytes] = Counter()

        async def handle(delivered: Delivered) -> Sequence[Append]:
            (*_, last) = found = payloads(delivered.entries)
            calls.update(found)
            if b"1" in found:
                await asyncio.Event().wait()  # for ever
            if b"2" in found and calls[b"2"] < 3:
                raise Nack("not yet", delay_s=0.01)
            if last == b"3" and calls[b"3"] < 3:
                extend_ack_timeout(60.0)
            return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

        member = await wal.join("g", ["a"])
        retry = RetryPolicy(attempts=3, first_pause_s=0.001, ack_timeout_s=0.1)
        processing = asyncio.create_task(process(wal, member, handle, semantics, retry=retry))
        assert payloads(await take(wal, "out", From.EARLIEST, 3)) == [b"0", b"2", b"3"]
        (entry,) = await take(wal, GROUP_DEAD_LETTERS, From.EARLIEST, 1)
        letter = decode(entry.payload)
        assert (bytes(letter.body), letter.tags["attempts"]) == (b"1", 3)
        assert "AckTimeout" in str(letter.tags["message"])
        await member.aclose()
        await processing

    async def test_what_a_member_holds_for_too_long_comes_again(self, wal: Wal) -> None:
        await create(wal, "a", "b")
        await fill(wal, "a", 4)
        await fill(wal, "b", 4)
        member = await wal.join("g", ["a", "b"], ack_timeout_s=1.0)
        assert len((await collect(member, 8, acknowledge=False)).keys()) == 2
        async with asyncio.timeout(WITHIN_S):
            again = await anext(member)
            member.extend_ack_timeout(again, 60.0)
            other = await anext(member)
            while other.channel == again.channel:
                await member.acknowledge(other)  # a broker has divided it
                other = await anext(member)
        for delivered in (again, other):
            await member.acknowledge(delivered)
        await member.aclose()

    @pytest.mark.parametrize("semantics", list(Semantics))
    async def test_processing_ends_when_the_member_leaves_while_a_handler_works(
        self, wal: Wal, semantics: Semantics
    ) -> None:
        await create(wal, "a", "out")
        await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        working, left = asyncio.Event(), asyncio.Event()

        async def handle(delivered: Delivered) -> Sequence[Append]:
            working.set()
            await left.wait()
            return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

        processing = asyncio.create_task(process(wal, member, handle, semantics))
        async with asyncio.timeout(WITHIN_S):
            await working.wait()
            await member.aclose()
            left.set()
            await processing

    @pytest.mark.parametrize(
        ("semantics", "worked", "copied"),
        [
            (Semantics.AT_MOST_ONCE, [b"0", b"2"], [b"2"]),
            (Semantics.AT_LEAST_ONCE, [b"0", b"0", b"2"], [b"0", b"2"]),
            (Semantics.EXACTLY_ONCE, [b"0", b"0", b"2"], [b"0", b"2"]),
        ],
    )
    async def test_one_argument_says_what_becomes_of_work_that_failed_in_the_middle(
        self, wal: Wal, semantics: Semantics, worked: list[bytes], copied: list[bytes]
    ) -> None:
        await create(wal, "a", "out")
        seen: list[bytes] = []

        async def handle(delivered: Delivered) -> Sequence[Append]:
            seen.extend(payloads(delivered.entries))
            if len(seen) == 1:
                raise ArithmeticError
            return [Append("out", bytes(entry.payload)) for entry in delivered.entries]

        await fill(wal, "a", 1)
        member = await wal.join("g", ["a"])
        with pytest.raises(ArithmeticError):
            await process(wal, member, handle, semantics)
        await member.aclose()
        member = await wal.join("g", ["a"])
        await fill(wal, "a", 1, 2)
        processing = asyncio.create_task(process(wal, member, handle, semantics))
        found = await take(wal, "out", From.EARLIEST, len(copied))
        await member.aclose()
        with suppress(Closed):  # where it left before the last acknowledgement
            await processing
        assert seen == worked
        assert payloads(found) == copied
