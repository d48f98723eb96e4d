"""A node in several processes: who starts, ends, is started again and stops when, with real processes. Most are a
stand-in for `tidewal run`, which takes its options, says when it is ready, and does what a test wants of it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidewal.actors.standalone import ROLES
from tidewal.cli.child_process import (
    FAILURES_MAX,
    PAUSE_MAX_S,
    RESET_S,
    ChildProcess,
    RestartBackoff,
    error_of,
    python_command,
    shown_status,
)
from tidewal.cli.process_metrics import MergedMetrics, fetch, merge_pages
from tidewal.cli.processes import ProcessSupervisor, forwarded_options
from tidewal.cli.role_groups import RoleGroup, divide_roles, stopping_order
from tidewal.runtime.cluster.roles import ROLE_NAMES
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import ConfigError, InvalidRequest, TidewalError, Unavailable
from tidewal.runtime.metrics.metrics import Metrics

BOUND_S = 60.0  # for what takes processes a second, on a busy machine

T = TypeVar("T")
Start = Callable[..., "subprocess.Popen[str]"]

# What a file `GROUP.does` in its directory says it does, instead of running until SIGTERM.
STAND_IN = """
import argparse, fcntl, json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tidewal.cli.child_process import end_with_parent

parser = argparse.ArgumentParser()
parser.add_argument("command")
for option in ("--roles", "--name", "--data", "--log-level"):
    parser.add_argument(option, default="")
