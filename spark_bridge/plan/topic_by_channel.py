"""The plan of topics whose channels are read each on its own (`consistency=channel`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

from ...runtime.errors import InvalidRequest, PositionLost
from ..options import LATEST
from ..scan.channel_range import BEGINNING, ChannelPlace
from .limits import Size, counted_entries
from .offsets import UNTIMED, Offset, parsed_place
from .topic import TopicPlan


class ByChannel(TopicPlan):
    """An offset is behind any entry of each channel."""

    # ---- offsets ----------------------------------------------------------------------------------------------------

    @property
    def _of(self) -> str:
        return "topics"

    def _earliest(self) -> Offset:
        return Offset(UNTIMED, dict.fromkeys(self.latest(), BEGINNING))

    def _newest(self) -> Offset:
        latest = self.latest().items()
        return Offset(UNTIMED, {name: BEGINNING if id is None else ChannelPlace(id) for name, id in latest})

    def _at(self, time: int) -> Offset:
        """Before the first entry with a timestamp ≥ `time`; the end where there is none."""
        latest = self._newest()
        found = {name: self._id_at(name, time) for name in latest.ends}
        places = {name: ChannelPlace(id, behind=False) for name, id in found.items() if id is not None}
        return replace(latest, ends={**latest.ends, **places})

    def _before(self, time: int) -> Offset:
        return self._at(time)

    def _upto(self, time: int) -> Offset:
        return self._at(time)

    def _given(self, given: dict[str, Any], default: str) -> Offset:
        """An offset, or for some channels by name a place or `latest`, and then `default` for the others."""
        if "v" in given:
            return self._offset(given)
        latest = self._newest()
        unknown = sorted(given.keys() - latest.ends.keys())
        if unknown:
            raise InvalidRequest(f"the offsets name channel {unknown[0]!r}, which is not read: correct it")
        others = latest.ends if default == LATEST else dict.fromkeys(latest.ends, BEGINNING)
        named = {
            name: latest.ends[name] if place == LATEST else parsed_place(name, place) for name, place in given.items()
        }
        return replace(latest, ends={**others, **named})

    def _is_new(self, begin: Offset, end: Offset) -> bool:
        return bool(self.ranges(begin, end))

    def _steps(self, begin: Offset, end: Offset) -> Generator[tuple[Offset, Iterable[Size]]]:
        """Entry by entry; each channel has its turn."""
        ends = {name: place for name, place in begin.ends.items() if name in end.ends}
        turns = deque((wanted.channel, counted_entries(self._log, wanted)) for wanted in self.ranges(begin, end))
        while turns:
            channel, entries = turns.popleft()
            entry = next(entries, None)
            if entry is not None:
                ends = {**ends, channel: ChannelPlace(entry.id)}
                turns.append((channel, entries))
                yield replace(end, ends=ends), (entry.size,)
        yield end, ()

    def _bounds(self) -> tuple[Offset, Offset]:
        """Of a channel that is to begin behind its end nothing is read."""
        begin, end = super()._bounds()
        ends = {name: min(begin.ends.get(name, BEGINNING), place) for name, place in end.ends.items()}
        return replace(begin, ends=ends), end

    # ---- ranges -----------------------------------------------------------------------------------------------------

    def _check(self, begin: Offset, end: Offset) -> None:
        self._check_dropped(begin, end)

    def _read_on_at(self, channel: str, begin: ChannelPlace, end: ChannelPlace) -> ChannelPlace:
        """At its beginning where a channel ends before `begin`, since it was created anew."""
        if end.id >= begin.id:
            return begin
        if self._options.fail_on_data_loss:
            raise PositionLost(
                f"channel {channel!r} ends ({end}) before where it was to be read on ({begin}): it was created anew. "
                "Start with a new checkpoint, or set failOnDataLoss=false to read it from its beginning",
                requested=begin.id,
                first_available=end.id,
                channel=channel,
            )
        return BEGINNING
