"""The checker finds each kind of violation, and none where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tidewal.runtime.testing.histories import history_checks as checks
from tidewal.runtime.testing.histories.client_history import CallOutcome, CallRecorder, ClientCall, load_calls


def append(number: int, outcome: CallOutcome, id: str = "") -> ClientCall:
    about = {"entries": [{"channel": "in", "payload": f"a:{number}"}]}
    return ClientCall("a", "append", about, number, number + 1, outcome, {"ids": [id]})


def insert(first: int, count: int, outcome: CallOutcome) -> ClientCall:
    return ClientCall("a", "insert", {"first": first, "count": count}, 0, 1, outcome)


def write(values: dict[str, int | None], began: int, outcome: CallOutcome = "ok") -> ClientCall:
    return ClientCall("a", "set", {"values": values}, began, began + 5, outcome)


def read(rows: dict[str, int], began: int) -> ClientCall:
    about = {"owner": "a", "consistency": "strong"}
    return ClientCall("b", "read", about, began, began + 5, "ok", {"rows": rows})


def test_appends_that_are_as_they_were_told_are_right() -> None:
    history = [append(0, "ok", "00"), append(1, "unknown"), append(2, "unknown"), append(3, "refused")]
    assert checks.appends(history, {"in": [("00", "a:0"), ("01", "a:2")]}) == []


def test_appends_that_are_not_are_found() -> None:
    def violation(operation: ClientCall, *content: tuple[str, str]) -> str:
        [found] = checks.appends([operation], {"in": content})
        return found

    assert "is lost" in violation(append(0, "ok", "00"))
    assert "2 times" in violation(append(0, "ok", "00"), ("00", "a:0"), ("01", "a:0"))
    assert "2 times" in violation(append(0, "unknown"), ("00", "a:0"), ("01", "a:0"))
    assert "acknowledged as 00 and is at 01" in violation(append(0, "ok", "00"), ("01", "a:0"))
    assert "was refused" in violation(append(0, "refused"), ("00", "a:0"))
    assert "never sent" in violation(append(0, "unknown"), ("00", "b:0"))


def test_messages_have_no_ids_and_are_checked_as_appends_are() -> None:
    about = {"entries": [{"channel": "topic", "payload": "a:0"}, {"channel": "topic", "payload": "a:1"}]}
    sent = [ClientCall("a", "send", about, 0, 1, "ok", {"ts": 7})]
    assert checks.appends(sent, {"topic": [("00", "a:0"), ("01", "a:1")]}) == []
    [lost] = checks.appends(sent, {"topic": [("00", "a:0")]})
    assert lost == "topic: a:1 was acknowledged and is lost"


def test_another_order_is_found() -> None:
    history = [append(0, "ok", "01"), append(1, "ok", "00")]
    [found] = checks.appends(history, {"in": [("00", "a:1"), ("01", "a:0")]})
    assert "stands behind" in found


def test_copies() -> None:
    given = [("00", "a:0"), ("01", "a:1")]
    assert checks.copies("g", given, given, exactly_once=True) == []
    assert checks.copies("g", given, [*given, ("02", "a:0")], exactly_once=False) == []
    assert checks.copies("g", given, [*given, ("02", "a:0")], exactly_once=True)
    assert checks.copies("g", given, given[:1], exactly_once=False)
    assert checks.copies("g", given, given[::-1], exactly_once=True)
    assert checks.copies("g", given, given[::-1], exactly_once=True, ordered=False) == []
    assert checks.copies("g", given, [*given, ("02", "x")], exactly_once=False)


def test_a_live_reader_that_skips_or_repeats_is_found() -> None:
    content = {"in": [("00", "a:0"), ("01", "a:1"), ("02", "a:2")]}

    def seen(*ids: str) -> list[str]:
        return checks.watched([ClientCall("a", "saw", {"channel": "in", "ids": list(ids)}, 0)], content)

    assert seen("00", "01") == []
    assert seen("00", "02")
    assert seen("00", "01", "01")
    assert seen("00", "01", "02", "03")


def test_rows() -> None:
    history = [insert(0, 2, "ok"), insert(2, 2, "unknown"), insert(4, 1, "refused")]
    assert checks.rows(history, "table", [0, 1, 3]) == []
    assert checks.rows(history, "table", [0, 3])
    assert checks.rows(history, "table", [0, 1, 3, 3])
    assert checks.rows(history, "table", [0, 1, 4])
    assert checks.rows(history, "table", [0, 1, 9])
    assert checks.same("table", [0, 1, 3], "topic", [0, 1]) == ["table and topic disagree about row 3"]


def test_reads_may_see_what_was_under_way() -> None:
    history = [write({"a/k": 1}, 0), write({"a/k": 2}, 10), write({"a/k": None}, 20, "unknown")]
    for value, began in ((1, 6), (1, 11), (2, 12), (2, 21)):
        assert checks.keys([*history, read({"a/k": value}, began)]) == []
    assert checks.keys([*history, read({}, 22)]) == []
    assert checks.keys([*history, read({"a/k": 2}, 30), read({"a/k": 2}, 40)]) == []


def test_reads_that_are_too_old_too_new_or_go_back_are_found() -> None:
    history = [write({"a/k": 1}, 0), write({"a/k": 2}, 10), write({"a/k": 3}, 20, "refused"), write({"a/k": 4}, 90)]
    assert checks.keys([*history, read({"a/k": 1}, 16)])  # 2 was acknowledged before
    assert checks.keys([*history, read({"a/k": 3}, 30)])  # refused
    assert checks.keys([*history, read({"a/k": 4}, 30)])  # not asked yet
    unknown = [write({"a/k": 1}, 0), write({"a/k": 2}, 10, "unknown")]
    assert checks.keys([*unknown, read({"a/k": 2}, 12), read({"a/k": 1}, 30)])  # seen once, gone again


def test_reads_of_writes_in_flight_side_by_side() -> None:
    """A client's writes are in the order of their calls, so one that is acknowledged has those before it behind it."""
    history = [write({"a/k": 1}, 0), write({"a/k": 2}, 1), write({"a/k": 3}, 2, "unknown")]
    assert checks.keys([*history, read({"a/k": 2}, 7)]) == []
    assert checks.keys([*history, read({"a/k": 3}, 7), read({"a/k": 3}, 20)]) == []
    assert checks.keys([*history, read({"a/k": 1}, 7)])
    assert checks.keys([*history, read({"a/k": 3}, 7), read({"a/k": 2}, 20)])