parser.add_argument("--metrics-port", type=int)
parser.add_argument("--json", action="store_true")
parser.add_argument("--end-with-stdin", action="store_true")
parser.add_argument("--follow", default="")
options = parser.parse_args()
assert options.json and options.end_with_stdin
home, group = Path(options.data), options.name.partition("-")[2]
end_with_parent(0.2 if (home / f"{group}.does").exists() else 60.0)
lock = open(home / f"{group}.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)

def note(what):
    with open(home / "journal", "a") as journal:
        journal.write(f"{group} {what}\\n")

def drain(*_):
    note("drained")
    os._exit(0)

def does():
    plan = home / f"{group}.does"
    return plan.read_text().split(None, 1) if plan.exists() else [""]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/metrics":
            from tidewal.runtime.metrics.metrics import Metrics
            status, body = 200, Metrics(options.name).render()
        else:
            sick = does()[0] == "sick"
            status, body = 503 if sick else 200, json.dumps({"ok": not sick, "host": self.server.server_name}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

note(f"started {options.roles}")
what = does()
if what[0] == "fail":
    print(what[1].strip(), file=sys.stderr)
    sys.exit(2)
if what[0] == "once":
    (home / f"{group}.does").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, (lambda *_: note("ignored")) if what[0] == "hang" else drain)
if options.metrics_port:
    server = HTTPServer((os.environ["TIDEWAL__METRICS__HOST"], options.metrics_port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
note("ready")  # said before it is printed: the supervisor may stop it right after that
print("a line of its log", group, file=sys.stderr, flush=True)
print("no address", flush=True)
if what[0] != "mute":
    print(json.dumps({"wal": f"of {group}", "metrics": "its own", group: "here"}), flush=True)
while True:
    signal.pause()
"""

SUPERVISOR = """
import json, sys
from pathlib import Path
from tidewal.cli import processes
from tidewal.cli.main import main
from tidewal.runtime.config.settings import Settings
import typer

count, home, port, as_json = json.loads(sys.argv[1])
processes.python_command = lambda: [sys.executable, str(Path(home) / "stand_in.py")]
app = typer.Typer()

@app.command()
def run() -> None:
    settings = Settings(metrics={"port": port})
    processes.run_processes(count, settings, name="n", data=Path(home), as_json=as_json)

main([], app)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The directory of stand-ins; all have ended after the test."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    yield tmp_path
    for lock in tmp_path.glob("*.lock"):
        assert is_gone(lock), f"{lock.stem} still runs"


@pytest.fixture
def supervise(home: Path) -> Iterator[Start]:
    """Starts a supervisor of stand-ins as a process of its own; it is gone after the test, and all below it."""
    with ExitStack() as stack:

        def start(
            count: int = 4, *, port: int = 0, as_json: bool = True, session: bool = False
        ) -> subprocess.Popen[str]:
            arguments = json.dumps([count, str(home), port, as_json])
            process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=session,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def is_gone(lock: Path) -> bool:
    """Whether the process with this lock ends in time. The lock goes with it, whether or not anyone waits for it."""
    with lock.open() as file:
        return eventually(lambda: locked(file.fileno()))


def locked(file: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def eventually(holds: Callable[[], bool]) -> bool:
    ends_s = time.monotonic() + BOUND_S
    while not holds():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.01)
    return True


async def until(holds: Callable[[], bool]) -> None:
    """Wait on the loop until something holds; `while_running` has the bound."""
    while not holds():  # noqa: ASYNC110 -- what is waited for happens in other processes
        await asyncio.sleep(0.01)


def journal(home: Path) -> list[str]:
    path = home / "journal"
    return path.read_text().splitlines() if path.exists() else []


async def no_pause(_: float) -> None:
    """A restart without the pause before it."""


def supervisor(home: Path, count: int, *, pause: Callable[[float], Awaitable[None]] = no_pause) -> ProcessSupervisor:
    def command(group: RoleGroup, port: int) -> list[str]:
        own = ["--roles", ",".join(group.roles), "--name", group.node_name("n"), "--metrics-port", str(port)]
        return [sys.executable, str(home / "stand_in.py"), "run", *own, "--json", "--end-with-stdin", f"--data={home}"]

    return ProcessSupervisor(divide_roles(count), command, settings=Settings(), name="n", pause=pause)


def while_running(below: ProcessSupervisor, work: Callable[[dict[str, object]], Awaitable[T]]) -> T:
    """What `work` returns, which is given the addresses once all are ready; all are stopped then."""

    async def run() -> T:
        ready: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(below.run(lambda where: ready.set_result(dict(where))))
        try:
            await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await running
            return await work(await ready)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(run(), BOUND_S * 2))


# ---- the roles of each process --------------------------------------------------------------------------------------


def test_the_roles_are_those_of_a_standalone_node_in_its_order():
    assert tuple(role.role for role in ROLES) == ROLE_NAMES


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        (1, {"owner": "mixcoord streamingnode proxy datanode querynode"}),
        (2, {"owner": "mixcoord streamingnode proxy", "readers": "datanode querynode"}),
        (3, {"owner": "mixcoord streamingnode proxy", "datanode": "datanode", "querynode": "querynode"}),
        (
            4,
            {"owner": "mixcoord streamingnode", "proxy": "proxy", "datanode": "datanode", "querynode": "querynode"},
        ),
        (
            7,
            {
                "owner": "mixcoord streamingnode",
                "proxy": "proxy",
                "datanode": "datanode",
                "querynode": "querynode",
                "proxy-2": "proxy",
                "querynode-2": "querynode",
                "proxy-3": "proxy",
            },
        ),
    ],
)
def test_the_roles_are_divided(processes: int, expected: dict[str, str]):
    assert {group.name: " ".join(group.roles) for group in divide_roles(processes)} == expected


@pytest.mark.parametrize("processes", range(1, 12))
def test_each_division_has_all_roles_its_number_of_names_and_the_owner_first(processes: int):
    groups = divide_roles(processes)
    assert {role for group in groups for role in group.roles} == set(ROLE_NAMES)
    assert len({group.name for group in groups}) == processes
    assert [group.name for group in groups if "streamingnode" in group.roles] == [groups[0].name]
    assert "mixcoord" in groups[0].roles


@pytest.mark.parametrize("processes", [0, -1])
def test_less_than_one_process_is_refused(processes: int):
    with pytest.raises(InvalidRequest):
        divide_roles(processes)


def test_processes_stop_in_the_opposite_order_of_their_roles_the_owner_last():
    names = [[group.name for group in groups] for groups in stopping_order(divide_roles(6))]
    assert names == [["querynode", "querynode-2"], ["datanode"], ["proxy", "proxy-2"], ["owner"]]


# ---- pieces ---------------------------------------------------------------------------------------------------------


