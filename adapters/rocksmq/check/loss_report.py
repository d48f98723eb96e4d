"""How tools show a journal: its size, and what salvages could not save."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

from ..journal.channels import ChannelTable
from .journal_survey import JournalSurvey, ReadOnlyDisk


def journal_summary(directory: str) -> dict[str, Any]:
    """The number of segments, their size in bytes and the losses of the log in `directory`, which a process may have
    open. Raises `FormatTooNew`, `OSError`."""
    with closing(JournalSurvey(ReadOnlyDisk(), os.path.join(directory, "journal"))) as survey:
        size = sum(segment.size for segment in survey.segments)
        return {"segments": len(survey.segments), "bytes": size, "losses": losses_of(survey.channels())}


def channels_of(directory: str) -> ChannelTable:
    """The channels of the log in `directory` as of the journal's end. Raises `FormatTooNew`, `OSError`."""
    with closing(JournalSurvey(ReadOnlyDisk(), os.path.join(directory, "journal"))) as survey:
        return survey.channels()


def losses_of(table: ChannelTable) -> dict[str, list[dict[str, Any]]]:
    """The losses that the journal has noted, by the name of the channel, as JSON shows them."""
    return {
        state.name: [
            {
                "first": f"{loss.first:016x}",
                "last": f"{loss.last:016x}",
                "unknown": loss.unknown,
                "accepted": loss.accepted,
            }
            for loss in state.losses
        ]
        for state in table.by_number.values()
        if state.losses
    }


def loss_lines(losses: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The same as lines for a terminal."""
    return [_line(name, loss) for name, each in losses.items() for loss in each]


def _line(name: str, loss: dict[str, Any]) -> str:
    what = "unknown whether any was there" if loss["unknown"] else "lost"
    return f"{name}: ids {loss['first']} to {loss['last']}: {what}" + (" (accepted)" if loss["accepted"] else "")
