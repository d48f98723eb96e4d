"""Requests over connections, over the log, and over both by turns: served once, answered, and never held up."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.direct_network import MemoryNetwork, MemoryTransport
from tidewal.runtime.cluster.state import NodeMember
from tidewal.runtime.config.settings import ClusterSettings
from tidewal.runtime.direct.address import HostPort
from tidewal.runtime.direct.client import OutgoingConnection
from tidewal.runtime.direct.connection import (
    HANDSHAKE_S,
    PING_S,
    SILENT_PINGS,
    STALLED_PINGS,
    UNSENT_BYTES,
    FramedConnection,
)
from tidewal.runtime.direct.connections import NodeConnections
from tidewal.runtime.direct.frames import encode_frame
from tidewal.runtime.direct.server import IN_FLIGHT_BYTES, DirectInbox, DirectServer
from tidewal.runtime.errors import Overloaded, TidewalError, Unavailable
from tidewal.runtime.log.names import Names
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.rpc.client import FIRST_RETRY_S, RpcClient
from tidewal.runtime.rpc.protocol import MESSAGE_BYTES_MAX
from tidewal.runtime.rpc.server import Request, RpcServer
from tidewal.runtime.testing.clock import elapse, run_virtual
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryLog, MemoryWal

NAMES = Names()
ADDRESS = HostPort("127.0.0.1", 1)
KEY = b"k" * 32
SECRET = "a long secret"


class Served:
    """A node with a role that counts and answers, and what others need to reach it."""

    def __init__(self, name: str, wal: MemoryWal, network: MemoryNetwork, members: dict[str, NodeMember]) -> None:
        self.name, self.members = name, members
        cluster = ClusterSettings.model_validate({"secret": SECRET, "listen": "127.0.0.1:0"})
        self.metrics = Metrics(name)
        self.connections = NodeConnections(name, members.get, cluster, network.of(), self.metrics)
        self.server = RpcServer(wal, "role", NAMES)
        self.inbox = DirectInbox(self.server)
        self.rpc = RpcClient(wal, NAMES, name=f"client-{name}", routes=self.connections)
        self.asked: list[int] = []
        self.answer: Callable[[Request], object] = lambda request: request.reply(request.params, bytes(request.body))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Served]:
        address = await self.connections.listen()
        self.members[self.name] = NodeMember(self.name, self.name, ("role",), 3000, address=address)
        await self.server.open()
        await self.rpc.open()
        self.connections.serve("role", self.inbox)
        tasks = [asyncio.create_task(self._serve(each)) for each in (self.server, self.inbox)]
        try:
            yield self
        finally:
            del self.members[self.name]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.connections.leave("role", self.inbox)
            await self.rpc.close()
            await self.connections.close()

    async def _serve(self, requests: RpcServer | DirectInbox) -> None:
        async for pack in requests:
            for request in pack.requests:
                self.asked.append(request.params["n"])
                self.answer(request)

    async def call(self, to: str, n: int, body: bytes = b"", deadline_s: float = 60.0):
        reply = await self.rpc.call("role", "echo", {"to": to, "n": n}, body, deadline_s=deadline_s)
        assert reply.values["n"] == n
        assert bytes(reply.body) == body

    def routes(self) -> tuple[int, int]:
        return tuple(int(self.metrics.value("direct_request_total", route=each)) for each in ("direct", "log"))


def run_pair(work: Callable[[Served, Served, MemoryNetwork], Awaitable[None]], plan: FaultPlan | None = None) -> None:
    """Two nodes of one log and one network."""

    async def main() -> None:
        log, network, members = MemoryLog(), MemoryNetwork(), dict[str, NodeMember]()
        async with AsyncExitStack() as stack:
            wals = [MemoryWal(log, plan or FaultPlan(1)) for _ in range(2)]
            a, b = [Served(name, wal, network, members) for name, wal in zip("ab", wals, strict=True)]
            for each in (a, b):
                await stack.enter_async_context(each.running())
            await work(a, b, network)

    run_virtual(main())


async def until_direct(a: Served, to: str) -> None:
    while to not in a.connections._connections:
        await a.call(to, 0)
        await elapse(0.01)


def test_the_first_request_goes_through_the_log_and_later_ones_directly() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await a.call("b", 1)
        assert a.routes() == (0, 1)
        await elapse(0.1)
        for n in range(2, 10):
            await a.call("b", n, bytes(n * 1000))
        assert a.routes() == (8, 1)
        assert b.asked == list(range(1, 10))
        assert a.metrics.value("direct_connection_num") == 1

    run_pair(work)


def test_errors_and_large_bodies_travel_as_through_the_log() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await until_direct(a, "b")
        await a.call("b", 1, bytes(MESSAGE_BYTES_MAX - 4096))
        b.answer = lambda request: request.fail(Overloaded("enough", limit="test"))
        with pytest.raises(Overloaded) as raised:
            await a.call("b", 2)
        assert raised.value.fields == {"limit": "test"}
        b.answer = lambda request: request.reply(body=bytes(MESSAGE_BYTES_MAX + 1))
        with pytest.raises(TidewalError, match="over the limit"):
            await a.call("b", 3)

    run_pair(work)


def test_a_question_whose_connection_breaks_goes_through_the_log_at_once_and_is_served_once() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await until_direct(a, "b")
        held: list[Request] = []
        b.answer = held.append
        asking = asyncio.create_task(a.call("b", 7))
        await elapse(0.01)
        assert len(held) == 1
        broken = asyncio.get_running_loop().time()
        network.break_all()
        await elapse(0.01)
        held[0].reply(held[0].params)  # its repetition has come through the log
        await asking
        assert asyncio.get_running_loop().time() - broken < FIRST_RETRY_S / 5
        assert b.asked.count(7) == 1

    run_pair(work)


def test_an_answer_that_the_broken_connection_had_is_given_again_through_the_log() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await until_direct(a, "b")

        def answer_and_break(request: Request) -> None:
            request.reply(request.params)
            network.break_all()

        b.answer = answer_and_break
        began = asyncio.get_running_loop().time()
        await a.call("b", 7)
        assert asyncio.get_running_loop().time() - began < FIRST_RETRY_S / 5
        assert b.asked.count(7) == 1

    run_pair(work)


@pytest.mark.parametrize("kind", ["drop", "duplicate", "delay"])
def test_each_request_is_served_once_whatever_breaks(seed, kind) -> None:
    """Connections break between any two frames, while the log loses, doubles and delays messages."""

    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        rng = random.Random(seed)
        network.breaks = lambda: rng.random() < 0.03
        numbers = range(1, 400)
        for at in range(0, len(numbers), 8):
            await asyncio.gather(*(a.call("b", n, bytes(n % 100), deadline_s=600) for n in numbers[at : at + 8]))
            await elapse(rng.uniform(0, 0.5))
        assert sorted(b.asked) == list(numbers)
        assert network.broken > 10
        direct, log = a.routes()
        assert min(direct, log) > 20

    run_pair(work, FaultPlan(seed, Rates(**{kind: 0.2})))


def test_a_node_that_cannot_be_reached_is_named_and_asked_through_the_log() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        [at] = [each for each in network.listeners if network.listeners[each] and str(each) == b.members["b"].address]
        listener = network.listeners.pop(at)
        for n in range(5):
            await a.call("b", n)
            await elapse(1)
        assert a.routes() == (0, 5)
        assert a.connections.unreachable() == {"b": f"{at}: nothing listens on {at}"}
        assert a.metrics.value("direct_unreachable_num") == 1
        network.listeners[at] = listener
        await elapse(10)
        assert a.connections.unreachable() is None
        await a.call("b", 9)
        assert a.routes() == (1, 5)

    run_pair(work)


def test_a_node_that_is_no_member_any_more_is_no_longer_sought() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await until_direct(a, "b")
        member = a.members.pop("b")
        network.break_all()
        await elapse(1)
        assert not a.connections._keeping
        a.members["b"] = member

    run_pair(work)


def test_a_paused_role_holds_up_its_clients_connection_and_not_their_memory() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await until_direct(a, "b")
        role_stands_still = b.connections._inboxes["role"] = DirectInbox(b.server)
        size = 8 * 1024 * 1024
        calls = [asyncio.create_task(a.call("b", n, bytes(size), deadline_s=100)) for n in range(24)]
        await elapse(2)
        waiting = sum(len(each.payload) for each in role_stands_still._arrived)
        assert IN_FLIGHT_BYTES <= waiting < IN_FLIGHT_BYTES + 2 * size
        [transport] = [each for each in network.transports if isinstance(each.protocol, OutgoingConnection)]
        assert transport.get_write_buffer_size() <= UNSENT_BYTES + size
        b.connections.serve("role", b.inbox)
        role_stands_still.close()
        await asyncio.gather(*calls)
        assert sorted(set(b.asked)) == list(range(24))

    run_pair(work)


# ---- one connection -------------------------------------------------------------------------------------------------


class Ends:
    """Both ends of one connection, which a test may leave out."""

    def __init__(self, key: bytes = KEY, to: str = "b", client: FramedConnection | None = None) -> None:
        self.network = MemoryNetwork()
        self.refused = 0
        self.server = DirectServer("b", KEY, {}, on_refused=self._refuse)
        self.client = client or OutgoingConnection("a", key, to)

    def _refuse(self) -> None:
        self.refused += 1

    async def connect(self) -> None:
        network = self.network.of()
        self.listener = await network.listen(ADDRESS, self._incoming)
        await network.connect(ADDRESS, lambda: self.client)

    def _incoming(self) -> FramedConnection:
        self.incoming = self.server.connection()
        return self.incoming


class Stranger(FramedConnection):
    """Says what it is told to, and keeps what it hears."""

    def __init__(self, says: bytes) -> None:
        super().__init__()
        self.says, self.heard = says, b""

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._transport.write(self.says)

    def data_received(self, data: bytes) -> None:
        self.heard += data


def test_both_ends_know_each_other_after_the_handshake() -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        await ends.client.until_established()
        await elapse(0.01)
        assert ends.incoming.established
        await elapse(60)
        assert ends.client.ended is ends.incoming.ended is None

    run_virtual(main())


@pytest.mark.parametrize(("key", "to"), [(b"x" * 32, "b"), (KEY, "another incarnation"), (b"", "b")])
def test_who_has_another_secret_or_seeks_another_node_is_refused(key, to) -> None:
    async def main() -> None:
        ends = Ends(key, to)
        await ends.connect()
        with pytest.raises(Unavailable, match="has closed it"):
            await ends.client.until_established()
        assert not ends.incoming.established
        assert ends.refused == 1

    run_virtual(main())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | st.lists(st.sampled_from(
    [
        encode_frame(["hello", 1, bytes(32)]),
        encode_frame(["hello", 2, bytes(32)]),
        encode_frame(["hello", 1, "x" * 32]),
        encode_frame(["proof", "a", bytes(32)]),
        encode_frame(["proof", 5, None]),
        encode_frame(["request", "role"]),
        encode_frame(["ping"]),
        encode_frame([["ping"], {}]),
    ]
), max_size=5).map(b"".join))  # fmt: skip
def test_a_stranger_learns_nothing_and_is_cut(says) -> None:
    async def main() -> None:
        stranger = Stranger(says)
        ends = Ends(client=stranger)
        await ends.connect()
        await elapse(HANDSHAKE_S + 1)
        assert not ends.incoming.established
        assert ends.incoming.ended is not None
        assert len(stranger.heard) < 60, "more than a challenge"
        assert b"welcome" not in stranger.heard

    run_virtual(main())


def test_a_node_does_not_take_a_stranger_for_another_node() -> None:
    async def main() -> None:
        network = MemoryNetwork().of()
        answers = encode_frame(["challenge", bytes(32)]) + encode_frame(["welcome", bytes(32)])
        await network.listen(ADDRESS, lambda: Stranger(answers))
        client = OutgoingConnection("a", KEY, "b")
        await network.connect(ADDRESS, lambda: client)
        with pytest.raises(Unavailable, match="does not know the cluster's secret"):
            await client.until_established()

    run_virtual(main())


def test_a_proof_is_good_for_one_connection() -> None:
    async def main() -> None:
        first = Ends()
        await first.connect()
        said: list[bytes] = []
        client_transport: MemoryTransport = first.client._transport  # pyright: ignore
        send = client_transport.write
        client_transport.write = lambda data: (said.append(data), send(data))  # pyright: ignore
        await first.client.until_established()
        hello = encode_frame(["hello", 1, first.client._handshake.client_nonce])
        again = Ends(client=Stranger(hello + said[0]))
        await again.connect()
        await elapse(1)
        assert b"proof" in said[0]
        assert again.refused == 1

    run_virtual(main())


def test_an_end_that_falls_silent_is_given_up() -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        await ends.client.until_established()
        await elapse(0.01)
        ends.incoming._timer.cancel()  # it hangs
        began = asyncio.get_running_loop().time()
        error = await ends.client.until_ended()
        assert "nothing was heard" in error.message
        assert asyncio.get_running_loop().time() - began < (SILENT_PINGS + 2) * PING_S

    run_virtual(main())


def test_an_end_that_takes_nothing_is_given_up_and_refuses_meanwhile() -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        await ends.client.until_established()
        await elapse(0.01)
        ends.incoming.pause()
        ends.client.write(["request", "role"], bytes(UNSENT_BYTES))
        with pytest.raises(Overloaded):
            ends.client.write(["request", "role"], bytes(UNSENT_BYTES))
        began = asyncio.get_running_loop().time()
        error = await ends.client.until_ended()
        assert "has taken nothing" in error.message
        assert asyncio.get_running_loop().time() - began < (STALLED_PINGS + 2) * PING_S

    run_virtual(main())


def test_a_node_that_dies_within_a_frame_ends_the_connection_alone(caplog) -> None:
    async def main() -> None:
        ends = Ends()
        await ends.connect()
        await ends.client.until_established()
        ends.client._transport.write(encode_frame(["request", "role"], bytes(1000))[:500])
        await elapse(0.01)
        ends.client.end(Unavailable("killed"))
        await elapse(0.01)
        assert ends.incoming.ended is not None
        assert not ends.server._connections

    with caplog.at_level(logging.INFO):
        run_virtual(main())


def test_what_is_no_request_ends_a_connection() -> None:
    async def work(a: Served, b: Served, network: MemoryNetwork) -> None:
        await until_direct(a, "b")
        a.connections._connections["b"].write(["request", "role"], b"garbage")
        await elapse(0.01)
        assert not network.transports
        await a.call("b", 5)

    run_pair(work)
