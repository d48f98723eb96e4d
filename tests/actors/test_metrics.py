"""Every metric of the table is written by a node that works, or by the fault that it counts."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.actors.nodes import role_of
from tidewal.actors.metrics import ScanMetrics
from tidewal.actors.standalone import Standalone
from tidewal.adapters.rocksmq import RocksMQ
from tidewal.runtime.actor import Actor, ActorSystem
from tidewal.runtime.actor.metrics import ActorMetrics
from tidewal.runtime.clock import HybridClock, add_ms, physical_ms
from tidewal.runtime.config.settings import Settings
from tidewal.runtime.errors import JournalFailed, Lagging, OrderViolated, Overloaded, Unavailable
from tidewal.runtime.log.dead_letters import REASONS
from tidewal.runtime.log.names import pchannel_of
from tidewal.runtime.log.record import BatchPart, Record, RecordType, encode
from tidewal.runtime.log.wal import ChannelPolicy, Delivery, From
from tidewal.runtime.metrics.metrics import METRICS, Metrics
from tidewal.runtime.ownership import ChannelGrant, ChannelOwner
from tidewal.runtime.ownership.metrics import ChannelOwnerMetrics
from tidewal.runtime.rows.schema import CollectionSchema, Field
from tidewal.runtime.streams.channel_reader import Granted
from tidewal.runtime.streams.read_metrics import ReadMetrics
from tidewal.runtime.streams.tt_stream import TtMsgStream
from tidewal.runtime.testing.clock import until
from tidewal.runtime.testing.disk import FaultyDisk
from tidewal.runtime.testing.faults import FaultPlan, Rates
from tidewal.runtime.testing.memory import MemoryWal

PEOPLE = CollectionSchema("people", (Field("id", "int64"), Field("name", "varchar", nullable=True)), "id")
ONLY_ON_FAULT = {  # each has a test below
    "mixcoord_reply_channel_dropped_total",  # in test_reply_channels.py
    "mixcoord_eviction_total",  # these two in test_cluster_metrics.py, of several members
    "mixcoord_lease_age_seconds",
    "direct_refused_total",  # these three in tests/runtime/direct/test_connections.py
    "direct_connection_num",
    "direct_unreachable_num",
    "wal_append_deduplicated_total",
    "wal_append_outcome_unknown_total",
    "wal_scan_time_tick_violation_message_total",
    "wal_scan_duplicate_message_total",
    "wal_scan_fenced_message_total",
    "wal_scan_incomplete_batch_total",
    "wal_dead_letter_message_total",
    "wal_group_dead_letter_total",  # of groups, which a node has none of: tests/runtime/test_groups_retries.py
    "wal_group_filtered_total",  # likewise: tests/adapters/rocksmq/test_filtered_reading.py
    "wal_group_reset_total",
    "wal_group_retry_total",  # likewise
    "wal_group_ack_timeout_total",  # these two in tests/runtime/test_groups_visibility.py
    "wal_group_nack_total",
    "wal_group_retry_topic_total",  # of members that process: tests/actors/test_topic_retries.py
    "wal_keyed_state_keys",  # of programs with keyed state, as are these five: tests/runtime/dataflow
    "wal_keyed_state_bytes",
    "wal_keyed_changelog_bytes",
    "wal_keyed_snapshot_unix_seconds",
    "wal_keyed_watermark_unix_seconds",
    "wal_scan_reset_total",  # in tests/runtime/test_stream_limits.py
    "rocksmq_groups_cut_off_total",
    "rocksmq_journal_recycled_bytes_total",
    "wal_group_lag_entries",  # in test_group_lags.py
    "wal_group_lag_seconds",
    "rocksmq_disk_pressure",
    "rocksmq_journal_failed",
    "rocksmq_index_failures_total",  # tests/adapters/rocksmq/test_index.py
    "overloaded_total",
    "streamingnode_write_factor",  # these two in test_pressure.py
    "streamingnode_write_delay_seconds",
    "wal_collection_unreadable",  # these two in test_unreadable.py
    "datanode_maintenance_failed_total",
    "actor_restart_total",
    "actor_blocked_total",
    "wal_backend_stall_total",  # these four in tests/runtime/test_stalls.py
    "wal_backend_stalled",
    "wal_backend_retry_total",
    "wal_backend_outcome_unknown_total",
}
NOTHING_AT_REST = {  # gauges of what waits: they are shown, and 0 on a node with nothing to do
    "streamingnode_delayed_ended_message_num",
    "streamingnode_prepared_transaction_num",
    "wal_scanner_pending_queue_bytes",
    "wal_clock_ahead_seconds",
    "proxy_tt_lag_ms",
    "streamingnode_inflight_bytes",
    "streamingnode_unflushed_bytes",
    "datanode_consume_tt_lag_ms",
    "datanode_fg_buffer_size",
    "querynode_consume_tt_lag_ms",
    "querynode_loading_num",
    "mixcoord_cut_lag_ms",
    "mixcoord_channel_without_owner_seconds",
    "mixcoord_topic_waiting_partition_num",
    "actor_mailbox_depth",
    "event_loop_lag_seconds",
}
OF_SUPERVISORS = {"process_up", "process_restarts_total"}  # of several processes: tests/cli/test_processes.py
OF_CLUSTERS = {  # of several QueryNodes, and of several owners: test_replicas.py, test_transactions_over_owners.py
    "querynode_fan_out_total",
    "streamingnode_decided_transaction_total",
}
OF_OBJECTS = {metric.name for metric in METRICS if metric.name.startswith("objects_")}  # tests/adapters/objects
OF_REPLICATORS = {metric.name for metric in METRICS if metric.name.startswith("replication_")}  # they are no nodes
OF_SPARK = {metric.name for metric in METRICS if metric.name.startswith("spark_")}  # of its driver, which is no node


def shown(metrics: Metrics) -> dict[str, float]:
    """Each metric of the table that has a series, and the sum of its series."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            name = sample.name.removesuffix("_count").removeprefix("tidewal_")
            sums[name] = sums.get(name, 0.0) + sample.value
    return {metric.name: sums[metric.name] for metric in METRICS if metric.name in sums}