def test_pauses_double_up_to_ten_seconds_and_begin_again_after_a_long_life():
    backoff = RestartBackoff()
    assert [backoff.pause_after(1.0) for _ in range(9)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, PAUSE_MAX_S]
    assert backoff.pause_after(RESET_S) == 0.1
    assert backoff.pause_after(1.0) == 0.2
    assert [backoff.pause_after(0.0) for _ in range(2000)][-1] == PAUSE_MAX_S


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [
        ([b"a line", b"tidewal: ConfigError: no such key"], ConfigError, "process proxy: no such key"),
        (
            [b'{"level":"fatal","message":"the command ends: Unavailable: no: a"}', b""],
            Unavailable,
            "process proxy: no: a",
        ),
        ([b"Error: No such option"], TidewalError, "process proxy: Error: No such option"),
        ([b"{}"], TidewalError, "process proxy: {}"),
        ([b"7"], TidewalError, "process proxy: 7"),
        ([], TidewalError, "process proxy: it said nothing"),
    ],
)
def test_the_error_of_a_process_is_the_one_that_it_said_last(
    lines: list[bytes], kind: type[TidewalError], message: str
):
    error = error_of("proxy", lines)
    assert (type(error), error.message) == (kind, message)


def test_an_end_is_shown_as_status_or_signal():
    assert [shown_status(each) for each in (3, -9, None)] == ["with status 3", "by SIGKILL", "before it began"]


def test_only_given_options_are_forwarded():
    assert forwarded_options(data=None, config=None, wal="", log_level=None, log_format=None) == []
    given = forwarded_options(data=Path("d"), config=Path("c"), wal="kafka://k", log_level=None, log_format=None)
    assert given == ["--data=d", "--config=c", "--wal=kafka://k"]


def test_a_process_has_the_working_directory_before_its_packages_only_where_the_supervisor_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert python_command() == [sys.executable, "-P", "-m", "tidewal"]
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert python_command() == [sys.executable, "-m", "tidewal"]


# ---- start, restart, stop -------------------------------------------------------------------------------------------


def test_the_owner_starts_first_and_stops_last(home: Path, capfd: pytest.CaptureFixture[str]):
    below = supervisor(home, 4)

    async def look(where: dict[str, object]) -> None:
        assert where.pop("processes") == {group.name: child.pid for group, child in below.children.items()}
        assert where == {"wal": "of owner", "owner": "here", "proxy": "here", "datanode": "here", "querynode": "here"}

    while_running(below, look)
    lines = journal(home)
    assert lines[:2] == ["owner started mixcoord,streamingnode", "owner ready"]
    assert lines[-4:] == ["querynode drained", "datanode drained", "proxy drained", "owner drained"]
    assert len(lines) == 12
    printed = capfd.readouterr()
    assert printed.out == ""
    assert sorted(line for line in printed.err.splitlines() if line.startswith("a line of its log")) == [
        f"a line of its log {name}" for name in ("datanode", "owner", "proxy", "querynode")
    ]
    assert printed.err.count("no address") == 4


def test_a_process_that_ends_is_started_again_after_a_pause(home: Path, caplog: pytest.LogCaptureFixture):
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    (home / "readers.does").write_text("once")
    below = supervisor(home, 2, pause=pause)
    readers = below.children[divide_roles(2)[1]]

    async def kill_again(where: dict[str, object]) -> None:
        assert where["processes"] == {group.name: child.pid for group, child in below.children.items()}
        before = readers.pid
        assert before
        os.kill(before, signal.SIGKILL)
        await until(lambda: readers.pid not in (None, before))

    while_running(below, kill_again)
    assert pauses == [0.1, 0.2]
    assert readers.restarts == below.metrics.value("process_restarts_total", process="readers") == 2
    assert "process readers has ended by SIGKILL after" in caplog.text
    assert below.metrics.value("process_restarts_total", process="owner") == 0


def test_a_process_that_drains_unasked_is_started_again(home: Path):
    below = supervisor(home, 1)
    (owner,) = below.children.values()

    async def drain(_: dict[str, object]) -> None:
        assert owner.pid
        os.kill(owner.pid, signal.SIGTERM)
        await until(lambda: journal(home).count("owner ready") == 2)

    while_running(below, drain)
    assert journal(home).count("owner drained") == 2


