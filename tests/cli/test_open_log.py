"""What the commands share that look into a log, over each log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidewal.cli.open_log import opened
from tidewal.cli.tail import _merged
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal


async def test_a_tail_of_a_channel_that_retention_has_emptied_ends(backend: Any) -> None:
    wal: Wal = await backend.wal()
    await wal.create_channel("orders", ChannelPolicy())
    for number in range(3):
        await wal.append("orders", b"%d" % number)
    found = [entry.payload async for _, entry in _merged(wal, ["orders"], From.EARLIEST, False, None)]
    assert [bytes(payload) for payload in found] == [b"0", b"1", b"2"]
    await backend.remove_all(wal, "orders")
    assert [entry async for _, entry in _merged(wal, ["orders"], From.EARLIEST, False, None)] == []


async def test_a_log_without_a_node_is_opened_with_the_limits_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"rocksmq://{tmp_path}/log"
    async with await open_wal(url):
        pass
    monkeypatch.setenv("TIDEWAL__ROCKSMQ__FREESPACEINMB", str(2**40))  # more than any disk has
    async with opened(url):
        pass
    assert f"less than {2**60} bytes are free for {tmp_path}/log" in caplog.text
    assert "(rocksmq.freeSpaceInMB) of the process that has the log open" in caplog.text
