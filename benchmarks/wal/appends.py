"""Durable appends beside the disk's limit, RocksDB and SQLite: all in the same rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ..report import interleaved, per_second, ratio
from .limits import KIB, MIB, TO_RAW, Bench
from .peers import Peer, RocksDB, SQLite

ROUNDS = 7
CASES = (
    ("8x1MiB", 8, MIB, 12),
    ("16x64KiB", 16, 64 * KIB, 48),
    ("1x1KiB", 1, KIB, 1000),
    ("16x1KiB", 16, KIB, 500),
    ("64x1KiB", 64, KIB, 200),
)  # name, in flight, bytes each, commits of all in a round


def measure(bench: Bench) -> None:
    peers: dict[str, RocksDB | SQLite] = {
        "rocksdict": RocksDB(bench.path("rocksdict")),
        "sqlite": SQLite(bench.path("sqlite")),
    }
    try:
        for name, in_flight, size, commits in CASES:
            _case(bench, peers, name, in_flight, size, commits, in_one_call=False)
        _case(bench, peers, "64x1KiB", 64, KIB, 300, in_one_call=True)
    finally:
        for peer in peers.values():
            peer.close()


def _case(
    bench: Bench, peers: Mapping[str, Peer], name: str, count: int, size: int, commits: int, *, in_one_call: bool
) -> None:
    """`count` producers that append one message at a time, or one that appends so many in one call."""
    log, raw = bench.log, bench.raw
    payload = os.urandom(size)
    together = payload * count
    kind = "append_many" if in_one_call else "append"

    def by_log() -> float:
        append = log.append_many if in_one_call else log.append
        rate = per_second(commits, lambda: append(count, payload, commits))
        log.recycle()
        return rate

    def by_disk() -> float:
        return per_second(commits, lambda: [raw.append(together) for _ in range(commits)])

    def by_peer(peer: Peer) -> float:
        append = peer.append_many if in_one_call else peer.append
        rate = per_second(commits, lambda: bench.run(append(count, payload, commits)))
        peer.recycle()
        return rate

    candidates: dict[str, Callable[[], float]] = {"log": by_log, "raw": by_disk}
    candidates |= {key: lambda peer=peer: by_peer(peer) for key, peer in peers.items()}
    measured = interleaved(candidates, rounds=ROUNDS)
    for key, rounds in measured.items():
        if key == "raw":
            continue
        prefix = f"wal.{kind}" if key == "log" else f"wal.peer.{key}.{kind}"
        each = rounds.median * count
        raw_mb_per_s = measured["raw"].median * count * size / 1e6
        ratio(f"{prefix}.{name}", rounds, measured["raw"], TO_RAW, messages_per_s=each, mb_per_s=each * size / 1e6,
              raw_mb_per_s=raw_mb_per_s)  # fmt: skip