@pytest.mark.slow
async def test_a_node_at_work_writes_every_metric(tmp_path):
    metrics = Metrics("n1")
    wal = await RocksMQ.open(str(tmp_path / "log"), segment_bytes=1 << 20, free_space_bytes=1, metrics=metrics)
    async with Standalone(wal, tmp_path / "tables", metrics=metrics) as node, node.client() as client:
        assert node.node.name == "n1"
        await client.create_collection(PEOPLE)
        await client.insert("people", [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}])
        await client.upsert("people", [{"id": 2, "name": "c"}])
        await client.flush("people")
        await client.release_collection("people")
        await client.load_collection("people")
        await client.delete("people", [2])
        await client.cut("people")
        assert await client.count("people", consistency="strong") == 1
        await client.compact("people")
        await client.create_topic("jobs", 1)
        await client.send("jobs", "resize")
        async with client.transaction() as t:
            await t.send("jobs", "rotate")
        await client.send("jobs", "rotate", deliver_after_s=0)
        await client.send("jobs", "scale", deliver_after_s=600)
        await until(lambda: metrics.value("streamingnode_delayed_released_total", topic_name="jobs") > 0)
        series = shown(metrics)
        assert metrics.value("streamingnode_unflushed_bytes", collection_name="people") > 0
        await client.drop_collection("people")
        await client.create_collection(PEOPLE)
        page = metrics.render().decode()
    await wal.close()
    silent = {metric.name for metric in METRICS} - {name for name, value in series.items() if value}
    of_others = OF_OBJECTS | OF_REPLICATORS | OF_SPARK | OF_SUPERVISORS | OF_CLUSTERS
    assert silent - ONLY_ON_FAULT - NOTHING_AT_REST - of_others == set()
    assert set(series) >= NOTHING_AT_REST
    assert 'collection_name="people"' in page  # of the second one; the first one's rows are not counted on
    assert metrics.value("proxy_insert_vectors_total", collection_name="people") == 0


