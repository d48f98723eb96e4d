"""The table of metrics, a node's registry, and the HTTP endpoint that shows it."""

from __future__ import annotations

import ast
import asyncio
import json
import platform
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidewal.runtime.errors import InvalidRequest, Unavailable, Unsupported
from tidewal.runtime.metrics import server as metrics_server
from tidewal.runtime.metrics.metrics import METRICS, Metrics
from tidewal.runtime.metrics.server import MAX_REQUEST_BYTES, Health, MetricsServer, metrics_app


def test_table_is_well_formed():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.meaning, metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_every_metric_of_the_table_can_be_used_and_is_shown():
    metrics = Metrics("n1")
    for metric in METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        if metric.kind == "counter":
            metrics.counter(metric.name, **labels).inc()
        elif metric.kind == "gauge":
            metrics.gauge(metric.name, **labels).set(1)
        else:
            metrics.histogram(metric.name, **labels).observe(1)
        assert metrics.value(metric.name, **labels) == 1
    samples = [s for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples]
    shown = {sample.name.removesuffix("_count") for sample in samples}
    assert {metric.full_name for metric in METRICS} <= shown
    assert {sample.labels["node_id"] for sample in samples if sample.name.startswith("tidewal_")} == {"n1"}


def test_amounts_observed_together_count_as_each_of_them():
    amounts = [-1.0, 0.0, 0.005, 0.0051, 0.3, 0.3, 1e9]
    one_by_one, together = Metrics("n1"), Metrics("n1")
    for amount in amounts:
        one_by_one.histogram("streamingnode_delayed_late_seconds").observe(amount)
    together.histogram("streamingnode_delayed_late_seconds").observe_all(amounts)
    shown = [_samples_of(each, "tidewal_streamingnode_delayed_late_seconds") for each in (one_by_one, together)]
    assert shown[0] == shown[1]
    assert together.value("streamingnode_delayed_late_seconds") == len(amounts)


def _samples_of(metrics: Metrics, name: str) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families if family.name == name for sample in family.samples]
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in samples}


def test_the_process_and_what_runs_in_it_are_shown():
    families = text_string_to_metric_families(Metrics("n1").render().decode())
    samples = {sample.name: sample for family in families for sample in family.samples}
    build = samples["tidewal_build_info"]
    assert (build.value, build.labels["version"]) == (1, metadata.version("tidewal"))
    assert build.labels["python_version"] == platform.python_version()
    assert samples["python_info"].labels["version"] == platform.python_version()
    assert "python_gc_collections_total" in samples
    if sys.platform == "linux":
        assert samples["process_resident_memory_bytes"].value > 1_000_000
        assert {"process_cpu_seconds_total", "process_open_fds"} <= samples.keys()


KINDS = {"counter": "counter", "gauge": "gauge", "watch": "gauge", "histogram": "histogram"}  # by method


def uses_in_the_source() -> Iterator[tuple[str, str, str, set[str | None]]]:
    """Yield (location, kind, name, labels) of each call that names its metric; None stands for `**labels`."""
    root = Path(__file__).parents[2]
    for floor in ("runtime", "adapters", "actors", "spark_bridge", "cli"):
        for path in (root / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
                    continue
                name = node.args[0]
                kind = KINDS.get(node.func.attr)
                if kind is not None and isinstance(name, ast.Constant):
                    place = f"{path.relative_to(root)}:{node.lineno}"
                    yield place, kind, name.value, {keyword.arg for keyword in node.keywords}


@pytest.mark.slow
def test_what_the_source_records_is_in_the_table():
    table = {metric.name: (metric.kind, set(metric.labels)) for metric in METRICS}
    uses = list(uses_in_the_source())
    assert uses
    for place, kind, name, labels in uses:
        assert name in table, place
        expected = table[name][1]
        assert table[name][0] == kind, place
        assert labels == expected or (None in labels and labels - {None} <= expected), place


def test_nodes_of_one_process_do_not_share_series():
    one, other = Metrics("n1"), Metrics("n2")
    one.counter("overloaded_total", limit="proxy.maxInflightBytes").inc(2)
    assert one.value("overloaded_total", limit="proxy.maxInflightBytes") == 2
    assert other.value("overloaded_total", limit="proxy.maxInflightBytes") == 0


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        ("counter", "wal_apend_message_total", {}),
        ("gauge", "overloaded_total", {"limit": "x"}),
        ("counter", "overloaded_total", {}),
        ("counter", "overloaded_total", {"limit": "x", "channel_name": "c"}),
        ("counter", "overloaded_total", {"limits": "x"}),
    ],
)
def test_what_is_not_in_the_table_is_an_error(kind: str, name: str, labels: dict[str, str]):
    with pytest.raises(InvalidRequest, match=name):
        getattr(Metrics(), kind)(name, **labels)


