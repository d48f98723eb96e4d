"""`<collection>/log`: every row version of a collection as a Delta table, the authoritative one.

A flush stores rows and the positions they came up to in one commit, so that both are there or neither is. Delta itself
does not keep a flush from being stored twice: it accepts an append whose application transaction is older than the
stored one. So a flush reads the position T of its vchannels from one snapshot, requires it to be the one it starts at,
and commits as the direct successor of that snapshot; when another commit came first it looks again.

Rows are durable before the commit that names them, and the commit before `flush` returns: what the log's
retention removes once the DataNode has moved its hold is safe here. A flush that fails leaves at most a Parquet file
that no commit names; `vacuum` removes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from ...runtime.errors import CorruptLog, Fenced, InvalidRequest, Unavailable
from ...runtime.streams.messages import Position
from ...runtime.tables.table_metadata import (
    FLUSH_KEY,
    POSITIONS_KEY,
    Positions,
    commit_name,
    encode_positions,
    newest_own_commit,
    read_commit,
    transaction_of,
)
from ...runtime.tables.table_store import StoreUri, TableLocation, table_at
from .delta_errors import storage_errors
from .delta_files import (
    INTERVAL_KEY,
    NO_HOOKS,
    checkpoint,
    open_delta,
    open_table,
    vacuum_table,
    write_parquet,
)
from .file_joining import StoredFile, files_of, groups_to_join, join
from .file_trimming import rows_upto
from .row_versions import stored_schema, to_versions, version_schema

R = TypeVar("R")

CHECKPOINT_EVERY_COMMITS: Final = 32
COMMIT_ATTEMPTS: Final = 100


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush did: `version` of the table behind it, rows and bytes written.

    `replayed`: another flush had stored these rows already, and nothing was written. A flush whose first call ended
    with an unknown outcome, and which a later call finds in the table, counts as that call's own.
    """

    version: int
    rows: int
    size_bytes: int
    replayed: bool = False


@dataclass(slots=True)
class _FlushAttempt:
    """A flush until its outcome is known: a commit that failed may be in the table all the same, or get there later.
    The commit has `id`, and so has each that is tried in its place: any of them is this flush."""

    start: Mapping[str, int]
    end: Mapping[str, int]
    id: str = field(default_factory=lambda: uuid4().hex)
    version: int = -1  # of the commit that was tried last; it alone may still be decided
    file: AddAction | None = None


