"""Hybrid reading: what a DataNode has stored comes from its Delta table, the rest from the log, without gap or overlap.

A version of the table says for each vchannel up to which T it has the rows, and where in the log that is. Of the rows
with S < `_ts` ≤ E those with `_ts` ≤ T are in the table, and those behind T in the log, behind that place. Rows at or
below T are never read from the log, though it may still have them, and may be gone from it. T only grows and the rows
below it stay, so an interval is the same rows whichever version of the table it is divided by.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from ...runtime.clock import MAX_TIMESTAMP
from ...runtime.errors import ConfigError, CorruptLog, InvalidRequest, PositionMismatch, Unavailable
from ...runtime.log.names import pchannel_of
from ...runtime.rows.schema import CollectionSchema
from ...runtime.tables.object_options import shown_failure
from ...runtime.tables.table_metadata import check_format, newest_own_commit, transaction_of
from ...runtime.tables.table_store import LOG, TableLocation, TableStore, open_tables
from ..options import MicroBatchLimits
from ..plan.offsets import scheme_of
from .channel_range import IN_TABLE, ChannelPlace, ChannelRange
from .delta import StoredRange, stored_rows

TASK_BYTES: Final = 128 * 1024 * 1024  # of Parquet files that one task reads

Stamps: TypeAlias = npt.NDArray[np.int64]
Firsts: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size_bytes: int
    rows: int
    lowest_ts: int
    highest_ts: int


class Snapshot:
    """One version of a collection's table of row versions. `times` has T per vchannel, `time` the least of them: a
    consistent line up to which the table has the rows of all channels."""

    def __init__(
        self, folder: str, wal: str, schema: CollectionSchema, vchannels: Sequence[str], version: int | None = None
    ) -> None:
        """The newest version, or `version`. `folder` is that of all tables, `wal` the URL of the log they come from.

        Raises `ConfigError` when there is no such table, `InvalidRequest` when it has not that version or is of another
        collection, `PositionMismatch` when it was filled from another kind of log, `FormatTooNew`, `CorruptLog`,
        `Unavailable`.
        """
        store = history_store(folder)
        self.folder: str = store.uri
        self.location: TableLocation = store.table(schema.name, LOG)
        self._schema = schema
        table = _open(self.location, version)
        with _damage_of(self.location):
            check_format(cast("dict[str, str | None]", table.metadata().configuration), self.location)
            self.version: int = table.version()
            self.times: dict[str, int] = {
                name: table.transaction_version(transaction_of(name)) or 0 for name in vchannels
            }
            self._files = _files(table)
        self.time: int = min(self.times.values())
        commit = newest_own_commit(self.location, self.version)
        self._positions = {} if commit is None else commit.positions
        self._check_origin(scheme_of(wal))

    def _check_origin(self, wal: str) -> None:
        if self._positions and not self._positions.keys() & self.times.keys():
            raise InvalidRequest(
                f"{self.location} is the table of another collection of that name, dropped or of another cluster: "
                "correct option history"
            )
        for position in self._positions.values():
            if position.wal != wal:
                raise PositionMismatch(
                    f"{self.location} was filled from {position.wal}, option wal names {wal}: correct option wal or "
                    "history",
                    expected=wal,
                    found=position.wal,
                )

    # ---- what each task reads ---------------------------------------------------------------------------------------

    def stored(
        self,
        begin_ts: int,
        end_ts: int,
        vchannels: tuple[str, ...] = (),
        *,
        last_ts: int = MAX_TIMESTAMP,
        tasks: int = 1,
    ) -> list[StoredRange]:
        """The table's part of an interval, of all vchannels or some, in ranges of up to `TASK_BYTES` or one file, for
        at least `tasks` tasks where the files allow it. Files that only have rows behind `last_ts` are left out."""
        files = self._between(begin_ts, min(end_ts, last_ts))
        limit = min(TASK_BYTES, -(-sum(file.size_bytes for file in files) // tasks))
        groups: list[list[str]] = []
        size_bytes = limit
        for file in files:
            if size_bytes + file.size_bytes > limit:
                groups.append([])
                size_bytes = 0
            groups[-1].append(file.name)
            size_bytes += file.size_bytes
        return [self._range(tuple(files), begin_ts, end_ts, vchannels) for files in groups]

    def _range(
        self, files: tuple[str, ...], begin_ts: int, end_ts: int, vchannels: tuple[str, ...] = ()
    ) -> StoredRange:
        return StoredRange(self.location.uri, files, begin_ts, end_ts, self._schema, vchannels)

    def _between(self, begin_ts: int, end_ts: int) -> list[_File]:
        return [file for file in self._files if file.lowest_ts <= end_ts and file.highest_ts > begin_ts]

    def unstored(self, wanted: ChannelRange) -> list[ChannelRange]:
        """The parts of a range of the log that are behind T. Vchannels of one T make one range."""
        parts: dict[int, list[str]] = {}
        for vchannel in wanted.vchannels:
            if pchannel_of(vchannel) == wanted.channel and self.times[vchannel] < wanted.end_ts:
                parts.setdefault(self.times[vchannel], []).append(vchannel)
        found = [self._behind(time, replace(wanted, vchannels=tuple(names))) for time, names in parts.items()]
        return [part for part in found if part.begin.id <= part.end.id]

    def _behind(self, time: int, wanted: ChannelRange) -> ChannelRange:
        """The part of `wanted` behind T = `time` of its vchannels: from where the table's rows end in the log, or from
        its own beginning where that lies further on (and is not just the first entry there is)."""
        if time < wanted.begin_ts and wanted.begin == IN_TABLE:
            raise self.not_in_history(wanted.begin_ts)
        end = self._end(wanted.vchannels[0]) if time else None
        if end is None and (time > wanted.begin_ts or wanted.begin == IN_TABLE):
            raise CorruptLog(
                f"{self.location} does not say where {wanted.vchannels[0]} ends in the log: another tool has removed "
                "its commits; the next flush says it again",
                path=self.location.uri,
            )
        further = end is not None and (not wanted.begin.behind or end.id > wanted.begin.id)
        return replace(wanted, begin=end if further else wanted.begin, begin_ts=max(time, wanted.begin_ts))

    def not_in_history(self, time: int) -> InvalidRequest:
        """The error for an offset that this table should have passed, and has not."""
        return InvalidRequest(
            f"the offset at {time} is one of history, but {self.location} goes up to {self.time} only: correct option "
            "history, or start with a new checkpoint"
        )

    def _end(self, vchannel: str) -> ChannelPlace | None:
        """Where the table's rows of a vchannel end in the log. The entry itself may be the first behind them."""
        position = self._positions.get(vchannel)
        if position is None or not position.message_id:
            return None
        return ChannelPlace(position.message_id, False, position.term, position.cseq)

    # ---- where to cut -----------------------------------------------------------------------------------------------

    def step(self, begin_ts: int, upto: int, limits: MicroBatchLimits) -> int:
        """How far behind `begin_ts` to go (up to `upto`) to get what is within the limits: rows, bytes of Parquet and
        records of the log; at least the rows of one timestamp."""
        files, rows, entries = self._between(begin_ts, upto), limits.rows, limits.entries
        if limits.bytes is not None and files:
            by_size = limits.bytes * sum(file.rows for file in files) // sum(file.size_bytes for file in files)
            rows = by_size if rows is None else min(rows, by_size)
        enough = min((limit for limit in (rows, entries) if limit is not None), default=None)
        if enough is None:
            return upto
        held: list[tuple[Stamps, Firsts]] = []
        count = 0
        for place, file in enumerate(files):
            held.append(self._stamps(file, begin_ts, upto))
            count += len(held[-1][0])
            if count > enough:
                # Rows that were not read yet lie at or behind the lowest of the files that follow.
                horizon = min([upto, *(each.lowest_ts - 1 for each in files[place + 1 : place + 2])])
                found = _end_of(held, horizon, rows, entries)
                if found is not None:
                    return found
        return upto

    def count(self, begin_ts: int, upto: int, enough: int) -> int:
        """How many rows lie behind `begin_ts` up to `upto`; once there are `enough`, further files are not counted."""
        total = 0
        for file in self._between(begin_ts, upto):
            total += len(self._stamps(file, begin_ts, upto)[0])
            if total >= enough:
                break
        return total

    def _stamps(self, file: _File, begin_ts: int, upto: int) -> tuple[Stamps, Firsts]:
        """The timestamps of a file's rows, and which rows are the first of their records."""
        wanted = self._range((file.name,), begin_ts, upto)
        batches = list(stored_rows(wanted, ["_ts", "_row"]))
        ts = [batch.column("_ts").to_numpy() for batch in batches]
        firsts = [batch.column("_row").to_numpy() == 0 for batch in batches]
        return np.concatenate([np.empty(0, np.int64), *ts]), np.concatenate([np.empty(0, np.bool_), *firsts])


