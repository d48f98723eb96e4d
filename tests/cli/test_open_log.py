"""What the commands share that look into a log, over each log."""

from __future__ import annotations

from typing import Any

from tidewal.cli.tail import _merged
from tidewal.runtime.log.wal import ChannelPolicy, From, Wal


async def test_a_tail_of_a_channel_that_retention_has_emptied_ends(backend: Any) -> None:
    wal: Wal = await backend.wal()
    await wal.create_channel("orders", ChannelPolicy())
    for number in range(3):
        await wal.append("orders", b"%d" % number)
    found = [entry.payload async for _, entry in _merged(wal, ["orders"], From.EARLIEST, follow=False)]
    assert [bytes(payload) for payload in found] == [b"0", b"1", b"2"]
    await backend.remove_all(wal, "orders")
    assert [entry async for _, entry in _merged(wal, ["orders"], From.EARLIEST, follow=False)] == []
