"""A web service with a node of its own: one handler inserts rows, one queries them, and Prometheus reads its metrics.

uvicorn app:app
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import tidewal

CITIES = tidewal.CollectionSchema(
    "cities",
    (tidewal.Field("id", "int64"), tidewal.Field("name", "varchar"), tidewal.Field("people", "int64", nullable=True)),
    primary_key="id",
)
RETRY_AFTER_S = 1


class City(BaseModel):
    """A row of the collection."""

    id: int
    name: str
    people: int | None = None


def service(data: str | Path) -> FastAPI:
    """The service, whose node keeps everything in the directory `data`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with tidewal.standalone(data) as node, node.client("web") as client:
            await client.create_collection(CITIES)  # finds it there after a restart
            app.state.client = client
            app.mount("/tidewal", node.metrics_app())  # /tidewal/metrics, /tidewal/healthz
            yield

    app = FastAPI(title="Cities", lifespan=lifespan)

    @app.post("/cities", status_code=201)
    async def insert(cities: list[City], request: Request) -> dict[str, int]:  # pyright: ignore[reportUnusedFunction]
        """Store cities; when this answers they are durable. One whose id is there is replaced."""
        client: tidewal.Client = request.app.state.client
        written = await client.insert("cities", [city.model_dump() for city in cities])
        return {"rows": written.rows, "ts": written.ts}

    @app.get("/cities")
    async def query(  # pyright: ignore[reportUnusedFunction]
        request: Request, where: str | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """The cities for which the filter `where` holds, with every write that was answered before."""
        client: tidewal.Client = request.app.state.client
        found = await client.query("cities", where, order_by=[("id", True)], limit=limit, consistency="strong")
        rows: list[dict[str, Any]] = found.table.to_pylist()  # Any for who has no stubs of pyarrow
        return rows

    @app.exception_handler(tidewal.TidewalError)
    async def refuse(  # pyright: ignore[reportUnusedFunction]
        request: Request, error: tidewal.TidewalError
    ) -> JSONResponse:
        """Each error as what it says: the caller's (422), for a moment (503), or the service's own (500)."""
        content = {"error": type(error).__name__, "message": error.message}
        if isinstance(error, tidewal.errors.InvalidRequest):
            return JSONResponse(content, status_code=422)
        if error.retryable:
            return JSONResponse(content, status_code=503, headers={"Retry-After": str(RETRY_AFTER_S)})
        return JSONResponse(content, status_code=500)

    return app


app = service(os.environ.get("TIDEWAL_DATA", "data"))
