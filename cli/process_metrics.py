"""`/metrics` and `/healthz` of several processes as one: asked of each at each request, and merged.

A series of a node has the label `node_id`, so those of all nodes stand side by side as they are. What Prometheus'
library says of a process (`process_*`, `python_*`) has none: it gets the one of the node that the process is.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from ..runtime.metrics.metrics import NODE_LABEL, Metrics
from ..runtime.metrics.server import Health, MetricsServer
from .child_process import ChildProcess

HOST = "127.0.0.1"
SCRAPE_DEADLINE_S = 1.0
PAGE_MAX_BYTES = 64 * 1024 * 1024

_LABELLED = re.compile(r'(?:[\w:]+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} ')
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')


class _Family:
    """What pages say of one metric: its comments once, and all series."""

    def __init__(self) -> None:
        self.comments: dict[str, str] = {}  # HELP and TYPE
        self.series: list[str] = []


def merge_pages(pages: Mapping[str, str]) -> str:
    """One page in Prometheus' text format of many, given by the `node_id` of the process that each is from.

    Raises `ValueError` for a page in another format.
    """
    families: dict[str, _Family] = {}
    for node_id, page in pages.items():
        family, name = None, ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, *_ = line.split(" ", 3)
                family = families.setdefault(name, _Family())
                family.comments.setdefault(kind, line)
            elif line and not line.startswith("#"):
                if family is None or not line.startswith(name):
                    raise ValueError(f"a series without a family: {line!r}")
                family.series.append(_with_node(line, node_id))
    return "".join(f"{line}\n" for family in families.values() for line in (*family.comments.values(), *family.series))


def _with_node(line: str, node_id: str) -> str:
    """The line of a series with the label `node_id`, which is added where it has none."""
    if not (labels := _LABELLED.match(line)):
        name, _, value = line.partition(" ")
        return f'{name}{{{NODE_LABEL}="{_escaped(node_id)}"}} {value}'
    if NODE_LABEL in _LABEL.findall(labels[1]):
        return line
    name, _, rest = line.partition("{")
    return f'{name}{{{NODE_LABEL}="{_escaped(node_id)}",{rest}'


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a process said last; no page where it did not answer."""

    page: str = ""
    health: Mapping[str, object] = field(default_factory=dict[str, object])


class ProcessScraper:
    """Asks the processes of a supervisor for their metrics and their health, all at once.

    `metrics` are the supervisor's own. A process without a port, or one that does not run or does not answer within
    `SCRAPE_DEADLINE_S`, is left out of the page, is down in `tidewal_process_up`, and is not healthy.
    """

    def __init__(self, supervisor: str, metrics: Metrics) -> None:
        self.children: Sequence[ChildProcess] = ()
        self._supervisor = supervisor
        self._metrics = metrics
        self._answers: dict[str, _Answer] = {}
        self._round: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask all; a caller that comes while they are being asked waits for the same answers."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._round)

    def page(self, own: str) -> str:
        """The page of all processes, behind `own`, the supervisor's."""
        pages = {
            child.group.node_name(self._supervisor): answer.page
            for child in self.children
            if (answer := self._answers.get(child.group.name)) and answer.page
        }
        return merge_pages({self._supervisor: own, **pages})

    def health(self) -> Health:
        """Healthy, and ready, where all processes are."""
        states = {child.group.name: self._state(child) for child in self.children}
        ok = bool(states) and all(state.get("ok") is True for state in states.values())
        return Health(ok, {"processes": states}, ready=not any("switching" in state for state in states.values()))

    def _state(self, child: ChildProcess) -> dict[str, object]:
        answer = self._answers.get(child.group.name, _Answer())
        state = {"ok": False, "pid": child.pid, "restarts": child.restarts, **answer.health}
        if child.pid is None:
            state |= {"ok": False, "error": "the process does not run"}
        elif not answer.health:
            state["error"] = "the process does not answer"
        return state

    async def _ask_all(self) -> None:
        answers = await asyncio.gather(*map(self._ask, self.children))
        for child, answer in zip(self.children, answers, strict=True):
            self._answers[child.group.name] = answer
            self._metrics.gauge("process_up", process=child.group.name).set(bool(answer.page))

    async def _ask(self, child: ChildProcess) -> _Answer:
        if child.pid is None or not child.metrics_port:
            return _Answer()
        page, health = await asyncio.gather(
            _page_of(child.metrics_port), _health_of(child.metrics_port), return_exceptions=True
        )
        return _Answer(
            "" if isinstance(page, BaseException) else page, {} if isinstance(health, BaseException) else health
        )


async def _page_of(port: int) -> str:
    status, body = await fetch(port, "/metrics")
    if status != HTTPStatus.OK:
        raise ValueError(f"/metrics answers {status}")
    page = body.decode()
    merge_pages({"": page})  # one page in another format must not spoil all
    return page


async def _health_of(port: int) -> dict[str, object]:
    status, body = await fetch(port, "/healthz")
    said = json.loads(body)
    if not isinstance(said, dict):
        raise ValueError("/healthz answers no object")
    return {**said, "ok": status == HTTPStatus.OK}


def free_port() -> int:
    """A port of loopback that is free now. Another program may take it before it is listened to."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def fetch(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of what a server on loopback answers, within `SCRAPE_DEADLINE_S`. Raises `OSError`,
    `TimeoutError`, and `ValueError` for an answer that is cut off or no HTTP."""
    async with asyncio.timeout(SCRAPE_DEADLINE_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
            answer = bytearray()
            while chunk := await reader.read(1 << 16):
                answer += chunk
                if len(answer) > PAGE_MAX_BYTES:
                    raise ValueError(f"{path} answers more than {PAGE_MAX_BYTES} bytes")
        finally:
            writer.close()
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.\d (\d{3}) ", head)
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if status is None or length is None or int(length[1]) != len(body):
        raise ValueError(f"{path} answers {len(answer)} bytes that are no whole answer")
    return int(status[1]), body


class MergedMetrics(Metrics):
    """The metrics of a supervisor, whose page has those of all its processes."""

    def __init__(self, supervisor: str) -> None:
        super().__init__(supervisor)
        self.scraper: ProcessScraper = ProcessScraper(supervisor, self)

    def render(self) -> bytes:
        """The page of what was asked last."""
        return self.scraper.page(super().render().decode()).encode()


class ProcessesServer(MetricsServer):
    """The endpoint of a supervisor: it asks the processes before it answers."""

    def __init__(self, metrics: MergedMetrics, *, host: str, port: int) -> None:
        super().__init__(metrics, metrics.scraper.health, host=host, port=port)
        self._scraper = metrics.scraper

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)  # `stop` ends one that still waits for the processes, too
        try:
            await self._scraper.refresh()
            await super()._serve(reader, writer)
        finally:
            self._connections.discard(task)
            writer.close()