@pytest.mark.slow
async def test_what_alerts_count_is_there_before_it_happens(tmp_path):
    metrics = Metrics("n1")
    async with Standalone(MemoryWal(), tmp_path / "tables", metrics=metrics) as node, node.client() as client:
        collection = await client.create_collection(PEOPLE)
        assert await client.count("people", consistency="strong") == 0
        names = node.node.names
        control = {names.catalog, names.insert_events, names.heartbeats, names.requests("proxy")}
        families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    letters = [
        sample for sample in families["tidewal_wal_dead_letter_message"].samples if sample.name.endswith("_total")
    ]
    channels = {pchannel_of(vchannel) for vchannel in collection.vchannels}
    assert {sample.labels["channel_name"] for sample in letters} >= channels | control
    assert {sample.labels["reason"] for sample in letters} == set(REASONS)
    violations = families["tidewal_wal_scan_time_tick_violation_message"].samples
    assert {sample.labels["channel_name"] for sample in violations} >= channels
    assert {sample.value for sample in (*letters, *violations) if sample.name.endswith("_total")} == {0}


# ---- the channel owner -----------------------------------------------------------------------------------------------


async def owning(wal: MemoryWal, metrics: Metrics) -> ChannelOwner:
    clock = HybridClock()
    await wal.create_channel("c", ChannelPolicy())
    owner = ChannelOwner(wal, clock, observer=ChannelOwnerMetrics(metrics, clock))
    await owner.acquire(ChannelGrant("c", 1, 0, add_ms(clock.now(), 60_000)))
    owner.activate("c", 1)
    return owner


async def test_a_retry_is_counted():
    metrics = Metrics()
    owner = await owning(MemoryWal(), metrics)
    for _ in range(2):
        await owner.append([("c", Record(RecordType.ROWS, body=b"x"))], producer="p", pseq=1)
    assert metrics.value("wal_append_deduplicated_total") == 1
    assert metrics.value("wal_append_message_total", channel_name="c", status="success") == 1
    assert metrics.value("wal_term", channel_name="c") == 1


@pytest.mark.parametrize(
    ("rates", "unknown", "failed"), [(Rates(unknown=1.0), 1, 0), (Rates(lost=1.0), 1, 0), (Rates(fail=1.0), 0, 1)]
)
async def test_an_append_that_fails_is_counted(rates: Rates, unknown: int, failed: int):
    metrics, plan = Metrics(), FaultPlan(1)
    owner = await owning(MemoryWal(faults=plan), metrics)
    plan.rates = rates
    appended = owner.append([("c", Record(RecordType.ROWS, body=b"x"))])
    if failed:
        with pytest.raises(Unavailable):
            await appended
    assert metrics.value("wal_append_outcome_unknown_total") == unknown
    assert metrics.value("wal_append_message_total", channel_name="c", status="failed") == failed
    assert metrics.value("wal_append_message_bytes", status="failed") == failed


# ---- readers ---------------------------------------------------------------------------------------------------------


def broken_log() -> Iterator[bytes]:
    """A zombie's record, a record twice, half a batch, and a record behind its own time."""
    yield encode(Record(RecordType.FENCE, ts=10, term=2, cseq=1))
    for ts, term, cseq, part in (
        (11, 1, 7, None),
        (12, 2, 2, None),
        (12, 2, 2, None),
        (13, 2, 3, BatchPart(1, 0, 2)),
        (14, 2, 4, None),
        (9, 2, 5, None),
    ):
        yield encode(Record(RecordType.ROWS, ts=ts, term=term, cseq=cseq, part=part, vchannel="c_1v0", body=b"x"))


