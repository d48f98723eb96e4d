"""What a salvage could not save: ranges of ids that are lost, kept in the journal's snapshots for good.

No reader passes such a range in silence: it ends with `PositionLost`, whose `first_available` lies behind the range,
until the operator accepts the loss (`tidewal salvage DIR NEW --accept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from ....runtime.errors import PositionLost
from ....runtime.log.wal import Entry


class Loss(NamedTuple):
    """Entries with ids from `first` to `last`, both included, existed or may have existed."""

    first: int
    last: int
    wall_ms: int  # when the salvage noted it
    unknown: bool = False  # whether any entry was there; then `last` is only a bound
    accepted: bool = False


ACCEPT = "tidewal salvage DIR NEW --accept"  # the way out for readers that cannot go on behind a loss by themselves

Losses = tuple[Loss, ...]  # by id

EntryT = TypeVar("EntryT", bound="tuple[bytes, int, object] | Entry")


def before_loss(losses: Losses, channel: str, wanted: int, reached: int, entries: Sequence[EntryT]) -> Sequence[EntryT]:
    """Of `entries`, found by a reader that wants id `wanted` next, those before the next loss. `reached` is the id that
    it would want then. Raises `PositionLost` where the loss is what comes next."""
    ahead = next((each for each in losses if not each.accepted and each.last >= wanted), None)
    if ahead is None:
        return entries
    good = [each for each in entries if int.from_bytes(each[0], "big") < ahead.first]
    if good or not (entries or max(wanted, reached - 1) >= ahead.first):
        return good
    requested, behind = max(wanted, ahead.first).to_bytes(8, "big"), (ahead.last + 1).to_bytes(8, "big")
    raise PositionLost(
        f"entries {requested.hex()} to {ahead.last:016x} of channel {channel} were damaged and could not be salvaged"
        f"{', if there were any' if ahead.unknown else ''}; the next is {behind.hex()}. While no process has the log "
        f"open, `{ACCEPT}` copies it and lets readers of the copy pass",
        requested=requested,
        first_available=behind,
        channel=channel,
    )