def test_a_channel_that_left_leaves_no_series():
    metrics = Metrics()
    for channel in ("dml_1", "dml_10"):
        metrics.gauge("proxy_tt_lag_ms", channel_name=channel).set(7)
        metrics.counter("wal_dead_letter_message_total", channel_name=channel, reason="checksum").inc()
    metrics.forget("channel_name", "dml_1")
    shown = metrics.render().decode()
    assert 'channel_name="dml_1"' not in shown
    assert shown.count('channel_name="dml_10"') >= 2


def test_a_series_that_is_watched_is_computed_at_each_scrape():
    metrics, depths = Metrics("n1"), {"a": 1, "b": 2}
    for channel in depths:
        metrics.watch("datanode_consume_tt_lag_ms", partial(depths.__getitem__, channel), channel_name=channel)
    metrics.gauge("datanode_consume_tt_lag_ms", channel_name="set").set(3)
    depths["a"] = 7
    assert metrics.value("datanode_consume_tt_lag_ms", channel_name="a") == 7
    assert metrics.series("datanode_consume_tt_lag_ms") == {("a",): 7, ("b",): 2, ("set",): 3}
    assert 'lag_ms{channel_name="a",node_id="n1"} 7.0' in metrics.render().decode()
    metrics.watch("datanode_consume_tt_lag_ms", lambda: 8, channel_name="a")
    assert metrics.value("datanode_consume_tt_lag_ms", channel_name="a") == 8
    metrics.remove("datanode_consume_tt_lag_ms", channel_name="a")
    metrics.forget("channel_name", "set")
    assert metrics.series("datanode_consume_tt_lag_ms") == {("b",): 2}
    with pytest.raises(InvalidRequest, match="is a counter"):
        metrics.watch("overloaded_total", lambda: 1, limit="x")


def test_no_series_says_when_another_one_began():
    metrics = Metrics()
    metrics.counter("overloaded_total", limit="x").inc()
    metrics.histogram("proxy_mutation_latency", status="ok").observe(1)
    assert "_created" not in metrics.render().decode()


async def exchange(server: MetricsServer, request: bytes) -> tuple[str, dict[str, str], bytes]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


async def test_metrics_page_is_what_the_registry_renders():
    metrics = Metrics("n1")
    metrics.counter("overloaded_total", limit="x").inc(3)
    async with MetricsServer(metrics, lambda: Health(ok=True)) as server:
        assert server.address[0] == "127.0.0.1"
        status, headers, body = await exchange(server, b"GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert int(headers["Content-Length"]) == len(body)
    assert headers["Content-Type"].startswith("text/plain")
    assert b'tidewal_overloaded_total{limit="x",node_id="n1"} 3.0' in body


@pytest.mark.parametrize(("ok", "status"), [(True, "HTTP/1.1 200 OK"), (False, "HTTP/1.1 503 Service Unavailable")])
async def test_health_says_what_it_saw(ok: bool, status: str):
    async with MetricsServer(Metrics(), lambda: Health(ok, {"lag_ms": 12, "ok": "not this"})) as server:
        answer, _, body = await exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n")
    assert answer == status
    assert json.loads(body) == {"ok": ok, "lag_ms": 12}


async def test_a_health_check_that_raises_is_not_ok():
    def broken() -> Health:
        raise ZeroDivisionError("lag")

    async with MetricsServer(Metrics(), broken) as server:
        status, _, body = await exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n")
    assert status.startswith("HTTP/1.1 503")
    assert json.loads(body) == {"ok": False, "error": "ZeroDivisionError: lag"}


@pytest.mark.parametrize(
    ("request_line", "status", "has_body"),
    [
        (b"HEAD /metrics HTTP/1.1", "200", False),
        (b"GET / HTTP/1.1", "404", True),
        (b"POST /metrics HTTP/1.1", "405", True),
        (b"\xff\xfe nonsense", "405", True),
    ],
)
async def test_other_requests(request_line: bytes, status: str, has_body: bool):
    async with MetricsServer(Metrics(), lambda: Health(ok=True)) as server:
        answer, _, body = await exchange(server, request_line + b"\r\n\r\n")
    assert answer.split()[1] == status
    assert bool(body) == has_body


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What the server sends until it closes; a reset is an end without an answer."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_request_without_end_is_dropped_and_the_next_one_served():
    async with MetricsServer(Metrics(), lambda: Health(ok=True)) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET /" + b"x" * (2 * MAX_REQUEST_BYTES))
        assert await read_to_end(reader) == b""
        writer.close()
        status, _, _ = await exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n")
    assert status.startswith("HTTP/1.1 200")


async def test_a_silent_client_is_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.0)
    async with MetricsServer(Metrics(), lambda: Health(ok=True)) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        assert await read_to_end(reader) == b""
        writer.close()


