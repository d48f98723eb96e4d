"""Other processes use the log through the owner's socket: `OwnerConnection`, `BlockingClient` and the server that
answers them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import threading

import pytest
import uvloop

from tests.adapters.rocksmq.usage import usage
from tidewal.adapters.rocksmq import RocksMQ, open_wal
from tidewal.adapters.rocksmq.client.blocking_client import BlockingClient
from tidewal.adapters.rocksmq.client.owner_connection import Address, OwnerConnection
from tidewal.adapters.rocksmq.owner.connection import ConnectionLimits
from tidewal.adapters.rocksmq.protocol import info_of
from tidewal.runtime.errors import (
    ChannelExists,
    ChannelNotFound,
    Closed,
    ConfigError,
    InvalidRequest,
    MessageTooLarge,
    PositionLost,
    Unavailable,
)
from tidewal.runtime.log.policy_codec import encode_policy
from tidewal.runtime.log.wal import Append, ChannelPolicy, Durability, From

PLAIN = ChannelPolicy()
CLIENT = bytes(range(16))
ANSWER_S = 10.0  # how long a test waits for what comes at once

CHILD = """
import json, sys
from tidewal.adapters.rocksmq.client.blocking_client import BlockingClient
heavy = [name for name in ("rocksdict", "pyarrow", "numpy", "pydantic", "asyncio") if name in sys.modules]
with BlockingClient(sys.argv[1]) as client:
    info = client.describe("a")
    everything = [(e.id.hex(), e.timestamp, len(e.payload)) for batch in client.read("a") for e in batch]
    after, upto = bytes.fromhex(everything[9][0]), bytes.fromhex(everything[19][0])
    some = [e.id.hex() for batch in client.read("a", after, upto) for e in batch]
    print(json.dumps({
        "heavy": heavy, "channels": client.channels(), "acks": info.policy.acks.value,
        "latest": client.latest_id("a").hex(), "at": client.id_at("a", 15).hex(),
        "everything": everything, "some": some,
    }))
