"""Mirror all that a log has into a replica of it, until stopped.

One replicator at a time writes a replica: it claims it in the replica's state, and each append asks, where the last
answer is older than `CLAIM_S`, whether the claim still holds. Who claims a replica whose replicator has not ended
waits `CLAIM_WAIT_S` first, but where the log itself is open in one process only. A process that stood still in the
middle of an append for longer than that may still double entries, which the next replicator to start notices: it brings
that channel over anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from ..clock import Clock, SystemClock
from ..errors import (
    ChannelExists,
    ChannelNotFound,
    CorruptLog,
    Fenced,
    InvalidRequest,
    MessageTooLarge,
    PositionLost,
    PreconditionFailed,
    Promoted,
    TidewalError,
    Unsupported,
)
from ..log.migration_state import MigrationPhase, check_not_migrated, is_migration_channel, migration_state
from ..log.names import Names
from ..log.redaction import shown_url
from ..log.replication_state import (
    REPLICATION_CHANNEL,
    GroupPlaces,
    ReplicatedChannel,
    ReplicationPhase,
    ReplicationState,
    ReplicationStates,
    behind,
    new_id,
    replica_mark,
    replication_state,
)
from ..log.wal import ChannelInfo, ChannelPolicy, Wal
from ..migration.node_log import STATE_CHANNELS, node_names
from ..migration.node_records import rewrite_of
from ..waiting import ended, side_by_side
from .channel_mirror import HOLDER, ChannelMirror, ReplicaDiffers
from .channel_promise import ChannelPromise
from .consistent_line import ConsistentLine
from .line_age import LineStanding
from .line_drawer import LineDrawer
from .replicated_groups import group_places, store_places
from .replicated_node import is_written_anew
from .replication_lag import ReplicationLag

MIRRORS_AT_ONCE = 8  # each has some MiB of entries under way
CLAIM_S = 2.0
CLAIM_WAIT_S = 15.0
HALTING = (Unsupported, MessageTooLarge, PositionLost)  # of a channel, whose replica ends there; others go on

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicationTimes:
    """How often, in seconds, a replicator looks for channels that came or went (`look_s`), saves what is
    replicated, with the groups' positions (`save_s`), and tries a channel again that was halted (`halted_s`)."""

    look_s: float = 1.0
    save_s: float = 5.0
    halted_s: float = 60.0


def holder_of(state: ReplicationState) -> str:
    """The name under which a replica holds the entries of its source."""
    return f"{HOLDER}-{state.log_id}"


class _Mirrored:
    """A channel that is replicated: its mirror and the task that runs it, None where it is halted until `retry_at`.
    `refused` is why the target does not take the channel at all."""

    def __init__(self, mirror: ChannelMirror) -> None:
        self.mirror: ChannelMirror = mirror
        self.task: asyncio.Task[None] | None = None
        self.refused: TidewalError | None = None
        self.retry_at: float = 0.0
        self._halted, self._halted_at = "", b""
        self.held: ReplicatedChannel | None = None  # up to where the source holds nothing any more
        self.kept: bytes = b""  # and the replica

    @property
    def place(self) -> ReplicatedChannel:
        place = self.mirror.place
        return replace(place, halted=self._halted) if place.source == self._halted_at else place  # it has gone on

    def halt(self, error: TidewalError, retry_at: float) -> None:
        """Let the channel stand where it is until `retry_at`."""
        self._halted, self._halted_at, self.retry_at = str(error), self.mirror.place.source, retry_at


