"""Entries that no role wrote, in every channel that roles read: the node goes on, loses nothing and says what it
passed over.

What is not tried: a record under the term that is granted now, numbered ahead of its owner. Whoever can write such a
record to the log is the owner, as far as a reader can tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgpack
import pytest

from tidewal.runtime.clock import MAX_TIMESTAMP
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import Record, RecordType, encode, stamp
from tidewal.runtime.log.wal import Append

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])

AT_ONCE = 50  # between two writes of a client


class Garbage:
    """Random and mutated entries. `seen` are entries that were in the log, `term` gives the one granted now."""

    def __init__(self, rng: random.Random, seen: Sequence[bytes], term: Callable[[], int]) -> None:
        self._rng = rng
        self._seen = seen
        self._term = term

    def entry(self, channel: str) -> Append:
        kinds = (self._noise, self._damaged, self._strange, self._foreign, self._newer, self._out_of_range)
        payload = self._rng.choices(kinds, (4, 4, 4, 4, 4, 1))[0]()
        return Append(channel, payload, self._rng.choice([0, self._rng.randrange(2**62)]))

    def _noise(self) -> bytes:
        return self._rng.randbytes(self._rng.randrange(200))

    def _damaged(self) -> bytes:
        payload = bytearray(self._rng.choice(self._seen))
        for _ in range(self._rng.randrange(1, 4)):
            payload[self._rng.randrange(len(payload))] ^= 1 << self._rng.randrange(8)
        return bytes(payload[: self._rng.choice([len(payload), self._rng.randrange(len(payload))])])

    def _strange(self) -> bytes:
        """Intact, of some type, with fields that mean nothing."""
        rng = self._rng
        record = Record(
            rng.choice(list(RecordType)),
            pseq=rng.randrange(100),
            producer=rng.choice(["", "x", "node"]),
            vchannel=rng.choice(["", "by-dev-rootcoord-dml_0_1v0", "?"]),
            key=rng.choice([b"", b"people"]),
            tags=rng.choice(
                [{}, {"method": "nonsense", "values": msgpack.packb({"to": "x"})}, {"method": 7, "values": 7}]
            ),
            body=rng.choice([rng.randbytes(20), msgpack.packb(self._value(3))]),
        )
        ts = rng.choice([0, rng.randrange(2**62), MAX_TIMESTAMP])
        return stamp(record, ts, self._other_term(), rng.choice([1, rng.randrange(2**62)]))

    def _other_term(self) -> int:
        terms = {0, 1, self._term() - 1, self._term() + 1, 2**62, MAX_TIMESTAMP} - {self._term(), -1}
        return self._rng.choice(sorted(terms))

    def _value(self, depth: int) -> object:
        rng = self._rng
        if not depth or rng.random() < 0.4:
            return rng.choice([None, 0, 1, 2, 2**40, -1, -(2**63), 1.5, "", "kind", b"x", True])
        if rng.random() < 0.5:
            return [self._value(depth - 1) for _ in range(rng.randrange(4))]
        return {rng.choice(["v", "kind", "id", "times", "ends", "state", 7]): self._value(depth - 1) for _ in range(4)}

    def _foreign(self) -> bytes:
        """A whole entry of this or another channel, a second time."""
        return self._rng.choice(self._seen)

    def _newer(self) -> bytes:
        """As a later Tidewal might write it without asking which level the cluster has: another type of records, a
        record of a replicated state with a kind or of a level that is not there yet."""
        rng = self._rng
        if rng.random() < 0.3:
            record = bytearray(encode(Record(RecordType.ROWS, ts=1)))
            record[2] += 1  # the version
            return bytes(record)
        body = {"v": rng.choice([1, 2, 9]), "kind": rng.choice(["level", "register", "unheard of", "renew", "page"])}
        type = rng.choice([RecordType.CATALOG, RecordType.CLUSTER, RecordType.FLUSHED])
        return encode(Record(type, ts=1, producer="newer", pseq=rng.randrange(100), body=msgpack.packb(body)))

    def _out_of_range(self) -> bytes:
        return encode(Record(RecordType.ROWS, ts=2**64 - 1, term=self._term()))


@pytest.mark.long
@pytest.mark.parametrize("entries", [200, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_node_outlives_garbage_in_every_channel_and_says_what_it_skipped(home, rng, entries) -> None:
    expected: set[int] = set()

    async def write(client, id: int) -> None:
        await client.insert("people", home.people(*range(id, id + 8)))
        expected.update(range(id, id + 8))

    async def check(client) -> None:
        found = await client.query("people", columns=["id"], consistency="strong")
        assert sorted(found.table["id"].to_pylist()) == sorted(expected)

    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=2)
        for id in range(0, 80, 8):
            await write(client, id)
            await check(client)
            await home.elapse(0.5)
        await client.flush("people")
        await client.cut("people")
        await home.elapse(2)
        wal, names = node.node.wal, node.node.names
        collection = await client.describe_collection("people")
        owned = sorted({pchannel_of(vchannel) for vchannel in collection.vchannels})
        seen = [bytes(entry.payload) for channel in home.log.channels.values() for entry in channel.entries]
        followed = [names.catalog, names.cluster, names.heartbeats, names.insert_events, *owned]
        followed += [names.requests(role) for role in ("mixcoord", "streamingnode", "proxy", "datanode", "querynode")]
        written = [channel for channel in home.log.channels if "-replies-" in channel]
        written += [names.cuts, names.query_events, names.dead_letters]
        catalog = node.system._cells  # the roles are looked up anew, should one restart

        def term() -> int:
            mixcoord = next(cell for cell in catalog.values() if cell.name == "mixcoord")._life.actor
            return max(mixcoord.catalog.leader.term, *(mixcoord.catalog.granted(name).term for name in owned))

        garbage = Garbage(rng, seen, term)
        for number in range(entries // AT_ONCE):
            for channel in (*followed, *written):
                await wal.append_many([garbage.entry(channel) for _ in range(AT_ONCE)])
            await write(client, 1_000 + 8 * number)
            await home.elapse(0.1)
            if number % 20 == 0:
                await check(client)
        await client.flush("people")
        await check(client)
        assert node.health().ok
        assert {status.restarts for status in node.system.status()} == {0}
        told = [line for line in node.node.metrics.render().decode().splitlines() if "dead_letter_message" in line]
        for channel in followed:
            assert any(f'channel_name="{channel}"' in line for line in told), f"{channel}: {told}"
    async with home.node(name="next") as node, node.client() as client:
        await check(client)
        await write(client, 500_000)
        await check(client)
        assert node.node.clock.ahead_ms < 60_000, "no time of a record that does not count was believed"