def test_a_process_that_cannot_begin_ends_all_with_its_error(home: Path):
    (home / "readers.does").write_text("fail tidewal: ConfigError: no such key")
    with pytest.raises(ConfigError, match="process readers: no such key"):
        while_running(supervisor(home, 2), lambda _: asyncio.sleep(0))
    lines = journal(home)
    assert lines.count("readers started datanode,querynode") == FAILURES_MAX
    assert lines[-1] == "owner drained"


def test_the_others_are_not_started_where_the_owner_cannot_begin(home: Path):
    (home / "owner.does").write_text("fail tidewal: DirectoryInUse: another process has it")
    with pytest.raises(TidewalError, match="process owner: another process has it"):
        while_running(supervisor(home, 4), lambda _: asyncio.sleep(0))
    assert set(journal(home)) == {"owner started mixcoord,streamingnode"}


def test_a_process_that_was_ready_once_is_started_again_whatever_it_fails_of(home: Path):
    below = supervisor(home, 2)
    readers = below.children[divide_roles(2)[1]]

    async def fail_for_a_while(_: dict[str, object]) -> None:
        (home / "readers.does").write_text("fail tidewal: Unavailable: no owner has the log open")
        assert readers.pid
        os.kill(readers.pid, signal.SIGKILL)
        await until(lambda: readers.restarts > FAILURES_MAX)
        (home / "readers.does").unlink()
        await until(lambda: journal(home).count("readers ready") == 2)

    while_running(below, fail_for_a_while)


def test_what_does_not_drain_is_killed_after_the_deadline(home: Path, caplog: pytest.LogCaptureFixture):
    (home / "owner.does").write_text("hang")
    (group,) = divide_roles(1)
    command = [sys.executable, str(home / "stand_in.py"), "run", "--name=n-owner", "--json", "--end-with-stdin"]
    child = ChildProcess(group, lambda _, __: [*command, f"--data={home}"], environment=os.environ, stop_deadline_s=0.2)

    async def stop() -> None:
        running = asyncio.create_task(child.run())
        await child.ready.wait()
        await child.stop()
        await running

    asyncio.run(asyncio.wait_for(stop(), BOUND_S))
    assert journal(home)[-1] == "owner ignored"
    assert "process owner has not drained within 0.2 s: it is killed" in caplog.text
    assert child.pid is None


def test_a_stop_ends_the_pause_before_a_restart(home: Path):
    pausing = asyncio.Event()

    async def pause_for_ever(_: float) -> None:
        pausing.set()
        await asyncio.Event().wait()

    below = supervisor(home, 1, pause=pause_for_ever)
    (owner,) = below.children.values()

    async def kill(_: dict[str, object]) -> None:
        assert owner.pid
        os.kill(owner.pid, signal.SIGKILL)
        await pausing.wait()

    while_running(below, kill)
    assert (owner.pid, owner.restarts) == (None, 0)


def test_a_program_that_is_not_there_is_tried_again(home: Path, caplog: pytest.LogCaptureFixture):
    programs = [str(home / "nowhere"), sys.executable]
    ports = iter([1, 2])
    given: list[int] = []

    def command(_: RoleGroup, port: int) -> list[str]:
        given.append(port)
        return [programs[min(child.restarts, 1)], *arguments]

    (group,) = divide_roles(1)
    arguments = [str(home / "stand_in.py"), "run", "--name=n-owner", "--json", "--end-with-stdin", f"--data={home}"]
    child = ChildProcess(
        group,
        command,
        environment=os.environ,
        free_port=lambda: next(ports),
        stop_deadline_s=BOUND_S,
        pause=no_pause,
    )

    async def until_ready() -> None:
        running = asyncio.create_task(child.run())
        await child.ready.wait()
        await child.stop()
        await running

    asyncio.run(asyncio.wait_for(until_ready(), BOUND_S))
    assert "process owner cannot be started: No such file or directory" in caplog.text
    assert given == [1, 2], "each start has a port of its own: the last one may be in use"


# ---- signals to the supervisor --------------------------------------------------------------------------------------


