"""The table of alerts: when each fires, what it says, and what an operator does then. `dashboards.py` writes the rules
of Prometheus from it, and `docs/reference.py` the page of metrics.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidewal.runtime.metrics.metrics import CHANNEL, METRICS, NODE_LABEL, QUERY

JOB = "tidewal"  # the job_name under which Prometheus scrapes nodes
_BY_NAME = {metric.name: metric for metric in METRICS}
_UP = "Prometheus' own: 1 where its last scrape of the node succeeded"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. `metric` is a name of the table, and `{metric}` in `expression` its full name; "" is Prometheus' own
    `up`. `action` is what an operator does when it fires."""

    name: str
    metric: str
    expression: str
    lasting: str
    severity: str
    summary: str
    action: str

    def rule(self) -> dict[str, object]:
        """The rule as Prometheus reads it."""
        name, meaning = ("up", _UP) if not self.metric else (_full_name(self.metric), _BY_NAME[self.metric].meaning)
        return {
            "alert": self.name,
            "expr": self.expression.replace("{metric}", name),
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": meaning, "action": self.action},
        }


def _full_name(metric: str) -> str:
    return _BY_NAME[metric].full_name


def _lag_alert(role: str, metric: str, action: str) -> Alert:
    return Alert(
        f"{role}Lags",
        metric,
        f"max by ({CHANNEL}) ({{metric}}) > 30000",
        "2m",
        "warning",
        f"{role}: the channel {{{{ $labels.{CHANNEL} }}}} is {{{{ $value }}}} ms behind",
        action,
    )


def _happened(labels: str, where: str = "") -> str:
    """Whether a counter has grown within 10 minutes. One that had grown before Prometheus first saw it (a node found
    bad records as it started) shows no increase: it is told by that it was not there 10 minutes ago."""
    series = f"{{metric}}{where}"
    return (
        f"sum by ({labels}) (increase({series}[10m])) > 0"
        f" or sum by ({labels}) ({series} unless {series} offset 10m) > 0"
    )


_NODE = f"{{{{ $labels.{NODE_LABEL} }}}}"

