"""Who belongs to the cluster, as the records of its own channel say: a state without leader, which every node writes.

A process is a member under its incarnation, a name that no process had before it. Its lease rests on the records of
this log alone (`membership.py`): each record that counts is relied upon by its author for `lease_ms` from the moment
that it was asked for. The end of a lease is a record, too: what a member writes behind its end is refused for every
reader alike, its author included, and so is a second registration. The kinds:

    found     id, check                     the cluster has this id, and a secret with this check (`identity.py`): the
                                            first one counts, and none behind it
    register  incarnation, name, roles,     a process becomes a member. `replaces` names the incarnation that had its
              lease_ms, level, min_level,   name before, of which it knows that it is dead (it has the lock of the
              version, address, host,       name): that one ends, and nothing is waited for. It must know the feature
              since_ms, replaces, number    level of this log
    renew     incarnation, number, report   the member relies on its lease anew; what it reports of itself
    evict     incarnation                   its lease ends when the time that it stated has passed
    drain     incarnation                   the member is about to leave: it gets nothing new
    leave     incarnation                   the member relies on nothing any more
    hold      held                          the feature level of this log stays as it is from now on, or may rise again

The feature level of this log is that of the cluster: the record that raises it counts only while all members know the
level, and no operator holds it; that of the catalog follows. So no order in which records land makes a member of a
process that does not know what the others may write.

`number` is the author's own count of its registrations and renewals, by which it knows them when it reads them back.
Records of earlier versions have no `host`, `since_ms`, `draining`, `tables`, `min_level` and `version`, and their logs
no `found`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, cast

import xxhash

from ..errors import PreconditionFailed
from ..replicated.records import FIRST_LEVEL, Event, FeatureLevels, apply_by_kind, typed
from .decided_positions import FENCE_POSITION
from .transaction_decisions import DECIDE, TRANSACTIONS_LEVEL, WRITTEN, TransactionDecisions

GONE_MAX = 1_000  # nodes that ended, whose ends are remembered; a record under way for longer than so many ends is lost

EVICTED, LEFT, REPLACED = "evicted", "left", "replaced"

Report: TypeAlias = Mapping[str, Any]

# What members report of themselves, as far as anyone but people looks at it.
RATES = "rates"  # bytes a second that are written, by pchannel that the member owns
CLOCK_MS = "clock_ms"  # the wall clock of its machine, in ms since 1970
PRESSURE = "pressure"  # what it uses of limits, and these, by their settings, where that is half or more
LOADED = "loaded"  # ids of the collections that it has rows of, where their memory is reported and they are few enough
ROWS = "rows"  # of which vchannels the rows can be asked for (`querynode/readiness.py`)
THROTTLED = "throttled"  # which limits slow down or refuse the writes that come to it (`Throttle.to_wire`)
UNREADABLE = "unreadable"  # names of collections whose tables it cannot read or write
UNREACHABLE = "unreachable"  # why it cannot reach the addresses of members, by their names


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Which cluster a log belongs to: its id, and what shows whether a secret is the cluster's."""

    id: str
    check: str

    def to_wire(self) -> dict[str, Any]:
        """The fields as msgpack has them."""
        return {"id": self.id, "check": self.check}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ClusterIdentity:
        """The identity of a wire form. Raises `ValueError` or `LookupError` for a malformed one."""
        if not (wire["id"] and wire["check"]):
            raise ValueError("a cluster without an id, or without a check of its secret")
        return cls(typed(wire["id"], str), typed(wire["check"], str))


