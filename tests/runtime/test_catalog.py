"""The catalog's fold: log order decides which node leads, superseded leaders do nothing, and a snapshot holds all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewal.runtime.catalog.catalog import CREATING, DROPPING, READY, Catalog, Collection, catalog_fold
from tidewal.runtime.errors import BadRecord, CollectionNotFound, FormatTooNew
from tidewal.runtime.log.record import Record, RecordType, encode
from tidewal.runtime.log.wal import Entry
from tidewal.runtime.replicated.records import Claim, decode_event, encode_event, pages_of
from tidewal.runtime.rows.schema import CollectionSchema, Field


class Log:
    """Catalog records in order, each with its id, on the last claim of its term."""

    def __init__(self) -> None:
        self.records: list[Entry] = []
        self.claims: dict[int, Claim] = {}

    def put(self, term: int, kind: str, **fields: object) -> Entry:
        number = len(self.records) + 1
        id = number.to_bytes(8, "big")
        claim = self.claims.get(term, Claim(b"no claim", term))
        record = encode_event(RecordType.CATALOG, {"kind": kind, **fields}, "m", number, claim)
        if kind == "leader":
            self.claims.setdefault(term, Claim(id, term))
        self.records.append(Entry(id, 0, encode(record)))
        return self.records[-1]

    def snapshot(self, catalog: Reader) -> list[Entry]:
        pages = pages_of(catalog.fold.snapshot(), catalog.fold.as_of, 1)
        return [self.put(catalog.term, **page) for page in pages]


class Reader:
    """Folds entries, and says which count."""

    def __init__(self) -> None:
        self.bad: list[BadRecord] = []
        self.fold = catalog_fold(lambda _, error: self.bad.append(error))

    @property
    def term(self) -> int:
        return self.fold.claim.term

    @property
    def leader(self) -> str:
        return self.fold.claim.node

    @property
    def leader_id(self) -> bytes:
        return self.fold.claim.id

    def begin(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert self.fold.read(entry) is None
        self.fold.finish()

    def apply(self, entry: Entry) -> bool:
        if not self.fold.settled:
            self.fold.settle()
        applied = self.fold.read(entry)
        if self.bad:
            raise self.bad.pop()
        assert applied is not None
        return applied.error is None

    def __getattr__(self, name: str) -> object:
        return getattr(self.fold.state, name)


def state(catalog: Reader) -> dict[str, object]:
    return {"claim": catalog.fold.claim, **catalog.fold.state.snapshot()}


def collection(id: int, name: str, channels: int = 2) -> dict[str, object]:
    schema = CollectionSchema(name, (Field("id", "int64"), Field("v", "double", nullable=True)), "id")
    return Collection(id, schema, tuple(f"p{n}_{id}v{n}" for n in range(channels)), created_ts=id * 10).to_wire()


def led(log: Log, term: int = 1, node: str = "m", previous: bytes = b"") -> Reader:
    catalog = Reader()
    assert catalog.apply(log.put(term, "leader", node=node, previous=previous))
    return catalog


def test_the_channels_of_all_collections_are_known_and_each_by_its_id():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "create", collection=collection(5, "flights", channels=1)))
    catalog.apply(log.put(1, "create", collection=collection(6, "airports", channels=3)))
    assert catalog.pchannels == {"p0", "p1", "p2"}
    restored = Catalog()
    restored.restore(catalog.snapshot())
    assert restored.pchannels == {"p0", "p1", "p2"}
    assert restored.by_id(6) == catalog.by_id(6) == catalog.collections["airports"]
    for id, left in ((6, {"p0"}), (5, set[str]())):
        catalog.apply(log.put(1, "drop", id=id))
        assert len(catalog.pchannels) > len(left)
        catalog.apply(log.put(1, "dropped", id=id))
        assert catalog.pchannels == left


def test_where_a_collection_begins_is_in_the_catalog():
    log = Log()
    catalog = led(log)
    for id, name in ((5, "flights"), (6, "airports")):
        catalog.apply(log.put(1, "create", collection=collection(id, name)))
    ends = {"p0": (1, 7, b"\x01"), "p1": (2, 9, b"\x02")}
    catalog.apply(log.put(1, "ready", id=5, beginning=(70, ends)))
    catalog.apply(log.put(1, "ready", id=6))  # as an earlier version has written it
    restored = Catalog()
    restored.restore(catalog.snapshot())
    for state in (catalog, restored):
        assert state.collection("flights").beginning == (70, ends)
        assert state.collection("airports").beginning is None
    catalog.apply(log.put(1, "drop", id=5))
    assert catalog.by_id(5).beginning == (70, ends)
    for malformed in ((70,), (70, {"p0": (1, 7)}), ("70", ends), (70, {"p0": (1, 7, "id")})):
        with pytest.raises(BadRecord):
            catalog.apply(log.put(1, "ready", id=6, beginning=malformed))


def test_a_collection_begins_becomes_ready_and_ends():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "create", collection=collection(5, "flights")))
    assert catalog.by_id(5).state == CREATING
    with pytest.raises(CollectionNotFound):
        catalog.collection("flights")
    catalog.apply(log.put(1, "ready", id=5))
    found = catalog.collection("flights")
    assert (found.state, found.shards, found.name, catalog.next_id) == (READY, 2, "flights", 6)
    catalog.apply(log.put(1, "drop", id=5))
    assert catalog.by_id(5).state == DROPPING
    catalog.apply(log.put(1, "dropped", id=5))
    assert catalog.collections == {}
    assert catalog.by_id(5) is None
    assert catalog.next_id == 6  # an id is never used again


def test_of_two_claims_the_first_in_the_log_wins_and_superseded_leaders_have_no_effect():
    log = Log()
    catalog = led(log, 1, "first")
    claim = catalog.leader_id
    won = log.put(2, "leader", node="second", previous=claim)
    lost = log.put(2, "leader", node="third", previous=claim)
    also_lost = log.put(3, "leader", node="third", previous=claim)
    assert [catalog.apply(record) for record in (won, lost, also_lost)] == [True, False, False]
    assert (catalog.leader, catalog.term, catalog.leader_id) == ("second", 2, won.id)
    assert not catalog.apply(log.put(1, "create", collection=collection(1, "zombie")))
    assert not catalog.apply(log.put(3, "create", collection=collection(1, "impostor")))
    assert not catalog.apply(log.put(2, "leader", node="again", previous=won.id))  # a new claim needs a new term
    assert catalog.collections == {}
    assert catalog.leader == "second"


def test_grants_leases_and_fences_give_the_next_owner_what_it_must_pass():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100))
    catalog.apply(log.put(1, "fenced", channels={"p0": (1, b"f1"), "p1": (1, b"g1")}))
    catalog.apply(log.put(1, "lease", node="a", limit=200, checkpoints={"p0": b"c", "p1": b"", "gone": b"x"}))
    catalog.apply(log.put(1, "grant", node="b", channels={"p0": (2, 1)}, limit=150))
    catalog.apply(log.put(1, "fenced", channels={"p0": (2, b"f2")}))
    first, second = catalog.channels["p0"], catalog.channels["p1"]
    assert (first.owner, first.term, first.limit, first.previous_limit, first.checkpoint) == ("b", 2, 150, 200, b"c")
    assert (second.owner, second.term, second.limit, second.previous_limit, second.checkpoint) == ("a", 1, 200, 0, b"")
    assert catalog.fences(["p0", "unknown"]) == {"p0": {1: b"f1", 2: b"f2"}}


def test_a_lease_takes_no_time_back_that_was_granted():
    """A grant behind the limits of an owner that was killed is longer than the first lease of its successor."""
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0)}, limit=100))
    catalog.apply(log.put(1, "fenced", channels={"p0": (1, b"f1")}))
    catalog.apply(log.put(1, "grant", node="b", channels={"p0": (2, 1)}, limit=200))
    catalog.apply(log.put(1, "lease", node="b", limit=110, checkpoints={"p0": b"c"}))
    assert catalog.channels["p0"].limit == 200, "its owner may have stamped up to there"
    assert catalog.granted("p0").covers(2, 150)
    catalog.apply(log.put(1, "lease", node="b", limit=120, checkpoints={}, released=True))
    assert (catalog.channels["p0"].owner, catalog.channels["p0"].limit) == ("", 120)


def test_channels_that_are_released_by_name_have_no_owner_and_the_others_keep_theirs():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0), "p1": (1, 0), "p2": (1, 0)}, limit=900))
    catalog.apply(log.put(1, "fenced", channels={"p0": (1, b"f0"), "p1": (1, b"f1")}))
    catalog.apply(log.put(1, "lease", node="a", limit=900, checkpoints={"p0": b"c0", "p1": b"c1"}))
    assert catalog.apply(log.put(1, "released", channels={"p0": (1, 300, b""), "p1": (1, 400, b"later")}))
    found = {name: (each.owner, each.term, each.limit, each.checkpoint) for name, each in catalog.channels.items()}
    assert found == {"p0": ("", 1, 300, b"c0"), "p1": ("", 1, 400, b"later"), "p2": ("a", 1, 900, b"")}
    catalog.apply(log.put(1, "lease", node="a", limit=950, checkpoints={}))
    assert [each.limit for each in catalog.channels.values()] == [300, 400, 950]
    catalog.apply(log.put(1, "grant", node="b", channels={"p0": (2, 1)}, limit=800))
    assert (catalog.channels["p0"].owner, catalog.channels["p0"].previous_limit) == ("b", 300)


def test_a_release_of_a_term_that_another_has_followed_changes_nothing():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100))
    catalog.apply(log.put(1, "grant", node="b", channels={"p0": (2, 1)}, limit=200))
    before = state(catalog)
    assert not catalog.apply(log.put(1, "released", channels={"p1": (1, 50, b""), "p0": (1, 50, b"")}))
    assert state(catalog) == before


def test_a_term_that_never_took_appends_reserves_no_time():
    log = Log()
    catalog = led(log)
    for term in range(1, 6):
        catalog.apply(log.put(1, "grant", node=f"n{term}", channels={"p0": (term, term - 1)}, limit=100 * term))
        if term == 2:
            catalog.apply(log.put(1, "fenced", channels={"p0": (2, b"f")}))
        assert catalog.channels["p0"].previous_limit == (200 if term > 2 else 0)
    assert catalog.granted("p0").limit == 500


def own(log: Log, author: str, number: int, kind: str, **fields: object) -> Entry:
    """A record that a node writes itself."""
    record = encode_event(RecordType.CATALOG, {"kind": kind, "node": author, **fields}, author, number, None)
    log.records.append(Entry((len(log.records) + 1).to_bytes(8, "big"), 0, encode(record)))
    return log.records[-1]


def granted() -> tuple[Log, Reader]:
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100))
    return log, catalog


def test_a_node_fences_renews_and_releases_what_it_was_granted_whoever_leads():
    log, catalog = granted()
    assert catalog.apply(own(log, "a", 1, "fenced", channels={"p0": (1, b"f0"), "p1": (1, b"f1")}))
    assert catalog.apply(log.put(2, "leader", node="m2", previous=catalog.leader_id))
    assert catalog.apply(own(log, "a", 2, "renewed", channels={"p0": (1, 500, b"c"), "p1": (1, 50, b"")}))
    first, second = catalog.channels["p0"], catalog.channels["p1"]
    assert (first.limit, first.checkpoint, second.limit, second.checkpoint) == (500, b"c", 100, b"")
    assert catalog.apply(own(log, "a", 3, "released", channels={"p0": (1, 300, b"")}))
    assert (first.owner, first.limit, first.fences, second.owner) == ("", 300, {1: b"f0"}, "a")


def test_a_node_says_nothing_of_terms_that_have_passed_or_of_channels_of_others():
    log, catalog = granted()
    catalog.apply(log.put(1, "grant", node="b", channels={"p0": (2, 1)}, limit=200))
    before = state(catalog)
    for number, (author, kind, channels) in enumerate(
        [
            ("a", "fenced", {"p0": (1, b"late")}),
            ("a", "fenced", {"p0": (2, b"of another's term")}),
            ("a", "renewed", {"p1": (1, 900, b""), "p0": (2, 900, b"")}),
            ("b", "released", {"p1": (1, 7, b"")}),
        ]
    ):
        assert not catalog.apply(own(log, author, number + 1, kind, channels=channels))
    assert not catalog.apply(own(log, "a", 9, "grant", channels={"p0": (3, 2)}, limit=900))
    assert state(catalog) == before
    assert catalog.apply(own(log, "a", 10, "released", channels={"p1": (1, 70, b"")}))
    assert not catalog.apply(own(log, "a", 11, "renewed", channels={"p1": (1, 900, b"")}))


def test_a_claim_forgets_no_number_of_what_nodes_write_themselves():
    """A record that was sent before the claim, and repeated, lands behind both."""
    log, catalog = granted()
    late = own(log, "a", 1, "fenced", channels={"p0": (1, b"the first fence")})
    assert catalog.apply(log.put(2, "leader", node="a", previous=catalog.leader_id))
    assert catalog.apply(own(log, "a", 2, "fenced", channels={"p0": (1, b"the fence that was repeated")}))
    assert catalog.apply(log.put(3, "leader", node="b", previous=catalog.leader_id))
    assert not catalog.apply(late)
    assert catalog.fences(["p0"]) == {"p0": {1: b"the fence that was repeated"}}
    behind = Reader()
    behind.begin([log.records[-1], *log.snapshot(catalog)])
    assert not behind.apply(late), "a snapshot tells the numbers of own records"
    assert state(behind) == state(catalog)


def test_the_numbers_of_a_leaders_records_say_nothing_of_its_own():
    log, catalog = granted()
    assert catalog.apply(own(log, "m", 90, "fenced", channels={}))
    assert catalog.apply(log.put(1, "create", collection=collection(5, "flights")))
    assert catalog.apply(own(log, "m", 91, "fenced", channels={}))


names = st.sampled_from(["x", "y", "z"])
pchannels = st.sampled_from(["p0", "p1", "p2"])
ids = st.integers(1, 4)
events = st.one_of(
    st.tuples(st.just("create"), st.fixed_dictionaries({"collection": st.builds(collection, ids, names)})),
    st.tuples(st.sampled_from(["ready", "drop", "dropped"]), st.fixed_dictionaries({"id": ids})),
    st.tuples(
        st.just("grant"),
        st.fixed_dictionaries(
            {
                "node": names,
                "channels": st.dictionaries(pchannels, st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1),
                "limit": st.integers(0, 999),
            }
        ),
    ),
    st.tuples(
        st.just("lease"),
        st.fixed_dictionaries(
            {
                "node": names,
                "limit": st.integers(0, 999),
                "checkpoints": st.dictionaries(pchannels, st.binary(max_size=2)),
            }
        ),
    ),
    st.tuples(st.just("claim"), st.fixed_dictionaries({"node": names})),
    st.tuples(st.just("zombie"), st.fixed_dictionaries({"id": ids})),
    st.tuples(st.just("fence"), st.fixed_dictionaries({"id": st.binary(min_size=1, max_size=2)})),
    st.tuples(st.just("release"), st.fixed_dictionaries({"limit": st.integers(0, 999), "id": st.binary(max_size=2)})),
)


@pytest.mark.slow
@given(st.lists(events, max_size=40), st.data())
def test_a_snapshot_and_the_rest_give_the_state_of_the_whole_log(history, data):
    log = Log()
    catalog = led(log)
    for kind, fields in history:
        match kind:
            case "claim":
                record = log.put(catalog.term + 1, "leader", previous=catalog.leader_id, **fields)
            case "zombie":
                record = log.put(max(0, catalog.term - 1), "dropped", **fields)
            case "fence":
                terms = {name: (state.term, fields["id"]) for name, state in catalog.channels.items()}
                record = log.put(catalog.term, "fenced", channels=terms)
            case "release":
                channels = list(catalog.channels.items())[:1]
                given = {name: (state.term, fields["limit"], fields["id"]) for name, state in channels}
                record = log.put(catalog.term, "released", channels=given)
            case _:
                record = log.put(catalog.term, kind, **fields)
        catalog.apply(record)
    whole = Reader()
    cut = data.draw(st.integers(1, len(log.records)))
    landed = data.draw(st.integers(cut, len(log.records)))
    for record in log.records[:cut]:
        whole.apply(record)
    between, behind = log.records[cut:landed], log.records[landed:]
    kept = [record for record in log.records[:landed] if record.id >= whole.fold.as_of]
    late = Reader()
    late.begin([*kept, *log.snapshot(whole)])
    for record in between:
        whole.apply(record)
    assert state(late) == state(whole)
    for record in behind:
        assert late.apply(record) == whole.apply(record)
    assert state(late) == state(whole) == state(catalog)


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_bad_records(body):
    with pytest.raises(BadRecord):
        decode_event(Record(RecordType.CATALOG, body=body))


@pytest.mark.parametrize(
    "event",
    [
        {"kind": 7},
        {"kind": "create"},
        {"kind": "create", "collection": 5},
        {"kind": "create", "collection": {"schema": {}}},
        {"kind": "ready"},
        {"kind": "grant", "channels": 3, "node": "n", "limit": 1},
        {"kind": "grant", "channels": {"p0": (1, 0), "p1": ("one", 0)}, "node": "n", "limit": 1},
        {"kind": "grant", "channels": {"p0": (1, 0)}, "node": "n", "limit": 1.5},
        {"kind": "grant", "channels": {"p0": 1}, "node": "n", "limit": 1},
        {"kind": "lease", "node": "n", "limit": 1, "checkpoints": {"p0": 7}},
        {"kind": "released", "channels": {"p0": (1, 2)}},
        {"kind": "released", "channels": {"p0": (1, 2.5, b"")}},
        {"kind": "level", "level": "high"},
        {"kind": "unheard_of"},
        {"kind": "ready", "id": 1, "v": 2},
    ],
)
def test_a_malformed_event_is_a_bad_record_and_changes_nothing(event):
    log = Log()
    catalog = led(log)
    before = state(catalog)
    with pytest.raises(BadRecord):
        catalog.apply(log.put(1, **event))
    assert state(catalog) == before


NEWER_SCHEMA = {**collection(5, "flights"), "schema": {"v": 2, "what": "nobody knows"}}


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "create", "collection": NEWER_SCHEMA},
        {"kind": "level", "level": 3},
    ],
)
def test_an_event_that_only_a_newer_one_knows_stops_the_reader_where_it_counts(event):
    log = Log()
    catalog = led(log)
    before = state(catalog)
    assert not catalog.apply(log.put(7, **event))
    with pytest.raises(FormatTooNew, match="upgrade"):
        catalog.apply(log.put(1, **event))
    assert state(catalog) == before


def test_a_claim_above_the_level_of_the_log_does_not_count():
    log = Log()
    catalog = led(log)
    before = state(catalog)
    assert not catalog.apply(log.put(1, "leader", node="late", v=2))
    with pytest.raises(BadRecord, match="level"):
        catalog.apply(log.put(2, "leader", node="newer", v=2))
    assert state(catalog) == before


def test_an_event_that_lands_behind_a_later_one_of_its_term_does_not_count():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0)}, limit=100))
    first = log.put(1, "lease", node="a", limit=200, checkpoints={})  # of unknown outcome, and tried again
    late = log.put(1, "create", collection=collection(5, "flights"))
    for record in (
        log.put(1, "lease", node="a", limit=300, checkpoints={}),
        log.put(1, "create", collection=collection(5, "flights")),
        log.put(1, "drop", id=5),
        log.put(1, "dropped", id=5),
    ):
        assert catalog.apply(record)
    assert not catalog.apply(first)
    assert not catalog.apply(late)
    assert catalog.channels["p0"].limit == 300
    assert catalog.collections == {}
    behind = Reader()
    behind.begin([log.records[-1], *log.snapshot(catalog)])
    assert not behind.apply(late), "a snapshot tells which events it holds"


def test_a_claim_under_any_other_term_than_the_next_does_not_count():
    log = Log()
    catalog = led(log)
    assert not catalog.apply(log.put(2**62, "leader", node="n", previous=catalog.leader_id))
    assert catalog.apply(log.put(2, "leader", node="n", previous=catalog.leader_id))


def test_entries_that_are_no_events_are_handed_over_and_skipped():
    log = Log()
    bad: list[str] = []
    fold = catalog_fold(lambda _, error: bad.append(str(error.reason)))
    fold.settle()
    fold.read(log.put(1, "leader", node="m", previous=b""))
    entries = [
        b"garbage",
        encode(Record(RecordType.ROWS, ts=2**63 - 1)),
        encode(Record(RecordType.CATALOG, term=1, cseq=9)),
    ]
    for payload in entries:
        assert fold.read(Entry(b"x", 0, payload)) is None
    assert bad == ["length", "type", "body"]
    applied = fold.read(log.put(1, "create", collection=collection(5, "flights")))
    assert applied is not None
    assert applied.error is None


def test_what_a_decision_rested_on_must_still_hold():
    log = Log()
    catalog = led(log)
    catalog.apply(log.put(1, "create", collection=collection(5, "flights")))
    catalog.apply(log.put(1, "grant", node="a", channels={"p0": (1, 0), "p1": (1, 0)}, limit=100))
    catalog.apply(log.put(1, "grant", node="b", channels={"p0": (2, 1)}, limit=100))
    before = state(catalog)
    for kind, fields in [
        ("create", {"collection": collection(6, "flights")}),
        ("create", {"collection": collection(4, "trains")}),
        ("ready", {"id": 4}),
        ("dropped", {"id": 4}),
        ("grant", {"node": "c", "channels": {"p1": (2, 1), "p0": (2, 1)}, "limit": 100}),
        ("grant", {"node": "c", "channels": {"p1": (1, 1)}, "limit": 100}),
        ("fenced", {"channels": {"p1": (1, b"f"), "p0": (1, b"the fence of a late owner")}}),
    ]:
        assert not catalog.apply(log.put(1, kind, **fields))
        assert state(catalog) == before
