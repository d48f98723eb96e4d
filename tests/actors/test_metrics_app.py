"""`/metrics` and `/healthz` of a node in the service that embeds it: mounted in FastAPI, read over ASGI."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from tidewal.runtime.errors import Fenced


def reading(app: FastAPI, root_path: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, root_path=root_path), base_url="http://service")


def mounted_twice(node) -> FastAPI:
    outer, inner = FastAPI(), FastAPI()
    inner.mount("/tidewal", node.metrics_app())
    outer.mount("/inside", inner)
    return outer


async def test_a_service_shows_the_node_that_it_embeds(home) -> None:
    async with home.node() as node:
        app = FastAPI()
        app.mount("/tidewal", node.metrics_app())
        app.add_api_route("/metrics", lambda: "its own")
        async with reading(app) as http:
            answer = await http.get("/tidewal/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=")
            families = {family.name for family in text_string_to_metric_families(answer.text)}
            assert {"tidewal_mixcoord_leader", "tidewal_build_info", "python_info"} <= families
            assert (await http.get("/metrics")).json() == "its own"
            assert (await http.head("/tidewal/metrics")).content == b""
            assert (await http.post("/tidewal/metrics")).status_code == 405
            assert (await http.get("/tidewal/other")).status_code == 404
            assert (await http.get("/tidewal/healthz")).json()["roles"]["proxy"] == "running"
            node.system.escalate("proxy", Fenced("another node has the log"))
            assert (await http.get("/tidewal/healthz")).status_code == 503


@pytest.mark.parametrize(
    ("path", "root_path"),
    [
        ("/tidewal/metrics", ""),
        ("/tidewal/metrics", "/proxied"),  # the proxy in front removes its prefix
        ("/proxied/tidewal/metrics", "/proxied"),  # it leaves it there, or the server puts it back
    ],
)
async def test_it_is_found_behind_a_proxy(home, path: str, root_path: str) -> None:
    async with home.node() as node:
        app = FastAPI()
        app.mount("/tidewal", node.metrics_app())
        async with reading(app, root_path) as http:
            assert (await http.get(path)).status_code == 200
            assert (await http.get(path.replace("metrics", "healthz"))).json()["ok"]


async def test_it_is_found_in_an_application_that_is_mounted_itself(home) -> None:
    async with home.node() as node, reading(mounted_twice(node)) as http:
        assert (await http.get("/inside/tidewal/metrics")).status_code == 200
        assert (await http.get("/tidewal/metrics")).status_code == 404
