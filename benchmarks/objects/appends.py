"""Appends beside bare PUTs of the same blocks, and beside Woodpecker through its sidecar: all in the same rounds."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, ExitStack
from uuid import uuid4

from tests.brokers.go_programs import find_program
from tests.brokers.jars import Missing
from tests.brokers.woodpecker import Etcd, Sidecar
from tidewal.adapters.objects.settings import ObjectsSettings
from tidewal.adapters.woodpecker.wal import WoodpeckerWal
from tidewal.runtime.log.wal import ChannelPolicy

from ..report import interleaved, per_second, ratio
from ..wal.limits import KIB, MIB, produce
from .stores import Bench, put_all

CASES = (("16x64KiB", 16, 64 * KIB, 40), ("10000x1KiB", 10_000, KIB, 4))  # name, in flight, bytes each, times each
AT_ONCE = ObjectsSettings(linger_ms=0)  # a block goes as soon as there is one: what is measured is no wait


def measure(bench: Bench) -> None:
    with ExitStack() as stack:
        woodpecker = _sidecar(bench, stack)
        for name, in_flight, size, times in CASES:
            _case(bench, woodpecker, name, in_flight, os.urandom(size), times)


def _sidecar(bench: Bench, stack: ExitStack) -> Sidecar | None:
    """A sidecar with its segments in the same store; None where its programs are not built."""
    try:
        etcd = Etcd(find_program("etcd"), bench.directory)
        program = find_program("sidecar")
    except Missing as missing:
        print(f"without Woodpecker: {missing}")
        return None
    etcd.start()
    stack.callback(etcd.stop)
    sidecar = Sidecar(program, bench.directory / "sidecar", etcd.endpoint, uuid4().hex, bench.server.settings)
    sidecar.start()
    stack.callback(sidecar.stop)
    return sidecar


def _case(bench: Bench, sidecar: Sidecar | None, name: str, in_flight: int, payload: bytes, times: int) -> None:
    count, blocks, stack = in_flight * times, list[bytes](), AsyncExitStack()
    log, store = bench.run(stack.enter_async_context(bench.log(AT_ONCE)))

    def by_log() -> float:
        store.bodies.clear()
        rate = per_second(count, lambda: bench.run(produce(log, in_flight, payload, times)))
        blocks[:] = store.bodies
        return rate

    candidates = {"log": by_log, "puts": lambda: per_second(count, lambda: bench.run(put_all(bench.bare(), blocks)))}
    if sidecar is not None:
        other = bench.run(WoodpeckerWal.connect(str(sidecar.directory)))
        stack.push_async_callback(other.close)
        bench.run(other.create_channel(name, ChannelPolicy(max_message_bytes=2 * MIB)))
        candidates["woodpecker"] = lambda: per_second(
            count, lambda: bench.run(produce(other, in_flight, payload, times, [name]))
        )
    measured = interleaved(candidates)
    bench.run(stack.aclose())
    ours, puts = measured["log"], measured["puts"]
    each = ours.median
    ratio(f"objects.append.{name}", ours, puts, "ratio to bare PUTs of the same blocks", messages_per_s=each,
          mb_per_s=each * len(payload) / 1e6, blocks=len(blocks), store=bench.name)  # fmt: skip
    if sidecar is not None:
        woodpecker = measured["woodpecker"]
        ratio(f"objects.append.{name}.woodpecker", ours, woodpecker, "ratio to Woodpecker",
              woodpecker_messages_per_s=woodpecker.median)  # fmt: skip
