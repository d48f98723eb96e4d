"""What a repair could not save: ranges of ids that are lost, kept in the journal for good.

No reader passes such a range in silence: it ends with `PositionLost`, whose `first_available` lies behind the range,
until the operator accepts the loss (`tidewal repair --accept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import msgpack

from ....runtime.errors import PositionLost


class Loss(NamedTuple):
    """Entries with ids from `first` to `last`, both included, existed or may have existed."""

    first: int
    last: int
    wall_ms: int  # when the repair noted it
    accepted: bool = False


ACCEPT = "tidewal repair --accept --apply"  # the way out for readers that cannot go on behind a loss by themselves

Losses = tuple[Loss, ...]  # by id, none overlaps another


def lost(channels: Mapping[int, Iterable[tuple[int, int]]], wall_ms: int) -> bytes:
    """The control record of a repair: channel number → ranges of ids, noted at `wall_ms` (milliseconds)."""
    pairs = [[number, [list(each) for each in ranges]] for number, ranges in channels.items()]
    return cast(bytes, msgpack.packb(["lost", wall_ms, pairs]))


def accept() -> bytes:
    """The control record that lets readers pass all losses noted so far."""
    return cast(bytes, msgpack.packb(["accept"]))


def noted(losses: Losses, first: int, last: int, wall_ms: int) -> Losses:
    """`losses` and one more range, unless it is known; ranges that overlap become one."""
    apart: list[Loss] = []
    for each in losses:
        if each.last < first or each.first > last:
            apart.append(each)
        elif each.first <= first and last <= each.last:
            return losses
        else:
            first, last = min(first, each.first), max(last, each.last)
    return tuple(sorted([*apart, Loss(first, last, wall_ms)]))


EntryT = TypeVar("EntryT", bound="tuple[bytes, int, object]")


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
        f"entries {requested.hex()} to {ahead.last:016x} of channel {channel} were damaged and could not be saved; the "
        f"next is {behind.hex()}. `{ACCEPT}` with the log's directory, while no process has it open, lets readers pass",
        requested=requested,
        first_available=behind,
        channel=channel,
    )
