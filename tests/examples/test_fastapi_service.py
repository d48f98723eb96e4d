"""The example `examples/fastapi_service`: a FastAPI service with a node of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

pytestmark = pytest.mark.slow

Serving = Callable[[], AbstractAsyncContextManager[Any]]


@pytest.fixture
def serving(load: Callable[[str], ModuleType], tmp_path: Path) -> Serving:
    """Runs the service in this process, always in the same directory, and gives a client of it."""
    example = load("fastapi_service/app.py")

    @asynccontextmanager
    async def serving() -> AsyncIterator[Any]:
        app = example.service(tmp_path / "data")
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client,
        ):
            yield client

    return serving


async def test_what_was_inserted_is_found_also_after_a_restart(serving: Serving) -> None:
    async with serving() as web:
        rows = [{"id": 1, "name": "Cádiz"}, {"id": 2, "name": "Porto", "people": 232_000}]
        written = await web.post("/cities", json=rows)
        assert (written.status_code, written.json()["rows"]) == (201, 2)
        found = await web.get("/cities", params={"where": 'name like "P%"'})
        assert found.json() == [{"id": 2, "name": "Porto", "people": 232_000}]
    async with serving() as web:
        assert [each["id"] for each in (await web.get("/cities")).json()] == [1, 2]


async def test_the_service_has_metrics_and_health(serving: Serving) -> None:
    async with serving() as web:
        await web.post("/cities", json=[{"id": 1, "name": "Cádiz"}])
        metrics = await web.get("/tidewal/metrics")
        assert 'tidewal_proxy_insert_vectors_total{collection_name="cities"' in metrics.text
        assert (await web.get("/tidewal/healthz")).json()["ok"] is True


async def test_an_error_says_whose_it_is(serving: Serving) -> None:
    async with serving() as web:
        wrong = await web.get("/cities", params={"where": "name =="})
        assert (wrong.status_code, wrong.json()["error"]) == (422, "InvalidFilter")
        assert (await web.post("/cities", json=[{"id": "x", "name": "Cádiz"}])).status_code == 422
