"""Tables in a bucket: the same store as a folder, and flushes that are there once, whatever becomes of requests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deltalake import DeltaTable
from obstore.store import ObjectStore

from tests.objects.faulty_http import HELD_S, FaultyStore, Forward, StoreRequest
from tidewal.actors.datanode.current_table import CurrentTable, compact
from tidewal.actors.datanode.delta_files import checkpoint, open_delta
from tidewal.actors.datanode.log_reader import read_current_at
from tidewal.actors.datanode.log_table import FlushResult, LogTable
from tidewal.actors.datanode.table_check import check_tables
from tidewal.actors.datanode.wal_identity import wal_of
from tidewal.runtime.errors import ConfigError, CorruptLog, DirectoryUnwritable, Fenced, TidewalError, Unavailable
from tidewal.runtime.tables import object_options
from tidewal.runtime.tables.object_options import REFUSED, client_of, storage_options
from tidewal.runtime.tables.table_metadata import commit_name
from tidewal.runtime.tables.table_store import CURRENT, LOG, open_tables, table_at

sys.path.insert(0, str(Path(__file__).parent))
from versions import KEY, SCHEMA, V0, V1, position, versions

pytestmark = pytest.mark.slow


def flush(log: LogTable, start: int, end: int, vchannel: str = V0) -> FlushResult:
    rows = versions(range(start + 1, end + 1), vchannel=vchannel)
    return log.flush(rows, start={vchannel: start}, end={vchannel: end}, positions={vchannel: position(end)})


def stored(log: LogTable) -> list[int]:
    table = DeltaTable(log.location.uri, storage_options=log.location.storage_options)
    return sorted(table.to_pyarrow_table(columns=["_ts"])["_ts"].to_pylist())


def log_in(uri: str, *, every: int = 32) -> LogTable:
    return LogTable.open(open_tables(uri).table("flights", LOG), SCHEMA, KEY, checkpoint_every_commits=every)


def objects(uri: str) -> ObjectStore:
    return client_of(uri, storage_options(uri))


def files(uri: str) -> list[str]:
    """The Parquet files of rows, whether a commit names them or not."""
    found = [each["path"] for page in objects(uri).list("flights/log/") for each in page]
    return [path for path in found if "/part-" in path]


class Nth:
    """A fault of the `number`th commit of a table, in its first `times` requests."""

    def __init__(self, number: int, times: int = 1) -> None:
        self.name = commit_name(number)
        self.left = times
        self.met = 0

    def __call__(self, request: StoreRequest, forward: Forward) -> bool:
        if request.command != "PUT" or not request.key.endswith(self.name) or not self.left:
            return True
        self.left -= 1
        self.met += 1
        return self.strike(request, forward)

    def strike(self, request: StoreRequest, forward: Forward) -> bool:
        raise NotImplementedError


class LostAnswer(Nth):
    """The commit is there, and its writer never hears it."""

    def strike(self, request: StoreRequest, forward: Forward) -> bool:
        forward()
        return False


class LostRequest(Nth):
    """The commit never gets there."""

    def strike(self, request: StoreRequest, forward: Forward) -> bool:
        return False


class Conflict(Nth):
    """The store is busy with another commit of that name, which fails."""

    def strike(self, request: StoreRequest, forward: Forward) -> bool:
        request.answer(409, "ConditionalRequestConflict")
        return False


class Unanswered(Nth):
    """The commit is there, and its writer waits for the answer until it gives up."""

    def __init__(self, number: int, times: int = 1) -> None:
        super().__init__(number, times)
        self.ended = threading.Event()

    def strike(self, request: StoreRequest, forward: Forward) -> bool:
        forward()
        self.ended.wait(HELD_S)
        return False


class Late(Nth):
    """The commit gets there when `released`; its writer waits for the answer."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.arrived, self.released = threading.Event(), threading.Event()

    def strike(self, request: StoreRequest, forward: Forward) -> bool:
        self.arrived.set()
        assert self.released.wait(HELD_S)
        return True


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients give up soon."""
    monkeypatch.setattr(object_options, "RETRY_S", 1)


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


# ---- the same store -------------------------------------------------------------------------------------------------


def test_a_bucket_is_a_store_of_tables(bucket: str) -> None:
    store = open_tables(f"{bucket}/some/tables/")
    assert (store.uri, store.exists(), store.tables()) == (f"{bucket}/some/tables", False, [])
    store.prepare()
    assert store.exists()
    log = LogTable.open(store.table("flights", LOG), SCHEMA, KEY)
    for t in range(1, 6):
        flush(log, t - 1, t)
    current = CurrentTable.open(store.table("flights", CURRENT), SCHEMA, KEY)
    assert compact(log, current, 5).rows == 5
    assert sorted(read_current_at(log, 5).to_table()["_ts"].to_pylist()) == [1, 2, 3, 4, 5]
    assert wal_of(store) == position(1).wal
    assert log.join_files() == 4
    assert log.vacuum() == current.vacuum() == 0
    assert [(each.collection, each.name) for each in store.tables()] == [("flights", LOG), ("flights", CURRENT)]
    assert [(report.table, report.rows, report.damage) for report in check_tables(store)] == [
        (LOG, 5, ""),
        (CURRENT, 5, ""),
    ]
    assert LogTable.open(log.location.uri).flushed(V0) == 5
    store.remove("flights")
    assert store.tables() == []
    with pytest.raises(CorruptLog, match="no table"):
        LogTable.open(store.table("flights", LOG))


def test_a_table_is_there_with_its_first_commit_and_stays_there_without_its_log(bucket: str) -> None:
    location = table_at(f"{bucket}/flights/log")
    assert not location.exists()
    log = LogTable.open(location, SCHEMA, KEY)
    assert location.exists()
    assert (location.has(commit_name(0)), location.has(commit_name(1))) == (True, False)
    with pytest.raises(FileNotFoundError):
        location.read(commit_name(1))
    flush(log, 0, 1)
    assert table_at(f"{bucket}/flights/log").exists()


def test_nodes_of_one_bucket_have_one_id(bucket: str, beside: ThreadPoolExecutor) -> None:
    found = set(beside.map(lambda _: open_tables(f"{bucket}/tables").identity(), range(8)))
    assert len(found) == 1
    assert open_tables(f"{bucket}/others").identity() not in found


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_node_keeps_its_tables_in_a_bucket(home, bucket: str) -> None:
    folder, home.tables = home.tables, f"{bucket}/tables"
    async with home.people_client() as client:
        await client.insert("people", home.people(1, 2, 3))
        await client.delete("people", [2])
        await client.flush("people")
        assert (await client.compact("people"))["rows"] == 2
    async with home.node() as node, node.client() as client:  # loads the rows from there
        assert await client.count("people", consistency="strong") == 2
        await client.drop_collection("people")
    assert open_tables(home.tables).tables() == []
    assert not folder.exists()


# ---- each flush once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [LostAnswer, LostRequest])
def test_a_commit_whose_request_or_answer_is_lost_is_there_once(faulty: FaultyStore, bucket: str, fault) -> None:
    log = log_in(bucket)
    faulty.fault = lost = fault(1)
    result = flush(log, 0, 3)
    assert (result.version, result.rows, result.replayed) == (1, 3, False)
    flush(log, 3, 4)
    assert lost.met == 1
    assert stored(log) == [1, 2, 3, 4]


@pytest.mark.parametrize("fault", [LostAnswer, LostRequest, Conflict])
def test_a_commit_of_unknown_outcome_is_decided_by_the_same_flush(
    faulty: FaultyStore, bucket: str, hasty: None, fault
) -> None:
    log = log_in(bucket)
    faulty.fault = lost = fault(1, times=1_000)
    with pytest.raises(Unavailable) as caught:
        flush(log, 0, 3)
    assert caught.value.outcome_unknown
    lost.left = 0
    again = flush(log, 0, 3)
    assert (again.version, again.rows, again.replayed) == (1, 3, False), "its own, whichever request stored it"
    assert again.size_bytes > 0
    assert stored(log) == [1, 2, 3]
    assert len(files(bucket)) == 1


def test_a_commit_that_is_there_after_a_timeout_is_told_from_another_node_s_by_its_id(
    faulty: FaultyStore, bucket: str, hasty: None
) -> None:
    slow, other = log_in(bucket), log_in(bucket)
    faulty.fault = stuck = Unanswered(1, times=1_000)
    with pytest.raises(Unavailable, match="tim") as caught:
        flush(slow, 0, 3)
    assert caught.value.outcome_unknown
    stuck.left = 0
    stuck.ended.set()
    flush(other, 0, 1, V1)  # so that its commit is not the newest one
    assert flush(other, 0, 3).replayed
    own = flush(slow, 0, 3)
    assert (own.version, own.rows, own.replayed) == (1, 3, False)
    assert flush(slow, 0, 3).replayed, "once told, it is a flush like others"
    assert stored(slow) == [1, 1, 2, 3]


def test_a_flush_that_another_node_has_made_meanwhile_is_not_its_own(
    faulty: FaultyStore, bucket: str, hasty: None
) -> None:
    slow, other = log_in(bucket), log_in(bucket)
    faulty.fault = lost = LostRequest(1, times=1_000)
    with pytest.raises(Unavailable):
        flush(slow, 0, 3)
    lost.left = 0
    assert not flush(other, 0, 3).replayed
    assert flush(slow, 0, 3).replayed
    assert stored(slow) == [1, 2, 3]


def test_a_longer_flush_over_one_of_unknown_outcome_is_fenced(faulty: FaultyStore, bucket: str) -> None:
    log, faulty.fault = log_in(bucket), LostAnswer(1)
    flush(log, 0, 3)
    with pytest.raises(Fenced):
        flush(log_in(bucket), 0, 5)


def test_a_commit_that_arrives_behind_the_checkpoint_of_others_is_made_again(
    faulty: FaultyStore, bucket: str, beside: ThreadPoolExecutor
) -> None:
    """A writer is held up between its look at the log and its PUT for longer than commits are kept."""
    slow, other = log_in(bucket), log_in(bucket)
    faulty.fault = late = Late(1)
    flushed = beside.submit(flush, slow, 0, 3)
    assert late.arrived.wait(HELD_S)
    for t in range(1, 4):
        flush(other, t - 1, t, V1)
    checkpoint(other.location, open_delta(other.location))
    # as the Delta library does once they are old
    objects(bucket).delete([f"flights/log/{commit_name(version)}" for version in range(3)])
    late.released.set()
    assert not flushed.result(HELD_S).replayed
    assert stored(slow) == [1, 1, 2, 2, 3, 3]
    assert LogTable.open(slow.location.uri).flushed(V0) == 3


def test_two_nodes_that_store_the_same_vchannel_store_each_row_once(bucket: str, beside: ThreadPoolExecutor) -> None:
    def run(log: LogTable, end: int) -> int:
        """A DataNode: it begins where the table ends, and begins anew where another was faster."""
        fenced = 0
        while (start := log.flushed(V0)) < end:
            try:
                flush(log, start, min(start + 1 + (start + fenced) % 3, end))
            except Fenced:
                fenced += 1
        return fenced

    logs = [log_in(bucket, every=8) for _ in range(2)]
    list(beside.map(run, logs, [20, 20]))
    assert stored(logs[0]) == list(range(1, 21))
    assert {log.positions()[V0].cseq for log in logs} == {20}


def test_flushes_of_two_nodes_into_one_table_are_all_there(bucket: str, beside: ThreadPoolExecutor) -> None:
    def run(vchannel: str) -> None:
        log = log_in(bucket, every=8)
        for t in range(10):
            flush(log, t, t + 1, vchannel)

    log = log_in(bucket, every=8)
    list(beside.map(run, [V0, V1]))
    assert stored(log) == sorted([*range(1, 11), *range(1, 11)])
    assert (log.flushed(V0), log.flushed(V1)) == (10, 10)


def test_a_file_that_waits_too_long_for_its_commit_is_written_again(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vacuum may have removed it: it looks at when the file was written."""
    log, other = log_in(bucket), log_in(bucket)
    monkeypatch.setattr(log.location, "retention_h", 0, raising=False)
    flush(log, 0, 1)
    flush(other, 0, 1, V1)  # so that the next commit is refused once
    flush(log, 1, 2)
    assert stored(log) == [1, 1, 2]
    assert len(files(bucket)) == 4


