"""Appends to Woodpecker through its sidecar, beside a Go program that uses the library directly with the same packing.

The Go program is `BenchmarkDirect` of `sidecars/woodpecker`: packs of 1 MiB, 16 on their way, as the sidecar has them.
Here one process appends as many records, a pack in a call. The segments of both are on the local disk, and they share
one etcd.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import uvloop

from tests.brokers.go_programs import build_tests, find_program
from tests.brokers.jars import Missing
from tests.brokers.woodpecker import Etcd, Sidecar, local
from tidewal.adapters.woodpecker.wal import WoodpeckerWal
from tidewal.runtime.log.wal import Append, ChannelPolicy

from .report import chosen, interleaved, per_second, ratio
from .wal.limits import KIB, scratch

CASES = (("1KiB", KIB, 963), ("64KiB", 64 * KIB, 15))  # name, bytes of a record, as many as fit into a pack
PACKS = 150  # of each candidate in a round
CALLS_IN_FLIGHT = 32  # so that the sidecar is never short of packs
DIRECT_WITHIN_S = 120.0


class Direct:
    """The Go program, on a log and a folder of its own."""

    def __init__(self, program: Path, settings: Path) -> None:
        self._program = program
        self._environment = {**os.environ, "TIDEWAL_WOODPECKER_CONFIG": str(settings)}

    def records_per_s(self, case: str) -> float:
        run = ["-test.run", "none", "-test.bench", f"^BenchmarkDirect$/^{case}$", "-test.benchtime", f"{PACKS}x"]
        said = subprocess.run(
            [self._program, *run], env=self._environment, capture_output=True, text=True, timeout=DIRECT_WITHIN_S
        )
        found = re.search(r"([\d.e+]+) records/s", said.stdout)
        assert found is not None, said.stdout + said.stderr
        return float(found[1])


async def append(wal: WoodpeckerWal, pack: Sequence[Append]) -> None:
    """Append `PACKS` packs of these records."""
    calls = iter(range(PACKS))

    async def one_after_another() -> None:
        for _ in calls:
            await wal.append_many(pack)

    await asyncio.gather(*(one_after_another() for _ in range(CALLS_IN_FLIGHT)))


@contextmanager
def running(directory: Path) -> Generator[tuple[Sidecar, Direct]]:
    """A sidecar, and the Go program on the same etcd. Raises `Missing` where one of them cannot be had."""
    sidecar_program, etcd = find_program("sidecar"), Etcd(find_program("etcd"), directory)
    direct_program = build_tests("sidecar", directory / "direct.test")
    sidecar = Sidecar(sidecar_program, directory / "log", etcd.endpoint, uuid4().hex, local(directory / "ours"))
    settings = local(directory / "direct")
    settings["woodpecker"]["meta"] = {"prefix": uuid4().hex}
    config = directory / "direct.yaml"
    config.write_text(json.dumps({**settings, "etcd": {"endpoints": [etcd.endpoint]}}))
    etcd.start()
    try:
        sidecar.start()
        try:
            yield sidecar, Direct(direct_program, config)
        finally:
            sidecar.stop()
    finally:
        etcd.stop()


def measure(sidecar: Sidecar, direct: Direct, case: str, size: int, count: int) -> None:
    pack = [Append(case, bytes(size), 1)] * count  # with a timestamp, as nodes append
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        wal = runner.run(WoodpeckerWal.connect(str(sidecar.directory)))
        runner.run(wal.create_channel(case, ChannelPolicy()))
        measured = interleaved(
            {
                "sidecar": lambda: per_second(PACKS * count, lambda: runner.run(append(wal, pack))),
                "direct": lambda: direct.records_per_s(case),
            }
        )
        runner.run(wal.close())
    ours, theirs = measured["sidecar"], measured["direct"]
    ratio(f"woodpecker.append_many.{count}x{case}", ours, theirs, "ratio to the library in Go",
          records_per_s=ours.median, direct_records_per_s=theirs.median)  # fmt: skip


def main() -> None:
    names = chosen("woodpecker", __doc__, [name for name, _, _ in CASES])
    with scratch() as directory:
        try:
            with running(Path(directory)) as (sidecar, direct):
                for case, size, count in CASES:
                    if case in names:
                        measure(sidecar, direct, case, size, count)
        except Missing as missing:
            print(f"Woodpecker is not measured: {missing}")


if __name__ == "__main__":
    main()