def _end_of(held: Sequence[tuple[Stamps, Firsts]], horizon: int, rows: int | None, entries: int | None) -> int | None:
    """The last timestamp up to which there are at most so many rows and entries, or else the first one. None when all
    up to `horizon` are within the limits, so that more may be."""
    stamps, firsts = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
    times, places = np.unique(stamps, return_inverse=True)
    over = np.zeros(len(times), np.bool_)
    for limit, weights in ((rows, np.ones(len(stamps))), (entries, firsts)):
        if limit is not None:
            over |= np.cumsum(np.bincount(places, weights, len(times))) > limit
    over &= times <= horizon
    if not over.any():
        return None
    return int(times[max(0, int(np.argmax(over)) - 1)])


def history_store(folder: str) -> TableStore:
    """The tables at the place in option `history`, a path or a URL. Raises `ConfigError` for one that has none."""
    try:
        return open_tables(folder)
    except ConfigError as error:
        raise ConfigError(
            f"option history must be a folder that driver and executors see under the same path, or a prefix of a "
            f"bucket: {error.message}",
            key="history",
        ) from error


@contextmanager
def _damage_of(location: TableLocation) -> Generator[None]:
    """Raise a `DeltaError` of the block as `CorruptLog`, a failure of the disk or the store as `Unavailable`; an absent
    table as it is."""
    try:
        yield
    except TableNotFoundError:
        raise
    except DeltaError as error:
        raise CorruptLog(f"the table {location} cannot be read: {error}", path=location.uri) from error
    except OSError as error:
        raise Unavailable(f"{location}: {shown_failure(error)}", path=location.uri) from error


def _open(location: TableLocation, version: int | None) -> DeltaTable:
    try:
        with _damage_of(location):
            newest = DeltaTable(location.uri, storage_options=location.storage_options)
    except TableNotFoundError as error:
        raise ConfigError(
            f"there is no table at {location}: option history is the folder of the DataNodes' tables (tidewal run "
            "shows it at its start), and has a table once the collection was created",
            key="history",
        ) from error
    if version is None or version == newest.version():
        return newest
    try:
        return DeltaTable(location.uri, version=version, storage_options=location.storage_options)
    except DeltaError as error:
        raise InvalidRequest(
            f"{location} does not have version {version}: the newest is {newest.version()}, and older ones are kept "
            f"for {location.log_retention_h} h. timestampAsOf reaches back to the first row",
        ) from error


def _files(table: DeltaTable) -> list[_File]:
    """The files of a version in the order of their lowest `_ts`. A file without statistics may have any."""
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    files = [
        _File(
            action["path"],
            action["size_bytes"],
            action.get("num_records") or 0,
            0 if (low := action.get("min._ts")) is None else low,
            MAX_TIMESTAMP if (high := action.get("max._ts")) is None else high,
        )
        for action in actions
    ]
    return sorted(files, key=lambda file: file.lowest_ts)