def test_versions_that_are_stored() -> None:
    history = [write({"a/k": 1}, 0), write({"a/k": None}, 10), write({"a/k": 2}, 20, "unknown")]
    assert checks.versions(history, "table", [("a/k", 1)]) == []
    assert checks.versions(history, "table", [("a/k", 1), ("a/k", 2)]) == []
    assert "is lost" in checks.versions(history, "table", [])[0]
    assert "2 times" in checks.versions(history, "table", [("a/k", 1), ("a/k", 1)])[0]
    assert "never written" in checks.versions(history, "table", [("a/k", 1), ("a/k", 3)])[0]
    assert "refused" in checks.versions([write({"a/k": 1}, 0, "refused")], "table", [("a/k", 1)])[0]


def test_collections_are_as_the_last_call_said() -> None:
    def ddl(kind: str, outcome: CallOutcome = "ok") -> ClientCall:
        return ClientCall("a", f"{kind}_collection", {"collection": "c"}, 0, 1, outcome)

    assert checks.collections([ddl("create")], ["c", "other"]) == []
    assert checks.collections([ddl("create"), ddl("drop")], []) == []
    assert checks.collections([ddl("create", "refused")], []) == []
    for either in ([], ["c"]):
        assert checks.collections([ddl("create"), ddl("drop", "unknown")], either) == []
    assert checks.collections([ddl("create")], [])
    assert checks.collections([ddl("create"), ddl("drop")], ["c"])
    assert checks.collections([ddl("create"), ddl("drop", "refused")], [])


