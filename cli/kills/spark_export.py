"""A Spark query beside the faults: `tidewal spark export` of one collection, started again whenever it fails."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from ...runtime.errors import Unavailable
from ...runtime.waiting import ended
from ..child_process import python_command, shown_status

RESTART_S = 1.0
ENDED_WITHIN_S = 60.0  # of SIGTERM
DONE_WITHIN_S = 300.0  # of its last start it has read everything that is there


class SparkExport:
    """A streaming query with a checkpoint, from `start` to `finish` or `kill`; what it says goes to `home`/spark.log.

    Where the process that has an embedded log is killed the query fails, as it does with everybody, and goes on from
    its checkpoint: `failures` says how often.
    """

    def __init__(self, url: str, prefix: str, collection: str, home: Path, environment: Mapping[str, str]) -> None:
        self.failures: int = 0
        self._files = home / "exported"
        self._log = home / "spark.log"
        options = ["--prefix", prefix, "--every", "1 second", "--json"]
        self._command = [*python_command(), "spark", "export", url, collection, str(self._files), *options]
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start it, and keep it running."""
        self._task = asyncio.create_task(self._keep_running(), name="spark")

    async def finish(self) -> None:
        """End it, and let a last one read all that there is. Raises `Unavailable` where that fails."""
        await self.kill(signal.SIGTERM)
        try:
            async with asyncio.timeout(DONE_WITHIN_S):
                status = await self._run_once("--once")
        except TimeoutError:
            raise Unavailable(f"Spark has not read all within {DONE_WITHIN_S:g} s: see {self._log}") from None
        if status:
            raise Unavailable(f"Spark ended {shown_status(status)}: see {self._log}")

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it, and none follows."""
        self._ending = True
        task, self._task = self._task, None
        if task is None:
            return
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            await asyncio.wait([task], timeout=ENDED_WITHIN_S)
        await ended(task)

    def ids(self) -> list[int]:
        """The column `id` of all rows that were exported: of the files that Spark's log of them names, which has each
        micro-batch once."""
        import pyarrow.parquet as pq

        batches = [each for each in (self._files / "_spark_metadata").iterdir() if not each.name.startswith(".")]
        lines = [line for each in batches for line in each.read_text().splitlines()[1:]]  # the first one is a version
        urls: set[str] = {json.loads(line)["path"] for line in lines}
        tables = [pq.read_table(unquote(urlsplit(url).path), columns=["id"]) for url in urls]
        return [cast(int, id) for table in tables for id in table.column("id").to_pylist()]

    async def _keep_running(self) -> None:
        while not self._ending:
            await self._run_once()
            if not self._ending:
                self.failures += 1
                await asyncio.sleep(RESTART_S)

    async def _run_once(self, *more: str) -> int:
        with self._log.open("ab") as log:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, *more, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment,
                process_group=0,
            )  # fmt: skip
        try:
            return await process.wait()
        finally:
            if process.returncode is None:  # this is cancelled
                process.kill()
                await process.wait()
