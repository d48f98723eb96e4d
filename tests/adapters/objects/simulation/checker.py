"""Whether what clients were answered agrees with what the log holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tidewal.runtime.errors import ChannelNotFound, PositionLost

from .history import NEVER, Appended, LogHistory, Reading, StrongRead
from .true_log import TrueChannel, TrueLog

Contents = Mapping[str, Sequence[tuple[bytes, bytes]]]


def violations(history: LogHistory, log: TrueLog, contents: Contents) -> Iterator[str]:
    """What does not hold. `contents` is what a process that opened the log in the end has read of each channel."""
    yield from history.failures
    for append in history.appends:
        yield from _append(append, log)
    yield from _order_of_writers(history, log)
    yield from _order_of_time(history, log)
    for reading in history.readings:
        yield from _reading(reading, log)
    for strong_read in history.strong_reads:
        yield from _strong_read(strong_read, log)
    for held in history.held:
        channel = log.at[held.id][0]
        if held.error is not None and not channel.dropped:
            yield f"{held.holder} holds {held.channel} from {held.id.hex()} on, and cannot read it: {held.error!r}"
    for name, channel in log.names.items():
        if channel.left != (found := list(contents.get(name, ()))):
            yield f"{name} has {_shown(channel.left)}, and a new process reads {_shown(found)}"
    if contents.keys() != log.names.keys():
        yield f"there are {sorted(log.names)}, and a new process finds {sorted(contents)}"


def _shown(entries: Sequence[tuple[bytes, bytes]]) -> str:
    return f"{len(entries)} entries, {entries[:1]} to {entries[-1:]}"


def _append(append: Appended, log: TrueLog) -> Iterator[str]:
    places = [log.places.get(payload.decode(), []) for _, payload in append.entries]
    there = [len(each) for each in places]
    if max(there) > 1:
        yield f"{append} is there more than once: {places}"
    elif append.outcome == "acked" and [[id] for id in append.ids] != places:
        yield f"{append} was acknowledged and is in the log under {places}"
    elif append.outcome == "refused" and any(there):
        yield f"{append} was refused and is there: {places}"
    elif len(set(there)) > 1:
        yield f"{append} is there in part: {places}"


def _order_of_writers(history: LogHistory, log: TrueLog) -> Iterator[str]:
    """What a writer submitted first comes first, in each channel."""
    last: dict[tuple[str, int], bytes] = {}
    for append in history.appends:
        ids = (id for _, payload in append.entries for id in log.places.get(payload.decode(), []))
        for id in (id for id in ids if id in log.at):
            of_channel = append.writer, log.at[id][0].number
            if id < last.get(of_channel, b""):
                yield f"{append} is before what its writer submitted earlier"
            last[of_channel] = id


def _order_of_time(history: LogHistory, log: TrueLog) -> Iterator[str]:
    """An append that begins after another one was acknowledged comes behind it."""
    by_payload = {payload: append for append in history.appends for _, payload in append.entries}
    for channel in log.channels.values():
        earliest = NEVER
        for _, payload in reversed(channel.entries):
            append = by_payload[payload]
            if append.asked > earliest:
                yield f"{payload!r} is before what was acknowledged when it was submitted"
            if append.outcome == "acked":
                earliest = min(earliest, append.answered)


def _reading(reading: Reading, log: TrueLog) -> Iterator[str]:
    who = f"a reader of {reading.channel} in {reading.process}"
    if any(id not in log.at for id, _ in reading.found):
        yield f"{who} got what is not in the log"
        return
    channel = _channel_of(reading, log)
    if reading.error is not None and not _may_end_so(reading, channel):
        yield f"{who} at {(reading.at or b'').hex()} ended with {reading.error!r}"
    if reading.found and channel is not None:
        yield from (f"{who} {fault}" for fault in _gaps(reading, channel, log.at[reading.found[0][0]][1]))
    if reading.alive and _is_behind(reading, channel, log):
        yield f"{who} stays at {(reading.at or b'').hex()}"


def _gaps(reading: Reading, channel: TrueChannel, first: int) -> Iterator[str]:
    there = channel.entries[first : first + len(reading.found)]
    if there != reading.found:
        yield f"got {reading.found}, the log has {there}"
    before = channel.entries[first - 1][0] if first else channel.removed_to
    if before > channel.removed_to and before != reading.behind:
        yield f"began at {reading.found[0]}, behind entries that are not removed"


def _is_behind(reading: Reading, channel: TrueChannel | None, log: TrueLog) -> bool:
    if channel is None:
        there = log.names.get(reading.channel)
        return there is not None and bool(there.left)
    return channel.dropped or reading.at != channel.entries[-1][0]


def _channel_of(reading: Reading, log: TrueLog) -> TrueChannel | None:
    found = log.at.get(reading.at) if reading.at is not None else None
    return None if found is None else found[0]


def _may_end_so(reading: Reading, channel: TrueChannel | None) -> bool:
    if isinstance(reading.error, ChannelNotFound):
        return channel is None or channel.dropped
    if isinstance(reading.error, PositionLost):
        return channel is None or channel.dropped or (reading.at or b"") < channel.removed_to
    return False


def _strong_read(read: StrongRead, log: TrueLog) -> Iterator[str]:
    if read.acked is None or (read.found is not None and read.found >= read.acked):
        return
    channel = log.at.get(read.acked)
    if channel is not None and not channel[0].dropped:
        yield f"{read} is older than what was acknowledged before"
    elif channel is not None and read.found is not None and log.at[read.found][0] is channel[0]:
        yield f"{read} is older than what was acknowledged before, in a channel that was dropped later"
