"""Fold the records of a log to the state that all its readers have. Pure: the result depends on the entries alone.

A record counts only by where it lies in the log, and for every reader alike, its author included:

- its author has written no record with a higher number before it (so a record that lands late, after an outcome that
  was unknown, or lands twice, does not count);
- where the state has a leader: it stands on the last winning claim, or it is of one of the kinds that any author may
  write, and stands on none (see below);
- the log has its feature level (see below);
- the state machine does not refuse it: what the author's decision rested on, its precondition, still holds.

Feature levels. What a version of Tidewal adds to a state belongs to a level: its authors write none of it before a
record has raised the log to that level, and no reader applies it before, whether it knows it or not. Whoever knows the
log's level knows all that counts there. So where processes of two versions follow one log, all have the same state, a
record that some cannot know ends none of them, and a process ends only at the record that raises the log above the
levels that it knows. Levels never fall.

Own records. What a process alone knows of itself need not wait for a leader: a state machine with a leader may name
`own_kinds`, which every author writes without a claim. No claim voids them, so their preconditions must say all that
they rest on. Numbers are kept apart for the two:

- Records on a claim are numbered within it. A claim voids all that stand on earlier ones, wherever they land, so their
  numbers are forgotten with it, and its author may bear a name that another process has had.
- Own records may land behind any number of claims, so a claim forgets none of their numbers: one that was sent before
  a claim, and was repeated under a higher number, does not count behind its repetition. Their author's name must be
  new, as in a state without leader: the records of a process that had it before may still be on their way.
- Neither says anything of the other: that the leader's record 8 was read does not mean that its own record 7 is lost,
  for the one may be refused where the other counts. So a replica that waits for its own record concludes only from own
  records behind it, and from records on its claims for those on claims.

A reader that begins first reads to the end of the log, and begins with the snapshot as of the latest record among those
whose following records it has all read; where there is none, with the record that begins the log. So a page of a
superseded leader, an incomplete snapshot and one that lands late do no harm: each says what the state was after one
record, and the records after that are applied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgpack

from ..errors import (
    BadRecord,
    CorruptLog,
    Fenced,
    FormatTooNew,
    FormatTooOld,
    InvalidRequest,
    PreconditionFailed,
    TidewalError,
)
from ..log.record import DECODE_ERRORS, RecordType
from ..log.wal import Entry
from . import records
from .records import (
    FIRST_LEVEL,
    LEADER,
    LEVELS,
    PAGE,
    Claim,
    Event,
    FeatureLevels,
    PageCollector,
    Proposed,
    decode_entry,
    typed,
)

AUTHORS_MAX = 1_000  # that write without a claim, whose last numbers are remembered


class StateMachine(Protocol):
    """What is replicated. It depends on nothing but the events: on no clock, no random number, no other channel. It may
    have these attributes:

    - `own_kinds`, where it has a leader: the kinds of events that every author may write, with or without a claim
      (`claim` is among the fields of an event that stands on one);
    - `kind_levels`: the feature levels of kinds that came later than with the first one;
    - `on_level`, a method that is called with a feature level to which the log is to rise. It raises
      `PreconditionFailed` to refuse that, and remembers the level where the state depends on it.
    """

    def apply(self, event: Event) -> None:
        """Apply the next event. Raises an error and changes nothing where the event is refused, such as
        `PreconditionFailed`; `BadRecord` for a malformed one and a kind that it does not know. `FormatTooNew` ends the
        reader: the event holds a form of a later version, whose authors should have waited for a feature level."""
        ...

    def snapshot(self) -> object:
        """The whole state, in a form that msgpack can encode."""
        ...

    def restore(self, snapshot: Any) -> None:
        """Become the state of a snapshot. Raises `BadRecord` for a malformed one."""
        ...


State = TypeVar("State", bound=StateMachine)


class Applied(NamedTuple):
    """A record that was read, and the error with which it is refused; None: it counts."""

    proposed: Proposed
    error: TidewalError | None


class Fold(Generic[State]):
    """The state after the entries read so far.

    `settle` is to be called once all entries were read that the log had when reading began. `state` is empty before,
    and so is `claim`, the last winning one. `begun` says whether the log has its beginning: nothing counts before that.
    `position` is the id of the last entry that was read, `as_of` that of the last record that this state rests on."""

    def __init__(
        self,
        create: Callable[[], State],
        type: RecordType,
        *,
        led: bool,
        levels: FeatureLevels = LEVELS,
        on_bad: Callable[[Entry, BadRecord], None] | None = None,
    ) -> None:
        """`create` returns an empty state. `led`: only records on the last winning claim count. `levels` are those that
        this process knows. `on_bad` gets what cannot be read, which is skipped."""
        self.state = create()
        self.levels: FeatureLevels = levels
        self.claim: Claim = Claim()
        self.level: int = FIRST_LEVEL
        self.position: bytes = b""
        self.as_of: bytes = b""
        self.settled: bool = False
        self.begun: bool = False
        self.read_bytes: int = 0
        self.snapshot_bytes: int = 0  # the size of the last snapshot that was read or taken
        self._type, self._led, self._on_bad = type, led, on_bad
        self._own_kinds: Set[str] = getattr(self.state, "own_kinds", frozenset[str]())
        self._kind_levels: Mapping[str, int] = getattr(self.state, "kind_levels", {})
        self._numbers: dict[str, int] = {}  # the last one of each author, those that wrote last at the end
        self._own_numbers: dict[str, int] = {}  # the same of records without a claim, where the state has a leader
        self._first = b""
        self._early: list[Proposed] = []
        self._pages = PageCollector()

    def number_of(self, author: str) -> int:
        """The number of the author's last record; 0 for none."""
        return max(self._numbers.get(author, 0), self._own_numbers.get(author, 0))

    def is_own_kind(self, kind: str) -> bool:
        """Whether any author may write an event of this kind without a claim, though the state has a leader."""
        if kind == records.NOOP:
            return bool(self._own_kinds)
        return kind in self._own_kinds and self._kind_levels.get(kind, FIRST_LEVEL) <= self.level

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, entry: Entry) -> Applied | None:
        """Read the next entry. None: it is no proposal, or it is applied once `settle` was called. Raises
        `FormatTooNew` for a record that counts and raises the log above the levels that this process knows; nothing has
        changed then."""
        self._first = self._first or entry.id
        applied = self._read(entry)
        self.position = entry.id
        self.read_bytes += len(entry.payload)
        return applied

    def _read(self, entry: Entry) -> Applied | None:
        try:
            proposed = decode_entry(entry, self._type)
            if proposed.kind == PAGE:
                self._read_page(proposed)
                return None
        except BadRecord as error:
            self._report(entry, error)
            return None
        if self.settled:
            return self.apply(proposed)
        self._early.append(proposed)
        return None

    def settle(self) -> None:
        """Begin with what was read. Raises `CorruptLog` where entries were removed and no snapshot replaces them. One
        may have come into the log behind the end that was read. Raises `FormatTooNew` for a snapshot of a later
        level."""
        if self._pages.snapshot is not None:
            self._restore(self._pages.snapshot)
            self._early = [proposed for proposed in self._early if proposed.id > self.as_of]
        elif self._lacks_beginning():
            raise CorruptLog("entries were removed, and no snapshot holds what they were")
        self._pages = PageCollector()
        self.settled = True

    def _lacks_beginning(self) -> bool:
        """Whether there are records of a log that began earlier. A replica that could not write the first record of a
        log may have written one of no effect."""
        if any(proposed.begins for proposed in self._early):
            return False
        return any(self._led or proposed.kind != records.NOOP for proposed in self._early)

    def replay(self) -> Iterator[Applied]:
        """Apply the records that `settle` found behind the snapshot, or behind the beginning."""
        early, self._early = self._early, []
        for proposed in early:
            yield self.apply(proposed)

    def finish(self) -> None:
        """`settle`, if that was not called before, and `replay`: for readers that only want the state."""
        if not self.settled:
            self.settle()
            for _ in self.replay():
                pass

    def _report(self, entry: Entry, error: BadRecord) -> None:
        if self._on_bad is not None:
            self._on_bad(entry, error)

    def _read_page(self, page: Proposed) -> None:
        if self.settled:
            return
        as_of = page.event.get("as_of")
        if isinstance(as_of, bytes) and as_of >= self._first:  # otherwise not all records after that were read
            self._pages.add(page.event)

    # ---- applying ---------------------------------------------------------------------------------------------------

    def apply(self, proposed: Proposed) -> Applied:
        """Apply a record of the log; see `read`."""
        try:
            if proposed.kind == LEADER and self._led:
                self._claim(proposed)
            else:
                self._check(proposed)
                self._apply(proposed)
        except FormatTooNew:
            raise
        except TidewalError as error:
            if isinstance(error, BadRecord):
                self._report(proposed.entry, error)
            return Applied(proposed, error)
        return Applied(proposed, None)

    def _check(self, proposed: Proposed) -> None:
        """Raise unless the record counts, as far as that does not depend on the state."""
        record = proposed.record
        if not (self.begun or proposed.begins):
            raise PreconditionFailed("the log has not begun")
        standing = (proposed.event.get("claim"), record.term) == (self.claim.id, self.claim.term)
        if self._led and not (standing or self._is_own(proposed)):
            raise Fenced(f"{self.claim.node} leads now, with term {self.claim.term}", term=self.claim.term)
        if record.pseq <= self._numbers_of(proposed).get(record.producer, 0):
            raise PreconditionFailed(f"record {record.pseq} of {record.producer} comes too late, or again")
        self._check_level(proposed.event["v"])

    def _check_level(self, needed: int) -> None:
        if not FIRST_LEVEL <= needed <= self.level:
            raise BadRecord(f"a record of feature level {needed}, in a log of level {self.level}", reason="level")

    def _is_own(self, proposed: Proposed) -> bool:
        return self._led and proposed.on_no_claim and self.is_own_kind(proposed.kind)

    def _numbers_of(self, proposed: Proposed) -> dict[str, int]:
        return self._own_numbers if self._is_own(proposed) else self._numbers

    def _apply(self, proposed: Proposed) -> None:
        """Apply a record that passed `_check`. Its number is used, also where the state machine refuses it; with
        `FormatTooNew` nothing has changed."""
        try:
            self._apply_event(proposed)
        except FormatTooNew:
            raise
        except TidewalError:
            self._note(proposed)
            raise
        self._note(proposed)

    def _note(self, proposed: Proposed) -> None:
        record, numbers = proposed.record, self._numbers_of(proposed)
        self.begun = True
        numbers.pop(record.producer, None)
        numbers[record.producer] = record.pseq
        self.as_of = proposed.id
        if len(numbers) > AUTHORS_MAX:
            del numbers[next(iter(numbers))]

    def _apply_event(self, proposed: Proposed) -> None:
        match proposed.kind:
            case records.NOOP:
                pass
            case records.BEGIN:
                self._begin(proposed)
            case records.LEVEL:
                self._raise_level(proposed.event.get("level"))
            case kind:
                self._check_level(self._kind_levels.get(kind, FIRST_LEVEL))
                self.state.apply(proposed.event)

    def _claim(self, proposed: Proposed) -> None:
        record, node = proposed.record, proposed.event.get("node")
        if record.term <= self.claim.term:
            raise Fenced(f"{self.claim.node} leads now, with term {self.claim.term}", term=self.claim.term)
        self._check_level(proposed.event["v"])
        if proposed.event.get("previous") != self.claim.id or record.term != self.claim.term + 1:
            raise Fenced(f"{self.claim.node} leads now, with term {self.claim.term}", term=self.claim.term)
        if not isinstance(node, str):
            raise BadRecord("a claim without a node", reason="body")
        self._begin(proposed)
        self.begun = True
        self.claim = Claim(proposed.id, record.term, node)
        self._numbers = {record.producer: record.pseq}
        self.as_of = proposed.id

    # ---- the feature level ------------------------------------------------------------------------------------------

    def _begin(self, proposed: Proposed) -> None:
        if not self.begun and proposed.begins and "level" in proposed.event:
            self._raise_level(proposed.event["level"])

    def _raise_level(self, level: object) -> None:
        if type(level) is not int:
            raise BadRecord(f"a feature level {level!r}", reason="body")
        if level <= self.level:
            raise PreconditionFailed(f"the feature level is {self.level}, and never falls")
        allow: Callable[[int], None] | None = getattr(self.state, "on_level", None)
        if allow is not None:
            allow(level)
        self._check_known(level)
        self.level = level

    def _check_known(self, level: int) -> None:
        if level > self.levels.highest:
            raise FormatTooNew(
                f"the log has feature level {level}, and this Tidewal knows {self.levels}: upgrade it; a level never "
                "falls",
                found=level,
                supported=self.levels.highest,
            )

    def check_not_too_old(self) -> None:
        """Raise `FormatTooOld` where the log has a level that this process does not know any more."""
        if self.begun and self.level < self.levels.lowest:
            raise FormatTooOld(
                f"the log has feature level {self.level}, and this Tidewal knows {self.levels}: start a version "
                f"between first, until the log has level {self.levels.lowest}",
                found=self.level,
                supported=self.levels.lowest,
            )

    def level_of(self, event: Event) -> int:
        """The feature level from which an event counts. Raises `InvalidRequest` where the log does not have it yet."""
        kind = event["kind"]
        level = max(event.get("v", FIRST_LEVEL), self._kind_levels.get(kind, FIRST_LEVEL))
        if level > self.level:
            raise InvalidRequest(f"a record {kind!r} of feature level {level}: the log has level {self.level}")
        return level

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """The state after the record `as_of`, with all that decides which of the next records count."""
        packed = self._packed(self.claim, self._numbers, self.state.snapshot())
        self.snapshot_bytes = len(packed)
        return packed

    def snapshot_for(self, claim: Claim, state: object) -> bytes:
        """The same for another log, as of its first record: `claim` is that record, where there is a leader, and
        `state` a snapshot of this state with ids of that log."""
        return self._packed(claim, {} if self._led else self._numbers, state)

    def _packed(self, claim: Claim, numbers: Mapping[str, int], state: object) -> bytes:
        wire = {
            "claim": list(claim),
            "level": self.level,
            "numbers": numbers,
            "own_numbers": self._own_numbers,
            "state": state,
        }
        return cast(bytes, msgpack.packb(wire))

    def _restore(self, packed: bytes) -> None:
        self._check_known(self._pages.level)
        try:
            wire = cast("dict[str, Any]", msgpack.unpackb(packed, strict_map_key=False))
            id, term, node = wire["claim"]
            numbers = _numbers_from(wire["numbers"])
            own_numbers = _numbers_from(wire.get("own_numbers", {}))  # earlier versions have none
            level = typed(wire["level"], int)
            self.state.restore(wire["state"])
        except FormatTooNew:
            raise
        except (*DECODE_ERRORS, LookupError, AttributeError, TidewalError) as error:
            raise CorruptLog(f"the snapshot cannot be read: {error!r}") from error
        self.begun = True
        self.claim, self.level, self._numbers = Claim(id, term, node), level, numbers
        self._own_numbers = own_numbers
        self.as_of, self.snapshot_bytes = self._pages.as_of, len(packed)


def _numbers_from(wire: Mapping[Any, Any]) -> dict[str, int]:
    return {typed(author, str): typed(number, int) for author, number in wire.items()}