async def test_connections_beyond_the_limit_are_closed_at_once_and_the_others_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 2)
    async with MetricsServer(Metrics(), lambda: Health(ok=True)) as server:
        silent = [await asyncio.open_connection(*server.address) for _ in range(2)]
        reader, writer = await asyncio.open_connection(*server.address)
        assert await read_to_end(reader) == b""
        writer.close()
        silent[0][1].write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert (await silent[0][0].read()).startswith(b"HTTP/1.1 200")
        for _, each in silent:
            each.close()


async def test_stop_ends_open_connections_and_frees_the_port():
    server = MetricsServer(Metrics(), lambda: Health(ok=True))
    await server.start()
    host, port = server.address
    reader, writer = await asyncio.open_connection(host, port)
    await server.stop()
    await server.stop()
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(InvalidRequest, match="not started"):
        _ = server.address
    async with MetricsServer(Metrics(), lambda: Health(ok=True), port=port) as again:
        assert again.address == (host, port)


async def test_a_taken_port_is_a_clear_error():
    async with MetricsServer(Metrics(), lambda: Health(ok=True)) as server:
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{server.address[1]}"):
            await MetricsServer(Metrics(), lambda: Health(ok=True), port=server.address[1]).start()


# ---- the same as an ASGI app -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "ok", "status", "body"),
    [
        ("GET", "/metrics", True, 200, b"tidewal_build_info{"),
        ("GET", "/healthz", True, 200, b'{"lag_ms": 1, "ok": true}'),
        ("GET", "/healthz", False, 503, b'{"lag_ms": 1, "ok": false}'),
        ("GET", "/readyz", True, 200, b'{"lag_ms": 1, "ok": true}'),
        ("GET", "/readyz", None, 503, b'{"lag_ms": 1, "ok": false}'),
        ("GET", "/healthz", None, 200, b'{"lag_ms": 1, "ok": true}'),
        ("GET", "/", True, 404, b"/metrics, /healthz or /readyz"),
        ("POST", "/metrics", True, 405, b"only GET and HEAD"),
    ],
)
@pytest.mark.parametrize("root", ["", "/tidewal"])
async def test_a_mounted_app_answers_as_the_server_does(method, path, ok, status, body, root):
    """With `ok` None the node makes progress, and is not ready."""
    sent: list = []

    async def send(message) -> None:
        sent.append(message)

    app = metrics_app(Metrics(), lambda: Health(ok is not False, {"lag_ms": 1}, ready=ok is not None))
    await app({"type": "http", "method": method, "path": root + path, "root_path": root}, None, send)
    start, content = sent
    assert (start["type"], start["status"]) == ("http.response.start", status)
    assert content["type"] == "http.response.body"
    assert body in content["body"]
    assert dict(start["headers"])[b"content-length"] == str(len(content["body"])).encode()


async def test_a_mounted_app_sends_no_body_for_head_and_takes_no_other_connection():
    sent: list = []

    async def send(message) -> None:
        sent.append(message)

    app = metrics_app(Metrics(), lambda: Health(ok=True))
    await app({"type": "http", "method": "HEAD", "path": "/metrics"}, None, send)
    assert sent[1]["body"] == b""
    assert int(dict(sent[0]["headers"])[b"content-length"]) > 0
    with pytest.raises(Unsupported):
        await app({"type": "websocket"}, None, send)
