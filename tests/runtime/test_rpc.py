"""Requests and replies over a log that loses, duplicates and delays them, and roles with several incarnations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tidewal.runtime.errors import (
    ChannelNotFound,
    Closed,
    DeadlineExceeded,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    TidewalError,
    Unavailable,
)
from tidewal.runtime.log.fragments import FragmentAssembler, fragments_of
from tidewal.runtime.log.names import Names
from tidewal.runtime.log.record import Record, RecordType, decode
from tidewal.runtime.log.wal import Append, ChannelInfo, ChannelPolicy, OnAppended
from tidewal.runtime.rpc.client import CLOSE_S, RpcClient
from tidewal.runtime.rpc.protocol import MESSAGE_BYTES_MAX
from tidewal.runtime.rpc.remembered_replies import REMEMBERED_BYTES
from tidewal.runtime.rpc.server import Request, RpcServer
from tidewal.runtime.testing.clock import run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

NAMES = Names()
SMALL_BYTES = 4096


class Server:
    """Answers `echo`, `fail`, and counts its requests."""

    def __init__(self, wal: MemoryWal) -> None:
        self.inbox = RpcServer(wal, "server", NAMES)
        self.asked: list[tuple[str, str]] = []
        self.silent = False

    async def serve(self) -> None:
        async for pack in self.inbox:
            for request in pack.requests:
                self.asked.append((request.client, request.method))
                if not self.silent:
                    self.answer(request)

    def answer(self, request: Request) -> None:
        if request.method == "fail":
            request.fail(Overloaded("enough", limit="test"))
        elif request.method == "medium":
            request.reply(body=bytes(2 * SMALL_BYTES))
        elif request.method == "large":
            request.reply(body=bytes(MESSAGE_BYTES_MAX + 1))
        else:
            request.reply(request.params, bytes(request.body))


@asynccontextmanager
async def serving(wal: MemoryWal) -> AsyncIterator[Server]:
    server = Server(wal)
    await server.inbox.open()
    task = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def calling(wal: MemoryWal, name: str = "") -> AsyncIterator[RpcClient]:
    caller = RpcClient(wal, NAMES, name=name)
    await caller.open()
    try:
        yield caller
    finally:
        await caller.close()


@pytest.mark.parametrize("refusal", [Overloaded("no room", limit="channels"), ChannelNotFound("dropped again")])
def test_a_client_listens_again_once_the_log_accepts_its_channel_again(monkeypatch, refusal) -> None:
    refused = 0

    async def refuse(*_: object) -> None:
        nonlocal refused
        refused += 1
        raise refusal

    async def run() -> None:
        wal = MemoryWal(MemoryLog())
        async with serving(wal), calling(wal) as caller:
            with monkeypatch.context() as full:
                full.setattr(MemoryWal, "create_channel", refuse)
                await wal.drop_channel(NAMES.replies(caller.name))
                with pytest.raises(DeadlineExceeded):
                    await caller.call("server", "echo", deadline_s=5)
            assert (await caller.call("server", "echo", {"n": 1}, deadline_s=5)).values == {"n": 1}

    run_virtual(run())
    assert 1 < refused < 20


class MigratedWal(MemoryWal):
    """A log to which another one has moved by the time at which a client has its first channel there."""

    moved = False

    async def create_channel(self, channel: str, policy: ChannelPolicy) -> None:
        await super().create_channel(channel, policy)
        if not self.moved and channel == NAMES.replies("c"):
            self.moved = True
            await self.drop_channel(channel)


def test_a_client_that_is_opened_while_the_log_is_migrated_listens_in_the_new_one() -> None:
    async def run() -> None:
        wal = MigratedWal(MemoryLog())
        async with serving(wal), calling(wal, "c") as caller:
            assert wal.moved
            assert (await caller.call("server", "echo", {"n": 1}, deadline_s=5)).values == {"n": 1}

    run_virtual(run())


def test_answers_with_values_and_bytes_and_raises_what_was_raised() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with serving(wal), calling(wal) as caller:
            reply = await caller.call("server", "echo", {"a": 1, "map": {7: b"x"}}, b"body")
            assert dict(reply.values) == {"a": 1, "map": {7: b"x"}}
            assert bytes(reply.body) == b"body"
            with pytest.raises(Overloaded) as raised:
                await caller.call("server", "fail")
            assert raised.value.limit == "test"

    run_virtual(main())


@pytest.mark.parametrize("kind", ["drop", "duplicate", "delay"])
def test_each_request_is_served_once_while_the_server_runs(seed: int, kind: str) -> None:
    async def main() -> None:
        plan = FaultPlan(seed, Rates(**{kind: 0.4}))
        wal = MemoryWal(faults=plan)
        async with serving(wal) as server, calling(wal) as caller:
            replies = await asyncio.gather(
                *(caller.call("server", "echo", {"n": number}, deadline_s=600) for number in range(200))
            )
            assert [reply.values["n"] for reply in replies] == list(range(200))
            assert len(server.asked) == 200
        assert plan.trace

    run_virtual(main())


def test_a_call_without_a_server_ends_with_the_deadline() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with calling(wal) as caller:
            before = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await caller.call("nobody", "echo", deadline_s=3)
            assert asyncio.get_running_loop().time() - before == pytest.approx(3)
            with pytest.raises(DeadlineExceeded, match="nobody did not answer echo within 0 s"):
                await caller.call("nobody", "echo", deadline_s=-1e-6)  # what earlier attempts left

    run_virtual(main())


def test_a_server_that_comes_later_is_found() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with calling(wal) as caller:
            call = asyncio.create_task(caller.call("server", "echo", {"n": 1}))
            await asyncio.sleep(0)
            async with serving(wal):
                assert (await call).values["n"] == 1

    run_virtual(main())


def test_the_next_incarnation_of_a_server_serves_no_request_again() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with calling(wal) as caller:
            async with serving(wal) as first:
                for number in range(5):
                    await caller.call("server", "echo", {"n": number})
                first.silent = True
                waiting = asyncio.create_task(caller.call("server", "waits", {"n": 9}))
                while len(first.asked) < 6:  # noqa: ASYNC110 -- what is waited for has no event to await
                    await asyncio.sleep(0)
            async with serving(wal) as second:
                assert (await waiting).values["n"] == 9
                assert [method for _, method in second.asked] == ["waits"]

    run_virtual(main())


def test_a_refusal_is_certain_only_where_no_earlier_incarnation_can_have_served_the_request() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with calling(wal) as caller:
            async with serving(wal) as first:
                with pytest.raises(Overloaded) as at_once:
                    await caller.call("server", "fail")
                first.silent = True
                waiting = asyncio.create_task(caller.call("server", "fail"))
                while len(first.asked) < 2:  # noqa: ASYNC110 -- what is waited for has no event to await
                    await asyncio.sleep(0)
            async with serving(wal):
                with pytest.raises(Overloaded) as repeated:
                    await waiting
        assert at_once.value.fields == {"limit": "test"}
        assert repeated.value.fields == {"limit": "test", "outcome_unknown": True}

    run_virtual(main())


def test_a_new_client_over_the_same_log_gets_replies_of_its_own() -> None:
    async def main() -> None:
        log = MemoryLog()
        async with serving(MemoryWal(log)) as server:
            for life in range(2):
                async with calling(MemoryWal(log), f"life-{life}") as caller:
                    assert (await caller.call("server", "echo", {"life": life})).values["life"] == life
            assert len(server.asked) == 2

    run_virtual(main())


def test_too_large_a_request_or_answer_is_an_error_and_not_a_silence() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with serving(wal), calling(wal) as caller:
            with pytest.raises(MessageTooLarge):
                await caller.call("server", "echo", {}, bytes(MESSAGE_BYTES_MAX))
            with pytest.raises(MessageTooLarge):
                await caller.call("server", "large")
            assert caller._waiting == {}
            assert (await caller.call("server", "echo", {"still": "there"})).values["still"] == "there"

    run_virtual(main())


def test_closing_ends_the_calls_that_wait() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with calling(wal) as caller:
            call = asyncio.create_task(caller.call("nobody", "echo"))
            await asyncio.sleep(0)
            await caller.close()
            with pytest.raises(Closed) as waiting:
                await call
            assert waiting.value.outcome_unknown  # a role may still serve it
            with pytest.raises(Closed) as later:
                await caller.call("server", "echo")
            assert "outcome_unknown" not in later.value.fields
        wal = MemoryWal()
        async with calling(wal) as caller:
            call = asyncio.create_task(caller.call("nobody", "echo"))
            await asyncio.sleep(0)
            await wal.close()
            with pytest.raises(Closed) as lost:
                await call
            assert lost.value.outcome_unknown

    run_virtual(main())


def test_on_another_event_loop_a_client_refuses_at_once() -> None:
    caller = RpcClient(MemoryWal(), NAMES)

    async def use() -> None:
        with pytest.raises(InvalidRequest, match=r"belongs to another event loop.*connect again"):
            await caller.call("server", "echo")
        with pytest.raises(InvalidRequest, match="belongs to another event loop"):
            await caller.close()

    run_virtual(caller.open())
    run_virtual(use())


class DeafWal(MemoryWal):
    """Its owner is gone: no channel is dropped any more, or the log says so."""

    refusal: TidewalError | None = None

    async def drop_channel(self, channel: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("refusal", [None, Unavailable("no owner answers")])
def test_closing_is_best_effort_where_the_log_does_not_answer(caplog, refusal) -> None:
    async def main() -> None:
        wal = DeafWal()
        wal.refusal = refusal
        caller = RpcClient(wal, NAMES)
        await caller.open()
        loop = asyncio.get_running_loop()
        began = loop.time()  # virtual
        assert await caller.close() is False
        assert loop.time() - began <= CLOSE_S
        assert await caller.close() is False

    run_virtual(main())
    assert len(caplog.messages) == 1
    assert "its reply channel is still there: " + ("no owner" if refusal else "no answer within 1 s") in caplog.text


@pytest.mark.slow
def test_what_is_remembered_is_bounded_in_bytes() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with serving(wal) as server, calling(wal) as caller:
            for _ in range(REMEMBERED_BYTES // 15_000 + 100):
                await caller.call("server", "echo", {}, bytes(15_000))
            remembered = server.inbox._answers
            assert sum(map(len, remembered._replies.values())) == remembered.size <= REMEMBERED_BYTES

    run_virtual(main())


def test_garbage_on_the_channels_is_skipped() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with serving(wal), calling(wal, "me") as caller:
            await wal.append(NAMES.requests("server"), b"\xff garbage")
            await wal.append(NAMES.replies("me"), b"garbage")
            assert (await caller.call("server", "echo", {"n": 1})).values["n"] == 1

    run_virtual(main())


class SmallWal(MemoryWal):
    """Takes no message over 4 KiB."""

    async def describe(self, channel: str) -> ChannelInfo:
        return replace(await super().describe(channel), backend_message_bytes=SMALL_BYTES)

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        assert max(len(entry.payload) for entry in entries) <= SMALL_BYTES
        super().submit(entries, done)


@pytest.mark.parametrize("kind", ["", "drop", "duplicate", "delay"])
def test_large_requests_and_replies_travel_in_fragments(seed: int, kind: str) -> None:
    async def main() -> None:
        wal = SmallWal(faults=FaultPlan(seed, Rates(**{kind: 0.3})) if kind else None)
        async with serving(wal) as server, calling(wal) as one, calling(wal) as other:
            bodies = [bytes([number]) * (number * 1500) for number in range(40)]
            calls = [
                caller.call("server", "echo", {"n": number}, body, deadline_s=600)
                for number, body in enumerate(bodies)
                for caller in (one, other)
            ]
            replies = await asyncio.gather(*calls)
            assert [bytes(reply.body) for reply in replies] == [body for body in bodies for _ in range(2)]
            assert [reply.values["n"] for reply in replies] == [number for number in range(40) for _ in range(2)]
            small = [number for number in range(40) if len(bodies[number]) < SMALL_BYTES]
            assert len(server.asked) >= 80
            if not kind:
                assert len(server.asked) == 80
            assert small
            with pytest.raises(MessageTooLarge):
                await one.call("server", "echo", {"much": bytes(SMALL_BYTES)})
            with pytest.raises(MessageTooLarge):
                await one.call("server", "large")

    run_virtual(main())


def test_fragments_that_never_become_whole_are_forgotten(seed: int) -> None:
    record = Record(RecordType.REQUEST, producer="me", key=b"key", body=bytes(range(256)) * 100)
    whole = [decode(piece) for piece in fragments_of(record, SMALL_BYTES, MESSAGE_BYTES_MAX)]
    random.Random(seed).shuffle(whole)
    fragments = FragmentAssembler(4 * len(record.body))
    for number in range(100):
        for piece in whole[:-1]:
            assert fragments.take(replace(piece, pseq=number)) is None
        assert fragments._bytes <= 4 * len(record.body)
    assert fragments.take(replace(whole[-1], pseq=0)) is None  # the rest of it is forgotten
    found = fragments.take(replace(whole[-1], pseq=99))
    assert found is not None
    assert (found.key, bytes(found.body), found.part) == (b"key", bytes(record.body), None)


class RefusingWal(MemoryWal):
    """Answers a large message with an error, later, and then takes what is small."""

    def submit(self, entries: Sequence[Append], done: OnAppended) -> None:
        if max(len(entry.payload) for entry in entries) > SMALL_BYTES:
            asyncio.get_running_loop().call_later(0.01, done, InvalidRequest("the log never takes this"))
        else:
            super().submit(entries, done)


def test_what_the_log_refuses_later_is_an_error_and_not_a_silence() -> None:
    async def main() -> None:
        wal = RefusingWal()
        async with serving(wal), calling(wal) as caller:
            with pytest.raises(InvalidRequest, match="never takes"):
                await caller.call("server", "echo", {}, bytes(2 * SMALL_BYTES))
            with pytest.raises(InvalidRequest, match="never takes") as served:
                await caller.call("server", "medium")
            assert served.value.outcome_unknown
            assert asyncio.get_running_loop().time() < 1

    run_virtual(main())


def test_clients_that_share_a_name_get_their_own_replies_only_and_leave_the_channel() -> None:
    async def main() -> None:
        wal = MemoryWal()
        async with serving(wal) as server:
            callers = [RpcClient(wal, NAMES, name="many", shared=True) for _ in range(3)]
            for _ in range(2):  # each anew under the same name, as after a kill
                for caller in callers:
                    await caller.open()
                replies = await asyncio.gather(
                    *(each.call("server", "echo", {"mine": place}) for place, each in enumerate(callers) for _ in "xyz")
                )
                assert [reply.values["mine"] for reply in replies] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
                await callers[0].close()
                assert not callers[0].listening
                assert callers[1].listening
                assert (await callers[1].call("server", "echo", {"still": "there"})).values["still"] == "there"
                for caller in callers:
                    await caller.close()
                assert NAMES.replies("many") in await wal.channels()
                callers = [RpcClient(wal, NAMES, name="many", shared=True) for _ in range(3)]
            assert len(server.asked) == 20

    run_virtual(main())
