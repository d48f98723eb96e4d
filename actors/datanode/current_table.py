"""`<collection>/current`: the newest row of each key as a Delta table, derived from the log by compaction.

Compaction reads the row versions above the table's T, merges the newest of each key, and stores the new T in the same
commit. So a crash leaves the table at its old T or at the new one, and running again ends at the same rows. T only
moves forward. The table can be deleted and built again from the log at any time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import RemoveAction

from ...runtime.errors import InvalidRequest, InvalidSchema, Unavailable
from ...runtime.tables.table_metadata import commit_name, newest_own_commit, transaction_of
from ...runtime.tables.table_store import StoreUri, TableLocation, table_at
from .delta_errors import storage_errors
from .delta_files import CHECKED, NO_HOOKS, checkpoint, open_table, vacuum_table
from .log_reader import NewestVersions, newest_versions
from .log_table import CHECKPOINT_EVERY_COMMITS, COMMIT_ATTEMPTS, LogTable
from .row_merge import merge_rows
from .row_versions import stored_schema, version_schema

ROWS_PER_STEP: Final = 1_000_000

_APP = transaction_of("current")


@dataclass(frozen=True, slots=True)
class CompactResult:
    """Where the table stands: it reflects `t` and has `rows` rows; `merged` keys were written or removed."""

    t: int
    rows: int
    merged: int


class CurrentTable:
    """The current rows of one collection: the user's columns, and `_ts`, the log time of the row."""

    def __init__(self, table: DeltaTable, location: TableLocation, user_schema: pa.Schema, primary_key: str) -> None:
        self.location = location
        self.user_schema = user_schema
        self.primary_key = primary_key
        self._table = table
        self._newest_own = -1

    @classmethod
    def open(
        cls, location: StoreUri | TableLocation, schema: pa.Schema | None = None, primary_key: str | None = None
    ) -> CurrentTable:
        """Open the table at `location`, or at that path; with the user's `schema` and the `primary_key`, create it when
        absent.

        Raises as `LogTable.open` does.
        """
        location = table_at(location)
        with storage_errors(location):
            table, user_schema, key = open_table(
                location, schema, primary_key, _columns, checkpoint_every_commits=CHECKPOINT_EVERY_COMMITS
            )
            return cls(table, location, user_schema, key)

    @property
    def t(self) -> int:
        """The T that the table reflects as of its newest commit; 0 while it is empty. Raises `CorruptLog` when another
        tool has changed its rows: merging would not restore them."""
        with storage_errors(self.location):
            self._table.update_incremental()
            commit = newest_own_commit(self.location, self._table.version(), self._newest_own)
            self._newest_own = self._newest_own if commit is None else commit.version
            return self._table.transaction_version(_APP) or 0

    @property
    def rows(self) -> int:
        """The number of rows at the T that was read last."""
        return self._table.count()

    def vacuum(self, retention_h: int | None = None) -> int:
        """Remove files that the table has not named for `retention_h` hours (by default the location's), and return
        their number.

        Each compaction leaves the files it replaced, so that readers of the older snapshot may finish.
        """
        kept_h = self.location.retention_h if retention_h is None else retention_h
        with storage_errors(self.location):
            return len(vacuum_table(self.location, self._table, kept_h, CommitProperties()))

    def begin_anew(self) -> None:
        """Remove all rows, durably: the log's table has gone back, and compaction begins at its first row. Raises
        `Unavailable` where another process writes the table."""
        with storage_errors(self.location):
            self._table.update_incremental()
            version, now_ms = self._table.version(), time.time_ns() // 1_000_000
            if not self._table.transaction_version(_APP):
                return
            files = pa.table(self._table.get_add_actions(flatten=True)).select(["path", "size_bytes"]).to_pylist()
            try:
                self._table.create_write_transaction(
                    [RemoveAction(str(file["path"]), True, now_ms, int(file["size_bytes"]), {}) for file in files],
                    "append",
                    self._table.schema(),
                    commit_properties=CommitProperties(
                        max_commit_retries=0, app_transactions=[Transaction(_APP, 0, now_ms)]
                    ),
                    post_commithook_properties=NO_HOOKS,
                )
            except CommitFailedError as error:
                raise Unavailable(f"{self.location} is written to: stop the nodes", path=self.location.uri) from error
            self.location.sync([commit_name(version + 1)])

    def merge(self, changes: NewestVersions, t: int) -> bool:
        """Merge `changes`, the newest versions between the table's T and `t`, and move it to `t`, in one commit.

        Returns False, with nothing changed, when another commit came first. `changes` have the user's columns as Delta
        stores them, `_ts` and `_op`.
        """
        commit = CommitProperties(
            # 0: never rebase onto a commit that moved T.
            max_commit_retries=0,
            app_transactions=[Transaction(_APP, t, time.time_ns() // 1_000_000)],
        )
        with storage_errors(self.location):
            version = self._table.version()
            stored = stored_schema(_columns(self.user_schema))
            actions = merge_rows(self.location, self._table, changes.to_table(), stored, self.primary_key)
            try:
                self._table.create_write_transaction(
                    actions,
                    "append",
                    self._table.schema(),
                    commit_properties=commit,
                    post_commithook_properties=NO_HOOKS,
                )
            except CommitFailedError:
                return False
            self.location.sync([commit_name(version + 1)])
            if (version + 1) % CHECKPOINT_EVERY_COMMITS == 0:
                self._table.update_incremental()
                checkpoint(self.location, self._table)
            return True


def compact(log: LogTable, current: CurrentTable, upto: int, *, rows_per_step: int = ROWS_PER_STEP) -> CompactResult:
    """Bring `current` forward to `upto`; nothing happens when it is there already.

    Works in steps of about `rows_per_step` versions, each one commit, and so holds no more than the versions of a step
    in memory, and 16 bytes for each version not yet merged (`merge_rows` what it holds besides). A step rewrites the
    files that have keys that changed.

    Raises `InvalidRequest` when `upto` passes what a vchannel has flushed: rows below it may still come. `Unavailable`
    when other compactions of this table won every one of `COMMIT_ATTEMPTS` commits. Also `DiskFull`, `CorruptLog`.
    """
    if not current.user_schema.equals(log.user_schema) or current.primary_key != log.primary_key:
        raise InvalidSchema(f"{current.location} and {log.location} have different columns")
    for vchannel in log.positions():
        if log.flushed(vchannel) < upto:
            raise InvalidRequest(f"{vchannel} is flushed up to {log.flushed(vchannel)} only, not {upto}")
    merged, lost = 0, 0
    while (t := current.t) < upto:
        step = _step(log, t, upto, rows_per_step)
        changes = newest_versions(log, above=t, upto=step, schema=_changes(log.user_schema), deletes=True)
        if current.merge(changes, step):
            merged += changes.rows
            continue
        lost += 1
        if lost == COMMIT_ATTEMPTS:
            raise Unavailable(f"{lost} commits to {current.location} lost against others", path=current.location.uri)
    return CompactResult(t, current.rows, merged)


def _step(log: LogTable, above: int, upto: int, rows_per_step: int) -> int:
    """The T up to which the next `rows_per_step` versions reach; all of one timestamp belong to one step."""
    dataset, wanted = log.dataset(above=above, upto=upto)
    with storage_errors(log.location):
        scanner = dataset.scanner(columns=["_ts"], filter=wanted, fragment_scan_options=CHECKED)
        stamps = scanner.to_table()["_ts"].to_numpy()
    if len(stamps) <= rows_per_step:
        return upto
    return int(np.partition(stamps, rows_per_step - 1)[rows_per_step - 1])


def _columns(user_schema: pa.Schema) -> pa.Schema:
    return version_schema(user_schema, system=["_ts"])


def _changes(user_schema: pa.Schema) -> pa.Schema:
    return stored_schema(version_schema(user_schema, system=["_ts", "_op"]))