ALERTS = (
    Alert(
        "NodeDown",
        "",
        f'{{metric}}{{job="{JOB}"}} == 0 or absent({{metric}}{{job="{JOB}"}})',
        "1m",
        "critical",
        "{{ with $labels.instance }}{{ . }} does not answer{{ else }}no node is scraped{{ end }}: the node is down,"
        " hangs, or cannot be reached",
        "look at its last log lines, then start it again; a node that hangs has to be killed first, which loses nothing"
        " acknowledged",
    ),
    Alert(
        "JournalFailed",
        "rocksmq_journal_failed",
        f"max by ({NODE_LABEL}) ({{metric}}) > 0",
        "0s",
        "critical",
        f"{_NODE}: a write or sync of the journal failed, nothing is accepted until it is reopened",
        "look at the disk (the node's log line has the error), then restart the node",
    ),
    Alert(
        "DiskPressure",
        "rocksmq_disk_pressure",
        f"max by ({NODE_LABEL}) ({{metric}}) > 0",
        "0s",
        "critical",
        f"{_NODE}: appends are refused for lack of space: free some on the disk of the log, or enlarge it",
        "free space; appends are taken again within a second, without a restart",
    ),
    Alert(
        "FreeSpaceLow",
        "rocksmq_free_space_bytes",
        f"min by ({NODE_LABEL}) ({{metric}} - 2 * {_full_name('rocksmq_free_space_limit_bytes')}) < 0",
        "1m",
        "warning",
        f"{_NODE}: the disk of the log has less than twice the free space below which appends are refused",
        "free space, or enlarge the disk, before `DiskPressure` fires",
    ),
    Alert(
        "TablesUnreadable",
        "wal_collection_unreadable",
        "max by (collection_name, role_name) ({metric}) > 0",
        "1m",
        "critical",
        "{{ $labels.role_name }}: the tables of {{ $labels.collection_name }} cannot be read;"
        " the other collections work",
        "`tidewal status` says why, `tidewal verify tables` names the files: bring them back from a backup; the node"
        " tries again by itself, and a restart does not help",
    ),
    Alert(
        "BrokersStall",
        "wal_backend_stalled",
        f"sum by ({CHANNEL}, operation) ({{metric}}) > 0",
        "30s",
        "critical",
        f"the brokers leave {{{{ $labels.operation }}}}s of {{{{ $labels.{CHANNEL} }}}} waiting",
        "look at the brokers and the network; the node goes on by itself when they answer",
    ),
    Alert(
        "ChannelWithoutOwner",
        "mixcoord_channel_without_owner_seconds",
        f"max by ({CHANNEL}) ({{metric}}) > 30",
        "0s",
        "critical",
        f"no node has {{{{ $labels.{CHANNEL} }}}} open since {{{{ $value }}}} s: writes to it wait",
        "`tidewal inspect cluster` says in words what is in the way; start nodes with the role `streamingnode`, and"
        " look at the brokers",
    ),
    Alert(
        "NoLeader",
        "mixcoord_leader",
        "max({metric}) < 1",
        "1m",
        "critical",
        "no node leads the cluster: collections cannot be created or dropped, and channels get no owners",
        "`tidewal inspect cluster`; start a node with the role `mixcoord`",
    ),
    Alert(
        "RoleMissing",
        "mixcoord_member_num",
        "max by (role_name) ({metric}) < 1",
        "1m",
        "critical",
        "no member of the cluster offers the role {{ $labels.role_name }}: what it does waits",
        "start a node with this role",
    ),
    Alert(
        "VersionsMixed",
        "mixcoord_member_version_num",
        "count(count by (version) ({metric} > 0)) > 1",
        "6h",
        "warning",
        "nodes of {{ $value }} versions of Tidewal are members of the cluster: an upgrade has not ended",
        "upgrade the nodes that `tidewal inspect cluster` names, or take the others back; what the later version adds"
        " waits for them",
    ),
    Alert(
        "MembersSilent",
        "mixcoord_eviction_total",
        _happened(NODE_LABEL),
        "0s",
        "warning",
        f"{_NODE}: the lease of a silent member was ended: it died, hung, or was cut off from the log",
        "nothing is lost; `tidewal inspect cluster` names it, its last log lines say why. Where it happens often to"
        " nodes that live, they have too little CPU, or `cluster.leaseMs` is too short",
    ),
    Alert(
        "NodeUnreachable",
        "direct_unreachable_num",
        f"max by ({NODE_LABEL}) ({{metric}}) > 0",
        "1m",
        "warning",
        f"{_NODE} cannot connect to {{{{ $value }}}} nodes: its requests to them go through the log, which is slower",
        "`tidewal inspect cluster` names them and says why; look at `cluster.address`, certificates and the network",
    ),
    Alert(
        "RoleRestarts",
        "actor_restart_total",
        _happened("actor"),
        "0s",
        "warning",
        "{{ $labels.actor }} failed and was started again",
        "its log line at `error` has the reason; a traceback there is a defect to report",
    ),
    _lag_alert("Proxy", "proxy_tt_lag_ms", "look at the disk or the brokers of the log, and at `EventLoopLags`"),
    _lag_alert(
        "DataNode",
        "datanode_consume_tt_lag_ms",
        "`TablesUnreadable` comes first; else it reads more slowly than is written: look at CPU and the table store",
    ),
    _lag_alert(
        "QueryNode",
        "querynode_consume_tt_lag_ms",
        "queries wait or are old: `TablesUnreadable` comes first; else look at CPU and at `EventLoopLags`",
    ),
    Alert(
        "TablesLag",
        "streamingnode_unflushed_age_seconds",
        "max by (collection_name) ({metric}) > 120",
        "2m",
        "warning",
        "rows of {{ $labels.collection_name }} have waited {{ $value }} s for its tables",
        "`TablesUnreadable` comes first; else the log lines of the datanode say why flushes fail: the table store is"
        " full, away or slow. Writes are refused at `streamingNode.maxUnflushedBytes`",
    ),
    Alert(
        "MaintenanceFailed",
        "datanode_maintenance_failed_total",
        _happened("collection_name"),
        "0s",
        "warning",
        "{{ $labels.collection_name }}: a compaction or cleanup of its tables failed",
        "its log line has the reason; it is tried again, meanwhile `current` is behind and the tables grow:"
        " `tidewal verify tables`, and look at the space of the table store",
    ),
    Alert(
        "SparkLags",
        "spark_cut_lag_ms",
        f"max by ({QUERY}) ({{metric}}) > 30000",
        "2m",
        "warning",
        f"Spark: the query {{{{ $labels.{QUERY} }}}} is {{{{ $value }}}} ms behind",
        "give the query more cores, or each batch less to do",
    ),
    Alert(
        "SparkQueryFailed",
        "spark_query_ended_total",
        _happened(NODE_LABEL, '{status="failed"}'),
        "0s",
        "critical",
        f"{_NODE}: a streaming query failed; it goes on from its checkpoint when it is started again",
        "Spark's log has the reason; mend it and start the query again with the same checkpoint",
    ),
    Alert(
        "Overloaded",
        "overloaded_total",
        "sum by (limit) (rate({metric}[5m])) > 1",
        "5m",
        "warning",
        "{{ $value }} requests a second are refused by the limit {{ $labels.limit }}",
        "write more slowly, or raise the limit that it names",
    ),
    Alert(
        "WritesThrottled",
        "streamingnode_write_factor",
        "min by (limit, collection_name) ({metric}) < 1",
        "2m",
        "warning",
        "writes {{ with $labels.collection_name }}to {{ . }} {{ end }}are let in at {{ $value }} of the full rate (0: "
        "not at all), because the limit {{ $labels.limit }} is near or reached",
        "the row Pressure of the dashboard has what is used of it: delete, flush, or raise the limit; `tidewal inspect"
        " cluster` names the node",
    ),
    Alert(
        "EventLoopLags",
        "event_loop_lag_seconds",
        f"max by ({NODE_LABEL}) ({{metric}}) > 0.5",
        "1m",
        "warning",
        f"{_NODE}: the event loop is {{{{ $value }}}} s late; some handler blocks it",
        "the log lines name handlers that block; else the machine has too little CPU",
    ),
    Alert(
        "GroupLags",
        "wal_group_lag_seconds",
        f"max by (group, {CHANNEL}) ({{metric}}) > 300",
        "5m",
        "warning",
        f"group {{{{ $labels.group }}}} is {{{{ $value }}}} s behind in {{{{ $labels.{CHANNEL} }}}}",
        "see that its members run and acknowledge (`tidewal groups list`), or start more of them",
    ),
    Alert(
        "ReplicaLags",
        "replication_lag_seconds",
        f"max by ({CHANNEL}) ({{metric}}) > 60",
        "2m",
        "warning",
        f"the replica is {{{{ $value }}}} s behind in {{{{ $labels.{CHANNEL} }}}}",
        "see that both logs answer, and that the replicator has enough CPU; `tidewal replicate --status` shows each"
        " channel",
    ),
    Alert(
        "ReplicationHalted",
        "replication_halted",
        f"max by ({CHANNEL}) ({{metric}}) > 0",
        "0s",
        "critical",
        f"{{{{ $labels.{CHANNEL} }}}} is not replicated any more",
        "`tidewal replicate --status` says why; drop the channel if it is not needed: it keeps the source's log from"
        " being removed",
    ),
    Alert(
        "ReplicaLineStands",
        "replication_line_age_seconds",
        f"max by ({NODE_LABEL}) ({{metric}}) > 60",
        "2m",
        "warning",
        "a promotion of the replica without its source would leave out the last {{ $value }} s of the log",
        "the replicator's log says why: a channel is halted, has no owner, or its owner is slow to promise a time; the"
        " replica's disk is not freed meanwhile",
    ),
    Alert(
        "GroupsCutOff",
        "rocksmq_groups_cut_off_total",
        _happened(NODE_LABEL),
        "0s",
        "critical",
        f"{_NODE}: consumer groups lost entries that they had not read, since retention needed the space",
        "the entries are gone; start the members of the groups, raise the retention",
    ),
    Alert(
        "TimeTickViolated",
        "wal_scan_time_tick_violation_message_total",
        _happened(CHANNEL),
        "0s",
        "critical",
        f"a record came behind a tick that had passed it in {{{{ $labels.{CHANNEL} }}}}",
        "a defect: report it with the log lines of the node, and keep the log",
    ),
    Alert(
        "ClockAway",
        "wal_clock_ahead_seconds",
        f"max by ({NODE_LABEL}) (abs({{metric}})) > 60",
        "1m",
        "warning",
        f"{_NODE}: timestamps lie {{{{ $value }}}} s from the wall clock: the clock was set, or the log is ahead of it",
        "synchronise the machine's clock; a log that is ahead is caught up with as time passes",
    ),
    Alert(
        "DeadLetters",
        "wal_dead_letter_message_total",
        _happened(f"{CHANNEL}, reason"),
        "0s",
        "warning",
        f"bad records in {{{{ $labels.{CHANNEL} }}}} were kept aside: {{{{ $labels.reason }}}}",
        "`tidewal dlq list`; mend what writes them, then replay or drop them",
    ),
    Alert(
        "GroupDeadLetters",
        "wal_group_dead_letter_total",
        _happened("group, reason"),
        "0s",
        "warning",
        "entries became dead letters of group {{ $labels.group }}: {{ $labels.reason }}",
        "`tidewal dlq list --group`; mend the handler, then replay or drop them",
    ),
)