def test_sigterm_drains_all_in_order_and_nothing_else_is_started(home: Path, supervise: Start):
    process = supervise(as_json=False)
    shown = [process.stdout.readline() for _ in range(10)]
    assert shown[:2] == ["wal       of owner\n", "owner     here\n"]
    assert [line.split()[:2] for line in shown[5:9]] == [
        [name, "process"] for name in ("owner", "proxy", "datanode", "querynode")
    ]
    assert shown[9] == "running; Ctrl-C ends it\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out) == (0, "drained\n"), err
    assert journal(home)[-4:] == ["querynode drained", "datanode drained", "proxy drained", "owner drained"]


def test_ctrl_c_at_the_terminal_reaches_the_supervisor_alone(home: Path, supervise: Start):
    process = supervise(session=True)
    where = json.loads(process.stdout.readline())
    assert list(where["processes"]) == ["owner", "proxy", "datanode", "querynode"]
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=BOUND_S)
    assert process.returncode == 0
    assert journal(home)[-4:] == ["querynode drained", "datanode drained", "proxy drained", "owner drained"]


def test_sigterm_before_all_are_ready_drains_what_there_is(home: Path, supervise: Start):
    (home / "owner.does").write_text("mute")
    process = supervise()
    assert eventually(lambda: "owner ready" in journal(home))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out) == (0, ""), err
    assert journal(home) == ["owner started mixcoord,streamingnode", "owner ready", "owner drained"]


def test_a_killed_supervisor_leaves_no_process(home: Path, supervise: Start):
    process = supervise()
    process.stdout.readline()
    process.kill()
    for name in ("owner", "proxy", "datanode", "querynode"):
        assert is_gone(home / f"{name}.lock")
    assert {line for line in journal(home) if line.endswith("drained")} == {
        "owner drained",
        "proxy drained",
        "datanode drained",
        "querynode drained",
    }


def test_a_process_that_does_not_drain_ends_with_its_killed_supervisor_all_the_same(home: Path, supervise: Start):
    (home / "readers.does").write_text("hang")
    process = supervise(2)
    process.stdout.readline()
    process.kill()
    assert is_gone(home / "readers.lock")
    assert "readers ignored" in journal(home)


def test_the_error_of_a_process_is_the_last_line_and_the_status_that_of_a_command(home: Path, supervise: Start):
    (home / "proxy.does").write_text("fail tidewal: ConfigError: no such key")
    process = supervise()
    out, err = process.communicate(timeout=BOUND_S)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1] == "tidewal: ConfigError: process proxy: no such key"


# ---- metrics and health ---------------------------------------------------------------------------------------------