"""


@pytest.fixture
async def store(open_rocksmq) -> RocksMQ:
    return await open_rocksmq(serve=True, tail_bytes=1, segment_bytes=8 * 1024 * 1024)


@pytest.fixture
async def connection(store, directory):
    opened = await OwnerConnection.open(directory, CLIENT, on_lost=print)
    yield opened
    await opened.close()


def appended(connection: OwnerConnection, number: int, *entries: Append) -> asyncio.Future:
    """The answer to an append, as it comes."""
    future = asyncio.get_running_loop().create_future()
    connection.append(number, number - 1, entries, future.set_result)
    return future


# ---- the blocking client ---------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_second_process_reads_what_the_first_wrote(store, directory):
    await store.create_channel("a", PLAIN)
    ids = await store.append_many([Append("a", bytes(i * 5_000), i + 1) for i in range(40)])
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, directory, stdout=asyncio.subprocess.PIPE)
    output, _ = await child.communicate()
    answer = json.loads(output)
    hexes = [id.hex() for id in ids]
    assert answer == {
        "heavy": [],
        "channels": ["a"],
        "acks": "all",
        "latest": hexes[-1],
        "at": hexes[14],
        "everything": [[id, i + 1, i * 5_000] for i, id in enumerate(hexes)],
        "some": hexes[10:20],
    }


async def test_the_blocking_client_names_its_errors(store, directory):
    await store.create_channel("a", PLAIN)
    ids = await store.append_many([Append("a", b"x")] * 3)

    def ask() -> None:
        client = BlockingClient(directory)
        with pytest.raises(ChannelNotFound):
            client.describe("no")
        with pytest.raises(PositionLost):
            list(client.read("a", ids[0], b"\x7f" * 8))
        with pytest.raises(PositionLost):
            list(client.read("a", b"\x7f" * 8))
        assert [e.id for batch in client.read("a", ids[0]) for e in batch] == ids[1:]
        assert [e.id for batch in client.read("a", ids[0], inclusive=True) for e in batch] == ids
        client.close()
        with pytest.raises(Closed):
            client.channels()
        with pytest.raises(Unavailable), BlockingClient(directory + "-not", timeout_s=0.01) as other:
            other.channels()

    await asyncio.to_thread(ask)


async def test_the_blocking_client_rides_over_a_change_of_owner(open_rocksmq, directory):
    client = BlockingClient(directory)
    store = await open_rocksmq(serve=True)
    await store.create_channel("a", PLAIN)
    assert await asyncio.to_thread(client.channels) == ["a"]
    await store.close()
    asking = asyncio.ensure_future(asyncio.to_thread(client.channels))  # no owner is there when it starts
    await open_rocksmq(serve=True)
    assert await asking == ["a"]
    client.close()


@pytest.mark.slow
async def test_a_large_history_is_read_in_large_answers(store, directory):
    await store.create_channel("a", PLAIN)
    for _ in range(12):
        await store.append_many([Append("a", os.urandom(64 * 1024)) for _ in range(16)])

    def read() -> list[list[bytes]]:
        with BlockingClient(directory) as client:
            return [[bytes(e.payload) for e in batch] for batch in client.read("a")]

    batches = await asyncio.to_thread(read)
    here = []
    reader = store.read("a", From.EARLIEST)
    while len(here) < 192:
        here += [bytes(entry.payload) for entry in await anext(reader)]
    await reader.aclose()
    assert [payload for batch in batches for payload in batch] == here
    assert len(batches) <= 8, "an answer carries several pieces of history"


# ---- the connection --------------------------------------------------------------------------------------------------


async def test_a_connection_does_what_the_owner_can(store, connection):
    assert (connection.boot, await connection.ask("channels")) == (1, [])
    policy = ChannelPolicy(acks=Durability.ONE, retention_bytes=7)
    assert await connection.ask("create", "a", encode_policy(policy)) is None
    with pytest.raises(ChannelExists):
        await connection.ask("create", "a", encode_policy(PLAIN))
    ids = await appended(connection, 1, Append("a", b"one", 1), Append("a", memoryview(b"two" * 9999), 2))
    assert await connection.ask("latest_id", "a") == ids[-1]
    assert await connection.ask("id_at", "a", 2) == ids[1]
    assert info_of("a", await connection.ask("describe", "a")) == await store.describe("a")
    entries, next_id, latest = await connection.ask("read", "a", ["earliest"], None, 0.0)
    assert [(e.id, e.timestamp, bytes(e.payload)) for e in entries] == [(ids[0], 1, b"one"), (ids[1], 2, b"two" * 9999)]
    assert latest == ids[1]
    assert await connection.ask("read", "a", ["next", next_id], None, 0.0) == [[], next_id, latest]
    assert (await connection.ask("read", "a", ["earliest"], ids[0], 0.0))[0] == entries[:1]
    await connection.ask("hold", "a", "me", ids[1])
    assert store.find("a").holds == {"me": int.from_bytes(ids[1], "big")}
    await connection.ask("hold", "a", "me", None)
    await connection.ask("truncate", "a", ids[1])
    assert (await connection.ask("read", "a", ["earliest"], None, 0.0))[0] == entries[1:]
    await connection.ask("drop", "a")
    assert await store.channels() == []
    with pytest.raises(ChannelNotFound):
        await connection.ask("read", "a", ["earliest"], None, 0.0)
    assert isinstance(await appended(connection, 2, Append("a", b"x")), ChannelNotFound)


async def test_an_append_that_is_sent_again_is_written_once(store, connection):
    await store.create_channel("a", PLAIN)
    first = await appended(connection, 1, Append("a", b"once"))
    future = asyncio.get_running_loop().create_future()
    connection.append(1, 0, [Append("a", b"once")], future.set_result)
    connection.append(2, 0, [Append("a", b"two")], lambda _: None)
    assert await future == first


async def test_appends_of_one_turn_travel_together_and_each_gets_its_own_answer(store, connection, monkeypatch):
    for name in "ab":
        await store.create_channel(name, PLAIN)
    sent = []
    send = connection._outbox.send
    monkeypatch.setattr(connection._outbox, "send", lambda buffers: sent.append(buffers) or send(buffers))
    good = [appended(connection, number, Append("ab"[number % 3 == 0], b"%d" % number)) for number in range(1, 31)]
    await asyncio.gather(*good)
    assert len(sent) == 1
    ids = {"a": [], "b": []}
    for number, future in enumerate(good, 1):
        ids["ab"[number % 3 == 0]] += future.result()
    for name in "ab":
        assert [entry.id for entry in await take(store, name, len(ids[name]))] == ids[name]

    entries = [
        Append("a", b"31"),
        Append("nowhere", b"32"),
        Append("a", b"33", -1),
        Append("a", b"34"),
        Append("b", b""),
    ]
    mixed = [appended(connection, number, entry) for number, entry in enumerate(entries, 31)]
    pair = appended(connection, 36, Append("a", b"35"), Append("a", b"36"))
    gap = appended(connection, 40, Append("a", b"40"))
    found = [type(answer) for answer in await asyncio.gather(*mixed)]
    assert found == [list, ChannelNotFound, InvalidRequest, list, list]
    assert len(await pair) == 2
    assert len(await gap) == 1
    taken = await take(store, "a", 25)
    assert [bytes(entry.payload) for entry in taken[20:]] == [b"31", b"34", b"35", b"36", b"40"]


async def take(store, channel: str, count: int):
    found = []
    reader = store.read(channel, From.EARLIEST)
    async with asyncio.timeout(ANSWER_S):
        while len(found) < count:
            found += await anext(reader)
    await reader.aclose()
    return found


async def test_appends_from_many_threads_keep_the_order_of_their_calls(store, connection):
    await store.create_channel("a", PLAIN)
    loop, answers, lock, order = asyncio.get_running_loop(), [], threading.Lock(), []
    everything = loop.create_future()

    def answered(result: object) -> None:
        assert isinstance(result, list), result
        answers.append(result)
        if len(answers) == 400:
            everything.set_result(None)

    def work(name: int) -> None:
        for turn in range(100):
            with lock:
                order.append(b"%d %d" % (name, turn))
                connection.append(len(order), 0, [Append("a", order[-1])], answered)

    await asyncio.gather(*[asyncio.to_thread(work, name) for name in range(4)])
    async with asyncio.timeout(ANSWER_S):
        await everything
    found = []
    reader = store.read("a", From.EARLIEST)
    while len(found) < 400:
        found += [bytes(entry.payload) for entry in await anext(reader)]
    await reader.aclose()
    assert found == order


async def test_large_appends_and_answers_pass_in_pieces(store, connection):
    await store.create_channel("a", PLAIN)
    payloads = [os.urandom(size) for size in (0, 1, 5_000, 200_000, 3_000_000, 4_000)]
    answers = [appended(connection, number, Append("a", payload)) for number, payload in enumerate(payloads, 1)]
    await asyncio.gather(*answers)
    await appended(connection, 7, *[Append("a", payload) for payload in payloads])
    found, start = [], ["earliest"]
    while len(found) < 12:
        entries, next_id, _ = await connection.ask("read", "a", start, None, 0.0)
        found += [bytes(entry.payload) for entry in entries]
        start = ["next", next_id]
    assert found == payloads * 2


async def test_what_no_frame_can_carry_is_refused_before_it_is_sent(store, connection):
    await store.create_channel("a", ChannelPolicy(max_message_bytes=1 << 30))
    assert isinstance(await appended(connection, 1, Append("a", bytes(connection.frame_bytes + 1))), MessageTooLarge)
    many = [Append(f"channel-{'x' * 200}-{number}", b"") for number in range(2_000)]
    assert isinstance(await appended(connection, 2, *many), MessageTooLarge)
    assert isinstance(await appended(connection, 3, Append("a", b"x", -1)), InvalidRequest)
    with pytest.raises(InvalidRequest):
        await connection.ask("channels", object())
    assert await connection.ask("channels") == ["a"]


def test_a_link_works_on_uvloop_too(directory):
    async def talk() -> None:
        store = await RocksMQ.open(directory, segment_bytes=8 * 1024 * 1024)
        await store.create_channel("a", PLAIN)
        connection = await OwnerConnection.open(directory, CLIENT, on_lost=print)
        payloads = [os.urandom(size) for size in (10, 3_000_000)]
        (first, second) = await appended(connection, 1, *[Append("a", payload) for payload in payloads])
        entries, _, latest = await connection.ask("read", "a", ["earliest"], None, 0.0)
        assert [bytes(entry.payload) for entry in entries] == payloads
        assert [entry.id for entry in entries] == [first, second]
        assert latest == second
        await connection.close()
        await store.close()

    uvloop.run(talk())


async def test_waiting_requests_wake_and_others_pass_them(store, connection, helpers):
    await store.create_channel("a", PLAIN)
    _, next_id, _ = await connection.ask("read", "a", ["latest"], None, 0.0)
    waiting = asyncio.ensure_future(connection.ask("read", "a", ["next", next_id], None, 20.0, wait_s=20.0))
    await helpers.until(lambda: store.find("a").waiters)
    assert await connection.ask("channels") == ["a"]
    (id,) = await appended(connection, 1, Append("a", b"more"))
    async with asyncio.timeout(ANSWER_S):
        entries, _, _ = await waiting
    assert [entry.id for entry in entries] == [id]


@pytest.mark.slow
async def test_a_reader_that_stops_waiting_leaves_nothing_at_the_owner(store, directory, helpers):
    """More often than the owner lets requests of one process wait."""
    store._server._limits = ConnectionLimits(waiting_requests=100)
    await store.create_channel("a", PLAIN)
    shared = await open_wal(f"rocksmq://{directory}", own=False)
    reader = shared.read("a", From.LATEST)
    for number in range(300):
        waiting = asyncio.ensure_future(anext(reader))
        await helpers.until(lambda: usage(store._server).waiting_requests == 1 and store.find("a").waiters)
        if number % 2:
            await reader.aclose()
            await asyncio.wait([waiting])
            reader = shared.read("a", From.LATEST)
        else:
            waiting.cancel()
        await helpers.until(lambda: usage(store._server).waiting_requests == 0 and not store.find("a").waiters)
    assert await shared.latest_id("a") is None
    await reader.aclose()
    await shared.close()


async def test_a_long_poll_ends_with_nothing_when_nothing_comes(store, connection):
    await store.create_channel("a", PLAIN)
    assert await connection.ask("read", "a", ["latest"], None, 0.001) == [[], (1).to_bytes(8, "big"), None]


async def test_a_lost_owner_ends_all_that_waits_and_tells_once(open_rocksmq, directory, helpers):
    store = await open_rocksmq(serve=True)
    await store.create_channel("a", PLAIN)
    lost = []
    connection = await OwnerConnection.open(directory, CLIENT, on_lost=lost.append)
    waiting = asyncio.ensure_future(connection.ask("read", "a", ["latest"], None, 50.0, wait_s=50.0))
    await helpers.until(lambda: store.find("a").waiters)
    await store.close()
    with pytest.raises(Unavailable):
        async with asyncio.timeout(ANSWER_S):
            await waiting
    await helpers.until(lambda: lost)
    answered = []
    connection.append(1, 0, [Append("a", b"x")], answered.append)
    connection.notify("beat")
    with pytest.raises(Unavailable) as refused:
        await connection.ask("channels")
    assert "outcome_unknown" not in refused.value.fields
    await connection.close()
    assert (len(lost), answered) == (1, [])
    with pytest.raises(Unavailable):
        await OwnerConnection.open(directory, CLIENT, on_lost=lost.append)


async def test_closing_a_link_is_no_loss(store, directory):
    lost = []
    connection = await OwnerConnection.open(directory, CLIENT, on_lost=lost.append)
    waiting = asyncio.ensure_future(connection.ask("channels"))
    await asyncio.sleep(0)
    await connection.close()
    await connection.close()
    with pytest.raises(Unavailable):
        await waiting
    assert lost == []


# ---- addresses -------------------------------------------------------------------------------------------------------


async def test_the_socket_is_its_owners_alone_and_replaces_a_stale_one(open_rocksmq, directory):
    os.makedirs(directory)
    path = os.path.join(directory, "socket")
    os.mkfifo(path)  # in place of what a crashed owner left behind
    store = await open_rocksmq(serve=True)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    await store.close()
    assert "socket" not in os.listdir(directory)


@pytest.fixture
def wrong_token(tmp_path) -> str:
    path = tmp_path / "wrong"
    path.write_bytes(bytes(32))
    return str(path)


async def test_a_port_takes_clients_that_have_the_token(open_rocksmq, directory, wrong_token):
    store = await open_rocksmq(serve=True, tcp_port=0)
    token = os.path.join(directory, "token")
    assert stat.S_IMODE(os.stat(token).st_mode) == 0o600
    address = Address.parse(f"rocksmq://127.0.0.1:{store.tcp_port}?token_file={token}")
    connection = await OwnerConnection.open(address, CLIENT, on_lost=print)
    await connection.ask("create", "a", encode_policy(PLAIN))
    assert len(await appended(connection, 1, Append("a", bytes(100_000)))) == 1
    with BlockingClient(address) as client:
        assert await asyncio.to_thread(client.channels) == ["a"]
    await connection.close()
    with pytest.raises(InvalidRequest):
        await OwnerConnection.open(Address(port=address.port, token_file=wrong_token), CLIENT, on_lost=print)
    with pytest.raises(Unavailable):
        await OwnerConnection.open(Address(port=address.port, token_file=wrong_token + "-not"), CLIENT, on_lost=print)
    await store.close()
    assert "token" not in os.listdir(directory)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("rocksmq:///a/b%20c", Address("/a/b c")),
        ("rocksmq://./x", Address(os.path.abspath("x"))),
        ("rocksmq://localhost:7?token_file=/t", Address(port=7, token_file="/t")),
        ("rocksmq://127.0.0.1:7", None),
        ("rocksmq://127.0.0.1?token_file=/t", None),
        ("rocksmq://example.org:7?token_file=/t", None),
        ("rocksmq://127.0.0.1:70000?token_file=/t", None),
        ("rocksmq:///", None),
        ("memory:///a", None),
    ],
)
def test_urls_name_a_directory_or_a_port_of_this_machine(url, address):
    if address is None:
        with pytest.raises(ConfigError):
            Address.parse(url)
    else:
        assert Address.parse(url) == address


async def test_a_path_too_long_for_an_address_works(tmp_path):
    directory = str(tmp_path / ("x" * 120))
    store = await RocksMQ.open(directory, segment_bytes=64 * 1024)
    await store.create_channel("a", PLAIN)
    connection = await OwnerConnection.open(directory, CLIENT, on_lost=print)
    assert await connection.ask("channels") == ["a"]
    with BlockingClient(directory) as client:
        assert await asyncio.to_thread(client.channels) == ["a"]
    await connection.close()
    await store.close()