def test_an_error_that_is_not_ours_is_found() -> None:
    operation = ClientCall("a", "append", {}, 0, 1, "unknown", {"foreign": True, "error": "KeyError: 1"})
    assert "KeyError" in checks.errors([operation])[0]


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    recorder = CallRecorder(tmp_path / "c.jsonl")
    first = recorder.begin("insert", first=0, count=1)
    recorder.begin("insert", first=1, count=1)
    recorder.end(first, "ok", ts=5)
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write('{"op": 1, "outcome": "o')  # torn
    done, open_one = load_calls([tmp_path / "c.jsonl"])
    result: dict[str, Any] = {"ts": 5}
    assert (done.outcome, done.result, done.ended is not None) == ("ok", result, True)
    assert (open_one.outcome, open_one.ended) == ("unknown", None)


LATER_MS = 1_000


def later(outcome: CallOutcome = "ok") -> ClientCall:
    return ClientCall("a", "later", {"payload": "a:1", "due_ms": LATER_MS}, 0, 1, outcome)


def cancel(cancelled: bool, outcome: CallOutcome = "ok") -> ClientCall:
    return ClientCall("a", "cancel", {"payload": "a:1"}, 2, 3, outcome, {"cancelled": cancelled})


def released(payload: str = "a:1", due_ms: int = LATER_MS, at_ms: int = LATER_MS) -> checks.ReleasedMessage:
    return checks.ReleasedMessage(payload, due_ms << 18, at_ms << 18)


def test_messages_that_are_due_later_come_once_unless_they_were_cancelled_in_time() -> None:
    for calls in ([later()], [later(), cancel(False)], [later(), cancel(True, "refused")], [later("unknown")]):
        assert checks.delayed(calls, [[released()], []]) == []
    for calls in ([later(), cancel(True)], [later("unknown")], [later("refused")], [later(), cancel(False, "unknown")]):
        assert checks.delayed(calls, [[], []]) == []


def test_messages_that_are_early_lost_doubled_or_cancelled_are_found() -> None:
    assert "is lost" in checks.delayed([later()], [[]])[0]
    assert "is lost" in checks.delayed([later(), cancel(False)], [[]])[0]
    assert "2 times" in checks.delayed([later()], [[released()], [released()]])[0]
    assert "cancelled in time" in checks.delayed([later(), cancel(True)], [[released()]])[0]
    assert "refused" in checks.delayed([later("refused")], [[released()]])[0]
    assert "was due at" in checks.delayed([later()], [[released(at_ms=LATER_MS - 1)]])[0]
    assert "never sent" in checks.delayed([], [[released()]])[0]
    wrong = [released("b:1", LATER_MS + 1), released()]
    assert "behind it" in checks.delayed([later()], [wrong])[0]


def test_half_a_transaction_is_found() -> None:
    entries = [{"channel": "t", "payload": "a:1"}]
    call = ClientCall("a", "transaction", {"first": 5, "count": 2, "entries": entries}, 0, 1, "unknown")
    there: dict[str, checks.Content] = {"t": [("01", "a:1")]}
    assert checks.transactions([call], [5, 6], there) == checks.transactions([call], [4, 7], {"t": []}) == []
    for ids, messages in (([5, 6], {"t": []}), ([5], there), ([], there)):
        assert "half of the transaction" in checks.transactions([call], ids, messages)[0]
    assert "is lost" in checks.rows([dataclasses.replace(call, outcome="ok")], "table", [5])[0]


def test_a_transaction_at_two_times_is_found() -> None:
    about = {"first": 5, "count": 2, "entries": [{"channel": "t", "payload": "a:1"}]}
    call = ClientCall("a", "transaction", about, 0, 1, "ok", {"ts": 9})
    unknown = dataclasses.replace(call, outcome="unknown", result={})
    assert checks.transaction_times([call], {5: 9, 6: 9, 7: 10}, {"a:1": 9, "b:1": 10}) == []
    assert checks.transaction_times([unknown], {5: 8, 6: 8}, {"a:1": 8}) == []
    assert checks.transaction_times([call], {}, {}) == [], "which is lost, as `rows` and `appends` say"
    for each, rows, messages in ((call, {5: 9, 6: 10}, {}), (unknown, {5: 8}, {"a:1": 9}), (call, {5: 8, 6: 8}, {})):
        [found] = checks.transaction_times([each], rows, messages)
        assert f"row 5 has the timestamps {sorted({*rows.values(), *messages.values()})}" in found
