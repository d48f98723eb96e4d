"""Every metric of Tidewal in one typed table, and a node's own registry of them.

`METRICS` has the name, unit, labels and meaning of every metric, those of the installed backends included:
`/metrics`, the docs, the dashboards and their tests derive from it. Names are Milvus' where the meaning is the same,
with `tidewal_` for `milvus_`; counters end in `_total`, as Prometheus wants them. Each series carries `node_id`. A lag
is a gauge per channel, to be read as the maximum over channels: an average hides the one that is stuck.

Handles are cheap, looking them up is not: take them once (`appended = metrics.counter("wal_append_message_total", …)`),
and count per batch, never per row.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client import Metric as Family
from prometheus_client.registry import Collector

from ..arguments import checked
from ..errors import InvalidRequest
from ..log.opening import installed_backends
from .batch_histogram import BatchHistogram
from .metric import BATCH_BUCKETS, COMMIT_SECONDS_BUCKETS, Metric, counter, gauge, milliseconds, seconds, sizes
from .watched_gauge import WatchedGauge

NODE_LABEL = "node_id"

CHANNEL = "channel_name"

_WAL = (
    counter("wal_append_message_total", "Records appended, by outcome", CHANNEL, "status"),
    sizes("wal_append_message_bytes", "Size of appended batches, over all their channels", "status"),
    seconds(
        "wal_append_message_duration_seconds",
        "From append to durable, by batch",
        "status",
        buckets=COMMIT_SECONDS_BUCKETS,
    ),
    counter("wal_append_deduplicated_total", "Retries answered from the producer table, not written again"),
    counter("wal_append_outcome_unknown_total", "Appends whose outcome was determined only under a new term"),
    gauge("wal_term", "count", "The term under which this node owns the channel", CHANNEL),
    gauge("wal_last_allocated_time_tick", "seconds", "Highest timestamp given out, as Unix time"),
    gauge("wal_last_confirmed_time_tick", "seconds", "Timestamp up to which every append is decided, as Unix time"),
    gauge(
        "wal_clock_ahead_seconds",
        "seconds",
        "How far timestamps lie ahead of the wall clock (it was set back, or the log carries the clock ahead) or, "
        "negative, behind it (it stepped days ahead, which is not followed)",
    ),
    counter("wal_sync_time_tick_total", "Time ticks of channels, by type: stored, or announced in a heartbeat", "type"),
    counter("wal_scan_message_total", "Records read", CHANNEL, "role_name"),
    counter("wal_scan_message_bytes_total", "Bytes read", CHANNEL, "role_name", unit="bytes"),
    counter(
        "wal_scan_time_tick_violation_message_total",
        "Records at or below a tick that came before them; anything but 0 is a defect",
        CHANNEL,
        "role_name",
    ),
    counter(
        "wal_scan_duplicate_message_total",
        "Records dropped because their (term, cseq) had been read",
        CHANNEL,
        "role_name",
    ),
    counter("wal_scan_fenced_message_total", "Records of a lower term dropped behind a fence", CHANNEL, "role_name"),
    counter(
        "wal_scan_incomplete_batch_total", "Batches dropped because a part of them was missing", CHANNEL, "role_name"
    ),
    gauge("wal_scanner_pending_queue_bytes", "bytes", "Read and not yet consumed", "collection_name", "role_name"),
    gauge(
        "wal_collection_unreadable",
        "info",
        "1 while the tables of a collection cannot be read, and its queries fail",
        "collection_name",
        "role_name",
    ),
    counter("wal_scan_reset_total", "Channels of streams whose next entries retention had removed and reset_to moved"),
    counter("wal_group_reset_total", "Positions of consumer groups that retention had removed and reset_to moved"),
    gauge(
        "wal_group_lag_entries",
        "count",
        "Entries that a group has not acknowledged, counted every 30 s up to 1,000, in the first 100 of the groups' "
        "channels by name",
        "group",
        CHANNEL,
    ),
    gauge(
        "wal_group_lag_seconds",
        "seconds",
        "Age of the oldest entry that a group has not acknowledged; 0 where none is, or none has a time",
        "group",
        CHANNEL,
    ),
    gauge(
        "replication_lag_entries",
        "count",
        "Entries of the source that the replica does not have yet, counted up to 10,000; the replicator serves it",
        CHANNEL,
    ),
    gauge(
        "replication_lag_seconds",
        "seconds",
        "Age of the oldest entry that the replica does not have yet; 0 where none is, or none has a time",
        CHANNEL,
    ),
    gauge("replication_halted", "info", "1 while a channel cannot be replicated, though others go on", CHANNEL),
    gauge(
        "replication_line_age_seconds",
        "seconds",
        "How much of the log's time a promotion without the source would leave out: what nodes have written or "
        "announced since the last line of their replica",
    ),
    gauge(
        "replication_line_kept_bytes",
        "bytes",
        "Payloads that came to the replica of nodes since its last line was begun: whatever its retention, it keeps "
        "them until there is a later one",
    ),
    counter("wal_group_retry_total", "Attempts of handlers after one that failed or ended its process", "group"),
    counter(
        "wal_group_ack_timeout_total", "Attempts of handlers, and packs of members, that ack_timeout_s ended", "group"
    ),
    counter("wal_group_nack_total", "Attempts of handlers that gave back what they got, by Nack", "group"),
    counter("wal_group_retry_topic_total", "Messages of which a copy went to the retry topic of a group", "group"),
    counter("wal_group_filtered_total", "Entries that did not pass the filter of a group, sent or not", "group"),
    counter("wal_group_dead_letter_total", "Entries that became dead letters of a group, by reason", "group", "reason"),
    gauge("wal_keyed_state_keys", "count", "Keys of a keyed state; the channel is its input", "group", CHANNEL),
    gauge(
        "wal_keyed_state_bytes",
        "bytes",
        "Memory of a keyed state, about, counted too high rather than too low; limit max_state_bytes of process_keyed",
        "group",
        CHANNEL,
    ),
    gauge(
        "wal_keyed_changelog_bytes",
        "bytes",
        "What the next member with the channel reads of the changelog, about",
        "group",
        CHANNEL,
    ),
    gauge(
        "wal_keyed_snapshot_unix_seconds",
        "seconds",
        "Log time of the oldest record of the changelog that is needed: where its newest whole snapshot began",
        "group",
        CHANNEL,
    ),
    gauge(
        "wal_keyed_watermark_unix_seconds",
        "seconds",
        "How far the time of the windows named `window` has come in the channel",
        "group",
        CHANNEL,
        "window",
    ),
    counter("wal_dead_letter_message_total", "Bad records that became dead letters, by reason", CHANNEL, "reason"),
)

_BACKEND = (
    counter("wal_backend_stall_total", "Appends and readers that the brokers let wait", CHANNEL, "operation"),
    gauge(
        "wal_backend_stalled", "count", "Appends and readers that the brokers leave waiting now", CHANNEL, "operation"
    ),
    counter(
        "wal_backend_retry_total",
        "Attempts that failed and were made again: requests to brokers, and their readers and producers",
        CHANNEL,
        "operation",
    ),
    counter(
        "wal_backend_outcome_unknown_total",
        "Entries that are in the log or not: their append ended without an answer",
        CHANNEL,
    ),
)

_PROXY = (
    gauge("proxy_tt_lag_ms", "milliseconds", "Now minus the last time announced", CHANNEL),
    milliseconds("proxy_mutation_latency", "From request to acknowledgement", "status"),
    counter("proxy_insert_vectors_total", "Rows inserted", "collection_name"),
    counter("proxy_upsert_vectors_total", "Rows upserted", "collection_name"),
    counter("proxy_delete_vectors_total", "Rows deleted", "collection_name"),
    counter("proxy_topic_message_total", "Messages that topics have taken", "topic_name"),
    counter("proxy_topic_bytes_total", "Bytes of the bodies of these messages", "topic_name"),
    counter("proxy_transaction_total", "Transactions committed"),
    counter("overloaded_total", "Requests refused, by the limit they reached", "limit"),
    gauge(
        "limit_used_ratio",
        "count",
        "Part of a limit that the process uses, of its memory and of the rows that it holds; near 1 writes are slowed "
        "down, then refused",
        "limit",
    ),
)

_STREAMINGNODE = (
    gauge(
        "streamingnode_inflight_bytes",
        "bytes",
        "Accepted and not yet acknowledged; limit streamingNode.maxInflightBytes",
    ),
    gauge(
        "streamingnode_unflushed_bytes",
        "bytes",
        "In the log and not yet in the table; limit streamingNode.maxUnflushedBytes",
        "collection_name",
    ),
    gauge(
        "streamingnode_unflushed_age_seconds",
        "seconds",
        "Age of the oldest record in the log that is not yet in the table; 0 where all are",
        "collection_name",
    ),
    gauge(
        "streamingnode_write_factor",
        "count",
        "Part of the full rate at which a limit lets writes in, to all collections where none is named: 0 where it "
        "refuses them, no series where it does nothing",
        "limit",
        "collection_name",
    ),
    gauge(
        "streamingnode_prepared_transaction_num",
        "count",
        "Transactions over several channels that are prepared in a channel of this node and not written or aborted",
    ),
    counter(
        "streamingnode_decided_transaction_total",
        "Transactions over several channels that were written to a channel of this node, aborted there, or lost: the "
        "log has removed what was prepared before it was written",
        "outcome",
    ),
    seconds("streamingnode_write_delay_seconds", "For which acknowledgements of writes were held back near limits"),
    gauge(
        "streamingnode_delayed_message_num",
        "count",
        "Messages in memory that are due later: all, or where they are more than streamingNode.maxDelayBytes takes, "
        "those that are due first",
        "topic_name",
    ),
    gauge(
        "streamingnode_delayed_ended_message_num",
        "count",
        "Of the messages in memory that are due later those that were sent to partitions that are over since",
        "topic_name",
    ),
    counter(
        "streamingnode_delayed_released_total", "Delayed messages that were put into their partitions", "topic_name"
    ),
    seconds(
        "streamingnode_delayed_late_seconds", "How long behind its due time a delayed message was in its partition"
    ),
)

_DATANODE = (
    gauge("datanode_consume_tt_lag_ms", "milliseconds", "Now minus the watermark consumed; by vchannel", CHANNEL),
    counter("datanode_consume_msg_total", "Records consumed", "msg_type"),
    counter("datanode_consume_bytes_total", "Bytes consumed", unit="bytes"),
    counter("datanode_msg_rows_total", "Rows consumed"),
    gauge("datanode_fg_buffer_size", "bytes", "Buffered for the next flush", "collection_name"),
    counter("datanode_flush_req_total", "Flushes, by outcome", "collection_name", "status"),
    counter("datanode_maintenance_failed_total", "Compactions and cleanups that failed", "collection_name"),
    counter("datanode_flushed_data_size_total", "Bytes flushed to the table", "collection_name", unit="bytes"),
    counter("datanode_flushed_data_rows_total", "Rows flushed to the table", "collection_name"),
    seconds("datanode_flush_duration_seconds", "One flush: write, commit and announce", "collection_name"),
    gauge(
        "datanode_channel_checkpoint_unix_seconds",
        "seconds",
        "Log time that the table holds up to; by vchannel",
        CHANNEL,
    ),
)

_QUERYNODE = (
    gauge("querynode_consume_tt_lag_ms", "milliseconds", "Now minus the watermark applied; by vchannel", CHANNEL),
    counter("querynode_consume_msg_total", "Records consumed", "msg_type"),
    counter("querynode_consume_bytes_total", "Bytes consumed", unit="bytes"),
    gauge("querynode_loading_num", "count", "Loads of rows from tables that are under way"),
    seconds("querynode_load_duration_seconds", "One load of rows from a table", buckets=BATCH_BUCKETS),
    counter("querynode_load_rows_total", "Rows loaded from tables"),
    counter("querynode_load_bytes_total", "Bytes loaded from tables, as they are in memory", unit="bytes"),
    counter("querynode_fan_out_total", "Questions that several QueryNodes have answered parts of"),
    milliseconds("querynode_sq_wait_tsafe_latency", "Wait for the freshness a read asked for", "query_type"),
    milliseconds("querynode_sq_req_latency", "A read as a whole", "query_type", "status"),
    gauge(
        "querynode_memory_bytes",
        "bytes",
        "Rows and vectors held; limit queryNode.memoryLimitBytes",
        "collection_name",
    ),
    gauge("querynode_entity_num", "count", "Rows held", "collection_name"),
)

_MIXCOORD = (
    gauge("mixcoord_leader", "info", "1 on the node that leads"),
    counter("mixcoord_election_total", "Elections won"),
    counter("mixcoord_reply_channel_dropped_total", "Reply channels dropped, of clients that showed no sign of life"),
    counter("mixcoord_assignment_total", "Channels assigned, by role", "role_name"),
    gauge(
        "mixcoord_cut_lag_ms", "milliseconds", "Now minus the last stored cut; none is stored while nothing is written"
    ),
    gauge("rootcoord_dml_channel_num", "count", "Physical channels for data"),
    gauge("mixcoord_member_num", "count", "Members of the cluster that offer the role", "role_name"),
    gauge(
        "mixcoord_lease_age_seconds",
        "seconds",
        "Since a coordinator last read a renewal of the member; its lease ends soon after its duration",
        "member_name",
    ),
    gauge(
        "mixcoord_feature_level", "info", "The feature level of the cluster: it rises once all members know the next"
    ),
    gauge("mixcoord_member_version_num", "count", "Members of the cluster that run the version of Tidewal", "version"),
    gauge("mixcoord_topic_partition_num", "count", "Partitions of the topic that are to take messages", "topic_name"),
    gauge(
        "mixcoord_topic_waiting_partition_num",
        "count",
        "Of these, those that wait until partitions of the epoch before have ended: sends to them wait",
        "topic_name",
    ),
    counter("mixcoord_eviction_total", "Leases of silent members that this coordinator has ended"),
    gauge("mixcoord_channel_num", "count", "Physical channels that the member owns, and has open", "member_name"),
    gauge(
        "mixcoord_channel_without_owner_seconds",
        "seconds",
        "For how long no member has had the physical channel open: writes to it wait",
        CHANNEL,
    ),
)

_DIRECT = (
    gauge("direct_connection_num", "count", "Direct connections to other nodes, by which requests to them go"),
    gauge(
        "direct_unreachable_num",
        "count",
        "Nodes whose addresses this node cannot reach: its requests to them go through the log",
    ),
    counter("direct_request_total", "Requests that name a node, by route: direct, or log", "route"),
    counter("direct_refused_total", "Connections that were closed before they proved to come from a node"),
)

_NODE = (gauge("build_info", "info", "1; the labels say what runs: Tidewal and Python", "version", "python_version"),)

_ACTORS = (
    gauge("actor_mailbox_depth", "count", "Messages waiting", "actor"),
    counter("actor_restart_total", "Restarts after a failure", "actor"),
    counter("actor_blocked_total", "Handlers that blocked the event loop too long", "actor"),
    gauge("event_loop_lag_seconds", "seconds", "How late the event loop runs callbacks that are due"),
)

QUERY = "query_name"

_PROCESSES = (
    gauge("process_up", "info", "1 where a process of `tidewal run --processes` has answered, else 0", "process"),
    counter("process_restarts_total", "Restarts of a process of `tidewal run --processes` that had ended", "process"),
)

_SPARK = (
    gauge("spark_query_num", "count", "Streaming queries of the driver that run"),
    counter("spark_query_ended_total", "Streaming queries that ended, by outcome", "status"),
    counter("spark_input_rows_total", "Rows read, by all sources of the query", QUERY),
    gauge("spark_input_rows_per_second", "count", "Rows per second between the last two triggers", QUERY),
    gauge("spark_processed_rows_per_second", "count", "Rows per second while Spark processed them", QUERY),
    seconds("spark_batch_duration_seconds", "One micro-batch, from trigger to commit", QUERY, buckets=BATCH_BUCKETS),
    gauge("spark_cut_lag_ms", "milliseconds", "The newest cut that was seen minus the one that was read up to", QUERY),
    gauge("spark_read_unix_seconds", "seconds", "Log time that the query has read up to", QUERY),
    gauge("spark_state_rows", "count", "Rows in the state of all operators", QUERY),
    gauge("spark_state_bytes", "bytes", "Memory of the state of all operators", QUERY),
    counter("spark_late_rows_total", "Rows that operators with state dropped behind the watermark", QUERY),
)

METRICS: tuple[Metric, ...] = (
    *_WAL,
    *_BACKEND,
    *(row for backend in installed_backends() for row in backend.metrics()),
    *_PROXY,
    *_STREAMINGNODE,
    *_DATANODE,
    *_QUERYNODE,
    *_MIXCOORD,
    *_DIRECT,
    *_ACTORS,
    *_NODE,
    *_PROCESSES,
    *_SPARK,
)

_BY_NAME = {metric.name: metric for metric in METRICS}
_Family = TypeVar("_Family", Counter, Gauge, Histogram)

_PROCESS = CollectorRegistry()  # nodes of one process share it: `process_*` and `python_*`, without a node's label
for _collector in (ProcessCollector, PlatformCollector, GCCollector):
    _collector(registry=_PROCESS)


class Metrics:
    """The metrics of one node: no global registry, so several nodes can run in one process. Thread-safe.

    A name outside the table, another kind than the table's, or other labels raise `InvalidRequest`.
    """

    @checked
    def __init__(self, node_id: str = "local") -> None:
        self.node_id = node_id
        self._registry = CollectorRegistry()
        self._families = {metric.name: _family(metric, self._registry) for metric in METRICS}
        versions = {"version": metadata.version("tidewal"), "python_version": platform.python_version()}
        self.gauge("build_info", **versions).set(1)

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the series to call `inc` on."""
        return self._series(name, Counter, labels)

    def gauge(self, name: str, **labels: str) -> Gauge:
        """Return the series to `set`, or to give a function to with `set_function`: it is called at each scrape."""
        return self._series(name, Gauge, labels)

    @checked
    def watch(self, name: str, function: Callable[[], float], **labels: str) -> None:
        """Let a series of a gauge be what `function` returns at each scrape, on any thread. For what there are many
        of: unlike what `gauge` returns, it takes little memory."""
        family = self._family_of(name, Gauge, labels)
        assert isinstance(family, WatchedGauge)
        family.watch(self._values(name, labels), function)

    def histogram(self, name: str, **labels: str) -> BatchHistogram:
        """Return the series to call `observe` on, or `observe_all`, in the table's unit."""
        series = self._series(name, Histogram, labels)
        assert isinstance(series, BatchHistogram)
        return series

    def forget(self, label: str, value: str) -> None:
        """Drop every series with this label value: call it when a channel or collection leaves the node.

        A gauge that stays would report its last lag for ever. Handles to dropped series have no effect any more.
        """
        for metric in METRICS:
            if label in metric.labels:
                self._families[metric.name].remove_by_labels({label: value})

    @checked
    def remove(self, name: str, **labels: str) -> None:
        """Drop the series of one metric that have these labels; fewer labels than the metric has drop several."""
        _known(name)
        self._families[name].remove_by_labels(labels)

    def value(self, name: str, **labels: str) -> float:
        """Read a counter or gauge, or a histogram's count; 0 where nothing was recorded yet."""
        metric = _known(name)
        sample = metric.full_name + ("_count" if metric.kind == "histogram" else "")
        found = self._registry.get_sample_value(sample, {NODE_LABEL: self.node_id, **labels})
        return 0.0 if found is None else found

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Read all series of a counter or gauge: their values, by the values of their labels in the table's order."""
        metric = _known(name)
        return {
            tuple(sample.labels[label] for label in metric.labels): sample.value
            for family in self._families[name].collect()
            for sample in family.samples
            if sample.name == metric.full_name
        }

    def render(self) -> bytes:
        """Write all series in Prometheus' text format, and those of the process."""
        return generate_latest(_WithoutCreated(self._registry)) + generate_latest(_PROCESS)

    def _series(self, name: str, kind: type[_Family], labels: dict[str, str]) -> _Family:
        return self._family_of(name, kind, labels).labels(*self._values(name, labels))

    def _values(self, name: str, labels: dict[str, str]) -> tuple[str, ...]:
        return self.node_id, *(labels[label] for label in _known(name).labels)

    def _family_of(self, name: str, kind: type[_Family], labels: dict[str, str]) -> _Family:
        """The family of a metric that is of this kind and has these labels."""
        metric = _known(name)
        family = self._families[name]
        if not isinstance(family, kind):
            raise InvalidRequest(f"metric {name} is a {metric.kind}, not a {kind.__name__.lower()}", metric=name)
        if set(labels) != set(metric.labels):
            raise InvalidRequest(f"metric {name} has the labels {metric.labels}, not {tuple(labels)}", metric=name)
        return family


class _WithoutCreated(Collector):
    """A registry without the series `…_created`, when each counter and histogram began: they would double the page, and
    nothing here asks for them. The library can leave them out for all registries of the process only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            family.samples = [each for each in family.samples if not each.name.endswith("_created")]
            yield family


def _known(name: str) -> Metric:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise InvalidRequest(f"no metric is named {name!r}: add it to runtime/metrics/metrics.py") from None


def _family(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    labels = (NODE_LABEL, *metric.labels)
    if metric.kind == "counter":
        return Counter(metric.full_name, metric.meaning, labels, registry=registry)
    if metric.kind == "gauge":
        return WatchedGauge(metric.full_name, metric.meaning, labels, registry=registry)
    return BatchHistogram(metric.full_name, metric.meaning, labels, registry=registry, buckets=metric.buckets)
