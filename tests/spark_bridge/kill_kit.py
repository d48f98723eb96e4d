"""The processes of the kill tests, from outside: a node that writes, and a Spark driver."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from deltalake import DeltaTable

from tests.kill_demo import descendants, still_there

sys.path.insert(0, str(Path(__file__).parent))
from kill_facts import LAST_ID, MODULUS, WINDOW_S

HERE = Path(__file__).parent
PATIENCE_S = 600.0  # beside others a cluster of Spark may take minutes to its first batch
WINDOW_MS = WINDOW_S * 1000
POLL_S = 0.002
# Spark's own, seldom, where one driver runs several queries: all that the bridge hands to Spark's Java side are bytes.
UNSERIALIZED = "Task not serializable"
CLUSTER = "local-cluster[2,1,1024]"  # two workers, whose executors are processes of their own


class Child:
    """A process in a group of its own, and the lines that it tells."""

    def __init__(self, script: str, *arguments: object, errors: Path) -> None:
        with errors.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / script), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._errors = errors
        self._lines: queue.Queue[list[str] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was torn by a kill
                self._lines.put(line.split())
        self._lines.put(None)

    def lines(self) -> Iterator[list[str]]:
        """What it tells, up to its end."""
        while (line := self._lines.get(timeout=PATIENCE_S)) is not None:
            yield line

    def tells(self) -> bool:
        """Whether there is a line that was not read yet, or no more will come."""
        return not self._lines.empty()

    def until(self, word: str) -> list[str]:
        """The rest of the first line that begins with `word`."""
        told: list[str] = []
        for first, *rest in self.lines():
            if first == word:
                return rest
            told += [" ".join((first, *rest))]
        raise AssertionError(f"ended before {word!r}: {told[-1:]} {self._errors.read_text()[-3000:]}")

    def say(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL for the whole group; what it had started must end too."""
        left: set[int] = set()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGSTOP)  # at once: the moment passes
            left = descendants(self.process.pid)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        assert not still_there(left)

    def wait(self) -> int:
        status = self.process.wait(PATIENCE_S)
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return status