LOADING = """
import sys
from tidewal.actors.datanode.log_reader import read_current_at
from tidewal.actors.datanode.log_table import LogTable

current = read_current_at(LogTable.open(sys.argv[1]), 100_000)
assert next(current.batches).num_rows
"""


def test_a_process_ends_in_good_order_while_it_loads_a_table(bucket: str) -> None:
    log = log_in(bucket)
    for start in range(0, 60_000, 5_000):
        flush(log, start, start + 5_000)
    subprocess.run([sys.executable, "-c", LOADING, log.location.uri], check=True, timeout=HELD_S)


# ---- what is refused, and how failures are named --------------------------------------------------------------------


@pytest.mark.parametrize("name", [*REFUSED, "AWS_CONDITIONAL_PUT", "aws_s3_allow_unsafe_rename"])
def test_options_by_which_commits_replace_each_other_are_refused(
    bucket: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "disabled")
    with pytest.raises(ConfigError, match=name) as caught:
        open_tables(bucket)
    assert caught.value.key == "tables"


@pytest.mark.parametrize("uri", ["s3://key:secret@bucket/tables", "s3://bucket/tables?secret_access_key=secret"])
def test_a_url_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_tables(uri)
    assert "secret@" not in caught.value.message
    assert "=secret" not in caught.value.message


