"""Any backend: a group's outputs equal the model, and what groups can do is declared."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from tests.group_model import chaos, check, passes
from tidewal.runtime.groups.processing import Semantics
from tidewal.runtime.testing.conformance.group_helpers import outputs_of

IN_PROCESS = ("memory", "rocksmq", "rocksmq-socket")


def test_groups_are_declared(wal):
    assert wal.capabilities.groups
    assert wal.capabilities.individual_acks
    assert wal.capabilities.atomic_commits


@pytest.mark.slow
@pytest.mark.parametrize("semantics", list(Semantics))
async def test_outputs_equal_the_model_whatever_fails_and_is_cancelled(backend, seed, semantics):
    wal = await backend.wal()
    written: dict[str, list[bytes]] = {}
    counted = backend.name in IN_PROCESS  # where the test sees what moves the position

    async def pause(seconds):
        await asyncio.sleep(seconds / 10)

    with passes(lambda: written) if counted else nullcontext() as passed:
        async with asyncio.timeout(100):
            written.update(await chaos(wal, seed, semantics, pause, steps=60, seeks=counted))
    check(semantics, written, await outputs_of(wal), passed)
