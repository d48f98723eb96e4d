"""Brokers that are not there when a log is opened: `Cluster.open` ends in time and says where it looked."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tidewal.adapters.kafka.cluster import Cluster
from tidewal.adapters.kafka.options import CONNECT_TIMEOUT_S, KafkaOptions
from tidewal.runtime.errors import Unavailable
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.stalls import StallWatch
from tidewal.runtime.metrics.metrics import Metrics
from tidewal.runtime.testing.clock import run_virtual

REFUSED = ConnectionRefusedError(111, "Connect call failed")


class Absent(Cluster):
    """Brokers that refuse each connection, or, where `silent`, never answer."""

    def __init__(self, *, silent: bool):
        super().__init__(KafkaOptions("nowhere:9092"), StallWatch(Metrics()))
        self.silent = silent

    async def _bootstrap(self):
        if self.silent:
            await asyncio.get_running_loop().create_future()
        raise REFUSED


async def failure_of(silent, within_s):
    """The error of opening, and the virtual seconds until it came."""
    cluster = Absent(silent=silent)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(Unavailable) as raised:
        await cluster.open(within_s)
    await cluster.close()
    return str(raised.value), loop.time() - began


@pytest.mark.parametrize(("silent", "reason"), [(False, "Connect call failed"), (True, "no connection")])
def test_the_first_contact_ends_in_time_with_the_address_and_what_to_check(silent, reason):
    told, seconds = run_virtual(failure_of(silent, CONNECT_TIMEOUT_S))
    assert CONNECT_TIMEOUT_S - 0.5 <= seconds <= 10
    for part in ("nowhere:9092", reason, "Check the address"):
        assert part in told


def test_a_log_that_is_open_goes_on_as_long_as_any_call():
    _, seconds = run_virtual(failure_of(False, None))
    assert seconds >= KafkaOptions("nowhere").delivery_timeout_s


async def test_a_port_on_which_nobody_listens_is_named_and_the_library_adds_no_line(caplog):
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: .*Connect call failed.*Check the address"):
        async with asyncio.timeout(20):
            await open_wal("kafka://127.0.0.1:1/x?connect_timeout_s=0.2")
    assert not caplog.records
    assert not logging.getLogger("aiokafka").filters