def test_a_store_that_ignores_conditions_is_refused_and_gets_no_id(faulty: FaultyStore, bucket: str) -> None:
    def careless(request: StoreRequest, forward: Forward) -> bool:
        del request.headers["If-None-Match"]
        return True

    faulty.fault = careless
    for _ in range(2):
        with pytest.raises(ConfigError, match="If-None-Match"):
            open_tables(bucket).identity()
    assert [each for page in objects(bucket).list() for each in page] == []


REFUSALS = {
    "AccessDenied": (403, DirectoryUnwritable),
    "InvalidAccessKeyId": (403, DirectoryUnwritable),
    "RequestTimeTooSkewed": (403, Unavailable),
    "ExpiredToken": (400, Unavailable),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_is_named_by_what_to_do_and_says_no_secret(
    faulty: FaultyStore, bucket: str, hasty: None, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, f"hidden-{name}")
    status, expected = REFUSALS[code]
    log = log_in(bucket)
    flush(log, 0, 1)

    def refuse(request: StoreRequest, forward: Forward) -> bool:
        request.answer(status, code)
        return False

    faulty.fault = refuse
    store = open_tables(bucket)
    for call in (
        store.identity,
        lambda: flush(log, 1, 2),
        lambda: LogTable.open(log.location),
        log.positions,
    ):
        with pytest.raises(TidewalError) as caught:
            call()
        assert type(caught.value) is expected, caught.value
        assert "hidden-" not in f"{caught.value.message} {caught.value.fields}"
    faulty.fault = None
    assert flush(log, 1, 2).rows == 1, "the table is as it was"


def test_a_bucket_that_is_not_there_is_named(bucket: str) -> None:
    with pytest.raises((DirectoryUnwritable, Unavailable), match="NoSuchBucket"):
        open_tables(f"{bucket}-of-nobody/tables").prepare()


def test_no_credentials_are_in_what_is_stored(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    credentials = tmp_path / "credentials"
    credentials.write_text("[tables]\naws_access_key_id = hidden-key\naws_secret_access_key = hidden-%secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "tables")
    log = log_in(bucket, every=1)
    flush(log, 0, 1)
    assert log.location.storage_options["aws_secret_access_key"] == "hidden-%secret"
    client = objects(bucket)
    found = [each["path"] for page in client.list() for each in page]
    assert any(path.endswith(".checkpoint.parquet") for path in found)
    assert all(b"hidden-" not in bytes(client.get(path).bytes()) for path in found)
    assert "hidden-" not in f"{log.location} {log.location!r} {log.location.uri}"


def test_a_profile_without_keys_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        open_tables("s3://bucket/tables")
