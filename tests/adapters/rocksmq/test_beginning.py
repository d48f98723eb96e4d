"""What opening refuses, the checks name too: segments that are missing at the journal's beginning, a damaged FORMAT."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.rocksmq.damage import flip
from tests.adapters.rocksmq.salvaging import SMALL, fingerprint, read_all, replace, report
from tidewal.adapters.rocksmq.check.opening_check import refusal
from tidewal.runtime.errors import CorruptLog
from tidewal.runtime.log.wal import ChannelPolicy

KEEPING = ChannelPolicy(retention_s=None)


@pytest.fixture
async def log(open_rocksmq, tmp_path: Path) -> Path:
    """A closed log of several segments with a channel that keeps everything, and one that does not."""
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.create_channel("kept", KEEPING)
    await store.create_channel("passing", ChannelPolicy())
    for number in range(200):
        await store.append("kept", b"%d" % number, number + 1)
        await store.append("passing", bytes(1000), number + 1)
    await store.close()
    return tmp_path / "log"


def segments(log: Path) -> list[Path]:
    return sorted((log / "journal").glob("*.segment"))


async def refused(open_rocksmq) -> str:
    with pytest.raises(CorruptLog) as caught:
        await open_rocksmq(segment_bytes=SMALL)
    return caught.value.message


@pytest.mark.parametrize("gone", [1, 2])
async def test_missing_first_segments_are_refused_named_and_salvaged(open_rocksmq, log: Path, gone: int):
    assert refusal(str(log)) is None
    for path in segments(log)[:gone]:
        path.unlink()
    message = await refused(open_rocksmq)
    assert "the first entries of kept were in them" in message
    assert str(refusal(str(log))) == message
    assert [damage.what for damage in report(log).damages] == ["segments before it are missing"]

    replace(log, accept=True)
    assert refusal(str(log)) is None
    store = await open_rocksmq(segment_bytes=SMALL)
    content, _ = await read_all(store)
    assert b"199" in content["kept"].values()
    await store.close()


async def test_what_retention_has_taken_is_not_missed(open_rocksmq, log: Path):
    store = await open_rocksmq(segment_bytes=SMALL)
    for name in ("kept", "passing"):
        await store.truncate(name, await store.latest_id(name))
    assert store.retain_now() > 0
    await store.close()
    assert segments(log)[0].name != "0000000000000001.segment"
    assert refusal(str(log)) is None
    assert not report(log).damages
    store = await open_rocksmq(segment_bytes=SMALL)
    await store.close()


async def test_a_journal_of_which_only_the_next_segment_is_left_is_not_intact(open_rocksmq, log: Path):
    for path in segments(log)[:-1]:
        path.unlink()
    message = await refused(open_rocksmq)
    assert "there is nothing to salvage" in message
    assert str(refusal(str(log))) == message
    with pytest.raises(CorruptLog, match="Restore the log from a backup"):
        report(log)


async def test_a_damaged_format_is_refused_with_the_way_out(open_rocksmq, log: Path):
    flip(log / "FORMAT", 3)
    message = await refused(open_rocksmq)
    assert "FORMAT is damaged: `tidewal salvage` copies the log" in message
    assert str(refusal(str(log))) == message
    replace(log)
    assert refusal(str(log)) is None


def test_looking_changes_nothing(log: Path):
    (log / "journal" / "preparing").write_bytes(b"x")
    before = fingerprint(log)
    assert refusal(str(log)) is None
    assert fingerprint(log) == before
