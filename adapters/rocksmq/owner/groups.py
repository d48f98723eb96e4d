"""Where consumer groups keep their positions: control records in the journal, in one frame with their outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ....runtime.errors import TidewalError
from ....runtime.groups.progress import Change, GroupProgress
from ....runtime.log.wal import Append, ChannelPolicy, OnAppended
from ..journal import channels as records
from ..journal.channels import ChannelTable, decode_id, encode_id
from ..journal.registry import Registry
from .appending import Appender


class JournalGroups:
    """`GroupBackend` of one open journal. Thread-safe: the positions that it returns are whole and do not change."""

    def __init__(self, registry: Registry, table: ChannelTable, appender: Appender) -> None:
        self._registry, self._table, self._appender = registry, table, appender

    def channels(self) -> Collection[str]:
        """The names of the durable channels."""
        return [c.name for c in list(self._registry.names.values()) if c.created and not c.policy.ephemeral]

    def policy(self, channel: str) -> ChannelPolicy:
        """Raises `ChannelNotFound`."""
        return self._registry.find(channel).policy

    def progress(self, channel: str) -> Mapping[str, GroupProgress]:
        """The position of each group in the channel. Raises `ChannelNotFound`."""
        return dict(self._registry.find(channel).groups)

    def begin(self, channel: str) -> bytes:
        """The id before the first entry that is kept or, without entries, before the next. Raises `ChannelNotFound`."""
        return encode_id(self._registry.find(channel).first_visible - 1)

    def end(self, channel: str) -> bytes:
        """The id of the last visible entry or, without entries, the id before the next: never below `begin`. Raises
        `ChannelNotFound`."""
        return encode_id(self._registry.find(channel).visible_to)

    def commit(self, outputs: Sequence[Append], changes: Sequence[Change], done: OnAppended) -> None:
        """Append `outputs` and store the positions in one frame; `done` gets the ids of the outputs. Raises as
        `Wal.submit` does, `InvalidRequest` for what is no id, and `Overloaded` for first positions, single
        acknowledgements and metadata that grows when too much is kept already (`limit`: "snapshot_bytes")."""
        if any(map(self._adds, changes)):
            self._registry.check_snapshot()
        self._appender.submit(outputs, done, records=[self._record(change) for change in changes])

    def _adds(self, change: Change) -> bool:
        """Whether the snapshot that begins each segment becomes larger by the change."""
        known = self._registry.find(change.channel).groups.get(change.group)
        return known is None or bool(change.ids) or len(change.metadata or b"") > len(known.metadata)

    def _record(self, change: Change) -> bytes:
        for id in change.ids:
            decode_id(id)
        if change.upto:
            decode_id(change.upto)
        return records.acked(self._registry.find(change.channel).number, change)

    def forget(self, group: str, done: OnAppended) -> None:
        """Remove a group's positions; `done` is called when that is durable. Entries of queues that the group has
        acknowledged stay removed."""

        def forgotten(result: list[bytes] | TidewalError) -> None:
            for number, state in list(self._table.by_number.items()):
                channel = self._registry.by_number.get(number)
                if channel is not None and state.truncated_to > channel.truncated_to:
                    channel.truncated_to = state.truncated_to
            done(result)

        self._appender.submit((), forgotten, records=[records.forget(group)])
