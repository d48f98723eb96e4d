"""Read the entries of some channels from a journal's files, damaged or not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing

from ....runtime.log.wal import Entry
from ..journal.channels import ChannelTable, JournalledChannel, encode_id
from ..journal.frame import JournalFrame
from .journal_survey import JournalSurvey, ReadOnlyDisk, apply_records


def channel_entries(directory: str, table: ChannelTable, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Entry]]:
    """The name of the channel with each entry that readers from the earliest one on find, in the order of the log: of
    the channels of `table` whose names are `wanted`. `table` has the channels as of the journal's end. What cannot be
    read is left out. Raises `FormatTooNew`, `OSError`."""
    states = {number: state for number, state in table.by_number.items() if wanted(state.name)}
    with closing(JournalSurvey(ReadOnlyDisk(), os.path.join(directory, "journal"))) as survey:
        for segment in survey.segments[_first_needed(survey, states) :]:
            for piece in survey.walk(segment, None) if segment.header is not None else ():
                if isinstance(piece, JournalFrame):
                    yield from _entries(piece, states)


def _first_needed(survey: JournalSurvey, states: dict[int, JournalledChannel]) -> int:
    """The number of segments before which all entries of these channels were truncated."""
    for place in reversed(range(len(survey.segments))):
        frame = survey.first_frame(survey.segments[place])
        if frame is not None:
            before = ChannelTable()
            apply_records(before, frame)
            reached = {number: known.last_id for number, known in before.by_number.items()}
            if all(reached.get(number, 0) < state.truncated_to for number, state in states.items()):
                return place
    return 0


def _entries(frame: JournalFrame, states: dict[int, JournalledChannel]) -> Iterator[tuple[str, Entry]]:
    at = 0
    for number, length, id, timestamp in frame.raw_rows():
        state = states.get(number)
        if state is not None and id >= state.truncated_to:
            yield state.name, Entry(encode_id(id), timestamp, bytes(frame.bodies[at : at + length]))
        at += length