@dataclass(frozen=True, slots=True)
class NodeMember:
    """A process that belongs to the cluster. `number` is that of its last record that counts. `level` is the highest
    feature level that it knows, `min_level` the lowest. `address` is where it can be reached, `report` what it said of
    itself last. `version` is that of its Tidewal, `host` the name of its machine, "" where that is unknown, and
    `since_ms` when the process began, by its own wall clock in ms since 1970, 0 where that is unknown: these are for
    people."""

    incarnation: str
    name: str
    roles: tuple[str, ...]
    lease_ms: int
    level: int = FIRST_LEVEL
    address: str = ""
    number: int = 0
    report: Report = field(default_factory=dict[str, Any])
    host: str = ""
    since_ms: int = 0
    draining: bool = False
    tables: str = ""
    min_level: int = FIRST_LEVEL
    version: str = ""

    @property
    def levels(self) -> FeatureLevels:
        """The feature levels that it knows."""
        return FeatureLevels(self.min_level, self.level)

    def to_wire(self) -> dict[str, Any]:
        """The fields as msgpack has them."""
        return {
            "incarnation": self.incarnation,
            "name": self.name,
            "roles": list(self.roles),
            "lease_ms": self.lease_ms,
            "level": self.level,
            "min_level": self.min_level,
            "version": self.version,
            "address": self.address,
            "number": self.number,
            "report": dict(self.report),
            "host": self.host,
            "since_ms": self.since_ms,
            "draining": self.draining,
            "tables": self.tables,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> NodeMember:
        """The member of a wire form. Raises `ValueError` or `LookupError` for a malformed one."""
        lease_ms = typed(wire["lease_ms"], int)
        if lease_ms < 1 or not wire["incarnation"]:
            raise ValueError(f"a member {wire['incarnation']!r} with a lease of {lease_ms} ms")
        return cls(
            typed(wire["incarnation"], str),
            typed(wire["name"], str),
            tuple(typed(role, str) for role in wire["roles"]),
            lease_ms,
            typed(wire["level"], int),
            typed(wire["address"], str),
            typed(wire["number"], int),
            cast("Report", typed(wire.get("report", {}), dict)),
            typed(wire.get("host", ""), str),
            typed(wire.get("since_ms", 0), int),
            typed(wire.get("draining", False), bool),
            typed(wire.get("tables", ""), str),
            typed(wire.get("min_level", FIRST_LEVEL), int),
            typed(wire.get("version", ""), str),
        )


def rendezvous_rank(subject: str, member: NodeMember) -> tuple[int, str]:
    """The rank of a member for `subject`, by a hash of both names; of two lives of one name the later one has the
    higher. Each subject is for the member that ranks highest: when a node comes or goes, only what is its own changes
    hands, and a node that was restarted has the same again."""
    return xxhash.xxh3_64_intdigest(f"{subject} {member.name}".encode()), member.incarnation


@dataclass(frozen=True, slots=True)
class GoneNode:
    """A process that was a member: how it ended, and the lease that it relied on."""

    how: str
    lease_ms: int


class ClusterState:
    """The members, and those that ended lately: a `StateMachine`. `identity` is None where the cluster was not founded
    (an earlier version's was not). `level` is the feature level of the cluster, `level_held` whether an operator holds
    it there. `longest_lease_ms` is the longest lease that any member has ever stated: what may be
    relied upon by one that is remembered no more. `transactions` are those over several pchannels, as decided."""

    kind_levels: ClassVar[Mapping[str, int]] = dict.fromkeys((DECIDE, WRITTEN, FENCE_POSITION), TRANSACTIONS_LEVEL)

    def __init__(self) -> None:
        self.transactions: TransactionDecisions = TransactionDecisions()
        self.identity: ClusterIdentity | None = None
        self.members: dict[str, NodeMember] = {}  # by incarnation
        self.gone: dict[str, GoneNode] = {}  # those that ended last at the end
        self.level: int = FIRST_LEVEL
        self.level_held: bool = False
        self.longest_lease_ms: int = 0

    @property
    def known_level(self) -> int:
        """The highest feature level that all members know; the present one where there are none."""
        return min((member.level for member in self.members.values()), default=self.level)

    def on_level(self, level: int) -> None:
        """`StateMachine.on_level`: all members must know it."""
        if self.level_held:
            raise PreconditionFailed(f"the feature level is held at {self.level}")
        lacking = sorted(each.incarnation for each in self.members.values() if each.level < level)
        if lacking:
            raise PreconditionFailed(f"not all members know the feature level {level}: {', '.join(lacking)}")
        self.level = level

    def with_role(self, role: str) -> list[NodeMember]:
        """The members that offer `role`."""
        return [member for member in self.members.values() if role in member.roles]

    def apply(self, event: Event) -> None:
        """`StateMachine.apply`."""
        apply_by_kind(self, event, "cluster")

    def snapshot(self) -> dict[str, Any]:
        """`StateMachine.snapshot`."""
        return {
            "identity": None if self.identity is None else self.identity.to_wire(),
            "members": [member.to_wire() for member in self.members.values()],
            "gone": [(incarnation, gone.how, gone.lease_ms) for incarnation, gone in self.gone.items()],
            "level": self.level,
            "level_held": self.level_held,
            "longest_lease_ms": self.longest_lease_ms,
            **({"transactions": self.transactions.to_wire()} if self.transactions.used else {}),
        }

    def restore(self, snapshot: Any) -> None:
        """`StateMachine.restore`."""
        wire = snapshot.get("identity")
        identity = None if wire is None else ClusterIdentity.from_wire(wire)
        members = [NodeMember.from_wire(wire) for wire in snapshot["members"]]
        gone = {typed(name, str): GoneNode(typed(how, str), typed(ms, int)) for name, how, ms in snapshot["gone"]}
        level, held = typed(snapshot.get("level", FIRST_LEVEL), int), typed(snapshot.get("level_held", False), bool)
        transactions = snapshot.get("transactions")
        self.transactions = (
            TransactionDecisions() if transactions is None else TransactionDecisions.from_wire(transactions)
        )
        self.longest_lease_ms = typed(snapshot["longest_lease_ms"], int)
        self.identity, self.level, self.level_held = identity, level, held
        self.members, self.gone = {member.incarnation: member for member in members}, gone

    # ---- one method per kind ----------------------------------------------------------------------------------------

    def _on_found(self, event: Event) -> None:
        identity = ClusterIdentity.from_wire(event)
        if self.identity is not None:
            raise PreconditionFailed(f"the cluster was founded before, with the id {self.identity.id}")
        self.identity = identity

    def _on_register(self, event: Event) -> None:
        member, replaces = NodeMember.from_wire(event), typed(event["replaces"], str)
        if member.incarnation in self.members or member.incarnation in self.gone:
            raise PreconditionFailed(f"{member.incarnation} was a member before: a process has a name of its own")
        if not member.min_level <= self.level <= member.level:
            raise PreconditionFailed(
                f"the cluster has feature level {self.level}, and {member.incarnation} knows {member.levels}"
            )
        before = self.members.get(replaces)
        if before is not None and before.name != member.name:
            raise PreconditionFailed(f"{replaces} has another name than {member.name}, and is not replaced by it")
        if before is not None:
            self._end(replaces, REPLACED)
        elif replaces in self.gone:  # evicted, and dead for certain now
            self.gone[replaces] = replace(self.gone[replaces], how=REPLACED)
        self.members[member.incarnation] = member
        self.longest_lease_ms = max(self.longest_lease_ms, member.lease_ms)

    def _on_renew(self, event: Event) -> None:
        member, number = self._present(event), typed(event["number"], int)
        report = cast("Report", typed(event.get("report", {}), dict))
        if number <= member.number:
            raise PreconditionFailed(f"renewal {number} of {member.incarnation} comes behind {member.number}")
        self.members[member.incarnation] = replace(member, number=number, report=report)

    def _on_evict(self, event: Event) -> None:
        self._end(self._present(event).incarnation, EVICTED)

    def _on_drain(self, event: Event) -> None:
        member = self._present(event)
        self.members[member.incarnation] = replace(member, draining=True)

    def _on_leave(self, event: Event) -> None:
        self._end(self._present(event).incarnation, LEFT)

    def _on_hold(self, event: Event) -> None:
        self.level_held = typed(event["held"], bool)

    def _on_decide(self, event: Event) -> None:
        self.transactions.decide(event)

    def _on_fence_position(self, event: Event) -> None:
        self.transactions.positions.fence(event)

    def _on_written(self, event: Event) -> None:
        self._present(event)  # others own its channels once it is no member
        self.transactions.written(event)

    def _present(self, event: Event) -> NodeMember:
        member = self.members.get(typed(event["incarnation"], str))
        if member is None:
            raise PreconditionFailed(f"{event['incarnation']} is no member of the cluster any more")
        return member

    def _end(self, incarnation: str, how: str) -> None:
        member = self.members.pop(incarnation)
        self.gone[incarnation] = GoneNode(how, member.lease_ms)
        if len(self.gone) > GONE_MAX:
            del self.gone[next(iter(self.gone))]
