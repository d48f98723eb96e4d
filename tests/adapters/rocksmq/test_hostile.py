"""Clients that send nonsense, stall, flood or die: only they are harmed, and all they took is given back."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.adapters.rocksmq.usage import Usage, usage
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.adapters.rocksmq.address import Address, socket_path
from tidewal.adapters.rocksmq.client.owner import SPARE, RemoteOwner
from tidewal.adapters.rocksmq.client.owner_connection import OwnerConnection
from tidewal.adapters.rocksmq.owner.connection import APPEND_OVERHEAD_BYTES, ConnectionLimits
from tidewal.adapters.rocksmq.owner.server import Server
from tidewal.adapters.rocksmq.protocol import APPENDS, HEAD_BYTES, HEADER, ROW, VERSION, encode, encode_request
from tidewal.runtime.errors import (
    BadRecord,
    ChannelNotFound,
    InvalidRequest,
    Overloaded,
    TidewalError,
    Unsupported,
    from_wire,
)
from tidewal.runtime.filters.subscription import FILTER_LANGUAGE
from tidewal.runtime.log.wal import Append, ChannelPolicy, From

FRAME_BYTES = 1024 * 1024
CLIENT = bytes(range(16))
HELLO = encode([1, "hello", VERSION, CLIENT])[0]
NOTHING = Usage(0, 0, 0, 0, 0)
ANSWER_S = 10.0  # how long a test waits for what comes at once

Serve = Callable[..., Server]


@pytest.fixture
async def store(open_rocksmq) -> RocksMQ:
    opened = await open_rocksmq(segment_bytes=8 * 1024 * 1024)
    await opened.create_channel("a", ChannelPolicy())
    return opened


@pytest.fixture
async def serve(store) -> AsyncIterator[Serve]:
    """Start a server of the store with these limits."""
    servers = []

    def start(served: object = store, **limits: float) -> Server:
        server = Server(served, store.directory, boot=7, frame_bytes=FRAME_BYTES, limits=ConnectionLimits(**limits))
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await asyncio.to_thread(server.stop)


@pytest.fixture
async def peers(store) -> AsyncIterator[Callable[..., object]]:
    """Connect as a client that may send anything."""
    opened = []

    async def connect(*, hello: bool = True) -> Peer:
        with socket_path(store.directory) as path:
            peer = Peer(*await asyncio.open_unix_connection(path))
        opened.append(peer)
        if hello:
            peer.send(HELLO)
            seq, greeting = await peer.answer()
            assert (seq, greeting.pop("waiting_requests") > 0) == (1, True)
            assert greeting == {"boot": 7, "frame_bytes": FRAME_BYTES, "filters": FILTER_LANGUAGE}
        return peer

    yield connect
    for peer in opened:
        peer.writer.transport.abort()


class Peer:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, object]:
        """The next answer: seq, and the result or the error."""
        async with asyncio.timeout(ANSWER_S):
            head_bytes, rows, payload_bytes = HEADER.unpack(await self.reader.readexactly(HEADER.size))
            seq, kind, result = msgpack.unpackb(await self.reader.readexactly(head_bytes))
            await self.reader.readexactly(rows * ROW.size + payload_bytes)
        return seq, result if kind == "ok" else from_wire(result)

    async def ended(self) -> None:
        """Return when the owner has ended the connection, having read whatever still comes."""
        async with asyncio.timeout(ANSWER_S):
            try:
                while await self.reader.read(1 << 20):
                    pass
            except ConnectionError:
                pass


async def all_is_well(store: RocksMQ) -> None:
    """Another client, and the owner itself, append and read."""
    connection = await OwnerConnection.open(store.directory, os.urandom(16), on_lost=print)
    before = await store.append("a", b"owner")
    future = asyncio.get_running_loop().create_future()
    connection.append(1, 0, [Append("a", b"client")], future.set_result)
    async with asyncio.timeout(ANSWER_S):
        (id,) = await future
        entries, _, _ = await connection.ask("read", "a", ["id", before, False], None, 0.0)
    assert [entry.id for entry in entries] == [id]
    await connection.close()


async def released(server: Server) -> None:
    """Return when clients cost nothing any more."""
    async with asyncio.timeout(ANSWER_S):
        while usage(server) != NOTHING:  # noqa: ASYNC110 -- it happens on a thread that knows no event
            await asyncio.sleep(0)


# ---- what is no request ----------------------------------------------------------------------------------------------


def frame(head: bytes, rows: bytes = b"", payloads: bytes = b"") -> bytes:
    return HEADER.pack(len(head), len(rows) // ROW.size, len(payloads)) + head + rows + payloads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", BadRecord),
        (frame(b"\xc1\xc1\xc1"), BadRecord),
        (HEADER.pack(2**32 - 1, 0, 0), BadRecord),
        (HEADER.pack(9, 2**32 - 1, 0), BadRecord),
        (HEADER.pack(9, 0, 2**32 - 1), BadRecord),
        (HEADER.pack(9, 1, FRAME_BYTES), BadRecord),
        (HEADER.pack(HEAD_BYTES + 1, 0, 0), BadRecord),
        (frame(b""), BadRecord),
        (frame(b"\x91" * 60_000), BadRecord),
        (frame(b"\x93\x01\xa1x"), BadRecord),
        (frame(msgpack.packb([1, "channels"]) + b"\xc0"), BadRecord),
        (frame(b"\xdd" + (HEAD_BYTES - 5).to_bytes(4, "big") + b"\x80" * (HEAD_BYTES - 5)), InvalidRequest),
        (frame(msgpack.packb({"channels": 1})), InvalidRequest),
        (frame(msgpack.packb(["channels"])), InvalidRequest),
        (frame(msgpack.packb([-1, "channels"])), InvalidRequest),
        (frame(msgpack.packb([msgpack.ExtType(5, b"x"), "channels"])), BadRecord),
    ],
    ids=[
        *("http", "no msgpack", "huge head", "huge rows", "huge payloads", "over the limit", "head over the limit"),
        *("nothing", "deep", "cut short", "too long", "many maps", "a map", "no seq", "negative seq", "extension"),
    ],
)
async def test_a_broken_frame_gets_a_typed_error_and_ends_the_connection(store, serve, peers, data, error):
    server = serve()
    peer = await peers()
    peer.send(data)
    seq, answer = await peer.answer()
    assert (seq, type(answer)) == (0, error)
    await peer.ended()
    await all_is_well(store)
    await released(server)


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ([1, "hello", 1, None], Unsupported),
        ([1, "hello", VERSION + 1, None, b"more"], Unsupported),
        ([1, "hello"], InvalidRequest),
        ([1, "hello", VERSION, b"short"], InvalidRequest),
        ([1, "hello", "2", None], InvalidRequest),
        ([1, "channels"], InvalidRequest),
        ([1, "append", 1, 0, []], InvalidRequest),
    ],
)
async def test_a_client_that_does_not_say_hello_as_agreed_is_refused(store, serve, peers, first, error):
    server = serve()
    peer = await peers(hello=False)
    peer.send(encode(first)[0])
    seq, answer = await peer.answer()
    assert (seq, type(answer)) == (1, error)
    await peer.ended()
    await released(server)


async def test_a_stranger_cannot_ask_for_memory(serve, peers):
    server = serve()
    peer = await peers(hello=False)
    peer.send(HEADER.pack(10, 0, FRAME_BYTES))
    assert isinstance((await peer.answer())[1], BadRecord)
    await peer.ended()
    await released(server)


def row(channel: int, length: int) -> bytes:
    return ROW.pack(channel, length, bytes(8), 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_frame",
    [
        frame(msgpack.packb([2, "append", 1, 0, ["a"]]), row(1, 1), b"x"),
        frame(msgpack.packb([2, "append", 1, 0, ["a"]]), row(0, 2), b"x"),
        frame(msgpack.packb([2, "append", 1, 0, ["a"]]), row(0, 1) + row(2, 0), b"x"),
        frame(msgpack.packb([2, "append", 1, 0, ["a"]]), row(0, 1) + row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 1, 0, ["a"]]), b"", b"x"),
        frame(msgpack.packb([2, "append", 1, 0, [7]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 1, 0, [["a"]]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 0, 0, ["a"]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", True, 0, ["a"]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 1, -1, ["a"]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 1, 0, "a"]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append"]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 1 << 63, 0, ["a"]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "append", 1, 1 << 63, ["a"]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "appends", 1 << 63, 0, ["a"]]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "appends", 1, 0, []])),
        frame(msgpack.packb([2, "appends", 1, 0, ["a"]]), row(0, 1) * (APPENDS + 1), b"x" * (APPENDS + 1)),
        frame(msgpack.packb([2, "appends", 1, 0, ["a"]]), row(0, 1) + row(1, 1), b"xx"),
        frame(msgpack.packb([2, "appends", 1, 0, ["a", 7]]), row(0, 1) + row(1, 1), b"xx"),
        frame(msgpack.packb([2, "channels"]), row(0, 1), b"x"),
        frame(msgpack.packb([2, "nonsense", 1])),
        frame(msgpack.packb([2, "group.nonsense", 1])),
        frame(msgpack.packb([2, "create", "a", {"acks": "some"}])),
        frame(msgpack.packb([2, "create", "b", {"max_message_bytes": "x"}])),
        frame(msgpack.packb([2, "create", "b", {"retention_s": float("nan")}])),
        frame(msgpack.packb([2, "create", "b", {"what": 1}])),
        frame(msgpack.packb([2, "read", "a", ["next", b"short"], None, 0.0])),
        frame(msgpack.packb([2, "read", "a", [["next"]], None, 0.0])),
    ],
)
async def test_a_request_that_does_not_fit_is_refused_and_the_connection_goes_on(store, serve, peers, request_frame):
    server = serve()
    peer = await peers()
    peer.send(request_frame)
    seq, answer = await peer.answer()
    assert (seq, type(answer) in (InvalidRequest, BadRecord)) == (2, True), answer
    peer.send(encode([3, "channels"])[0])
    assert await peer.answer() == (3, ["a"])
    assert await store.latest_id("a") is None
    peer.writer.close()
    await released(server)


METHODS = [
    "hello",
    "beat",
    "describe",
    "latest_id",
    "id_at",
    "read",
    "create",
    "drop",
    "truncate",
    "hold",
    "append",
    "appends",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=20)
    | st.sampled_from(["a", "b", "next", "earliest", "", "\x00"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.slow
async def test_whatever_is_asked_is_answered(store, serve, peers):
    """Random messages as requests: each gets one answer, a result or a typed error, and the connection stays open."""
    server = serve()
    peer = await peers()
    loop = asyncio.get_running_loop()

    async def ask(method: str, arguments: list[object]) -> None:
        peer.send(encode([9, method, *arguments])[0])
        seq, answer = await peer.answer()
        assert seq == 9
        if isinstance(answer, TidewalError):
            assert type(answer).__name__ not in ("HandlerFailed", "TidewalError"), answer

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(METHODS), st.lists(VALUES, max_size=5))
    def any_request(method: str, arguments: list[object]) -> None:
        if method == "read" and arguments:
            arguments[-1:] = [0.0]  # ask for no waiting: this test has no time
        asyncio.run_coroutine_threadsafe(ask(method, arguments), loop).result()

    await asyncio.to_thread(any_request)
    await store.create_channel("a", ChannelPolicy())
    await all_is_well(store)
    peer.writer.close()
    await released(server)


# ---- clients that stall ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "half",
    [b"\0\0", HEADER.pack(100, 0, 0) + b"\x93", HEADER.pack(100, 0, FRAME_BYTES) + b"\x93" * 200_000],
    ids=["header", "frame", "large frame"],
)
async def test_half_a_frame_is_cut_off_and_its_memory_given_back(store, serve, peers, half):
    server = serve(stalled_s=0.05)
    peer = await peers()
    peer.send(half)
    await peer.ended()
    await all_is_well(store)
    await released(server)


async def test_a_frame_in_single_bytes_is_understood(serve, peers):
    serve()
    peer = await peers()
    for byte in encode([5, "channels"])[0]:
        peer.send(bytes([byte]))
        await peer.writer.drain()
        await asyncio.sleep(0)
    assert await peer.answer() == (5, ["a"])


async def test_bytes_that_drip_in_too_slowly_are_cut_off(store, serve, peers):
    server = serve(stalled_s=0.05)
    peer = await peers()
    peer.send(HEADER.pack(100, 0, FRAME_BYTES))
    ended = asyncio.ensure_future(peer.ended())
    while not ended.done():
        peer.send(b"x" if not peer.writer.is_closing() else b"")
        await asyncio.sleep(0)
    await ended
    await released(server)


async def test_a_client_that_says_nothing_is_cut_off(serve, peers):
    server = serve(hello_s=0.05, idle_s=0.05)
    silent, idle = await peers(hello=False), await peers()
    await silent.ended()
    await idle.ended()
    await released(server)


async def test_a_client_that_waits_for_an_answer_is_not_idle(store, serve, peers):
    serve(idle_s=0.5, hello_s=60.0, stalled_s=60.0)
    waiting = await peers()
    waiting.send(encode([5, "read", "a", ["latest"], None, 60.0])[0])
    idle = await peers()
    await idle.ended()  # by then the other has been silent as long
    await store.append("a", b"x")
    assert (await waiting.answer())[0] == 5


@pytest.mark.slow
async def test_answers_that_a_client_does_not_take_stay_bounded_and_end_the_connection(store, serve):
    for _ in range(8):
        await store.append("a", bytes(1024 * 1024))
    limit = 256 * 1024
    server = serve(outbox_bytes=limit, stalled_s=0.3)
    deaf = socket.socket(socket.AF_UNIX)
    with socket_path(store.directory) as path:
        deaf.connect(path)
    deaf.sendall(HELLO + encode([0, "channels"])[0] + encode([5, "read", "a", ["earliest"], None, 0.0])[0] * 50)
    highest = 0
    async with asyncio.timeout(ANSWER_S):
        while not usage(server).connections:  # noqa: ASYNC110 -- it happens on a thread that knows no event
            await asyncio.sleep(0)
        while (used := usage(server)).connections:
            highest = max(highest, used.outbox_bytes)
            await asyncio.sleep(0)
    deaf.close()
    assert 0 < highest <= limit + 5 * 1024 * 1024, "one answer over the limit"
    await all_is_well(store)
    await released(server)


async def test_an_end_that_comes_together_with_a_request_is_noticed(store, serve):
    """What was not read when a client closes makes its end an error, which uvloop reports once, with the data."""
    server = serve()
    with socket_path(store.directory) as path, socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.send(HELLO)
        assert await asyncio.to_thread(client.recv, 1, socket.MSG_PEEK)
        busy = threading.Event()
        server._loop.call_soon_threadsafe(busy.wait, ANSWER_S)
        client.send(encode([0, "beat"])[0])
    busy.set()
    await released(server)


# ---- clients that flood ----------------------------------------------------------------------------------------------


class Held:
    """The store, but appends are not done before the test says so."""

    def __init__(self, store: RocksMQ) -> None:
        self._store = store
        self.waiting: list[Callable[[], None]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def submit_from(self, client: bytes, number: int, settled: int, entries: object, done: object) -> None:
        self.waiting.append(lambda: self._store.submit_from(client, number, settled, entries, done))

    def submit_each_from(self, client: bytes, number: int, settled: int, entries: object, done: object) -> bool:
        self.waiting.append(lambda: self._store.submit_each_from(client, number, settled, entries, done))
        return True


async def test_a_flood_of_appends_waits_at_its_own_connection(store, serve, peers, helpers):
    limit, count = 64 * 1024, 200
    held = Held(store)
    server = serve(held, in_flight_bytes=limit)
    flood = await peers()
    for number in range(1, count + 1):
        flood.send(encode_request(number, "append", (number, number - 1), [Append("a", bytes(4096), number)])[0])
    await helpers.until(lambda: usage(server).in_flight_bytes > limit)
    other = await peers()
    other.send(encode([5, "channels"])[0])
    assert await other.answer() == (5, ["a"])
    assert usage(server).in_flight_bytes <= limit + 8192
    assert len(held.waiting) < count
    seen = 0
    async with asyncio.timeout(ANSWER_S):
        while seen < count:
            assert usage(server).in_flight_bytes <= limit + 8192
            while held.waiting:
                held.waiting.pop(0)()
                seen += 1
            await asyncio.sleep(0)
    assert [(await flood.answer())[0] for _ in range(count)] == list(range(1, count + 1))
    assert [e.timestamp for e in await helpers.take(store, "a", From.EARLIEST, count)] == list(range(1, count + 1))
    for peer in (flood, other):
        peer.writer.close()
    await released(server)


async def test_a_flood_of_appends_together_waits_too_and_each_of_them_counts(store, serve, peers, helpers):
    """`in_flight_bytes` is what one request of this many small appends costs, so the next one waits."""
    held = Held(store)
    server = serve(held, in_flight_bytes=APPENDS * APPEND_OVERHEAD_BYTES)
    flood = await peers()
    for number in range(1, 5 * APPENDS, APPENDS):
        flood.send(encode_request(number, "appends", (number, number - 1), [Append("a", b"")] * APPENDS)[0])
    for last in range(APPENDS, 6 * APPENDS, APPENDS):
        await helpers.until(lambda: held.waiting)
        other = await peers()
        other.send(encode([5, "channels"])[0])
        assert await other.answer() == (5, ["a"])
        assert len(held.waiting) == 1
        held.waiting.pop()()
        store.wake()
        seq, ids = await flood.answer()
        assert seq == last - APPENDS + 1
        assert ids[-8:] == last.to_bytes(8, "big")
        other.writer.close()
    flood.writer.close()
    await released(server)


async def test_one_refused_append_harms_none_that_came_with_it(store, serve, peers):
    await store.create_channel("e", ChannelPolicy(ephemeral=True))
    server = serve()
    peer = await peers()
    entries = [Append(name, b"x") for name in ("a", "nowhere", "e", "a")]
    for seq in (10, 20):  # the same again
        peer.send(encode_request(seq, "appends", (1, 0), entries)[0])
        answers = dict([await peer.answer() for _ in entries])
        assert set(answers) == set(range(seq, seq + 4))
        assert isinstance(answers[seq + 1], ChannelNotFound)
        assert answers[seq] == [(1).to_bytes(8, "big")]
        assert answers[seq + 3] == [(2).to_bytes(8, "big")]
        assert answers[seq + 2] == [await store.latest_id("e")]
    assert await store.latest_id("a") == (2).to_bytes(8, "big")
    peer.writer.close()
    await released(server)


async def test_appends_of_a_client_that_is_gone_are_given_back_when_done(store, serve, peers, helpers):
    held = Held(store)
    server = serve(held)
    peer = await peers()
    peer.send(encode_request(1, "append", (1, 0), [Append("a", b"x")])[0])
    await helpers.until(lambda: held.waiting)
    peer.writer.transport.abort()
    await released(server)
    held.waiting.pop()()
    assert len(await helpers.take(store, "a", From.EARLIEST, 1)) == 1


async def test_large_requests_take_turns(store, serve, peers, helpers):
    """The second finds no memory until the first is through, and small ones pass both."""
    server = serve(receiving_bytes=FRAME_BYTES)
    large = encode_request(5, "append", (1, 0), [Append("a", bytes(900_000))])
    data = b"".join(large)
    first, second = await peers(), await peers()
    first.send(data[:300_000])
    await helpers.until(lambda: usage(server).receiving_bytes)
    second.send(data)
    await all_is_well(store)
    assert usage(server).receiving_bytes == len(data)
    first.send(data[300_000:])
    assert (await first.answer())[0] == 5
    assert (await second.answer())[0] == 5
    for peer in (first, second):
        peer.writer.close()
    await released(server)


async def test_a_large_request_that_never_comes_makes_room_for_the_next(store, serve, peers, helpers):
    server = serve(receiving_bytes=FRAME_BYTES, stalled_s=0.1)
    data = b"".join(encode_request(5, "append", (1, 0), [Append("a", bytes(900_000))]))
    first, second, third = await peers(), await peers(), await peers()
    first.send(data[:300_000])
    await helpers.until(lambda: usage(server).receiving_bytes)
    second.send(data)
    third.send(data)
    await first.ended()
    assert (await second.answer())[0] == 5
    assert (await third.answer())[0] == 5
    for peer in (second, third):
        peer.writer.close()
    await released(server)


async def test_waiting_requests_are_bounded(store, serve, peers):
    server = serve(waiting_requests=3)
    peer = await peers()
    for seq in range(10, 15):
        peer.send(encode([seq, "read", "a", ["latest"], None, 60.0])[0])
    refused = [await peer.answer(), await peer.answer()]
    assert [(seq, type(error), error.limit) for seq, error in refused] == [
        (13, Overloaded, "waiting_requests"),
        (14, Overloaded, "waiting_requests"),
    ]
    await store.append("a", b"x")
    assert {(await peer.answer())[0] for _ in range(3)} == {10, 11, 12}
    peer.writer.close()
    await released(server)


async def test_a_read_of_what_is_there_does_not_queue_behind_reads_that_wait(store, serve, helpers):
    """These take turns where the owner lets fewer wait than a process has readers."""
    server = serve(waiting_requests=SPARE + 2)
    owner = await RemoteOwner.open(Address.of_directory(store.directory), CLIENT, on_lost=print)
    await store.append("a", b"before")
    _, end = await owner.read("a", ["latest"], 0.0)
    waiting = [asyncio.ensure_future(owner.read("a", ["next", end], 60.0)) for _ in range(5)]
    await helpers.until(lambda: usage(server).waiting_requests == 2)
    async with asyncio.timeout(ANSWER_S):
        entries, _ = await owner.read("a", ["earliest"], 0.0)
        assert [entry.payload for entry in entries] == [b"before"]
        await store.append("a", b"behind")
        for answer in waiting:
            entries, _ = await answer
            assert [entry.payload for entry in entries] == [b"behind"]
    await owner.close()
    await released(server)


async def test_requests_that_were_cancelled_leave_room_at_once(store, serve, peers):
    """A process that has left many readers may ask for as many others in the same breath."""
    server = serve(waiting_requests=3)
    peer = await peers()
    first, second, third = (range(begin, begin + 3) for begin in (10, 20, 30))
    frames = [[seq, "read", "a", ["latest"], None, 60.0] for seq in first]
    frames += [[0, "cancel", seq] for seq in first]
    frames += [[seq, "read", "a", ["latest"], None, 60.0] for seq in second]
    frames += [[0, "cancel", seq] for seq in second]
    frames += [[seq, "read", "a", ["latest"], None, 60.0] for seq in third]  # too many, even if they are cancelled
    peer.send(b"".join(encode(frame)[0] for frame in frames))
    refused = [await peer.answer() for _ in third]
    assert [(seq, type(error)) for seq, error in refused] == [(seq, Overloaded) for seq in third]
    peer.writer.close()
    await released(server)


async def test_two_hundred_connections_at_once(store, serve, peers):
    server = serve(connections=64)
    clients = [await peers(hello=False) for _ in range(200)]
    for peer in clients[:64]:
        peer.send(HELLO)
        assert (await peer.answer())[0] == 1
    for peer in clients[64:]:
        seq, error = await peer.answer()
        assert (seq, type(error), error.limit) == (0, Overloaded, "connections")
    assert usage(server).connections == 64
    with pytest.raises(Overloaded):
        await OwnerConnection.open(store.directory, CLIENT, on_lost=print)
    for peer in clients:
        peer.writer.transport.abort()
    await released(server)
    await all_is_well(store)


# ---- clients that die ------------------------------------------------------------------------------------------------

DYING = """
import os, socket, sys
from tidewal.adapters.rocksmq.address import socket_path
from tidewal.adapters.rocksmq.protocol import HEADER, VERSION, encode
peer = socket.socket(socket.AF_UNIX)
with socket_path(sys.argv[1]) as path:
    peer.connect(path)
