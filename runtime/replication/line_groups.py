"""The groups of a line: where they stood when it was begun, and what transactions have moved until its time.

A group's position may be a part of a transaction's decision in the members' state, and be stored in the group later
(`cluster/decided_positions.py`): what is stored counts up to the mark that it has. So what was decided between both
steps of a line has its mark there; what was decided before, and has none, is settled, or the group was moved back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cluster.decided_positions import DecidedPositions
from ..groups.group_filter import RecordState
from ..log.replication_state import GroupPlaces, ReplicatedChannel
from ..log.wal import GroupInfo, Wal
from ..migration.group_positions import GroupPosition
from .replicated_groups import group_places

_BEFORE_ALL = GroupPosition(b"", b"")


class LineGroups:
    """The `groups` of a source as they were when a line was begun. `decided` is what transactions had moved before
    these were read, and `known` where they were seen last."""

    def __init__(self, groups: Sequence[GroupInfo], decided: DecidedPositions, known: GroupPlaces) -> None:
        self._groups, self._decided, self._known = list(groups), decided, known

    async def at_line(
        self, source: Wal, target: Wal, places: Mapping[str, ReplicatedChannel], decided: DecidedPositions
    ) -> dict[str, dict[str, GroupPosition]]:
        """Where they are in the replica `target`, and with what, by group and channel. It has all that `source` had
        when the line was begun, up to `places`, and `decided` is what transactions have moved up to the line."""
        found = await group_places(source, target, self._groups, places, self._known)
        positions = {
            group: {name: GroupPosition(each.target, each.metadata) for name, each in channels.items()}
            for group, channels in found.items()
        }
        for (group, channel), token in decided.moved_since(self._decided).items():
            of_group = positions.setdefault(group, {})
            at = of_group.get(channel, _BEFORE_ALL)  # a group that is new goes on behind what was decided
            marked = RecordState.of(at.metadata)._replace(token=token)
            of_group[channel] = at._replace(metadata=marked.to_metadata())
        return positions
