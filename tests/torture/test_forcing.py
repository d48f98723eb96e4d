"""What calls mean in a log that went on without its source."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from tests.torture.forcing import (
    NO_LINE,
    as_of,
    contents,
    cut_short,
    is_of_line,
    line_time,
    not_salvaged,
    read_salvaged,
    without_undone,
)
from tidewal.runtime.log.opening import open_wal
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import ChannelPolicy
from tidewal.runtime.replication.replicator import Replicator
from tidewal.runtime.testing.histories import history_checks as checks
from tidewal.runtime.testing.histories.client_history import CallOutcome, ClientCall
from tidewal.runtime.testing.memory import MemoryWal

LINE = 100


def _call(kind: str, outcome: CallOutcome = "ok", **result: object) -> ClientCall:
    about = {"first": 7, "count": 1, "payload": "c:1", "entries": [{"channel": "in", "payload": "c:1"}]}
    return ClientCall("c", kind, about, 0, 1, outcome, result)


def _outcomes(*calls: ClientCall) -> list[str]:
    return [call.outcome for call in as_of(calls, LINE)]


def test_what_was_acknowledged_above_the_line_is_not_there() -> None:
    assert _outcomes(_call("insert", ts=LINE), _call("insert", ts=LINE + 1)) == ["ok", "refused"]
    below, above = as_of([_call("insert", ts=LINE)], LINE), as_of([_call("insert", ts=LINE + 1)], LINE)
    assert checks.rows(below, "a read", []) == ["a read: row 7 was acknowledged and is lost"]
    assert len(checks.rows(above, "a read", [7])) == 1
    assert checks.rows(below, "a read", [7]) == checks.rows(above, "a read", []) == []


def test_what_has_no_timestamp_is_there_or_not() -> None:
    assert _outcomes(_call("append", ids=["01"]), _call("cancel", cancelled=True)) == ["unknown", "unknown"]
    appended = as_of([_call("append", ids=["01"])], LINE)
    assert checks.appends(appended, {"in": []}) == checks.appends(appended, {"in": [("05", "c:1")]}) == []
    assert len(checks.appends(appended, {"in": [("05", "c:1"), ("06", "c:1")]})) == 1


def test_a_cancellation_that_came_too_late_stays_one() -> None:
    assert _outcomes(_call("cancel", cancelled=False)) == ["ok"]


def test_what_was_refused_or_is_unknown_stays_so_and_reads_are_left_out() -> None:
    assert _outcomes(_call("insert", "unknown"), _call("send", "refused")) == ["unknown", "refused"]
    assert _outcomes(_call("read", rows={}), _call("read", "unknown"), _call("saw", "unknown")) == []


def test_only_what_was_acknowledged_with_a_timestamp_is_of_a_line() -> None:
    assert is_of_line(_call("send", ts=LINE), LINE)
    others = _call("send", ts=LINE + 1), _call("send", "unknown"), _call("append", ids=["01"])
    assert not any(is_of_line(call, LINE) for call in others)


def test_a_group_may_have_copied_what_is_undone() -> None:
    made = [("01", "c:1"), ("02", "x:1")]
    assert without_undone(made, [], [_call("append")]) == [("02", "x:1")], "of which nobody knows"
    assert without_undone(made, [("09", "c:1")], [_call("append")]) == made


def test_what_was_acknowledged_above_the_line_was_salvaged(tmp_path: Path) -> None:
    calls = [_call("send", ts=LINE + 1), _call("transaction", "unknown")]
    assert not_salvaged(calls, LINE, {}) == ["c:1 was acknowledged above the line, and is lost"]
    assert not_salvaged(calls, LINE + 1, {}) == []
    record = bytes(encode(Record(RecordType.MESSAGE, body=b"c:1")))
    lines = [
        {"channel": name, "payload": base64.b64encode(each).decode()} for name, each in (("in", b"?"), ("t", record))
    ]
    (tmp_path / "left.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    salvaged = read_salvaged(tmp_path / "left.jsonl")
    assert salvaged == {"in": [b"?"], "t": [record]}
    assert not_salvaged(calls, LINE, salvaged) == []


async def test_channels_of_programs_begin_as_in_the_source() -> None:
    wal = MemoryWal()
    await wal.create_channel("in", ChannelPolicy())
    for payload in (b"1", b"2"):
        await wal.append("in", payload)
    before = await contents(wal, ["in", "out"])
    assert before == {"in": [b"1", b"2"], "out": []}
    whole, half = {"in": [b"1", b"2"], "out": []}, {"in": [b"1"], "out": []}
    assert cut_short(before, whole, {}) == cut_short(before, half, {"in": [b"2"]}) == []
    lost, wrong, twice = (half, {}), ({"in": [b"2"], "out": []}, {"in": [b"1"]}), (whole, {"in": [b"2"]})
    assert [len(cut_short(before, *each)) for each in (lost, wrong, twice)] == [1, 1, 1]
    await wal.close()


async def test_a_replica_without_a_line(tmp_path: Path) -> None:
    source, url = MemoryWal(), f"rocksmq://{tmp_path / 'replica'}"
    async with await open_wal(url, own=True) as replica, Replicator(source, replica, "memory://source").claimed():
        pass
    assert await line_time(url) == NO_LINE
    await source.close()
