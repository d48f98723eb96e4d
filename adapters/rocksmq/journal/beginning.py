"""Whether a journal has its beginning. Retention takes away the oldest segments, but none with an entry of a channel
that keeps everything: where such an entry is gone, something else has removed the segment."""

from __future__ import annotations

from collections.abc import Mapping

from ....runtime.errors import CorruptLog
from ....runtime.log.wal import Delivery
from .channels import ChannelTable, JournalledChannel


def check_beginning(path: str, removed_to: Mapping[int, int], table: ChannelTable) -> None:
    """Raise `CorruptLog` where segments before the first one, `path`, are missing. `removed_to` maps the number of each
    channel to its last id before that segment, `table` has the channels as of the journal's end."""
    lacking = lacking_beginning(removed_to, table)
    if lacking:
        names = ", ".join(state.name for state in lacking[:3]) + (", …" if len(lacking) > 3 else "")
        raise CorruptLog(
            f"segments before {path} are missing: the first entries of {names} were in them, which retention keeps. Put"
            " the segments back, or restore the log from a backup; `tidewal salvage` saves the rest",
            path=path,
            offset=0,
        )


def lacking_beginning(removed_to: Mapping[int, int], table: ChannelTable) -> list[JournalledChannel]:
    """The channels of `table` that keep everything, and of which entries up to `removed_to` are gone that were neither
    truncated nor noted as lost."""
    return [
        state
        for number, state in table.by_number.items()
        if _keeps_everything(state) and _first_kept(state) <= removed_to.get(number, 0)
    ]


def _keeps_everything(state: JournalledChannel) -> bool:
    policy = state.policy
    limited = policy.retention_s is not None or policy.retention_bytes is not None
    return not (policy.ephemeral or limited or policy.delivery is not Delivery.KEEP)


def _first_kept(state: JournalledChannel) -> int:
    """The lowest id that an entry can have that must still be there."""
    first = max(state.floor + 1, state.truncated_to)
    for loss in state.losses:
        if loss.first <= first <= loss.last:
            first = loss.last + 1
    return first