def series_of(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All series of a page; it has none twice, and no family twice."""
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(set(types)) == len(types)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_pages_become_one_with_each_family_once():
    first, second = Metrics("a"), Metrics('b"\\\n,')
    for metrics in (first, second):
        metrics.counter("datanode_consume_bytes_total").inc(3)
        metrics.histogram("wal_append_message_duration_seconds", status="ok").observe(0.1)
    tricky = ',node_id="x'
    second.gauge("wal_term", channel_name=tricky).set(4)
    pages = {metrics.node_id: metrics.render().decode() for metrics in (first, second)}
    merged = series_of(merge_pages(pages))
    alone = [series_of(page) for page in pages.values()]
    assert len(merged) == sum(map(len, alone))
    for metrics in (first, second):
        of_node = ("node_id", metrics.node_id)
        assert merged["tidewal_datanode_consume_bytes_total", frozenset({of_node})] == 3
        assert merged["process_resident_memory_bytes", frozenset({of_node})] > 0
        assert ("python_gc_collections_total", frozenset({of_node, ("generation", "0")})) in merged
    assert merged["tidewal_wal_term", frozenset({("node_id", second.node_id), ("channel_name", tricky)})] == 4


def test_a_value_that_looks_like_the_label_is_none():
    page = '# TYPE a gauge\na{b=",node_id="} 1\na{node_id="n",b="c"} 2\na 3\n'
    assert merge_pages({"p": page}) == (
        '# TYPE a gauge\na{node_id="p",b=",node_id="} 1\na{node_id="n",b="c"} 2\na{node_id="p"} 3\n'
    )


@pytest.mark.parametrize("page", ["<html>", "a 1\n", "# TYPE a gauge\nb 1\n"])
def test_a_page_in_another_format_is_refused(page: str):
    with pytest.raises(ValueError, match="without a family"):
        merge_pages({"p": page})


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\n\r\nno length",
    ],
)
def test_an_answer_that_is_cut_off_is_none(answer: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            with pytest.raises(ValueError, match="no whole answer"):
                await fetch(server.sockets[0].getsockname()[1], "/metrics")

    asyncio.run(ask())


def http(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=BOUND_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def health(port: int) -> tuple[int, dict[str, dict[str, object]]]:
    status, body = http(port, "/healthz")
    said = json.loads(body)
    assert said["ok"] == (status == 200)
    return status, said["processes"]


def ups(page: str) -> dict[str, float]:
    return {
        dict(labels)["process"]: value
        for (name, labels), value in series_of(page).items()
        if name == "tidewal_process_up"
    }


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nodes(page: str) -> set[str]:
    return {dict(labels)["node_id"] for _, labels in series_of(page)}


# A busy machine may not answer within the deadline: what is shown of a process that does is waited for.


def test_one_endpoint_has_the_metrics_and_the_health_of_all(home: Path, supervise: Start, port: int):
    process = supervise(2, port=port)
    where = json.loads(process.stdout.readline())
    assert where["metrics"] == f"http://127.0.0.1:{port}/metrics"
    assert eventually(lambda: nodes(http(port, "/metrics")[1]) == {"n", "n-owner", "n-readers"})
    assert eventually(lambda: ups(http(port, "/metrics")[1]) == {"owner": 1, "readers": 1})
    assert eventually(lambda: health(port)[0] == 200)
    _, processes = health(port)
    assert {name: state["pid"] for name, state in processes.items()} == where["processes"]
    (home / "readers.does").write_text("sick")
    assert eventually(
        lambda: (
            {name: state["ok"] for name, state in health(port)[1].items()}
            == {
                "owner": True,
                "readers": False,
            }
        )
    )
    assert health(port)[0] == 503
    assert http(port, "/elsewhere")[0] == 404


def test_a_process_that_does_not_answer_is_left_out_and_down(supervise: Start, port: int):
    process = supervise(2, port=port)
    readers = json.loads(process.stdout.readline())["processes"]["readers"]
    os.kill(readers, signal.SIGSTOP)
    try:
        assert eventually(lambda: nodes(http(port, "/metrics")[1]) == {"n", "n-owner"})
        assert ups(http(port, "/metrics")[1])["readers"] == 0
        status, processes = health(port)
        assert (status, processes["readers"]["error"]) == (503, "the process does not answer")
    finally:
        os.kill(readers, signal.SIGCONT)
    assert eventually(lambda: health(port)[0] == 200)


def test_restarts_are_counted_and_shown(supervise: Start, port: int):
    process = supervise(2, port=port)
    readers = json.loads(process.stdout.readline())["processes"]["readers"]
    os.kill(readers, signal.SIGKILL)
    assert eventually(lambda: health(port)[1]["readers"]["restarts"] == 1)
    assert eventually(lambda: health(port)[0] == 200)
    assert health(port)[1]["readers"]["pid"] != readers
    restarts = ("tidewal_process_restarts_total", frozenset({("node_id", "n"), ("process", "readers")}))
    assert series_of(http(port, "/metrics")[1])[restarts] == 1


def test_a_process_that_does_not_run_is_not_healthy():
    metrics = MergedMetrics("n")
    assert not metrics.scraper.health().ok, "of no processes"
    (group,) = divide_roles(1)
    metrics.scraper.children = [ChildProcess(group, lambda _, __: [], environment={}, stop_deadline_s=1)]
    asyncio.run(metrics.scraper.refresh())
    health = metrics.scraper.health()
    assert not health.ok
    assert health.details == {
        "processes": {"owner": {"ok": False, "pid": None, "restarts": 0, "error": "the process does not run"}}
    }
    assert ups(metrics.render().decode()) == {"owner": 0}


def test_a_port_in_use_is_said_before_any_process_is_started(home: Path, supervise: Start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        process = supervise(2, port=other.getsockname()[1])
        _, err = process.communicate(timeout=BOUND_S)
    assert process.returncode == 2
    assert "tidewal: Unavailable: cannot listen on" in err
    assert journal(home) == []
