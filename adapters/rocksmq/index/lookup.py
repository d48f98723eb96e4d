"""Find entries of a channel by position and time, in memory and in the files. Blocks: for the read threads."""

from __future__ import annotations

from ..owner.channel_cache import LiveChannel
from .history import History, SegmentGone

FIRST_PIECE_BYTES = 64 * 1024  # enough to find one entry


def first_entry(channel: LiveChannel, history: History) -> bytes | None:
    """The id of the first entry that readers get; None while there is none."""
    while (first := channel.first_visible) <= channel.visible_to:
        entries = channel.tail.take(first)
        if entries is None:
            try:
                forgotten_to = channel.tail.forgotten_to
                entries, _ = history.read(channel.number, first, forgotten_to, piece_bytes=FIRST_PIECE_BYTES)
            except SegmentGone:
                continue
            entries = entries or channel.tail.take(channel.tail.forgotten_to + 1)
        return entries[0].id if entries else None
    return None


def first_at(channel: LiveChannel, history: History, timestamp: int) -> int | None:
    """The id of the first entry whose timestamp is ≥ `timestamp`; None while there is none."""
    while True:
        rows, first = channel.tail.rows, channel.first_visible
        forgotten_to, reaches = channel.tail.forgotten_to, channel.tail.forgotten_timestamp >= timestamp
        if reaches and first <= forgotten_to and not channel.policy.ephemeral:
            try:
                found = history.id_at(channel.number, timestamp, first, forgotten_to)
            except SegmentGone:
                continue
            if found is not None:
                return found if found <= channel.visible_to else None
        for _, id, of_row, _ in rows:
            if of_row >= timestamp and id >= first:
                return id
        return None
