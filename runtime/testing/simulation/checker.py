"""Whether the history of a simulated cluster, and what its log holds, are as they must be.

Checked at the end of a run, when no fault is left and each client has had its last append acknowledged:

- at each instant at most one term can acknowledge in a channel: no acknowledgement follows the beginning of a higher
  term, and no look at all nodes found two that could;
- what was acknowledged is what a later reader sees, under the term and id with which it was acknowledged, and each
  client's appends are there once each, in their order, without a gap: so nothing is lost, doubled or reordered;
- the state of the catalog, and of the members, is the same from the first record on and from any snapshot;
- no timestamp lies further ahead of the true time than the clocks were set, and one lease.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import groupby
from typing import Any

from ...catalog.catalog import Catalog
from ...cluster.state import ClusterState
from ...cluster.version import TidewalVersion
from ...errors import BadRecord, FormatTooNew
from ...log.names import Names
from ...log.record import Record, RecordType
from ...log.wal import Entry
from ...replicated.fold import Fold
from ...replicated.records import PAGE, Event, PageCollector, decode_entry
from ...streams.channel_reader import ChannelReader
from .cluster import SimulatedCluster
from .history import HistoryEvent

SLACK_MS = 1_000  # of timestamps ahead: a new owner's room beyond the limit before it, and one renewal


class ClusterViolation(AssertionError):
    """A run whose history or log is not as it must be."""


def check_cluster(cluster: SimulatedCluster) -> None:
    """Raise `ClusterViolation`, with the last events, at the first thing that is wrong."""
    _check_terms(cluster)
    _check_state(cluster, Names().cluster, RecordType.CLUSTER, _members_fold)
    catalog: Catalog = _check_state(cluster, Names().catalog, RecordType.CATALOG, _catalog_fold).state
    for channel in cluster.channels:
        _check_channel(cluster, channel, catalog)
    ahead_ms = cluster.clock_ahead_ms()
    if ahead_ms > cluster.ahead_ms + cluster.lease_s * 1000 + SLACK_MS:
        _fail(cluster, f"timestamps run {ahead_ms} ms ahead")


def _fail(cluster: SimulatedCluster, what: str, channel: str = "") -> None:
    raise ClusterViolation(f"{channel}: {what}\n{cluster.history.tail(channel)}")


# ---- one term at a time ---------------------------------------------------------------------------------------------


def _check_terms(cluster: SimulatedCluster) -> None:
    highest: dict[str, int] = defaultdict(int)
    for event in cluster.history.events:
        if event.kind == "promised":
            _fail(cluster, f"two owners at {event.at_s:.3f} s: {event.note}", event.channel)
        elif event.kind == "active":
            highest[event.channel] = max(highest[event.channel], event.term)
        elif event.kind == "acked" and 0 < event.term < highest[event.channel]:
            _fail(cluster, f"{event.to_json()} came behind term {highest[event.channel]}", event.channel)


# ---- what a reader sees ---------------------------------------------------------------------------------------------


def _check_channel(cluster: SimulatedCluster, channel: str, catalog: Catalog) -> None:
    reader = ChannelReader(channel, granted=catalog.granted(channel))
    records = [each for each in reader.accept(cluster.log.channels[channel].entries) if each.type is RecordType.ROWS]
    seen: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        seen[record.producer].append(record)
    acked: dict[str, list[HistoryEvent]] = defaultdict(list)
    for event in cluster.history.of("acked"):
        if event.channel == channel:
            acked[event.producer].append(event)
    for producer, events in acked.items():
        numbers = [record.pseq for record in seen[producer]]
        if numbers != list(range(1, max(event.pseq for event in events) + 1)):
            missing = sorted({event.pseq for event in events} - set(numbers))
            _fail(cluster, f"of {producer} a reader sees {_shown(numbers)}, acknowledged and lost: {missing}", channel)
        for event in events:
            found = seen[producer][event.pseq - 1]
            if event.id and (found.id, found.term) != (event.id, event.term):
                _fail(cluster, f"{event.to_json()}, and a reader sees it in term {found.term}", channel)


def _shown(numbers: Sequence[int]) -> str:
    """The runs of rising numbers among them."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" for run in runs)


# ---- states ---------------------------------------------------------------------------------------------------------


def _members_fold(version: TidewalVersion) -> Fold[ClusterState]:
    return Fold(version.cluster, RecordType.CLUSTER, led=False, levels=version.levels)


def _catalog_fold(version: TidewalVersion) -> Fold[Catalog]:
    return Fold(version.catalog, RecordType.CATALOG, led=True, levels=version.levels)


def _check_state(
    cluster: SimulatedCluster, channel: str, type: RecordType, create: Callable[[TidewalVersion], Fold[Any]]
) -> Fold[Any]:
    """Fold all entries that there ever were from the first one on, and from each snapshot on, as each version does that
    knows the feature level; returns the state as the last version has it."""
    entries = [*cluster.faults.removed.get(channel, []), *cluster.log.channels[channel].entries]
    every = [entry for _, entry in sorted({entry.id: entry for entry in entries}.items())]
    pages = dict(_pages(every, type))
    states: dict[TidewalVersion, Fold[Any]] = {}
    for version in cluster.plan.versions:
        with suppress(FormatTooNew):
            states[version] = whole = _folded(create(version), [entry for entry in every if entry.id not in pages])
            for as_of in sorted(_whole_snapshots(pages.values())):
                behind = [entry for entry in every if entry.id >= as_of and _as_of(pages, entry) in (None, as_of)]
                if _folded(create(version), behind).snapshot() != whole.snapshot():
                    _fail(cluster, f"the snapshot as of {as_of.hex()} gives another state than the start", channel)
    for node in cluster.nodes:
        fold = node.catalog.fold if channel == Names().catalog else node.cluster.fold
        running = node.process.running and fold.position == every[-1].id
        if running and fold.snapshot() != states[node.version].snapshot():
            _fail(cluster, f"{node.incarnation} has another state than a reader from the start", channel)
    return states[cluster.plan.versions[-1]]


def _pages(entries: Sequence[Entry], type: RecordType) -> Iterator[tuple[bytes, Event]]:
    """The pages of snapshots among the entries, by the ids of these."""
    for entry in entries:
        with suppress(BadRecord):
            proposed = decode_entry(entry, type)
            if proposed.kind == PAGE:
                yield entry.id, proposed.event


def _as_of(pages: Mapping[bytes, Event], entry: Entry) -> bytes | None:
    return pages[entry.id]["as_of"] if entry.id in pages else None


def _whole_snapshots(pages: Iterable[Event]) -> Set[bytes]:
    """The records as of which there is a snapshot with all its pages."""
    collector, found = PageCollector(), set[bytes]()
    for page in sorted(pages, key=lambda page: page["as_of"]):
        collector.add(page)
        if collector.snapshot is not None:
            found.add(collector.as_of)
    return found


def _folded(fold: Fold[Any], entries: Sequence[Entry]) -> Fold[Any]:
    for entry in entries:
        fold.read(entry)
    fold.finish()
    return fold
