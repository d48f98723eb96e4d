"""Read a log that no process has open as the next opening will read it, and change nothing."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing, contextmanager

from ....runtime.errors import CorruptLog, TidewalError
from ..index.index import IndexEntry, SegmentSummary
from ..journal.recovery import Recovery
from ..journal.segments import Segments
from ..owner.directory import check_format
from .index_check import IndexCheck
from .journal_survey import ReadOnlyDisk


def refusal(directory: str) -> TidewalError | None:
    """The error with which the log in `directory` refuses to be opened; None where it can be opened. Raises
    `OSError`."""
    segments = Segments(_UnchangedDisk(), os.path.join(directory, "journal"), 0, 0)
    try:
        check_format(directory)
        with closing(segments), _index(os.path.join(directory, "index")) as index:
            Recovery(_UnchangedDisk(), segments, index).read()
    except TidewalError as error:
        return error
    return None


class _UnchangedDisk(ReadOnlyDisk):
    """Files for reading only, in a folder from which nothing is removed."""

    def remove(self, path: str) -> None:
        pass


class _UnchangedIndex:
    """An index as recovery finds it, which takes nothing. One that cannot be read is built again: then it knows
    nothing."""

    rebuilt = False

    def __init__(self, check: IndexCheck | None) -> None:
        self._check = check

    def summary(self, epoch: int) -> SegmentSummary | None:
        return None if self._check is None else self._check.summary(epoch)

    def durable_to(self) -> tuple[int, int]:
        return (0, 0) if self._check is None else self._check.durable_to()

    def add(self, entries: list[tuple[int, IndexEntry]], durable_to: tuple[int, int]) -> None:
        pass

    def seal(self, epoch: int, summary: SegmentSummary) -> None:
        pass


@contextmanager
def _index(path: str) -> Generator[_UnchangedIndex]:
    try:
        check = IndexCheck.open(path)
    except CorruptLog:
        check = None
    try:
        yield _UnchangedIndex(check)
    finally:
        if check is not None:
            check.close()