class Replicator:
    """Mirrors `source` into `target`. Both are open to write, the target past `check_in_use`. `is_last`: also from a
    source that this replica replaces. `lag` is told how far the channels are. `heartbeats` is the channel in which
    nodes announce times where an administrator has made it (`common.preCreatedTopic.timeticker`). After an error with
    `retryable` another one may begin at once."""

    def __init__(
        self,
        source: Wal,
        target: Wal,
        source_url: str,
        *,
        is_last: bool = False,
        times: ReplicationTimes = ReplicationTimes(),
        clock: Clock | None = None,
        lag: ReplicationLag | None = None,
        heartbeats: str = "",
    ) -> None:
        self._source, self._target, self._shown = source, target, shown_url(source_url)
        self._times, self._clock, self._lag = times, clock or SystemClock(), lag
        self._is_last, self._heartbeats = is_last, heartbeats
        self._is_replaced = False  # the source, by this replica
        self._states = ReplicationStates(target)
        self._claim = new_id()
        self._claim_seen_s = 0.0
        self._lowest_id: bytes | None = None  # of the source
        self._looking = asyncio.Lock()  # one look at the state at a time
        self._mirrored: dict[str, _Mirrored] = {}
        self._saved: dict[str, ReplicatedChannel] = {}  # of an earlier replicator, until the channel is looked at
        self._stored: GroupPlaces = {}  # by this replicator: one that was killed may have stored what it never saved
        self._contentless: set[str] = set()  # channels whose entries are not replicated
        self._node: Names | None = None  # of the nodes that have used the source
        self._lines: LineDrawer | None = None  # for these
        self._announced: asyncio.Task[None] | None = None
        self._left: set[str] = set()  # channels that are gone from the source, and are in the replica's line
        self._kept_bytes, self._begun_bytes = 0, 0  # that came since its line was begun, and since the next one was

    @property
    def state(self) -> ReplicationState:
        """What the replica says, as this process last saved or read it."""
        return self._states.state

    async def run(self) -> None:
        """Replicate until cancelled; what was brought over is saved then.

        Raises `Fenced` when another replicator has claimed the replica, `Promoted` when it was promoted, or another
        replica of the source, `Moved` when the source was migrated, `InvalidRequest` where the target is not empty, or
        is a replica of another log or the source itself, or the source is another log than before, or was told to
        forget this replica,
        `Unsupported` for a log that several clusters share, and errors of both logs."""
        async with self.claimed():
            saved_s = self._clock.monotonic()
            while True:
                await self._check_claim()
                await self._look_at_channels()
                self._follow_announced()
                if self._clock.monotonic() - saved_s >= self._times.save_s:
                    await self.save()
                    await self._look_at_contentless()
                    saved_s = self._clock.monotonic()
                await asyncio.sleep(self._times.look_s)

    @asynccontextmanager
    async def claimed(self) -> AsyncGenerator[None]:
        """Have the replica claimed while the block runs; behind it all is saved, and the claim given back."""
        await self._begin()
        try:
            yield
        except asyncio.CancelledError:  # stopped, in good order
            await self._stop()
            try:
                await self.save(claim="")
            except TidewalError as error:  # the caller waits for the end, and not for another try
                _log.warning("what was replicated last is not saved, the next replicator counts it: %s", error)
            raise
        except BaseException:
            await self._stop()
            raise
        await self._stop()
        await self.save(claim="")

    async def catch_up(self) -> None:
        """Bring over all that the source has now, channel by channel, and save it. Raises as `run`, and what halts a
        channel."""
        await self._sync_names()
        others: dict[str, ReplicaDiffers] = {}

        async def catch_up(name: str) -> None:
            if refused := self._mirrored[name].refused:
                raise refused
            try:
                await self._mirrored[name].mirror.catch_up()
            except ReplicaDiffers as error:
                others[name] = error

        there = [name for name in self._mirrored if name not in self._left]
        await side_by_side(there, catch_up, MIRRORS_AT_ONCE)
        for name, error in others.items():
            await self._anew(name, error)
            if name in self._mirrored:  # else its entries are not replicated any more
                await self._mirrored[name].mirror.catch_up()
        await self.save()

    # ---- the claim ---------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        source = await self._source_state()
        state = await self._states.read()
        if state.log_id == source.log_id:
            raise InvalidRequest("the source and the target are the same log: take an empty log as the target")
        if state.phase is ReplicationPhase.NONE:
            await self._check_empty()
            state = ReplicationState(ReplicationPhase.REPLICA, new_id(), source.log_id)
        await self._check_not_moved()
        self._know_node(await node_names(self._source))
        self._check_pair(state, source)
        after = replace(state, other=self._shown, of_node=state.of_node or self._node is not None)
        await claim_replica(self._states, after, self._claim, self._target)
        await self._check_not_moved()  # again: of a promotion that has begun by then no other line takes the place
        await self._check_claim()
        # before anything is held there: `forget_replica` knows the replica by this
        await self._source.create_channel(replica_mark(self.state), ChannelPolicy())
        self._saved, self._kept_bytes = dict(self.state.channels), self.state.line_kept
        if id := await self._source.latest_id(REPLICATION_CHANNEL):
            self._lowest_id = bytes(len(id))
        await self._drop_leftovers()

    async def _check_not_moved(self) -> None:
        moved = await migration_state(self._target)
        if moved.phase is not MigrationPhase.OPEN:
            raise Promoted(
                f"the replica is being promoted to {moved.other}, or was: `tidewal promote --force --to {moved.other}` "
                "goes on; until it has ended `tidewal migrate` with the same --to and --cancel takes it back"
            )

    async def _change(self, after: ReplicationState) -> None:
        try:
            await self._states.change(after)
        except PreconditionFailed as error:
            raise fenced() from error

    def _check_pair(self, state: ReplicationState, source: ReplicationState) -> None:
        if state.phase is ReplicationPhase.PROMOTED:
            raise Promoted(
                f"the replica was promoted and is in use by itself: what {self._shown} has that it has not is salvaged "
                "with `tidewal promote --from --salvage`; to replicate again take an empty log as the target"
            )
        if state.phase in (ReplicationPhase.SOURCE, ReplicationPhase.REPLACED):
            raise InvalidRequest(
                "the target is not a replica, but a source, or was one: take an empty log as the target"
            )
        if state.phase is not ReplicationPhase.REPLICA or state.source_id != source.log_id:
            raise InvalidRequest(
                f"the target is not a replica of {self._shown}"
                + (f", but of {state.other}" if state.other else "")
                + ": take the source that it has, or an empty log as the target"
            )
        if source.phase is ReplicationPhase.REPLICA:
            raise InvalidRequest(f"{self._shown} is a replica itself, of {source.other}: replicate that one")
        self._check_not_replaced(source)

    def _check_not_replaced(self, source: ReplicationState) -> None:
        state = self.state
        if source.phase is ReplicationPhase.REPLACED and not (self._is_last and source.source_id == state.log_id):
            raise Promoted(
                f"a replica of {self._shown} was promoted, and {source.other} has taken its place: replicate that one, "
                "into an empty log"
            )

    async def _source_state(self) -> ReplicationState:
        states = ReplicationStates(self._source)
        if (await states.read()).phase is ReplicationPhase.NONE:
            try:
                await states.change(ReplicationState(ReplicationPhase.SOURCE, new_id()))
            except PreconditionFailed:  # another replicator of this source came first
                await states.read()
        if states.state.phase is ReplicationPhase.SOURCE:
            await states.settle()
        return states.state

    async def _check_empty(self) -> None:
        for wal in (self._source, self._target):
            if wal.capabilities.foreign_topics:
                raise Unsupported("topics that others made are not replicated", capability="replication")
        if set(await self._target.channels()) - {REPLICATION_CHANNEL}:
            raise InvalidRequest("the target is not empty: take another directory, or another name on the brokers")

    async def _check_claim(self) -> None:
        """Raise `Fenced` or `Promoted` unless this replicator still has the replica."""
        async with self._looking:
            await self._see_claim()

    async def _see_claim(self) -> None:
        asked_s = self._clock.monotonic()
        state = await self._states.read()
        if state.phase is ReplicationPhase.PROMOTED:
            raise Promoted("the replica was promoted: it is in use by itself")
        if state.claim != self._claim:
            raise fenced()
        self._claim_seen_s = asked_s

    async def may_write(self) -> None:
        """Before each write to the replica: behind a promotion what it has is its programs'. Raises as
        `_check_claim`."""
        if self._clock.monotonic() - self._claim_seen_s > CLAIM_S:
            await self._check_claim()

    async def _stop(self) -> None:
        tasks = [each.task for each in self._mirrored.values() if each.task is not None]
        if self._announced is not None:
            tasks.append(self._announced)
        for task in tasks:
            task.cancel()
        for task in tasks:
            await ended(task)

    # ---- channels ----------------------------------------------------------------------------------------------------

    def _add(self, name: str, place: ReplicatedChannel) -> None:
        rewrite = rewrite_of(self._node)
        mirror = ChannelMirror(self._source, self._target, name, place, self.may_write, rewrite, self._count)
        self._mirrored[name] = _Mirrored(mirror)

    def _count(self, brought: int) -> None:
        self._kept_bytes += brought
        self._begun_bytes += brought

    async def _drop_leftovers(self) -> None:
        """Remove from the target what is not in its state any more, and not in the source."""
        names = {*await self._source.channels(), *self._saved}
        for name in await self._target.channels():
            if name not in names and not is_own(name):
                await self._drop_there(name)

    async def _source_names(self) -> set[str]:
        """The channels of the source, and of no other log in its place: what is not among them is dropped. Raises
        `Promoted` and `Moved` where another log has taken its place, and `InvalidRequest` where it says no more what
        this is a replica of."""
        names = await self._source.channels()
        source = await replication_state(self._source)  # behind the names: these are of the log that this one says
        if source.log_id != self.state.source_id:
            raise InvalidRequest(
                f"{self._shown} is another log now, or has lost what it had: the replica is left as it is, promote it "
                "with --force (`tidewal promote`)"
            )
        self._check_not_replaced(source)
        self._is_replaced = source.phase is ReplicationPhase.REPLACED
        await check_not_migrated(self._source, self._shown)
        if replica_mark(self.state) not in names:
            await self._check_claim()  # a promotion takes the mark away, too
            await release(self._source, holder_of(self.state))  # what was held behind that
            raise InvalidRequest(
                f"{self._shown} was told with `tidewal replicate --forget` to hold nothing for this replica any more: "
                "start the replicator again if that was a mistake"
            )
        await self._look_for_node(names)
        left = self._node
        return {name for name in names if not is_own(name) and (left is None or not is_written_anew(name, left))}

    async def _look_for_node(self, names: Iterable[str]) -> None:
        """Let the replica say so, before anything of a node's is there, where one uses the source now."""
        if self._node is None and any(name.endswith(tuple(STATE_CHANNELS)) for name in names):
            self._know_node(await node_names(self._source))
            if self._node is not None:
                async with self._looking:
                    await self._see_claim()
                    await self._change(replace(self.state, of_node=True))

    def _know_node(self, names: Names | None) -> None:
        self._node = names
        if names is not None and not self._is_last and self._lines is None:
            heard = replace(names, timeticker=self._heartbeats)
            self._lines = LineDrawer(self._source, self._target, heard)

    def _follow_announced(self) -> None:
        if self._lines is not None and self._announced is None:
            following = self._lines.follow(self._promise_of)
            self._announced = asyncio.create_task(following, name="announced times")

    def _promise_of(self, name: str) -> ChannelPromise | None:
        each = self._mirrored.get(name)
        return None if each is None else each.mirror.promise

    async def _sync_names(self) -> None:
        """Create in the target what has come to the source, and drop what has gone."""
        names = await self._source_names()
        gone = (self._mirrored.keys() | self._saved.keys() | self._contentless) - names
        self._left = {name for name in gone if self._is_in_line(name)}
        for name in gone - self._left:
            await self._drop(name)

        others: dict[str, ChannelExists] = {}

        async def create(name: str) -> None:
            try:
                await self._create(name, await self._source.describe(name))
            except ChannelNotFound:  # dropped meanwhile
                pass
            except ChannelExists as error:  # it was dropped at the source, and created again with another policy
                others[name] = error

        await side_by_side(sorted(names - self._mirrored.keys() - self._contentless), create)
        for name, error in others.items():
            await self._anew(name, error)

    def _is_in_line(self, name: str) -> bool:
        """Whether a promotion without the source would need the channel: that may be dropped once a later line says so,
        or the source is fenced."""
        return not self._is_replaced and name in self.state.line.get("ends", ())

    async def _create(self, name: str, info: ChannelInfo) -> None:
        if info.policy.temporary:
            self._contentless.add(name)
            return
        refused: TidewalError | None = None
        await self.may_write()
        try:
            await self._target.create_channel(name, info.policy)
        except (InvalidRequest, Unsupported) as error:  # by what the target's brokers allow
            refused = error
        if info.policy.ephemeral:
            self._contentless.add(name)
            return
        place = self._saved.pop(name, ReplicatedChannel())
        self._add(name, place)  # first: where the channel goes meanwhile the next look drops it
        if not place.source and (first_id := info.first_id or self._lowest_id):  # also of what comes to an empty one
            await self._source.hold(name, holder_of(self.state), first_id)
        if refused is not None:  # the next try finds no channel, so the next look creates it
            self._mirrored[name].refused = refused
            self._halt(name, refused)

    async def _look_at_contentless(self) -> None:
        """Find channels that were dropped and created again between two looks, and have entries to replicate now."""
        for name in list(self._contentless):
            with suppress(ChannelNotFound):  # dropped meanwhile
                policy = (await self._source.describe(name)).policy
                if not (policy.temporary or policy.ephemeral):
                    self._contentless.discard(name)  # the next look creates it

    async def _look_at_channels(self) -> None:
        await self._sync_names()
        for name, each in list(self._mirrored.items()):
            if each.task is not None and each.task.done():
                await self._on_ended(name, each, each.task)
            waits = name in self._left or self._clock.monotonic() < each.retry_at
            if each.task is None and not waits and name in self._mirrored:
                each = self._mirrored[name]
                each.task = asyncio.create_task(each.mirror.follow(), name=f"replicate {name}")
        if self._lines is not None:
            with self._while_changed():
                await self._lines.look(self._line_places(), self._promises())
        if self._lag is not None:
            self._lag.note({name: each.place for name, each in self._mirrored.items() if name not in self._left})
            if self._lines is not None:
                self._lag.line.note(self._line_standing(self._lines))

    async def _on_ended(self, name: str, each: _Mirrored, task: asyncio.Task[None]) -> None:
        each.task = None
        error = task.exception()
        if isinstance(error, ReplicaDiffers):
            await self._anew(name, error)
        elif isinstance(error, ChannelNotFound) and self._is_in_line(name):
            self._left.add(name)
        elif isinstance(error, ChannelNotFound):
            await self._drop(name)
        elif isinstance(error, HALTING):
            self._halt(name, error)
        elif error is not None:
            raise error

    def _halt(self, name: str, error: TidewalError) -> None:
        _log.error("%s is not replicated: %s", name, error)
        self._mirrored[name].halt(error, self._clock.monotonic() + self._times.halted_s)

    async def _anew(self, name: str, error: TidewalError) -> None:
        """Bring a channel over from its first entry on. What is saved says so before the old entries are dropped, so
        that its places never mean those of another channel of this name."""
        _log.warning("%s is brought over anew: %s", name, error)
        with suppress(ChannelNotFound):  # it goes: the next look drops what is there by then
            info = await self._source.describe(name)
            self._forget(name)
            await self.save(line={} if self._is_in_line(name) else None)
            await self._drop_there(name)
            await self._create(name, info)

    async def _drop(self, name: str) -> None:
        task = self._forget(name)
        if task is not None:
            await ended(task)
        await self.save()
        await self._drop_there(name)

    async def _drop_there(self, name: str) -> None:
        await self.may_write()
        await self._target.drop_channel(name)

    def _forget(self, name: str) -> asyncio.Task[None] | None:
        self._saved.pop(name, None)
        self._contentless.discard(name)
        if self._lines is not None:
            self._lines.forget(name)
        each = self._mirrored.pop(name, None)
        return None if each is None else each.task

    # ---- what is saved -----------------------------------------------------------------------------------------------

    def _places(self) -> dict[str, ReplicatedChannel]:
        return {name: each.place for name, each in self._mirrored.items()}

    async def save(self, *, claim: str | None = None, line: Mapping[str, Any] | None = None) -> None:
        """Save what is replicated in the replica, move its groups, and let go of what both logs hold below. `line`
        takes the place of the line that the replica has; None: a new one does, where it can be drawn."""
        await self._check_claim()
        drawn = await self._drawn() if line is None else None
        places = self._places()
        channels = {**self._saved, **places}
        there = {name: place for name, place in channels.items() if name not in self._refused()}
        groups = await self._moved_groups(there)
        async with self._looking:
            await self._see_claim()
            before = self.state
            known = before.line if line is None else line
            after = replace(
                before,
                channels=channels,
                groups=groups,
                claim=self._claim if claim is None else claim,
                line=known if drawn is None else drawn[0].to_wire(),
                line_kept=self._kept_bytes if drawn is None else self._begun_bytes,
            )
            if after != before:
                await self._change(after)
            if drawn is not None:
                self._kept_bytes = self._begun_bytes
        kept = None if drawn is None else drawn[1]

        async def let_go(name: str) -> None:
            if name in self._mirrored:
                with suppress(ChannelNotFound, PositionLost):  # dropped meanwhile, or cut: the next one looks again
                    await self._let_go(name, self._mirrored[name], places[name], kept)

        await side_by_side(places, let_go)
        if self._lines is not None and not self._lines.is_begun and claim is None:
            self._begun_bytes = 0
            with self._while_changed():
                await self._lines.begin(self.state.groups, self._line_places())

    def _line_standing(self, lines: LineDrawer) -> LineStanding:
        log_time = lines.log_time(self._promises())
        return LineStanding(self.state.line.get("time", 0), log_time, self._kept_bytes, lines.waits_for)

    def _promises(self) -> dict[str, ChannelPromise]:
        """What the owners have promised of the channels that a line may have."""
        return {name: self._mirrored[name].mirror.promise for name in self._line_names()}

    def _line_places(self) -> dict[str, ReplicatedChannel]:
        """The places of the same channels."""
        return {name: self._mirrored[name].place for name in self._line_names()}

    def _line_names(self) -> list[str]:
        out = self._refused() | self._left
        return [name for name in self._mirrored if name not in out]

    async def _drawn(self) -> tuple[ConsistentLine, Mapping[str, bytes]] | None:
        """A new line, where one can be drawn; and from which id on the replica keeps each channel then."""
        if self._lines is None:
            return None
        with self._while_changed():
            return await self._lines.draw(self._line_places(), self._promises())
        return None

    @contextmanager
    def _while_changed(self) -> Generator[None]:
        """Give a line up where the source changes meanwhile: the next save tries again."""
        try:
            yield
        except (ChannelNotFound, CorruptLog, PositionLost) as error:  # a snapshot takes the place of what is read
            _log.warning("no line is drawn now: %s", error)

    async def save_node(self, node: Mapping[str, Any]) -> None:
        """Save in the replica where nodes go on in it, which replaces its source now."""
        async with self._looking:
            await self._see_claim()
            await self._change(replace(self.state, node=node))

    def _refused(self) -> set[str]:
        return {name for name, each in self._mirrored.items() if each.refused is not None}

    async def _moved_groups(self, channels: Mapping[str, ReplicatedChannel]) -> GroupPlaces:
        known = self.state.groups
        if not (self._source.capabilities.groups and self._target.capabilities.groups):
            return known
        groups = await group_places(self._source, self._target, await self._source.groups(), channels, known)
        await store_places(self._target, groups, self._stored, self.may_write)
        self._stored = groups
        return groups

    async def _let_go(
        self, name: str, each: _Mirrored, place: ReplicatedChannel, kept: Mapping[str, bytes] | None
    ) -> None:
        """Let the source hold what lies behind `place`. The replica holds that, too; that of nodes what its line needs,
        which is known where one was drawn, with `kept`."""
        if not place.source:
            return
        if each.held != place:
            await self._source.hold(name, holder_of(self.state), behind(place.source))
            each.held = place
        front = behind(place.target) if self._node is None else (kept or {}).get(name, each.kept)
        if front == each.kept:
            return
        await self.may_write()
        await self._target.hold(name, HOLDER, front)
        if self._node is not None and (await self._target.describe(name)).policy.retention_s is None:
            await self._truncate(name, front)  # as the source was: what is pending is kept for ever
        each.kept = front

    async def _truncate(self, name: str, front: bytes) -> None:
        if self._target.capabilities.truncate:
            await self._target.truncate(name, front)


