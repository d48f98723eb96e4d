"""The node shows how far the groups of its log are behind, also those that have no members now."""

from __future__ import annotations

import pytest

from tidewal.actors.mixcoord import group_lags
from tidewal.actors.mixcoord.group_lags import INTERVAL_S
from tidewal.runtime.clock import compose
from tidewal.runtime.log.wal import Append, ChannelPolicy

pytestmark = pytest.mark.asyncio(loop_factories=["memory"])


def lags(node) -> dict[tuple[str, ...], tuple[float, float]]:
    read = node.node.metrics.series
    seconds = read("wal_group_lag_seconds")
    return {key: (entries, seconds[key]) for key, entries in read("wal_group_lag_entries").items()}


async def leave(wal, group: str, channel: str, acknowledged: int) -> None:
    """A group without members that has acknowledged some entries."""
    member = await wal.join(group, [channel])
    delivered = await anext(member)
    await member.acknowledge(delivered.parts()[acknowledged - 1])
    await member.aclose()


async def fill(node, channel: str, entries: int) -> None:
    now = compose(node.node.clock.clock.wall_ms(), 0)
    await node.wal.create_channel(channel, ChannelPolicy())
    await node.wal.append_many([Append(channel, b"%d" % number, now) for number in range(entries)])


async def test_entries_and_age_of_each_group_are_shown_until_it_is_dropped(home) -> None:
    async with home.node() as node:
        await fill(node, "orders", 5)
        await leave(node.wal, "billing", "orders", 2)
        await leave(node.wal, "mail", "orders", 5)
        await home.elapse(INTERVAL_S + 1)
        shown = lags(node)
        assert shown["billing", "orders"] == (3, pytest.approx(INTERVAL_S, abs=1))
        assert shown["mail", "orders"] == (0, 0)
        await node.wal.drop_group("mail")
        await home.elapse(INTERVAL_S)
        assert set(lags(node)) == {("billing", "orders")}
        assert lags(node)["billing", "orders"] == (3, pytest.approx(2 * INTERVAL_S, abs=1))


async def test_no_more_positions_are_measured_than_the_limit(home, monkeypatch, caplog) -> None:
    monkeypatch.setattr(group_lags, "POSITIONS_MAX", 2)
    async with home.node() as node:
        await fill(node, "orders", 2)
        for group in ("a", "b", "c"):
            await leave(node.wal, group, "orders", 1)
        await home.elapse(3 * INTERVAL_S)
        assert set(lags(node)) == {("a", "orders"), ("b", "orders")}
        assert caplog.text.count("the lag is measured of 2 positions of groups alone") == 1


async def test_entries_are_counted_up_to_a_limit_and_their_age_is_right(home, monkeypatch) -> None:
    monkeypatch.setattr(group_lags, "COUNTED_MAX", 3)
    async with home.node() as node:
        await fill(node, "orders", 9)
        await leave(node.wal, "billing", "orders", 2)
        await home.elapse(INTERVAL_S + 1)
        assert lags(node)["billing", "orders"] == (3, pytest.approx(INTERVAL_S, abs=1))