async def test_what_a_reader_drops_is_counted():
    metrics, wal = Metrics(), MemoryWal()
    await wal.create_channel("c", ChannelPolicy())
    for payload in broken_log():
        await wal.append("c", payload, 0)
    stream = TtMsgStream(wal, vchannels=["c_1v0"])
    stream.as_consumer(["c"], From.EARLIEST)
    scan_metrics = ScanMetrics(metrics, "datanode", stream)
    with pytest.raises(OrderViolated):
        async for _ in stream:
            pass
    read_metrics = ReadMetrics(metrics, "datanode", stream.counts)
    for _ in range(2):
        scan_metrics.publish()
        read_metrics.publish()
    read = {"channel_name": "c", "role_name": "datanode"}
    assert metrics.value("wal_scan_message_total", **read) == 7
    assert metrics.value("wal_scan_message_bytes_total", **read) == sum(map(len, broken_log()))
    assert metrics.value("wal_scan_fenced_message_total", **read) == 1
    assert metrics.value("wal_scan_duplicate_message_total", **read) == 1
    assert metrics.value("wal_scan_incomplete_batch_total", **read) == 1
    assert metrics.value("wal_scan_time_tick_violation_message_total", **read) == 1
    await stream.close()


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_bad_record_is_counted_kept_and_skipped(home):
    async with home.node() as node, node.client() as client:
        collection = await client.create_collection(home.PEOPLE, shards=1)
        channel = collection.vchannels[0].rpartition("_")[0]
        for damaged in (channel, node.node.names.heartbeats):
            await node.node.wal.append(damaged, b"not a record", 0)
        await client.insert("people", home.people(1))
        await client.flush("people")
        assert await client.count("people", consistency="strong") == 1
        page = node.node.metrics.render().decode()
        kept = await node.node.wal.latest_id(node.node.names.dead_letters)
    lines = [line for line in page.splitlines() if line.startswith("tidewal_wal_dead_letter_message_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == 2  # the node met both, for DataNode and QueryNode
    assert kept is not None


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_heartbeat_is_read_before_the_grant_that_it_rests_on_and_is_not_bad(home, monkeypatch):
    """As in a node that has just started: it reads the catalog further before it judges."""
    async with home.node() as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        catalog = role_of(node, "datanode").catalog
        caught_up = asyncio.Event()
        granted, catch_up = catalog.granted, catalog.catch_up

        def is_behind() -> bool:
            return "heartbeats" in asyncio.current_task().get_name() and not caught_up.is_set()

        async def read_further() -> object:
            if is_behind():
                caught_up.set()
            return await catch_up()

        monkeypatch.setattr(catalog, "granted", lambda name: Granted(0, 0) if is_behind() else granted(name))
        monkeypatch.setattr(catalog, "catch_up", read_further)
        await asyncio.sleep(2)
        assert caught_up.is_set()
        page = node.node.metrics.render().decode()
        assert await node.node.wal.latest_id(node.node.names.dead_letters) is None
    lines = [line for line in page.splitlines() if line.startswith("tidewal_wal_dead_letter_message_total{")]
    assert all(line.endswith(" 0.0") for line in lines)


# ---- the log's backend -----------------------------------------------------------------------------------------------


async def test_what_retention_takes_is_counted(tmp_path):
    metrics = Metrics()
    wal = await RocksMQ.open(str(tmp_path), segment_bytes=64 * 1024, free_space_bytes=0, metrics=metrics, serve=False)
    await wal.create_channel("a", ChannelPolicy(retention_bytes=0))
    for _ in range(8):
        await wal.append("a", bytes(20_000))
    wal.retain_now()
    assert metrics.value("rocksmq_journal_recycled_bytes_total") > 0
    await wal.close()


async def test_a_group_that_retention_cuts_off_is_counted_and_so_is_its_reset(tmp_path):
    metrics = Metrics()
    wal = await RocksMQ.open(str(tmp_path), segment_bytes=64 * 1024, free_space_bytes=0, metrics=metrics, serve=False)
    await wal.create_channel("a", ChannelPolicy(retention_bytes=0, delivery=Delivery.UNTIL_ACKED))
    await (await wal.join("late", ["a"])).aclose()
    for _ in range(8):
        await wal.append("a", bytes(20_000))
    wal.retain_now()
    assert metrics.value("rocksmq_groups_cut_off_total") == 1
    member = await wal.join("late", ["a"], reset_to=From.EARLIEST)
    assert (await anext(member)).entries
    assert metrics.value("wal_group_reset_total") == 1
    await member.aclose()
    await wal.close()


async def test_a_failed_journal_is_shown(tmp_path):
    metrics, disk = Metrics(), FaultyDisk()
    wal = await RocksMQ.open(str(tmp_path), free_space_bytes=0, disk=disk, metrics=metrics, serve=False)
    await wal.create_channel("a", ChannelPolicy())
    assert metrics.value("rocksmq_journal_failed") == 0
    disk.fail("sync", errno.EIO, times=100)
    with pytest.raises(JournalFailed):
        await wal.append("a", b"x")
    assert metrics.value("rocksmq_journal_failed") == 1
    await wal.close()


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_refused_write_names_its_limit(home):
    key = "quotaAndLimits.limitWriting.forceDeny"
    settings = Settings.model_validate({"quotaAndLimits": {"limitWriting": {"forceDeny": True}}})
    async with home.node(settings=settings) as node, node.client() as client:
        await client.create_collection(home.PEOPLE)
        with pytest.raises(Overloaded) as caught:
            await client.insert("people", home.people(1))
        assert caught.value.limit == key
        assert node.node.metrics.value("overloaded_total", limit=key) == 1
        assert node.node.metrics.value("proxy_mutation_latency", status="failed") == 1


@pytest.mark.asyncio(loop_factories=["memory"])
async def test_a_read_too_far_behind_is_refused_with_the_channel_that_lags(home):
    settings = Settings.model_validate({"queryNode": {"scheduler": {"maxTimestampLag": 5}}})
    async with home.node(settings=settings) as node, node.client() as client:
        await client.create_collection(home.PEOPLE, shards=1)
        await client.insert("people", home.people(1))
        assert await client.count("people", consistency="strong") == 1
        node.node.clock.clock.jump_wall(60_000)  # the lease does not reach so far, so nothing is ticked until renewed
        with pytest.raises(Lagging, match="maxTimestampLag") as caught:
            await client.count("people")
        assert caught.value.channel.endswith("dml_0")
        assert caught.value.lag_s > 55
        assert physical_ms(caught.value.last_tick) < node.node.clock.clock.wall_ms() - 55_000
        assert (await client.query("people", consistency="eventually")).table.num_rows == 1
        await home.elapse(10.0)
        assert await client.count("people") == 1  # by itself, once the lease was renewed


# ---- actors ----------------------------------------------------------------------------------------------------------


class Fragile(Actor):
    async def on_message(self, message: object) -> None:
        raise ZeroDivisionError(message)


async def test_restarts_and_blocked_handlers_are_counted():
    metrics = Metrics()
    actor_metrics = ActorMetrics(metrics)
    async with ActorSystem(threads=False, observer=actor_metrics) as system:
        actor_metrics.watch(["fragile"], system.status, lambda: system.loop_lag_s)
        ref = await system.spawn(Fragile, name="fragile")
        ref.tell("x")
        assert metrics.value("actor_mailbox_depth", actor="fragile") == 1
        while not metrics.value("actor_restart_total", actor="fragile"):  # noqa: ASYNC110 -- a counter has no event
            await asyncio.sleep(0)
        actor_metrics.blocked("fragile/tick", 700, "")
    assert metrics.value("actor_restart_total", actor="fragile") == 1
    assert metrics.value("actor_blocked_total", actor="fragile") == 1
    assert metrics.value("event_loop_lag_seconds") == 0