peer.sendall(encode([1, "hello", VERSION, bytes(16)])[0] + encode([2, "read", "a", ["latest"], None, 60.0])[0])
peer.sendall(HEADER.pack(1000, 1, 900_000) + bytes(300_000))
print("half", flush=True)
sys.stdin.read()
"""


async def test_a_client_killed_in_the_middle_of_a_frame_leaves_nothing(store, serve, helpers):
    server = serve()
    child = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", DYING, store.directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert await asyncio.to_thread(child.stdout.readline) == b"half\n"
    await helpers.until(lambda: usage(server).receiving_bytes and usage(server).waiting_requests)
    child.kill()
    await asyncio.to_thread(child.communicate)
    await released(server)
    await all_is_well(store)


async def test_the_owner_stops_in_the_middle_of_everything(store, serve, peers, helpers):
    held = Held(store)
    server = serve(held)
    peer, half = await peers(), await peers()
    peer.send(encode_request(1, "append", (1, 0), [Append("a", b"x")])[0])
    peer.send(encode([5, "read", "a", ["latest"], None, 60.0])[0])
    half.send(HEADER.pack(100, 0, 900_000))
    await helpers.until(lambda: held.waiting and store.find("a").waiters and usage(server).receiving_bytes)
    await asyncio.to_thread(server.stop)
    await peer.ended()
    await half.ended()
    assert usage(server) == NOTHING
    held.waiting.pop()()  # its answer finds no client
    assert len(await helpers.take(store, "a", From.EARLIEST, 1)) == 1


@pytest.mark.parametrize("timestamp", [1 << 64, -1, 1.5, "now"])
async def test_a_timestamp_that_no_frame_holds_is_refused_and_stops_no_journal(tmp_path, timestamp):
    async with await RocksMQ.open(str(tmp_path / "log")) as wal:
        await wal.create_channel("a", ChannelPolicy())
        for entries in ([Append("a", b"x", timestamp)], [Append("a", b"x"), Append("a", b"y", timestamp)]):
            with pytest.raises(InvalidRequest, match="timestamp"):
                await wal.append_many(entries)
        with pytest.raises(InvalidRequest, match="timestamp"):
            await wal.append("a", b"x", timestamp)
        assert await wal.append("a", b"after", (1 << 64) - 1) == (1).to_bytes(8, "big")
