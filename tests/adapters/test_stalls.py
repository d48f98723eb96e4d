"""What brokers leave waiting is reported while it waits, and said to be over when it is: appends and readers alike."""

from __future__ import annotations

import asyncio

import pytest

from tests.backends import log_url
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, From
from tidewal.runtime.metrics.metrics import Metrics

pytestmark = [pytest.mark.broker, pytest.mark.slow]

WITHIN_S = 40.0


@pytest.mark.parametrize("name", ["own_kafka", "own_pulsar"])
async def test_a_broker_that_stands_still_is_reported_and_so_is_its_return(name, request, helpers, caplog):
    broker = request.getfixturevalue(name)
    metrics = Metrics("test")
    wal = await open_wal(log_url(name.removeprefix("own_"), broker), metrics=metrics)
    await wal.create_channel("a", ChannelPolicy())
    read = []
    reading = asyncio.create_task(helpers.drain(wal.read("a", From.EARLIEST), read))
    await wal.append("a", b"before")
    async with asyncio.timeout(WITHIN_S):
        await helpers.until(lambda: read)

        def reported(operation, metric="wal_backend_stall_total"):
            return metrics.value(metric, channel_name="a", operation=operation)

        broker.pause()
        append = asyncio.create_task(wal.append("a", b"meanwhile"))
        await helpers.until(lambda: reported("append") and reported("read"))
        assert reported("append", "wal_backend_stalled") == 1
        assert reported("read", "wal_backend_stalled") == 1
        broker.resume()
        id = await append
        await helpers.until(lambda: read[-1].id == id)
        await helpers.until(lambda: not reported("append", "wal_backend_stalled"))
        await helpers.until(lambda: not reported("read", "wal_backend_stalled"))
    assert len(read) == 2
    assert "appending to a: the stall is over" in caplog.text
    assert "reading a: the stall is over" in caplog.text
    await wal.close()
    await reading