class Node:
    """A node that writes, run after run, and the model: which rows have happened, by timestamp."""

    def __init__(self, url: str, folder: Path, rng: random.Random) -> None:
        self.url = url
        self._folder = folder
        self._rng = rng
        self._tried: dict[int, int] = {}  # first id to rows, of those without an answer
        self.rows: list[tuple[int, int, int]] = []  # timestamp, first id, count
        self._first = 0
        self._start()

    def _start(self) -> None:
        self._child = Child(
            "kill_node.py",
            self.url,
            self._folder / "tables",
            self._first,
            self._rng.randrange(2**31),
            errors=self._folder / "node.log",
        )
        self._follow("ready")

    def _follow(self, until: str) -> list[str]:
        """Take in what it tells, up to the line that begins with `until`."""
        for word, *numbers in self._child.lines():
            if word == until:
                return numbers
            self._take(word, numbers)
        raise AssertionError(f"the node ended before {until!r}: {(self._folder / 'node.log').read_text()[-3000:]}")

    def _take(self, word: str, numbers: list[str]) -> None:
        first, count, *ts = map(int, numbers)
        if word == "try":
            self._tried[first] = count
            self._first = max(self._first, first + count)
        else:
            del self._tried[first]
            self.rows.append((ts[0], first, count))

    def die_and_come_back(self) -> None:
        """Kill it and start it again. Of what was on its way some may have happened, in some channels (see `LateWal`):
        its table tells."""
        self._child.kill()
        for word, *numbers in self._child.lines():
            if word in ("try", "ack"):
                self._take(word, numbers)
        unsure, self._tried = self._tried, {}
        self._start()
        self._child.say("flush")
        self._follow("flushed")
        stored = DeltaTable(self._folder / "tables" / "numbers" / "log").to_pyarrow_table(columns=["id", "_ts"])
        times = dict(zip(stored["id"].to_pylist(), stored["_ts"].to_pylist(), strict=True))
        for first, count in unsure.items():
            self.rows += [(times[id], id, 1) for id in range(first, first + count) if id in times]

    def follow(self, rows: int) -> None:
        """Let it write until so many rows are acknowledged."""
        for word, *numbers in self._child.lines():
            self._take(word, numbers)
            if sum(count for _, _, count in self.rows) >= rows:
                return
        raise AssertionError(f"the node ended: {(self._folder / 'node.log').read_text()[-3000:]}")

    def stop_writing(self) -> int:
        """The time of a cut that all rows are in, and a last one in a later window."""
        self._child.say("stop")
        [time] = self._follow("cut")
        return int(time)

    def cut(self, collection: str) -> int:
        """The time of a cut that all is in that was acknowledged in this collection."""
        self._child.say("cut", collection)
        [time] = self._follow("cut")
        return int(time)

    def end(self) -> None:
        if self._child.process.poll() is None:
            self._child.say("end")
            try:
                self._child.wait()
            except subprocess.TimeoutExpired:
                self._child.kill()
                raise

    def sums(self) -> dict[int, tuple[int, int, int]]:
        """What each window must come to."""
        found: dict[int, list[int]] = defaultdict(list)
        for ts, first, count in self.rows:
            found[(ts >> 18) // WINDOW_MS * WINDOW_MS] += range(first, first + count)
        return {start: (len(ids), sum(ids), sum(id * id % MODULUS for id in ids)) for start, ids in found.items()}


class Driver:
    """A Spark driver with some of the queries of `kill_driver.py`, run after run, and what their files hold."""

    def __init__(self, url: str, folder: Path, rng: random.Random, queries: Sequence[str]) -> None:
        self._url = url
        self._folder = folder
        self._rng = rng
        self.queries = queries
        self.interrupted = 0  # batches that were planned when the driver died, and not committed

    def start(self, mode: str = "run", master: str = "local[2]") -> Child:
        """A new process."""
        self.interrupted += sum(map(self._is_in_batch, self.queries))
        log = self._folder / "driver.log"
        return Child("kill_driver.py", self._url, self._folder, mode, master, *self.queries, errors=log)

    def _newest(self, folder: str) -> int:
        names = [path.name.partition(".")[0] for path in (self._folder / folder).glob("[0-9]*")]
        return max(map(int, names), default=-1)

    def _is_in_batch(self, query: str) -> bool:
        return self._newest(f"{query}/offsets") > self._newest(f"{query}/commits")

    def reach(self, moment: str, child: Child) -> bool:
        """Wait until one of the queries has made progress, and then for a moment in a batch; False when it ended by
        itself."""
        query = self._rng.choice(self.queries)
        begun = self._newest(f"{query}/commits")
        reached = {
            "planned": lambda: self._is_in_batch(query),
            "written": lambda: self._newest("out/_spark_metadata") > self._newest("sums/commits"),
            "random": _after(self._rng.uniform(0, 0.5)),
        }
        return self.wait(child, lambda: self._newest(f"{query}/commits") > begun) and self.wait(child, reached[moment])

    def wait(self, child: Child, reached: Callable[[], bool]) -> bool:
        """Until `reached`; False when the driver ended before. As long as batches come it is only slow."""
        deadline, known = time.monotonic() + PATIENCE_S, self._batches()
        while not reached():
            if child.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                before, known = known, self._batches()
                assert known != before, "the queries stand still"
                deadline = time.monotonic() + PATIENCE_S
            time.sleep(POLL_S)
        return True

    def _batches(self) -> list[int]:
        return [self._newest(f"{query}/{folder}") for query in self.queries for folder in ("offsets", "commits")]


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since it was first asked."""
    end: list[float] = []

    def passed() -> bool:
        if not end:
            end.append(time.monotonic() + seconds)
        return time.monotonic() > end[0]

    return passed


@contextmanager
def running(url: str, folder: Path, rng: random.Random, queries: Sequence[str]) -> Iterator[tuple[Node, Driver]]:
    """A node that writes, and a driver, not started."""
    node = Node(url, folder, rng)
    try:
        yield node, Driver(url, folder, rng, queries)
    finally:
        node.end()


def drained(driver: Driver, master: str) -> Child:
    """A driver whose queries have come to an end."""
    while True:
        child = driver.start("drain", master)
        try:
            child.until("started")
            driver.wait(child, child.tells)
            child.until("drained")
        except BaseException as error:
            child.kill()
            if UNSERIALIZED not in str(error):
                raise
            print(error)
        else:
            return child


def assert_each_row_is_there_once(node: Node, driver: Driver, master: str = "local[2]") -> None:
    """Let writers and queries come to an end, and compare."""
    node.stop_writing()
    child = drained(driver, master)
    try:
        node.cut("copies")
        child.say("read")
        lines = list(child.lines())
    finally:
        child.kill()
    windows = {int(start): tuple(map(int, rest)) for word, start, *rest in lines if word == "window"}
    if "sums" in driver.queries:
        assert windows == node.sums()
    everything = (*map(sum, zip(*node.sums().values(), strict=True)),)
    for query in set(driver.queries) - {"sums"}:
        [found] = [tuple(map(int, rest)) for word, *rest in lines if word == query]
        assert found == (everything[0] + 1, everything[1] + LAST_ID, everything[2] + LAST_ID**2)
