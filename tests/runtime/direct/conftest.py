"""Real sockets on both event loops: a node runs on uvloop, a program that embeds one perhaps on asyncio's own."""

from __future__ import annotations

import asyncio

import pytest
import uvloop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Function) -> dict[str, object]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