class LogTable:
    """All row versions of one collection. Calls block; one `LogTable` may be used from several threads.

    Any number of processes may flush vchannels of their own into one table at the same time.
    """

    def __init__(self, table: DeltaTable, location: TableLocation, user_schema: pa.Schema, primary_key: str) -> None:
        self.location = location
        self.user_schema = user_schema
        self.primary_key = primary_key
        self.schema: pa.Schema = version_schema(user_schema)
        self._stored = stored_schema(self.schema)
        self._statistics = ("_ts", "_vchannel", primary_key)
        self._table = table
        self._checkpoint_every = int(table.metadata().configuration[INTERVAL_KEY])
        self._positions: Positions = {}
        self._newest_own = -1  # the version of the commit that has these positions
        self._times: dict[str, int] = {}  # T by vchannel, as far as they were asked of this snapshot
        self._times_of = (table, -1)
        self._attempt: _FlushAttempt | None = None  # the flush whose outcome is unknown
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        location: StoreUri | TableLocation,
        schema: pa.Schema | None = None,
        primary_key: str | None = None,
        *,
        checkpoint_every_commits: int = CHECKPOINT_EVERY_COMMITS,
    ) -> LogTable:
        """Open the table at `location`, or at that path; with `schema` (the user's columns) and `primary_key`, create
        it when absent.

        Raises `InvalidSchema` when the table has another schema or key, `FormatTooNew` when a newer Tidewal made it,
        `CorruptLog` when it is absent and no schema was given, or damaged, `DirectoryUnwritable`, `DiskFull`.

        All other calls raise `CorruptLog`, too, and store nothing, when the rows were changed by another tool.
        """
        location = table_at(location)
        with storage_errors(location):
            table, user_schema, key = open_table(
                location, schema, primary_key, version_schema, checkpoint_every_commits=checkpoint_every_commits
            )
            return cls(table, location, user_schema, key)

    @property
    def version(self) -> int:
        """The version of the snapshot that was read last."""
        return self._table.version()

    def flushed(self, vchannel: str) -> int:
        """The T up to which the rows of `vchannel` are stored, 0 when none are. Looks for other writers' commits."""
        with self._lock, storage_errors(self.location):
            self._refresh()
            return self._stored_t(vchannel)

    def positions(self) -> Positions:
        """For each vchannel, the position stored with its last flush.

        A vchannel that has a T but no position here (only where a foreign tool removed the commits that hold them)
        continues by seeking its T.
        """
        with self._lock, storage_errors(self.location):
            return self._refresh()

    def stored(self, vchannels: Sequence[str]) -> tuple[int, Positions]:
        """The least T of `vchannels`, and `positions`, of one and the same snapshot: the newest."""
        with self._lock, storage_errors(self.location):
            found = self._refresh()
            return min(map(self._stored_t, vchannels)), found

    def flush(
        self,
        rows: pa.Table | Sequence[pa.RecordBatch],
        *,
        start: Mapping[str, int],
        end: Mapping[str, int],
        positions: Mapping[str, Position],
    ) -> FlushResult:
        """Store the rows with `start < _ts ≤ end` of each vchannel, and with them its new T (`end`) and position.

        `start` and `end` map each vchannel to a timestamp, `positions` to its position at `end`. On return all are
        durable. Rows already stored (a replay after a crash) are not stored again. An empty `rows` moves the positions
        only. Blocks for the writing of one Parquet file, two syncs of the disk and a commit.

        Raises `Fenced` (`channel`, `stored`): the table is neither at `start` nor at or behind `end`, so another
        DataNode flushes this vchannel. `InvalidRequest`: rows outside the interval or of another shape. `Unavailable`:
        other writers won every one of `COMMIT_ATTEMPTS` commits. `DiskFull`, `DirectoryUnwritable`, `CorruptLog`.
        After any of these the table holds what it held before, or all of the flush, now or once a request that is under
        way arrives; the same call again, with the same rows, finds out. A longer one may be `Fenced` by this one.
        """
        versions = to_versions(rows, self.schema, self.primary_key)
        _check_interval(versions, start, end, positions)
        with self._lock, storage_errors(self.location):
            return self._flush(versions.cast(self._stored), start, end, positions)

    def move(self, before: Mapping[str, Position], after: Mapping[str, Position]) -> None:
        """Let these be the positions in the place of those `before`, by vchannel: the log was migrated to another one.
        T and rows stay, but where a timestamp falls: the table goes back to it, without the rows above. On return that
        is durable; where it was done before nothing is. Raises `CorruptLog` where the table has other positions, and as
        `flush` does."""

        def attempt() -> None:
            found = self._read_positions()
            if found == after:
                return
            if found != before:
                raise CorruptLog(
                    f"{self.location} has changed since its log was migrated: a node that goes on with another copy of "
                    "the log has written to it",
                    path=self.location.uri,
                )
            ends = {name: at.timestamp for name, at in after.items() if at.timestamp < before[name].timestamp}
            actions = rows_upto(self.location, self._table, self._stored, ends, self._statistics) if ends else []
            self._commit(actions, ends, after)

        with self._lock, storage_errors(self.location):
            self._refresh()
            self._until_committed(attempt)

    def dataset(self, *, above: int = 0, upto: int | None = None) -> tuple[ds.Dataset, pc.Expression]:
        """The newest snapshot, and the filter for its rows with `above < _ts ≤ upto`.

        Files whose statistics lie outside the interval are not opened when the filter is applied. The snapshot stays
        readable until a `vacuum` removes files that a later compaction replaced.
        """
        with self._lock, storage_errors(self.location):
            self._refresh()
            files = self.location.file_system()
            dataset = cast(ds.Dataset, self._table.to_pyarrow_dataset(schema=self._stored, filesystem=files))
        wanted = pc.field("_ts") > above
        return dataset, wanted if upto is None else wanted & (pc.field("_ts") <= upto)

    def join_files(self) -> int:
        """Join the small files of many flushes into large ones, and return how many files the table has fewer.

        Rows, T and positions stay as they are; the replaced files stay until `vacuum`. Flushes go on meanwhile.
        Raises as `flush` does.
        """
        with self._lock, storage_errors(self.location):
            self._refresh()
            groups = groups_to_join(files_of(self._table))
        return sum(self._join(group) for group in groups)

    def vacuum(self, retention_h: int | None = None) -> int:
        """Remove files that no commit names, or none has named for `retention_h` hours (by default the location's);
        return their number.

        Raises `InvalidRequest` when `retention_h` is below `MIN_RETENTION_H`: a flush may be writing such a file now.
        """

        kept_h = self.location.retention_h if retention_h is None else retention_h

        def attempt() -> int:
            # The commits of a vacuum must carry the positions too, or the log's clean-up could remove the last ones.
            positions = {POSITIONS_KEY: encode_positions(self._read_positions())}
            commit = CommitProperties(max_commit_retries=0, custom_metadata=positions)
            return len(vacuum_table(self.location, self._table, kept_h, commit))

        with self._lock, storage_errors(self.location):
            self._refresh()
            return self._until_committed(attempt)

    def _join(self, group: Sequence[StoredFile]) -> int:
        def attempt() -> int:
            if not {file.name for file in group} <= {file.name for file in files_of(self._table)}:
                return 0  # another process has joined them
            self._commit(actions, {}, {})
            return len(group) - 1

        with storage_errors(self.location):
            actions = join(self.location, group, self._stored, statistics=self._statistics)
            with self._lock:
                return self._until_committed(attempt)

    def _flush(
        self, rows: pa.Table, start: Mapping[str, int], end: Mapping[str, int], positions: Mapping[str, Position]
    ) -> FlushResult:
        flush = self._attempt
        if flush is None or (flush.start, flush.end) != (start, end):
            flush = self._attempt = _FlushAttempt(dict(start), dict(end))

        def attempt() -> FlushResult:
            if self._is_replay(start, end):
                if not self._is_commit_of(flush):
                    return FlushResult(self._table.version(), 0, 0, replayed=True)
            else:
                self._commit_flush(flush, rows, positions)
            return FlushResult(flush.version, rows.num_rows, (flush.file and flush.file.size) or 0)

        result = self._until_committed(attempt)
        self._attempt = None
        return result

    def _commit_flush(self, flush: _FlushAttempt, rows: pa.Table, positions: Mapping[str, Position]) -> None:
        if rows.num_rows and not (flush.file and self._stays(flush.file)):
            flush.file = write_parquet(self.location, rows, statistics=self._statistics)
        flush.version = self._table.version() + 1
        self._commit([flush.file] if flush.file else [], flush.end, positions, flush.id)
        if any(self._stored_t(vchannel) < t for vchannel, t in flush.end.items()):
            raise CommitFailedError("the commit is behind a checkpoint that others wrote and cleaned up after")

    def _is_commit_of(self, flush: _FlushAttempt) -> bool:
        """Whether the commit that was tried for `flush` is in the table, though its answer was lost."""
        commit = read_commit(self.location, flush.version) if flush.version >= 0 else None
        return commit is not None and commit.flush == flush.id

    def _until_committed(self, attempt: Callable[[], R]) -> R:
        """Run `attempt` on the present snapshot, and again on the next one whenever another commit came first."""
        version = self._table.version()
        if self._newest_own != version or not self.location.has(commit_name(version)):
            self._refresh()  # another tool's commit may have been undone; one that was cleaned up is too old to be read
        for _ in range(COMMIT_ATTEMPTS):
            before = self._table.version()
            try:
                return attempt()
            except CommitFailedError:
                self._refresh()
                if self._table.version() == before:
                    raise
        raise Unavailable(f"{COMMIT_ATTEMPTS} commits to {self.location} lost against others", path=self.location.uri)

    def _is_replay(self, start: Mapping[str, int], end: Mapping[str, int]) -> bool:
        if any(self._stored_t(vchannel) != t for vchannel, t in start.items()):
            self._refresh()  # another process may have flushed the vchannel since the present snapshot
        stored = {vchannel: self._stored_t(vchannel) for vchannel in start}
        if all(stored[vchannel] >= end[vchannel] for vchannel in start):
            return True
        for vchannel, t in stored.items():
            if t != start[vchannel]:
                raise Fenced(
                    f"{vchannel} is stored up to {t}, not {start[vchannel]}: another DataNode flushes it, or a flush "
                    "whose outcome was unknown has arrived",
                    channel=vchannel,
                    stored=t,
                    start=start[vchannel],
                )
        return False

    def _commit(
        self,
        actions: Sequence[AddAction | RemoveAction],
        end: Mapping[str, int],
        positions: Mapping[str, Position],
        flush: str = "",
    ) -> None:
        """Commit as the direct successor of the present snapshot, and read the newest; `CommitFailedError` when another
        commit came first.

        The Delta library looks for other commits and then creates its own. A writer that was held up in between for
        longer than commits are kept may create one that was there and has been removed: behind a checkpoint, where no
        reader sees it. Only a table opened afresh tells.
        """
        version = self._table.version()
        metadata = {POSITIONS_KEY: encode_positions(self._read_positions() | dict(positions))}
        now_ms = time.time_ns() // 1_000_000
        self._table.create_write_transaction(
            list(actions),
            "append",
            self._table.schema(),
            commit_properties=CommitProperties(
                # 0: never rebase onto a commit whose positions were not looked at.
                max_commit_retries=0,
                app_transactions=[Transaction(transaction_of(vchannel), t, now_ms) for vchannel, t in end.items()],
                custom_metadata=metadata | ({FLUSH_KEY: flush} if flush else {}),
            ),
            post_commithook_properties=NO_HOOKS,
        )
        self.location.sync([commit_name(version + 1)])
        self._table = open_delta(self.location)
        self._read_positions()
        if (version + 1) % self._checkpoint_every == 0:
            checkpoint(self.location, self._table)

    def _stays(self, written: AddAction) -> bool:
        """Whether a file that no commit names yet is far from being vacuumed."""
        age_s = time.time() - written.modification_time / 1000
        return age_s < self.location.retention_h * 3600 / 2

    def _stored_t(self, vchannel: str) -> int:
        """Asked once for each snapshot: the library reads all commits behind the checkpoint to tell it."""
        snapshot = (self._table, self._table.version())
        if self._times_of != snapshot:
            self._times, self._times_of = {}, snapshot
        if vchannel not in self._times:
            self._times[vchannel] = self._table.transaction_version(transaction_of(vchannel)) or 0
        return self._times[vchannel]

    def _refresh(self) -> Positions:
        """Move the snapshot to the newest version, and return its positions, as `_read_positions` does.

        A snapshot that has been moved over many commits gets slower (5 to 30 ms a commit after 600); one that is read
        from a checkpoint is fast again.
        """
        before = self._table.version()
        try:
            self._table.update_incremental()
            passed_checkpoint = self._table.version() // self._checkpoint_every != before // self._checkpoint_every
        except DeltaError:
            # The commits in between may have been cleaned up, or the table is damaged: reading it anew tells which.
            passed_checkpoint = True
        if passed_checkpoint:
            self._table = open_delta(self.location)
        return self._read_positions()

    def _read_positions(self) -> Positions:
        """The positions in the newest commit of Tidewal. Raises `CorruptLog` when another tool changed rows since."""
        commit = newest_own_commit(self.location, self._table.version(), self._newest_own)
        if commit is not None:
            self._newest_own = commit.version
            self._positions = commit.positions or self._positions
        return dict(self._positions)


def _check_interval(
    rows: pa.Table, start: Mapping[str, int], end: Mapping[str, int], positions: Mapping[str, Position]
) -> None:
    if not start or not start.keys() == end.keys() == positions.keys():
        raise InvalidRequest("start, end and positions of a flush must name the same vchannels, at least one")
    for vchannel in start:
        if not 0 <= start[vchannel] < end[vchannel]:
            raise InvalidRequest(f"{vchannel}: a flush needs 0 <= start < end, not {start[vchannel]}, {end[vchannel]}")
    spans = rows.group_by("_vchannel").aggregate([("_ts", "min"), ("_ts", "max")]).to_pylist()
    for span in spans:
        vchannel, low, high = span["_vchannel"], span["_ts_min"], span["_ts_max"]
        if vchannel not in start or not (start[vchannel] < low and high <= end[vchannel]):
            raise InvalidRequest(f"rows of {vchannel!r} with _ts from {low} to {high} are outside the flush")