async def claim_replica(states: ReplicationStates, after: ReplicationState, claim: str, target: Wal) -> None:
    """Have the replica claimed under `claim`, with `after` as its state. Where the last claim was not given back, this
    returns when its process has ended or has seen that it is replaced. Raises `Fenced` where another claim came
    first."""
    was_left = (
        bool(after.claim) and not target.capabilities.one_machine
    )  # where the open log is the claim, it has ended
    try:
        await states.change(replace(after, claim=claim))
    except PreconditionFailed as error:
        raise fenced() from error
    if was_left:
        _log.warning("the last replicator has not ended in good order: waiting %g s for it to be gone", CLAIM_WAIT_S)
        await asyncio.sleep(CLAIM_WAIT_S)


async def release(wal: Wal, holder: str) -> None:
    """Let go of all that `wal` holds for `holder`."""

    async def let_go(name: str) -> None:
        with suppress(ChannelNotFound):  # dropped meanwhile
            if not is_own(name) and not (await wal.describe(name)).policy.ephemeral:
                await wal.hold(name, holder, None)

    await side_by_side(await wal.channels(), let_go)


def fenced() -> Fenced:
    """The error of a replicator whose replica another one writes."""
    return Fenced("another replicator writes this replica now: stop one of them", channel=REPLICATION_CHANNEL)


def is_own(name: str) -> bool:
    """Whether the channel is one that migrations and replication have made for themselves."""
    return is_migration_channel(name)
